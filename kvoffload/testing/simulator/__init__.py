"""A deterministic accelerator, stepped by a scheduler: it proves order on a machine without one.

Its memory is host memory. Its streams are queues that run only when a scheduler steps them, in any
interleaving that the waits allow; one copy of a batch is one step, so that copies can tear. A copy
reads its source and its descriptors when it runs, not when it is enqueued.
"""

from kvoffload.testing.simulator.backend import SimBackend
from kvoffload.testing.simulator.rig import SimRig
from kvoffload.testing.simulator.world import SimEvent, SimStream, Switches, World

__all__ = ["SimBackend", "SimEvent", "SimRig", "SimStream", "Switches", "World"]
