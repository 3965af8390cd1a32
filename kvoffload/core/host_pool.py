"""The host side: how many chunks a budget buys, and where each lies in one allocation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvoffload.core.backend import HostOrder
from kvoffload.core.errors import CapacityError, ConfigurationError
from kvoffload.core.host_memory import HostMemory, total_memory
from kvoffload.core.plan import Side, pools_of
from kvoffload.core.sizes import format_bytes
from kvoffload.core.specs import IntArray


@dataclass(frozen=True, eq=False)
class HostLayout:
    """Where chunks lie, relative to the start of the allocation.

    Groups that share tensors share a pool of chunk ids; groups that share none have a pool each,
    so that small chunks do not occupy the space of large ones.

    Attributes:
        order: the order of pages.
        factor: pieces per chunk.
        offset, hi, lo: int64[tensors], as ``base``, ``hi``, ``lo`` of :class:`Side`.
        count: int64[tensors], chunks.
        num_chunks: int64[groups], chunk ids of each group.
        nbytes: bytes of the allocation.
    """

    order: HostOrder
    factor: int
    offset: IntArray
    hi: IntArray
    lo: IntArray
    count: IntArray
    num_chunks: IntArray
    nbytes: int

    @classmethod
    def within(
        cls,
        budget: int,
        page_bytes: IntArray,
        groups: Sequence[IntArray],
        factor: int,
        order: HostOrder,
    ) -> HostLayout:
        """The layout with the most chunks that ``budget`` bytes hold, the same number per pool.

        Args:
            budget: bytes.
            page_bytes: int64[tensors].
            groups: tensor indices of each group.
            factor: pieces (pages of each tensor) per chunk.
            order: how pages lie.

        Raises:
            CapacityError: the budget does not hold one chunk, or is more than the machine has.
            ConfigurationError: the factor is not positive.
        """
        if factor < 1:
            raise ConfigurationError(f"block_size_factor must be at least 1, not {factor}")
        pools = pools_of(groups)
        pool_of_tensor = np.full(len(page_bytes), -1, dtype=np.int64)
        for tensors, pool in zip(groups, pools.tolist(), strict=True):
            pool_of_tensor[tensors] = pool
        moved = int(page_bytes[pool_of_tensor >= 0].sum())
        chunk_bytes = moved * factor
        if budget < chunk_bytes:
            raise CapacityError(
                f"a host budget of {budget} bytes holds no chunk: one takes {chunk_bytes} bytes "
                f"({len(page_bytes)} tensors, {moved} bytes per block, {factor} blocks per chunk)"
            )
        total = total_memory()
        if budget > total:
            raise CapacityError(
                f"a host budget of {budget} bytes ({format_bytes(budget)}) is more than this "
                f"machine has: {total} bytes ({format_bytes(total)})"
            )
        chunks = budget // chunk_bytes
        offset, hi, lo = (np.zeros(len(page_bytes), dtype=np.int64) for _ in range(3))
        end = 0
        for pool in range(int(pools.max()) + 1):
            mine = np.flatnonzero(pool_of_tensor == pool)
            page = page_bytes[mine]
            before = np.cumsum(page) - page
            block = int(page.sum())
            if order is HostOrder.PLANES:
                offset[mine], hi[mine], lo[mine] = before * factor * chunks, page * factor, page
            elif order is HostOrder.TENSOR_MAJOR:
                offset[mine], hi[mine], lo[mine] = before * factor, block * factor, page
            else:
                offset[mine], hi[mine], lo[mine] = before, block * factor, block
            offset[mine] += end
            end += block * factor * chunks
        return cls(
            order=order,
            factor=factor,
            offset=offset,
            hi=hi,
            lo=lo,
            count=np.full(len(page_bytes), chunks, dtype=np.int64),
            num_chunks=np.full(len(groups), chunks, dtype=np.int64),
            nbytes=end,
        )


class HostPool:
    """Chunks in one allocation.

    Args:
        layout: where they lie.
        allocate: from a number of bytes to host memory; a backend's ``allocate_host``.
    """

    def __init__(self, layout: HostLayout, allocate: Callable[[int], HostMemory]) -> None:
        self.layout = layout
        self.memory = allocate(layout.nbytes)

    def side(self) -> Side:
        """The pool as one side of a geometry."""
        layout, start = self.layout, self.memory.address
        return Side(
            base=layout.offset + start,
            hi=layout.hi,
            lo=layout.lo,
            factor=layout.factor,
            count=layout.count,
            start=np.full(len(layout.offset), start, dtype=np.int64),
            end=np.full(len(layout.offset), start + self.memory.nbytes, dtype=np.int64),
        )

    def resident_bytes(self) -> int:
        """Bytes that occupy memory now, read from the operating system."""
        return self.memory.resident_bytes()

    def release(self) -> None:
        """Give the memory back. Works twice."""
        self.memory.release()
