"""A small cache on a backend, with a model of what every byte must be.

The device is filled and read by a rig, past the code under test.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from kvoffload.core.backend import Backend, HostOrder
from kvoffload.core.engine import CURRENT_STREAM, After, TransferEngine, TransferResult
from kvoffload.core.errors import KVOffloadError
from kvoffload.core.kv_caches import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from kvoffload.core.lanes import Lane
from kvoffload.core.specs import DeviceLoadStoreSpec, HostLoadStoreSpec, IntArray
from kvoffload.core.worker import OffloadingWorker
from kvoffload.rig import Bytes, rig_for

GUARD = 241
"""The tag of the rows before and behind every tensor, which nothing may touch."""
NEVER = -1
"""The tag of what was never written: zeros."""
PERIOD = 251
"""After so many bytes, and so many tags, contents repeat."""
SHUTDOWN_SECONDS = 10.0
"""How long a lab waits for its jobs when it is closed."""


@dataclass(frozen=True)
class Cache:
    """What a lab's caches look like.

    Attributes:
        pages: bytes of a page, for each tensor.
        groups: tensors of each group.
        blocks: per tensor.
        chunks: that host memory holds, of every pool.
        factor: blocks per chunk.
        order: of host memory; None: what the backend prefers.
        interleaved: all tensors in one allocation, a block's pages side by side.
        gap: bytes between the rows of a tensor, or between blocks where they are interleaved.
    """

    pages: tuple[int, ...] = (64, 24, 104)
    groups: tuple[tuple[int, ...], ...] = ((0, 1, 2),)
    blocks: int = 12
    chunks: int = 8
    factor: int = 1
    order: HostOrder | None = None
    interleaved: bool = False
    gap: int = 0


class Lab:
    """Tensors, a worker over them, and a rig that holds the device.

    Blocks are known by tags: page ``t`` of a block that is filled with tag ``x`` holds
    ``(7 * x + 13 * t + offset) % PERIOD`` at each offset. Stores, loads and copies that are
    submitted here change the model in the order of their submission; :meth:`check` compares all.

    Args:
        backend: a fresh one; the lab shuts it down.
        cache: what it looks like.
        job_deadline: of the engine.
        seed: of :attr:`rng`.
    """

    def __init__(
        self,
        backend: Backend,
        cache: Cache = Cache(),
        *,
        job_deadline: float | None = None,
        seed: int = 0,
    ) -> None:
        self.backend = backend
        self.cache = cache
        self.rng = np.random.default_rng(seed)
        self.rig = rig_for(backend)
        self._job_deadline = job_deadline
        self._job_ids = itertools.count(1)
        self._ended: dict[int, TransferResult] = {}  # collected, and not told by finish()
        self._stack = contextlib.ExitStack()
        self._shared: torch.Tensor | None = None
        self._guarded = [self._allocate(t) for t in range(len(cache.pages))]
        self.tensors = [guarded[1:-1] for guarded in self._guarded]
        self.device = np.full((len(cache.pages), cache.blocks), NEVER)
        """The model: tag of each page on the device."""
        self.worker = self.register()
        self.host = self._untouched_host()
        """The model: tag of each page in host memory."""

    def _allocate(self, tensor: int) -> torch.Tensor:
        """``(1 + blocks + 1, page)``, the outer rows being guards."""
        cache, rows = self.cache, self.cache.blocks + 2
        if not cache.interleaved:
            row = cache.pages[tensor] + cache.gap
            whole = self.rig.allocate(rows * row).view(rows, row)
            return whole[:, : cache.pages[tensor]]
        row = sum(cache.pages) + cache.gap
        if self._shared is None:
            self._shared = self.rig.allocate(rows * row).view(rows, row)
        first = sum(cache.pages[:tensor])
        return self._shared[:, first : first + cache.pages[tensor]]

    def caches(self) -> CanonicalKVCaches:
        """The tensors as an engine's caches."""
        pages = self.cache.pages
        return CanonicalKVCaches(
            [CanonicalKVCacheTensor(t, p) for t, p in zip(self.tensors, pages, strict=True)],
            [[CanonicalKVCacheRef(t, pages[t]) for t in group] for group in self.cache.groups],
        )

    def register(self) -> OffloadingWorker:
        """A worker for the lab's tensors, with room for so many chunks of all of them."""
        cache = self.cache
        return OffloadingWorker.for_caches(
            self.backend,
            self.caches(),
            host_bytes=sum(cache.pages) * cache.chunks * cache.factor,
            block_size_factor=cache.factor,
            host_order=cache.order,
            job_deadline=self._job_deadline,
        )

    def register_again(self) -> None:
        """A new worker after the old one was unregistered; host memory is new, too."""
        self.worker = self.register()
        self.host = self._untouched_host()

    def _untouched_host(self) -> IntArray:
        units = max(self.worker.num_chunks) * self.cache.factor
        return np.full((len(self.cache.pages), units), NEVER)

    def let_go(self) -> None:
        """Unregister, and forget the tensors: nothing here holds device memory any more."""
        self.worker.unregister()
        self.tensors.clear()
        self._guarded.clear()
        self._shared = None
        self.rig.synchronize()

    def __enter__(self) -> Self:
        self._stack.enter_context(self.rig)
        rows = np.array([0, self.cache.blocks + 1])

        def guard() -> None:
            for number, tensor in enumerate(self._guarded):
                self.rig.scatter(tensor, rows, self.content([GUARD] * 2, number))

        self.rig.compute(guard)
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._stack:
            self.rig.release()
            self.worker.shutdown(SHUTDOWN_SECONDS)

    @property
    def engine(self) -> TransferEngine:
        """Behind the worker."""
        if self.worker.engine is None:
            raise KVOffloadError("the worker has no engine")
        return self.worker.engine

    def content(self, tags: Sequence[int] | IntArray, tensor: int) -> Bytes:
        """What pages of a tensor hold: uint8 ``(len(tags), page)``."""
        page, numbers = self.cache.pages[tensor], np.asarray(tags, dtype=np.int64)
        ramp = (np.arange(PERIOD + page - 1) % PERIOD).astype(np.uint8)
        rows = np.lib.stride_tricks.sliding_window_view(ramp, page)
        content: Bytes = rows[(7 * numbers + 13 * tensor) % PERIOD]
        content[numbers == NEVER] = 0
        return content

    # ------------------------------------------------------------------------- device work
    def hold(self) -> None:
        """Hold the device until ``rig.release()``, so that what is submitted has to wait.

        Not where copies may block: submitting one would wait for the release, for ever.
        """
        if self.backend.capabilities.asynchronous:
            self.rig.hold()

    def fill(self, blocks: Sequence[int], tags: Sequence[int]) -> None:
        """Device work on the caller's stream: write ``tags`` into ``blocks`` of every tensor."""
        rows = np.array(blocks, dtype=np.int64)
        self.device[:, rows] = tags

        def work() -> None:
            for number, tensor in enumerate(self.tensors):
                self.rig.scatter(tensor, rows, self.content(tags, number))

        self.rig.compute(work, writes=blocks)

    def fill_all(self, first: int = 0) -> None:
        """Give every block a tag of its own, counted from ``first``."""
        everywhere = range(self.cache.blocks)
        self.fill(everywhere, [(first + block) % GUARD for block in everywhere])

    def peek(self, blocks: Sequence[int]) -> list[Bytes]:
        """Device work on the caller's stream: read ``blocks``; look at it after a synchronise."""
        rows = np.array(blocks, dtype=np.int64)
        out: list[Bytes] = []
        self.rig.compute(
            lambda: out.extend(self.rig.gather(tensor, rows) for tensor in self.tensors),
            reads=blocks,
        )
        return out

    # ---------------------------------------------------------------------------- transfers
    def store(
        self,
        blocks: Sequence[int],
        chunks: Sequence[int],
        *,
        group: int = 0,
        after: After = CURRENT_STREAM,
    ) -> int:
        """Submit a store of whole chunks; its job id."""
        return self.store_groups({group: (blocks, chunks)}, after=after)

    def load(
        self,
        chunks: Sequence[int],
        blocks: Sequence[int],
        *,
        group: int = 0,
        first: int = 0,
        after: After = CURRENT_STREAM,
    ) -> int:
        """Submit a load that enters its first chunk at logical block ``first``; its job id."""
        return self.load_groups({group: (chunks, blocks, first)}, after=after)

    def store_groups(
        self,
        groups: dict[int, tuple[Sequence[int], Sequence[int]]],
        *,
        after: After = CURRENT_STREAM,
    ) -> int:
        """Submit one store of several groups: blocks and chunks of each."""
        moved = {group: (blocks, chunks, 0) for group, (blocks, chunks) in groups.items()}
        device, host, pairs = self._specs(moved)
        job_id = next(self._job_ids)
        self.worker.transfer_async(job_id, (device, host), after=after)
        for tensor, blocks, units in pairs:
            self.host[tensor, units] = self.device[tensor, blocks]
        return job_id

    def load_groups(
        self,
        groups: dict[int, tuple[Sequence[int], Sequence[int], int]],
        *,
        after: After = CURRENT_STREAM,
    ) -> int:
        """Submit one load of several groups: chunks, blocks and first logical block of each."""
        moved = {
            group: (blocks, chunks, first) for group, (chunks, blocks, first) in groups.items()
        }
        device, host, pairs = self._specs(moved)
        job_id = next(self._job_ids)
        self.worker.transfer_async(job_id, (host, device), after=after)
        for tensor, blocks, units in pairs:
            self.device[tensor, blocks] = self.host[tensor, units]
        return job_id

    def copy(
        self, sources: Sequence[int], targets: Sequence[int], *, after: After = CURRENT_STREAM
    ) -> int:
        """Submit a copy on the device, of group 0; its job id."""
        others = [0] * (len(self.cache.groups) - 1)
        sizes = [len(sources), *others]
        job_id = next(self._job_ids)
        self.worker.copy_blocks(
            job_id,
            DeviceLoadStoreSpec(sources, sizes),
            DeviceLoadStoreSpec(targets, sizes),
            after=after,
        )
        for tensor in self.cache.groups[0]:
            self.device[tensor, list(targets)] = self.device[tensor, list(sources)]
        return job_id

    def _specs(
        self, moved: dict[int, tuple[Sequence[int], Sequence[int], int]]
    ) -> tuple[DeviceLoadStoreSpec, HostLoadStoreSpec, list[tuple[int, IntArray, IntArray]]]:
        nothing: tuple[Sequence[int], Sequence[int], int] = ([], [], 0)
        blocks, chunks, first = zip(
            *(moved.get(group, nothing) for group in range(len(self.cache.groups))), strict=True
        )
        device = DeviceLoadStoreSpec(_joined(blocks), [len(each) for each in blocks], list(first))
        factor = self.cache.factor
        pairs = []
        for group, (mine, theirs, entered) in moved.items():
            logical = entered % factor + np.arange(len(mine))
            units = np.asarray(theirs, dtype=np.int64)[logical // factor] * factor
            pairs += [
                (tensor, np.asarray(mine, dtype=np.int64), units + logical % factor)
                for tensor in self.cache.groups[group]
            ]
        return device, HostLoadStoreSpec(_joined(chunks)), pairs

    def submit(self, lane: Lane) -> int:
        """Block 1 to chunk 0, chunk 0 to block 2, or block 1 to block 3."""
        if lane is Lane.STORE:
            return self.store([1], [0])
        return self.load([0], [2]) if lane is Lane.LOAD else self.copy([1], [3])

    def finish(self, *job_ids: int) -> list[TransferResult]:
        """Wait for the jobs; their results, in the order of the ids."""
        self.worker.wait(job_ids)
        self.collect()
        return [self._ended.pop(job_id) for job_id in job_ids]

    def collect(self) -> list[TransferResult]:
        """What has ended since the last call; :meth:`finish` still tells of it."""
        results = self.worker.get_finished()
        self._ended.update({result.job_id: result for result in results})
        return results

    def succeed(self, *job_ids: int) -> None:
        """Wait for the jobs; all must have succeeded.

        Raises:
            AssertionError: one did not.
        """
        for result in self.finish(*job_ids):
            if not result.success:
                raise AssertionError(f"job {result.job_id} failed: {result.error}")

    # ----------------------------------------------------------------------------- comparing
    def check(self) -> None:
        """Every byte on the device and in host memory is what the model says; synchronises.

        Raises:
            AssertionError: naming what is wrong.
        """
        self.check_device()
        self.check_host()

    def check_device(self) -> None:
        """As :meth:`check`, on the device alone: all blocks, and the guards around them."""
        rows = np.arange(self.cache.blocks + 2)
        for number, tensor in enumerate(self._guarded):
            tags = np.concatenate(([GUARD], self.device[number], [GUARD]))
            _compare(
                self.rig.read(tensor, rows),
                self.content(tags, number),
                lambda row, t=number: (  # type: ignore[misc]
                    f"block {row - 1} of tensor {t}"
                    if 0 < row <= self.cache.blocks
                    else f"the bytes around tensor {t}"
                ),
            )

    def check_host(self, chunks: Sequence[int] | None = None) -> None:
        """As :meth:`check`, in host memory alone: all of it, or these chunks where it is large."""
        side, memory = self.engine.geometry.host, self.engine.host.memory
        for number, page in enumerate(self.cache.pages):
            units = np.arange(int(side.count[number]) * side.factor)
            if chunks is not None:
                units = units[np.isin(units // side.factor, chunks)]
            first = (
                side.base[number]
                - memory.address
                + units // side.factor * side.hi[number]
                + units % side.factor * side.lo[number]
            )
            found = memory.numpy()[first[:, None] + np.arange(page)]
            wanted = self.content(self.host[number, units], number)
            _compare(
                found,
                wanted,
                lambda row, t=number, units=units: (  # type: ignore[misc]
                    f"chunk {units[row] // side.factor}, piece {units[row] % side.factor} "
                    f"of tensor {t}"
                ),
            )

    def expect(self, blocks: Sequence[int], tags: Sequence[int]) -> None:
        """Every byte of ``blocks`` is that of ``tags``; synchronises.

        Raises:
            AssertionError: naming what is wrong.
        """
        rows = np.array(blocks, dtype=np.int64)
        for number, tensor in enumerate(self.tensors):
            _compare(
                self.rig.read(tensor, rows),
                self.content(tags, number),
                lambda row, t=number: f"block {blocks[row]} of tensor {t}",  # type: ignore[misc]
            )


def _joined(parts: Sequence[Sequence[int]]) -> list[int]:
    return [int(value) for part in parts for value in part]


def _compare(found: Bytes, wanted: Bytes, name: Callable[[int], str]) -> None:
    wrong = np.flatnonzero((found != wanted).any(axis=1)).tolist()
    if wrong:
        first = wrong[0]
        offset = int(np.flatnonzero(found[first] != wanted[first])[0])
        raise AssertionError(
            f"{len(wrong)} pages are wrong; the first is {name(first)}, from byte {offset}: "
            f"{found[first, offset : offset + 8].tolist()} instead of "
            f"{wanted[first, offset : offset + 8].tolist()}"
        )
