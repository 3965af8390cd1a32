"""Blocks on a device and as many chunks in host memory, for transfers that are to be timed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

import numpy as np

from kvoffload.core.backend import Backend
from kvoffload.core.engine import CURRENT_STREAM, After, TransferEngine
from kvoffload.core.errors import ConfigurationError, CopyError, StateError
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.lanes import Lane
from kvoffload.core.specs import DeviceLoadStoreSpec, HostLoadStoreSpec, IntArray
from kvoffload.core.worker import OffloadingWorker
from kvoffload.rig import DeviceRig

UNREGISTER_SECONDS = 30.0
TOUCHED_AT_ONCE = 64 << 20
"""Bytes."""
CHECKED = 8
"""Blocks whose bytes are compared."""


class Pool:
    """All of its memory is touched when it is made. Use it as a context manager.

    Args:
        backend: stays open; it serves one pool at a time.
        rig: holds its device.
        page_bytes: of one block in one tensor.
        blocks: on the device, and as many chunks of one block.
        tensors: how many.
        between: called now and then while memory is touched, which takes seconds for gigabytes; it
            may raise to end this.

    Raises:
        ConfigurationError: the device has not that much memory.
    """

    def __init__(
        self,
        backend: Backend,
        rig: DeviceRig,
        page_bytes: int,
        blocks: int,
        *,
        tensors: int = 1,
        between: Callable[[], object] = lambda: None,
    ) -> None:
        self._rig = rig
        self._job_ids = itertools.count()
        self._tensors = [
            rig.allocate(blocks * page_bytes).view(blocks, page_bytes) for _ in range(tensors)
        ]
        self.worker = OffloadingWorker.for_caches(
            backend,
            CanonicalKVCaches.from_tensors(self._tensors),
            host_bytes=blocks * page_bytes * tensors,
        )
        self.blocks = blocks
        try:
            at_once = max(TOUCHED_AT_ONCE // (page_bytes * tensors), 1)
            for first in range(0, blocks, at_once):
                between()
                some = np.arange(first, min(first + at_once, blocks))
                for lane in (Lane.STORE, Lane.LOAD):
                    self.transfer(lane, some, some)
        except BaseException:
            self.close()
            raise

    @property
    def engine(self) -> TransferEngine:
        """Behind the worker."""
        if self.worker.engine is None:
            raise StateError("the worker has no engine")
        return self.worker.engine

    @property
    def pinned(self) -> bool:
        """Host memory is page-locked."""
        return self.engine.host.memory.pinned

    def submit(
        self, lane: Lane, blocks: IntArray, chunks: IntArray, *, after: After = CURRENT_STREAM
    ) -> int:
        """Start a store to, or a load from, these chunks; its job id."""
        job_id = next(self._job_ids)
        device, host = DeviceLoadStoreSpec(blocks), HostLoadStoreSpec(chunks)
        pair = (device, host) if lane is Lane.STORE else (host, device)
        self.worker.transfer_async(job_id, pair, after=after)
        return job_id

    def finish(self, job_ids: Iterable[int]) -> None:
        """Wait for the jobs.

        Raises:
            TransferError: one has failed.
        """
        self.worker.wait(list(job_ids))
        self.poll()

    def poll(self) -> list[int]:
        """Ids of the jobs that have ended since the last look; never waits.

        Raises:
            TransferError: one has failed.
        """
        results = self.worker.get_finished()
        for result in results:
            if result.error is not None:
                raise result.error
        return [result.job_id for result in results]

    def transfer(self, lane: Lane, blocks: IntArray, chunks: IntArray) -> None:
        """Submit, and :meth:`finish`."""
        self.finish([self.submit(lane, blocks, chunks)])

    def check(self, rng: np.random.Generator) -> None:
        """Store some blocks and load them into others: what is measured must be a copy.

        Raises:
            CopyError: bytes did not arrive.
        """
        count = min(CHECKED, self.blocks // 2)
        if count < 1:
            raise ConfigurationError(f"a pool of {self.blocks} blocks is too small to be checked")
        blocks, chunks = (rng.permutation(self.blocks) for _ in range(2))
        there, back = blocks[:count], blocks[count : 2 * count]
        shape = (count, self._tensors[0].shape[1])
        data = [rng.integers(0, 256, shape, dtype=np.uint8) for _ in self._tensors]
        for tensor, bytes_ in zip(self._tensors, data, strict=True):
            self._rig.write(tensor, there, bytes_)
        self.transfer(Lane.STORE, there, chunks[:count])
        self.transfer(Lane.LOAD, back, chunks[:count])
        for tensor, bytes_ in zip(self._tensors, data, strict=True):
            if not np.array_equal(self._rig.read(tensor, back), bytes_):
                raise CopyError("what was stored is not what was loaded: nothing was measured")

    def close(self) -> None:
        """Wait for all jobs, and give the memory back."""
        self.worker.unregister(UNREGISTER_SECONDS)
        self._tensors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
