"""A request trace through the whole system, with every byte checked.

The engine is simulated, the rest is real: device blocks with prefix reuse, the manager of host
memory, the worker and its backend, and bytes that move.
"""

from __future__ import annotations

import collections
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffload.core.backend import Backend
from kvoffload.core.blocks import expand_block_ids, whole_chunks
from kvoffload.core.engine import TransferResult
from kvoffload.core.errors import CapacityError, ConfigurationError, KVOffloadError
from kvoffload.core.host_memory import memory_limit
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.sizes import format_bytes
from kvoffload.core.specs import DeviceLoadStoreSpec, IntArray, LoadStoreSpec
from kvoffload.core.worker import OffloadingWorker
from kvoffload.replay import pattern
from kvoffload.replay.device_pool import DevicePool
from kvoffload.replay.trace import Request
from kvoffload.rig import DeviceRig
from kvoffload.scheduler.host_manager import HostOffloadingManager
from kvoffload.scheduler.keys import OffloadKey
from kvoffload.scheduler.manager import RequestContext

PART_BYTES = 16 << 20
"""About as much of a layer is computed or compared at a time, so that stopping never takes long and
large pages need little memory."""


@dataclass(frozen=True)
class Settings:
    """What to replay on.

    Attributes:
        device_blocks: blocks of the device pool.
        host_bytes: budget of host memory.
        layers: tensors of the cache.
        page_bytes: bytes of one block in one layer.
        concurrency: requests in flight.
        block_size_factor: device blocks per chunk; only whole chunks are stored.
    """

    device_blocks: int
    host_bytes: int
    layers: int
    page_bytes: int
    concurrency: int
    block_size_factor: int = 1


@dataclass
class Report:
    """What happened. Blocks are device blocks; chunks are host chunks.

    Only requests whose every byte was compared are counted; a run that was interrupted does not
    compare those that were in flight.

    ``device_hit_blocks + host_hit_blocks + computed_blocks == blocks``, and ``hit_rate`` is the
    share of the first two.
    """

    backend: str
    requests: int = 0
    blocks: int = 0
    device_hit_blocks: int = 0
    host_hit_blocks: int = 0
    computed_blocks: int = 0
    hit_rate: float = 0.0
    stored_chunks: int = 0
    evicted_chunks: int = 0
    refused_stores: int = 0
    bytes_stored: int = 0
    bytes_loaded: int = 0
    corrupt_blocks: int = 0
    failed_jobs: int = 0
    host_chunks: int = 0
    host_bytes_resident: int = 0
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        """No byte was wrong and no job failed."""
        return not self.corrupt_blocks and not self.failed_jobs


@dataclass
class _Running:
    """A request between admission and retirement."""

    context: RequestContext
    ids: IntArray
    keys: list[OffloadKey]  # of its blocks
    chunk_keys: list[OffloadKey]  # of its whole chunks
    blocks: IntArray
    on_device: int  # leading blocks
    loaded: slice  # blocks
    load_keys: list[OffloadKey] = field(default_factory=list)
    load_job: int | None = None
    store_job: int | None = None
    store_keys: list[OffloadKey] = field(default_factory=list)


class _StoppedError(Exception):
    """The caller of :meth:`Replay.run` wants it to stop."""


class Replay:
    """One run. The worker that it builds owns ``backend`` and is shut down by :meth:`close`.

    Args:
        backend: available on this machine.
        backend_name: for the report.
        rig: holds the device; entered by the caller.
        settings: see there.

    Raises:
        CapacityError: ``host_bytes`` holds no chunk, or either side, or both together where both
            are host memory, is more than there is.
    """

    def __init__(
        self, backend: Backend, backend_name: str, rig: DeviceRig, settings: Settings
    ) -> None:
        self._settings = settings
        self._rig = rig
        self._progress: Callable[[int], None] = lambda _: None
        self._stop: Callable[[], bool] = lambda: False
        self._stopped = False
        _check_memory(backend, settings)
        shape = (settings.layers, settings.device_blocks, settings.page_bytes)
        self._layers = list(rig.allocate(math.prod(shape)).view(shape))
        self._worker = OffloadingWorker.for_caches(
            backend,
            CanonicalKVCaches.from_tensors(self._layers),
            host_bytes=settings.host_bytes,
            block_size_factor=settings.block_size_factor,
        )
        self._manager = HostOffloadingManager(self._worker.num_chunks)
        self._pool = DevicePool(settings.device_blocks)
        self._running: collections.deque[_Running] = collections.deque()
        self._results: dict[int, TransferResult] = {}
        self._job_ids = itertools.count()
        self.report = Report(backend=backend_name, host_chunks=self._worker.num_chunks[0])

    def run(
        self,
        requests: Sequence[Request],
        *,
        progress: Callable[[int], None] = lambda _: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Report:
        """Serve the requests in their order.

        Args:
            requests: see :func:`check`.
            progress: called with the number of requests served and compared, after each.
            stop: asked all the time, from any thread; once it is true the run ends: what has not
                begun is cancelled, what has is waited for, and nothing more is compared.
        """
        check(requests, self._settings)
        self._progress, self._stop = progress, stop
        report, began = self.report, time.perf_counter()
        try:
            for number, request in enumerate(requests, start=1):
                self._go_on()
                self._admit(request, number)
            while self._running:
                self._retire()
        except _StoppedError:
            report.interrupted = True
            self._abandon()
        finally:
            report.seconds = time.perf_counter() - began
            report.hit_rate = (report.device_hit_blocks + report.host_hit_blocks) / max(
                report.blocks, 1
            )
            report.host_bytes_resident = self._worker.host_bytes_resident()
        return report

    def _is_stopped(self) -> bool:
        # For good: work that was left out must not be compared later.
        if not self._stopped and self._stop():
            self._stopped = True
        return self._stopped

    def _go_on(self) -> None:
        if self._is_stopped():
            raise _StoppedError

    def _abandon(self) -> None:
        """End every job, and compare nothing."""
        jobs = [
            job
            for running in self._running
            for job in (running.load_job, running.store_job)
            if job is not None
        ]
        self._worker.cancel(jobs)
        self._worker.wait(jobs)
        self._running.clear()

    def close(self) -> None:
        """Shut the worker down. Works twice."""
        self._worker.shutdown()

    def _admit(self, request: Request, number: int) -> None:
        ids = np.array(request.hash_ids, dtype=np.int64)
        keys = [OffloadKey(i.to_bytes(8, "big")) for i in request.hash_ids]
        while len(self._running) >= self._settings.concurrency or not self._pool.fits(keys):
            self._retire()

        factor = self._settings.block_size_factor
        context = RequestContext(str(number))
        on_device = self._pool.prefix(keys)
        running = _Running(
            context,
            ids,
            keys,
            on_device=on_device,
            loaded=slice(on_device, on_device),
            chunk_keys=[_chunk_key(keys[i : i + factor]) for i in _whole(len(keys), factor)],
            blocks=np.array(self._pool.acquire(context.request_id, keys), dtype=np.int64),
        )
        self._running.append(running)
        self._manager.touch(running.chunk_keys, context)
        # A load may enter the first chunk behind what the device has of it.
        first_chunk = on_device // factor
        chunks = self._manager.lookup(running.chunk_keys[first_chunk:], context).hits
        ready = (first_chunk + chunks) * factor if chunks else on_device
        if ready > on_device:
            running.loaded = slice(on_device, ready)
            running.load_keys = running.chunk_keys[first_chunk : first_chunk + chunks]
            self._load(running)
        if ready < len(keys):
            self._compute(running.blocks[ready:], ids[ready:])
            self._store(running, ready // factor)

    def _load(self, running: _Running) -> None:
        source = self._manager.prepare_load(running.load_keys, running.context)
        blocks = running.blocks[running.loaded]
        target = DeviceLoadStoreSpec(blocks, [len(blocks)], [running.loaded.start])
        running.load_job = self._submit(source, target)
        # Whoever uses these blocks next on the device does so after the load.
        self._worker.fence([running.load_job])

    def _compute(self, blocks: IntArray, ids: IntArray) -> None:
        def work() -> None:
            for number, layer in enumerate(self._layers):
                for part in self._parts(len(blocks)):
                    # Nobody will look at what is left out.
                    if self._is_stopped():
                        return
                    self._rig.scatter(layer, blocks[part], self._expected(ids[part], number))

        self._rig.compute(work, writes=blocks.tolist())

    def _expected(self, ids: IntArray, layer: int) -> npt.NDArray[np.uint8]:
        return pattern.pages(ids, layer, self._settings.page_bytes)

    def _store(self, running: _Running, first_chunk: int) -> None:
        output = self._manager.prepare_store(running.chunk_keys[first_chunk:], running.context)
        if output is None:
            self.report.refused_stores += 1
            return
        self.report.evicted_chunks += len(output.evicted_keys)
        running.store_keys = output.keys_to_store
        if output.keys_to_store:
            factor = self._settings.block_size_factor
            place = {key: chunk for chunk, key in enumerate(running.chunk_keys)}
            chunks = np.array([place[key] for key in output.keys_to_store], dtype=np.int64)
            source = DeviceLoadStoreSpec(running.blocks[expand_block_ids(chunks, factor)])
            running.store_job = self._submit(source, output.store_spec)

    def _submit(self, src: LoadStoreSpec, dst: LoadStoreSpec) -> int:
        job_id = next(self._job_ids)
        self._worker.transfer_async(job_id, (src, dst))
        return job_id

    def _parts(self, blocks: int) -> Iterator[slice]:
        """So many blocks, in pieces of about :data:`PART_BYTES` of one layer."""
        # A small page costs more than its bytes.
        step = max(PART_BYTES // max(self._settings.page_bytes, 64), 1)
        return (slice(start, start + step) for start in range(0, blocks, step))

    def _retire(self) -> None:
        """Apply the completions of the oldest request, and compare every page of its blocks."""
        self._go_on()
        running = self._running[0]
        report = self.report
        if running.load_job is not None:
            result = self._result(running.load_job)
            self._manager.complete_load(running.load_keys, running.context, result.success)
            report.bytes_loaded += result.transfer_size
            if not result.success:
                # What an engine does with a failed load: compute.
                self._compute(running.blocks[running.loaded], running.ids[running.loaded])
        if running.store_job is not None:
            result = self._result(running.store_job)
            self._manager.complete_store(running.store_keys, running.context, result.success)
            report.bytes_stored += result.transfer_size
            report.stored_chunks += len(running.store_keys) if result.success else 0
        self._manager.release(running.context)
        report.corrupt_blocks += self._count_corrupt(running)
        self._pool.release(running.context.request_id, running.keys)
        self._running.popleft()
        report.requests += 1
        report.blocks += len(running.keys)
        report.device_hit_blocks += running.on_device
        report.host_hit_blocks += running.loaded.stop - running.on_device
        report.computed_blocks += len(running.keys) - running.loaded.stop
        self._progress(report.requests)

    def _result(self, job_id: int) -> TransferResult:
        self._worker.wait([job_id])
        for result in self._worker.get_finished():
            self._results[result.job_id] = result
            self.report.failed_jobs += not result.success
        if job_id not in self._results:
            raise KVOffloadError(f"job {job_id} was waited for, but has no result")
        return self._results.pop(job_id)

    def _count_corrupt(self, running: _Running) -> int:
        corrupt = np.zeros(len(running.ids), dtype=bool)
        for number, layer in enumerate(self._layers):
            for part in self._parts(len(running.ids)):
                self._go_on()
                found = self._rig.read(layer, running.blocks[part])
                wrong = found != self._expected(running.ids[part], number)
                corrupt[part] |= wrong.any(axis=1)
        # Content that was left out because of a stop is not corrupt.
        self._go_on()
        return int(corrupt.sum())


def _whole(blocks: int, factor: int) -> range:
    """First blocks of the whole chunks of a request."""
    return range(*whole_chunks(0, blocks, factor), factor)


def _chunk_key(keys: Sequence[OffloadKey]) -> OffloadKey:
    """What a chunk is known by: all its blocks, nothing shortened."""
    return OffloadKey(b"".join(key.block_hash for key in keys))


def check(requests: Sequence[Request], settings: Settings) -> None:
    """Every request fits the device pool.

    Raises:
        ConfigurationError: naming the first that does not.
    """
    for request in requests:
        if len(request.hash_ids) > settings.device_blocks:
            raise ConfigurationError(
                f"--device-blocks {settings.device_blocks}: the request of {request.source} needs "
                f"{len(request.hash_ids)} blocks"
            )


def _check_memory(backend: Backend, settings: Settings) -> None:
    """Both pools fit this machine's memory together, where both are in it."""
    if backend.device is None or backend.device.type != "cpu":
        return
    device = settings.device_blocks * settings.layers * settings.page_bytes
    limit = memory_limit()
    if device + settings.host_bytes > limit.nbytes:
        raise CapacityError(
            f"device blocks of {device} bytes ({format_bytes(device)}) and a host budget of "
            f"{settings.host_bytes} bytes ({format_bytes(settings.host_bytes)}) are together more "
            f"than {limit.source} has: {limit.nbytes} bytes ({format_bytes(limit.nbytes)})"
        )
