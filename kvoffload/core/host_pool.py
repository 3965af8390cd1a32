"""The host side: how many chunks a budget buys, and where each lies in one allocation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from kvoffload.core.backend import HostOrder
from kvoffload.core.errors import CapacityError, ConfigurationError
from kvoffload.core.host_memory import HostMemory
from kvoffload.core.plan import Side, pools_of
from kvoffload.core.sizes import format_bytes
from kvoffload.core.specs import IntArray


@dataclass(frozen=True)
class HostCapacity:
    """What a budget bought, in the units that people plan with.

    Attributes:
        nbytes: bytes of the allocation.
        chunks: per group, chunk ids it can use (groups that share tensors share them).
        blocks: per group, device blocks that those chunks hold.
        tokens: tokens of one sequence that all groups can keep together; None if it was not said
            how many tokens a block holds.
    """

    nbytes: int
    chunks: tuple[int, ...]
    blocks: tuple[int, ...]
    tokens: int | None

    def __str__(self) -> str:
        tokens = "" if self.tokens is None else f", {self.tokens} tokens"
        return (
            f"{format_bytes(self.nbytes)}, chunks per group {list(self.chunks)}, "
            f"blocks per group {list(self.blocks)}{tokens}"
        )


@dataclass(frozen=True, eq=False)
class HostLayout:
    """Where chunks lie, relative to the start of the allocation.

    Groups that share tensors share a pool of chunk ids; groups that share none have a pool each,
    so that small chunks do not occupy the space of large ones.

    Attributes:
        order: the order of pages.
        factor: blocks per chunk.
        offset, hi, lo: int64[tensors], as ``base``, ``hi``, ``lo`` of :class:`Side`.
        count: int64[tensors], chunks.
        capacity: what that is worth.
    """

    order: HostOrder
    factor: int
    offset: IntArray
    hi: IntArray
    lo: IntArray
    count: IntArray
    capacity: HostCapacity

    @classmethod
    def within(
        cls,
        budget: int,
        page_bytes: IntArray,
        groups: Sequence[IntArray],
        *,
        factor: int = 1,
        order: HostOrder = HostOrder.PLANES,
        tokens_per_block: Sequence[int] | None = None,
    ) -> HostLayout:
        """The layout that lets the longest sequence stay, within ``budget`` bytes.

        Args:
            budget: bytes.
            page_bytes: int64[tensors].
            groups: tensor indices of each group; every tensor is in one.
            factor: blocks per chunk.
            order: how pages lie.
            tokens_per_block: per group; by default all groups hold equally many.

        Raises:
            CapacityError: the budget does not hold one chunk of each group.
            ConfigurationError: ``factor`` or ``tokens_per_block`` is not positive.
        """
        if isinstance(factor, bool) or not isinstance(factor, int) or factor < 1:
            raise ConfigurationError(f"block_size_factor must be at least 1, not {factor!r}")
        per_block = [1] * len(groups) if tokens_per_block is None else list(tokens_per_block)
        if len(per_block) != len(groups) or any(
            isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1
            for tokens in per_block
        ):
            raise ConfigurationError(
                f"tokens_per_block must be positive for each of {len(groups)} groups, "
                f"not {tokens_per_block}"
            )
        pool_of_group = pools_of(groups).tolist()
        tensors_of = [
            np.unique(
                np.concatenate([t for t, q in zip(groups, pool_of_group, strict=True) if q == p])
            )
            for p in range(max(pool_of_group) + 1)
        ]
        chunk_bytes = [int(page_bytes[tensors].sum()) * factor for tensors in tensors_of]
        # Chunks that a pool needs for each token of a sequence: one per group and chunk.
        demand = [Fraction(0)] * len(tensors_of)
        for pool, tokens in zip(pool_of_group, per_block, strict=True):
            demand[pool] += Fraction(1, tokens * factor)
        chunks = _divide(budget, chunk_bytes, demand)

        offset, hi, lo, count = (np.zeros(len(page_bytes), dtype=np.int64) for _ in range(4))
        end = 0
        for tensors, chunk, number in zip(tensors_of, chunk_bytes, chunks, strict=True):
            page = page_bytes[tensors]
            before = np.cumsum(page) - page
            count[tensors] = number
            if order is HostOrder.PLANES:
                places = before * factor * number, page * factor, page
            elif order is HostOrder.TENSOR_MAJOR:
                places = before * factor, chunk, page
            else:
                places = before, chunk, chunk // factor
            offset[tensors], hi[tensors], lo[tensors] = places
            offset[tensors] += end
            end += chunk * number
        per_group = [chunks[pool] for pool in pool_of_group]
        usable = min(int(number / needed) for number, needed in zip(chunks, demand, strict=True))
        return cls(
            order=order,
            factor=factor,
            offset=offset,
            hi=hi,
            lo=lo,
            count=count,
            capacity=HostCapacity(
                nbytes=end,
                chunks=tuple(per_group),
                blocks=tuple(number * factor for number in per_group),
                tokens=None if tokens_per_block is None else usable,
            ),
        )


def _divide(budget: int, chunk_bytes: Sequence[int], demand: Sequence[Fraction]) -> list[int]:
    """Chunks per pool, so that all pools are full after the same number of tokens."""
    sizes = f"{list(chunk_bytes)} bytes" if len(chunk_bytes) > 1 else f"{chunk_bytes[0]} bytes"
    if budget < sum(chunk_bytes):
        raise CapacityError(
            f"a host budget of {budget} bytes is too small: one chunk of each group takes {sizes}"
        )
    tokens = budget / sum(size * needed for size, needed in zip(chunk_bytes, demand, strict=True))
    # Rounded down, but one at least; what that exceeds comes off the most plentiful pool.
    chunks = [max(int(tokens * needed), 1) for needed in demand]
    while (over := sum(n * s for n, s in zip(chunks, chunk_bytes, strict=True)) - budget) > 0:
        richest = max(
            (i for i in range(len(chunks)) if chunks[i] > 1), key=lambda i: chunks[i] / demand[i]
        )
        chunks[richest] -= min(-(-over // chunk_bytes[richest]), chunks[richest] - 1)
    # What rounding left over goes to the pool that is full first, as long as it is enough.
    left = -over
    while True:
        fullest = min(range(len(chunks)), key=lambda i: chunks[i] / demand[i])
        if chunk_bytes[fullest] > left:
            return chunks
        chunks[fullest] += 1
        left -= chunk_bytes[fullest]


class HostPool:
    """Chunks in one allocation.

    Args:
        layout: where they lie.
        allocate: from a number of bytes to host memory; a backend's ``allocate_host``.
    """

    def __init__(self, layout: HostLayout, allocate: Callable[[int], HostMemory]) -> None:
        self.layout = layout
        self.memory = allocate(layout.capacity.nbytes)

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
