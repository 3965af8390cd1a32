"""A lab whose worker hangs on one of the two protocols, and an engine's step on it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvoffload.backends.thread_base import ThreadStream, void
from kvoffload.connector import Outcome, events, jobs
from kvoffload.connector.worker_side import BaseWorkerSide, Finished
from kvoffload.core.backend import Backend
from kvoffload.core.lanes import Lane
from kvoffload.core.specs import DeviceLoadStoreSpec
from kvoffload.core.worker import OffloadingWorker
from kvoffload.rig import DeviceRig
from kvoffload.scheduler.host_manager import HostOffloadingManager
from kvoffload.scheduler.keys import OffloadKey
from kvoffload.testing.conformance.lab import Cache, Lab
from kvoffload.testing.simulator import SimBackend, SimRig, SimStream
from kvoffload.testing.simulator.launcher import SteppedLauncher

DEFAULT = Cache()
PROTOCOLS: dict[str, Any] = {"jobs": jobs, "events": events}


def key(number: int, group: int = 0) -> OffloadKey:
    return OffloadKey(b"content %d" % number, group)


def keys(*numbers: int) -> list[OffloadKey]:
    return [key(number) for number in numbers]


@dataclass(frozen=True)
class Step:
    """What came of a step."""

    metadata: Any
    finished: Finished
    report: Any
    outcome: Outcome


class Connected(Lab):
    """Device memory, a worker side over it, and a scheduler side with its manager.

    Args:
        backend: a fresh one.
        protocol: ``"jobs"`` or ``"events"``.
        cache: what the memory looks like.
        stepped: launches wait until they are stepped, as they always do on the simulator, which
            takes no second thread.
    """

    def __init__(
        self,
        backend: Backend,
        protocol: str,
        cache: Cache = DEFAULT,
        *,
        writes: bool = True,
        stepped: bool = False,
        workers: int = 1,
        null_block: int | None = None,
        job_deadline: float | None = None,
    ) -> None:
        self.protocol = PROTOCOLS[protocol]
        self.name = protocol
        self._writes = writes
        self.launcher = (
            SteppedLauncher()
            if stepped or isinstance(backend, SimBackend)
            else events.ThreadLauncher()
        )
        super().__init__(backend, cache, job_deadline=job_deadline)
        self.manager = HostOffloadingManager(
            self.worker.num_chunks, pool_of_group=self.worker.pool_of_group
        )
        self.scheduler = self.protocol.SchedulerSide(
            self.manager,
            workers=workers,
            groups=len(cache.groups),
            block_size_factor=cache.factor,
            null_block=null_block,
        )

    def make_side(self, make_worker: Callable[[Any], OffloadingWorker]) -> BaseWorkerSide[Any, Any]:
        options = {"launcher": self.launcher} if self.name == "events" else {}
        side: BaseWorkerSide[Any, Any] = self.protocol.WorkerSide(
            make_worker, writes=self._writes, **options
        )
        return side

    def register(self) -> OffloadingWorker:
        self.side: Any = self.make_side(lambda _: Lab.register(self))
        self.side.register_kv_caches(self.caches())
        assert self.side.worker is not None
        return self.side.worker

    def __exit__(self, *exc_info: object) -> None:
        self.rig.release()
        self.side.shutdown()
        super().__exit__(*exc_info)

    # -------------------------------------------------------------------------------- an engine
    def begin(self, metadata: Any = None) -> Any:
        """A step up to the model's launch; its metadata."""
        metadata = self.scheduler.build_metadata() if metadata is None else metadata
        self.side.handle_preemptions(metadata)
        self.side.start_step(metadata)
        return metadata

    def end(self, metadata: Any) -> Step:
        """The rest of it; launches have been launched."""
        self.side.finish_step()
        self.launcher.drain()
        return self.poll(metadata)

    def poll(self, metadata: Any = None) -> Step:
        """What has ended, told to the scheduler."""
        finished = self.side.get_finished(set())
        report = self.side.take_worker_metadata()
        return Step(metadata, finished, report, self.scheduler.update(report))

    def poll_worker(self) -> None:
        """What has ended, told to nobody."""
        self.side.get_finished()
        self.side.take_worker_metadata()

    def step(self, compute: Callable[[], None] = lambda: None, metadata: Any = None) -> Step:
        """A whole step; ``compute`` is the model."""
        metadata = self.begin(metadata)
        compute()
        return self.end(metadata)

    def wait(self) -> None:
        """Until the device has done everything that was launched."""
        self.worker.wait(self.engine.in_flight)

    def advance(self) -> None:
        """Let a device go on that does so only when it is told to."""
        if isinstance(self.rig, SimRig):
            self.rig.advance(50)

    def settle(self) -> Outcome:
        """Empty steps until nothing is pending; all that ended meanwhile."""
        total = Outcome()
        for _ in range(10):
            if not (self.scheduler.has_pending_work() or self.side.has_pending_work()):
                break
            metadata = self.begin()
            self.side.finish_step()
            self.launcher.drain()
            self.wait()
            found = self.poll(metadata).outcome
            total.loaded += found.loaded
            total.invalid_blocks |= found.invalid_blocks
            total.stored += found.stored
            total.not_stored += found.not_stored
            total.released += found.released
        assert not self.scheduler.has_pending_work(), "something never ends"
        return total

    def keep(self, blocks: list[int], numbers: list[int], request: str = "before") -> None:
        """Have these contents in host memory: computed in those blocks, tag by number."""
        self.scheduler.allocated(blocks)
        self.scheduler.store(request, keys(*numbers), blocks)
        tags = np.repeat(numbers, self.cache.factor).tolist()
        at_once = self.step(lambda: self.fill(blocks, tags)).outcome.stored
        assert at_once + self.settle().stored == keys(*numbers)
        self.scheduler.request_finished(request)

    def load_into(self, request: str, numbers: list[int], blocks: list[int]) -> int:
        """Plan a load of what is kept."""
        self.scheduler.allocated(blocks)
        assert self.scheduler.lookup(request, keys(*numbers)).hits == len(numbers)
        number: int = self.scheduler.load(request, keys(*numbers), DeviceLoadStoreSpec(blocks))
        return number

    @contextlib.contextmanager
    def holding(self, lane: Lane) -> Iterator[None]:
        """Within, nothing of the lane runs."""
        stream = self.backend.new_stream(lane)
        if isinstance(stream, SimStream):
            stream.held = True
            yield
            stream.held = False
        elif isinstance(stream, ThreadStream):
            gate = threading.Event()
            stream.submit(lambda: void(gate.wait()))
            try:
                yield
            finally:
                gate.set()
        else:
            from kvoffload.testing.fake_device import load

            assert isinstance(stream, torch.Stream)
            load().hold(stream)
            try:
                yield
            finally:
                load().release(stream)


# ------------------------------------------------------------------------- tensors of any layout
def on_device(rig: DeviceRig, elements: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Flat device memory, filled with bytes of which no two neighbours are alike."""
    nbytes = elements * dtype.itemsize
    flat = rig.allocate(nbytes)
    data = (np.arange(nbytes) * 37 % 251).astype(np.uint8)
    rig.write(flat.view(1, nbytes), np.array([0]), data[None])
    return flat.view(dtype)


def on_host(rig: DeviceRig, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it is now, over a host copy of all of its storage; bytes, not numbers."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat.set_(storage, 0, (1, storage.nbytes()), (storage.nbytes(), 1))
    data = torch.from_numpy(rig.read(flat, np.array([0]))[0].copy())
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return torch.as_strided(
        data.view(integers), tensor.shape, tensor.stride(), tensor.storage_offset()
    )
