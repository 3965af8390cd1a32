"""A real torch device emulated in C++, with the entry points of drivers: it tests device code.

Its memory faults when the host touches it, each of its streams is a worker thread, its events are
real, and it can be held, delayed and broken. It is for tests and for ``--on fake``: nothing falls
back to it.
"""

from kvoffload.testing.fake_device.build import CannotBuildError
from kvoffload.testing.fake_device.library import DEVICE_TYPE, Counts, FakeDevice, load
from kvoffload.testing.fake_device.rig import FakeRig

__all__ = ["CannotBuildError", "Counts", "DEVICE_TYPE", "FakeDevice", "FakeRig", "load"]
