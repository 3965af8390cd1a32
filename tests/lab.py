"""A small cache on a real backend, filled and read by ways that bypass the code under test."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from kvoffload.core.backend import Backend
from kvoffload.core.engine import CURRENT_STREAM, After, TransferEngine, TransferResult
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.lanes import Lane
from kvoffload.core.specs import DeviceLoadStoreSpec, HostLoadStoreSpec
from kvoffload.core.worker import OffloadingWorker
from kvoffload.rig import rig_for

BLOCKS, CHUNKS = 12, 8
PAGES = (64, 24, 100)

Bytes = npt.NDArray[np.uint8]


class Lab:
    """Three tensors of unequal pages, a worker over them, and a rig that holds the device.

    The content of a block is ``tag``: page ``t`` of a block filled with tag ``x`` holds
    ``(x + t + offset) % 251`` at each offset.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.rig = rig_for(backend)
        self.tensors = [self.rig.allocate(BLOCKS * page).view(BLOCKS, page) for page in PAGES]
        self.worker = self.register()
        self._job_ids = itertools.count(1)
        self._stack = contextlib.ExitStack()

    def register(self) -> OffloadingWorker:
        """A worker for the lab's tensors."""
        return OffloadingWorker.for_caches(
            self.backend,
            CanonicalKVCaches.from_tensors(self.tensors),
            host_bytes=sum(PAGES) * CHUNKS,
        )

    def __enter__(self) -> Self:
        self._stack.enter_context(self.rig)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.rig.release()
        self.worker.shutdown()
        self._stack.close()

    @property
    def engine(self) -> TransferEngine:
        assert self.worker.engine is not None
        return self.worker.engine

    def content(self, tags: Sequence[int], tensor: int) -> Bytes:
        offsets = np.arange(PAGES[tensor]) + tensor
        values: Bytes = ((np.array(tags)[:, None] + offsets) % 251).astype(np.uint8)
        return values

    def fill(self, blocks: Sequence[int], tags: Sequence[int]) -> None:
        """Device work on the caller's stream: write ``tags`` into ``blocks``."""
        rows = np.array(blocks, dtype=np.int64)

        def work() -> None:
            for number, tensor in enumerate(self.tensors):
                self.rig.scatter(tensor, rows, self.content(tags, number))

        self.rig.compute(work, writes=blocks)

    def peek(self, blocks: Sequence[int]) -> list[Bytes]:
        """Device work on the caller's stream: read ``blocks``; look at it after a synchronise."""
        rows = np.array(blocks, dtype=np.int64)
        out: list[Bytes] = []
        self.rig.compute(
            lambda: out.extend(self.rig.gather(tensor, rows) for tensor in self.tensors),
            reads=blocks,
        )
        return out

    def expect(self, blocks: Sequence[int], tags: Sequence[int]) -> None:
        """Every byte of ``blocks`` is that of ``tags``; synchronises the device."""
        rows = np.array(blocks, dtype=np.int64)
        for number, tensor in enumerate(self.tensors):
            found, wanted = self.rig.read(tensor, rows), self.content(tags, number)
            wrong = [b for b, f, w in zip(blocks, found, wanted, strict=True) if (f != w).any()]
            assert not wrong, f"blocks {wrong} of tensor {number} are wrong"

    def store(
        self, blocks: Sequence[int], chunks: Sequence[int], after: After = CURRENT_STREAM
    ) -> int:
        job_id = next(self._job_ids)
        spec = (DeviceLoadStoreSpec(blocks), HostLoadStoreSpec(chunks))
        assert self.worker.transfer_async(job_id, spec, after=after)
        return job_id

    def load(
        self, chunks: Sequence[int], blocks: Sequence[int], after: After = CURRENT_STREAM
    ) -> int:
        job_id = next(self._job_ids)
        spec = (HostLoadStoreSpec(chunks), DeviceLoadStoreSpec(blocks))
        assert self.worker.transfer_async(job_id, spec, after=after)
        return job_id

    def copy(
        self, sources: Sequence[int], targets: Sequence[int], after: After = CURRENT_STREAM
    ) -> int:
        job_id = next(self._job_ids)
        source, target = DeviceLoadStoreSpec(sources), DeviceLoadStoreSpec(targets)
        assert self.worker.copy_blocks(job_id, source, target, after=after)
        return job_id

    def submit(self, lane: Lane) -> int:
        """Block 1 to chunk 0, chunk 0 to block 2, or block 1 to block 3."""
        if lane is Lane.STORE:
            return self.store([1], [0])
        return self.load([0], [2]) if lane is Lane.LOAD else self.copy([1], [3])

    def finish(self, *job_ids: int) -> list[TransferResult]:
        """Wait for the jobs; all results, in the order of the ids."""
        self.worker.wait(job_ids)
        results = {result.job_id: result for result in self.worker.get_finished()}
        return [results[job_id] for job_id in job_ids]

    def succeed(self, *job_ids: int) -> None:
        for result in self.finish(*job_ids):
            assert result.success, result
