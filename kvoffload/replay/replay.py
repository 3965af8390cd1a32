"""A request trace through the whole system, with every byte checked.

The engine is simulated, the rest is real: device blocks with prefix reuse, the manager of host
memory, the worker and its backend, and bytes that move.
"""

from __future__ import annotations

import collections
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffload.core.backend import Backend
from kvoffload.core.blocks import expand_block_ids, whole_chunks
from kvoffload.core.engine import TransferResult
from kvoffload.core.errors import ConfigurationError, KVOffloadError
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.specs import DeviceLoadStoreSpec, IntArray, LoadStoreSpec
from kvoffload.core.worker import OffloadingWorker
from kvoffload.replay import pattern
from kvoffload.replay.device_pool import DevicePool
from kvoffload.replay.trace import Request
from kvoffload.rig import DeviceRig
from kvoffload.scheduler.host_manager import HostOffloadingManager
from kvoffload.scheduler.keys import OffloadKey
from kvoffload.scheduler.manager import RequestContext


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
    loaded: slice  # blocks
    load_keys: list[OffloadKey] = field(default_factory=list)
    load_job: int | None = None
    store_job: int | None = None
    store_keys: list[OffloadKey] = field(default_factory=list)


class Replay:
    """One run. The worker that it builds owns ``backend`` and is shut down by :meth:`close`.

    Args:
        backend: available on this machine.
        backend_name: for the report.
        rig: holds the device; entered by the caller.
        settings: see there.

    Raises:
        CapacityError: ``host_bytes`` holds no chunk, or either side is more than there is.
    """

    def __init__(
        self, backend: Backend, backend_name: str, rig: DeviceRig, settings: Settings
    ) -> None:
        self._settings = settings
        self._rig = rig
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
            progress: called with the number of requests served, after each.
            stop: asked before each request; True ends the run early.
        """
        check(requests, self._settings)
        report, began = self.report, time.perf_counter()
        for number, request in enumerate(requests, start=1):
            if stop():
                report.interrupted = True
                break
            self._admit(request, number)
            progress(number)
        while self._running:
            self._retire()
        report.seconds = time.perf_counter() - began
        report.hit_rate = (report.device_hit_blocks + report.host_hit_blocks) / max(
            report.blocks, 1
        )
        report.host_bytes_resident = self._worker.host_bytes_resident()
        return report

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

        report = self.report
        report.requests += 1
        report.blocks += len(keys)
        report.device_hit_blocks += on_device
        report.host_hit_blocks += ready - on_device
        report.computed_blocks += len(keys) - ready

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
                self._rig.scatter(layer, blocks, self._expected(ids, number))

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

    def _retire(self) -> None:
        """Apply the completions of the oldest request, and compare every page of its blocks."""
        running = self._running.popleft()
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
            found = self._rig.read(layer, running.blocks)
            corrupt |= (found != self._expected(running.ids, number)).any(axis=1)
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
