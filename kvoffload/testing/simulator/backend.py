"""The simulator as a backend: it takes the same path as every real one."""

from __future__ import annotations

import logging
from typing import Any

import torch

from kvoffload.core.backend import Backend, Capabilities, Keep, Probe, Stream
from kvoffload.core.errors import CopyError
from kvoffload.core.host_memory import HostMemory
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.lanes import Lane
from kvoffload.core.plan import CopyPlan, Descriptors, Geometry
from kvoffload.testing.simulator.world import (
    BatchUnsupportedError,
    SimEvent,
    SimFault,
    SimStream,
    World,
)

logger = logging.getLogger(__name__)


class _Held:
    """Stands for memory that a copy needs until it has run."""


class _PinnedMemory(HostMemory):
    """Host memory that counts as page-locked until it is released."""

    def __init__(self, nbytes: int, numa_node: int | None, world: World) -> None:
        super().__init__(nbytes, numa_node=numa_node)
        self.pinned = True
        self._world = world
        world.counters.pins += 1

    def release(self) -> None:
        if self.pinned:
            self.pinned = False
            self._world.counters.pins -= 1
        super().release()


class SimBackend(Backend):
    """Copies on a simulated device.

    Args:
        world: the device; a new one by default.
    """

    device = torch.device("cpu")

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World()
        self._streams: dict[Lane, SimStream] = {}
        self._takes_batches: bool | None = None  # not known before the first
        self.capabilities = Capabilities(
            asynchronous=True,
            timing_events=True,
            pinned_memory=True,
            batch_copy=self.world.switches.batch,
            max_batch=self.world.switches.max_batch,
            queue_depth=self.world.switches.queue_depth,
        )

    def probe(self) -> Probe:
        return Probe(True, "simulated")

    def current_stream(self) -> Stream:
        return self.world.compute

    def new_stream(self, lane: Lane) -> SimStream:
        if lane not in self._streams:
            self._streams[lane] = SimStream(self.world, lane.value)
        return self._streams[lane]

    def new_event(self) -> SimEvent:
        self.world.check_alive()
        return SimEvent(self.world)

    def allocate_host(self, nbytes: int, numa_node: int | None = None) -> HostMemory:
        return _PinnedMemory(nbytes, numa_node, self.world)

    def bind(self, geometry: Geometry, *_: CanonicalKVCaches | HostMemory) -> None:
        self.world.own(
            (int(start), int(end))
            for side in (geometry.device, geometry.host)
            for start, end in zip(side.start, side.end, strict=True)
        )

    def unbind(self) -> None:
        self.world.own([])

    def swap_blocks(self, plan: CopyPlan, stream: Stream, keep: Keep[Any]) -> None:
        if not isinstance(stream, SimStream):
            raise TypeError(f"not a stream of this backend: {stream!r}")
        copies, held = plan.descriptors(), keep(_Held())
        fault = self.world.take_fault(plan.lane)
        if fault is SimFault.SUBMIT:
            raise CopyError("injected: submit")
        half = max(len(copies.size) // 2, 1)
        if fault in (SimFault.PARTIAL, SimFault.EXECUTE):
            first, *rest = copies.split(half)
            self._enqueue(first, plan, stream, held)
            if fault is SimFault.PARTIAL:
                raise CopyError("injected: half of it was enqueued")
            stream.fail(CopyError("injected: execute"))
            for part in rest:
                self._enqueue(part, plan, stream, held)
            return
        self._enqueue(copies, plan, stream, held)
        if fault is SimFault.QUERY:
            stream.fail(CopyError("injected: query"))

    def _enqueue(
        self, copies: Descriptors, plan: CopyPlan, stream: SimStream, held: object
    ) -> None:
        """As few calls as the device allows."""
        # A source that nobody writes may be read at any time: only then, and only on the host.
        relaxed = self.world.switches.relaxed_source and plan.src_on_host and plan.settled
        if self._takes_batches is not False:
            try:
                for part in copies.split(self.world.switches.max_batch):
                    stream.copy(part, plan, held, relaxed=relaxed)
            except BatchUnsupportedError as error:
                # Found out with the first call, before anything was enqueued.
                logger.warning("copying one by one: %s", error)
                self._takes_batches = False
            else:
                self._takes_batches = self._takes_batches or len(copies.size) > 1 or None
                return
        for single in copies.split(1):
            stream.copy(single, plan, held, relaxed=relaxed)

    def close(self) -> None:
        self.world.remove(self._streams.values())
        self._streams = {}
