"""Block-id arithmetic: from the ids of two specs to pairs of units that are copied onto each other.

A *unit* is the smallest piece a copy addresses: on the device a block (or, where one block consists
of several kernel blocks, a kernel block), in a chunk one of its ``block_size_factor`` sub-blocks.
Unit ``u`` of a side with factor ``f`` is piece ``u % f`` of block or chunk ``u // f``.

Everything here is int64, whatever comes in, and free of Python loops over blocks.
"""

from __future__ import annotations

import numpy as np

from kvoffload.core.errors import SpecError
from kvoffload.core.specs import BlockIds, IntArray, as_ids


def expand_block_ids(
    block_ids: BlockIds,
    block_size_factor: int,
    output: IntArray | None = None,
    skip_count: int = 0,
) -> IntArray:
    """Each id becomes ``block_size_factor`` consecutive sub-block ids.

    ``expand_block_ids([0, 1, 3], 4)`` is ``[0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15]``.

    Args:
        block_ids: integers of any width.
        block_size_factor: sub-blocks per block, at least 1.
        output: int64 array of the result's length to write into; allocated by default.
        skip_count: sub-blocks of the *first* block to leave out, less than ``block_size_factor``.

    Returns:
        int64[len(block_ids) * block_size_factor - skip_count]; ``output`` where it was given.

    Raises:
        SpecError: the factor, the skip count or ``output`` does not fit.
    """
    ids = as_ids(block_ids, "block_ids")
    if block_size_factor < 1:
        raise SpecError(f"block_size_factor must be at least 1, not {block_size_factor}")
    if not 0 <= skip_count < block_size_factor or (skip_count and not len(ids)):
        raise SpecError(
            f"skip_count {skip_count} must be at least 0 and less than block_size_factor "
            f"{block_size_factor}, and needs a block to skip in"
        )
    length = len(ids) * block_size_factor - skip_count
    if output is None:
        output = np.empty(length, dtype=np.int64)
    elif output.dtype != np.int64 or output.shape != (length,):
        raise SpecError(f"output must be int64[{length}], not {output.dtype}{list(output.shape)}")
    sub = np.arange(block_size_factor, dtype=np.int64)
    output[:] = (ids[:, None] * block_size_factor + sub).reshape(-1)[skip_count:]
    return output


def chunks_touched(group_sizes: IntArray, block_indices: IntArray, factor: int) -> IntArray:
    """How many chunks each group's blocks touch.

    A group of ``n`` blocks that enters its first chunk at sub-block ``block_index % factor``
    touches ``ceil((block_index % factor + n) / factor)`` chunks, none if it is empty.

    Args:
        group_sizes: int64[groups], blocks per group.
        block_indices: int64[groups], logical index of each group's first block.
        factor: device blocks per chunk.

    Returns:
        int64[groups].
    """
    skip = block_indices % factor
    return np.where(group_sizes > 0, -(-(skip + group_sizes) // factor), 0)


def chunk_units(
    chunk_ids: IntArray,
    touched: IntArray,
    group_sizes: IntArray,
    block_indices: IntArray,
    factor: int,
) -> IntArray:
    """The chunk sub-block that belongs to each block, group after group.

    Args:
        chunk_ids: int64, the chunks of all groups.
        touched: int64[groups], how many of them each group has: :func:`chunks_touched`.
        group_sizes, block_indices, factor: as in :func:`chunks_touched`.

    Returns:
        int64[sum(group_sizes)]: ``chunk id * factor + sub-block``.
    """
    first_block = np.cumsum(group_sizes) - group_sizes
    first_chunk = np.cumsum(touched) - touched
    # Position of each block counted from the start of its group's first chunk.
    position = np.arange(int(group_sizes.sum()), dtype=np.int64)
    position -= np.repeat(first_block - block_indices % factor, group_sizes)
    chunk, sub = np.divmod(position, factor)
    units: IntArray = chunk_ids[np.repeat(first_chunk, group_sizes) + chunk] * factor + sub
    return units


def whole_chunks(first_block: int, end_block: int, factor: int) -> tuple[int, int]:
    """The part of ``[first_block, end_block)`` that fills whole chunks; empty if there is none.

    Doing it twice changes nothing.

    Args:
        first_block, end_block: logical block indices within a request.
        factor: blocks per chunk.

    Returns:
        First and end of the part, both multiples of ``factor`` unless it is empty.
    """
    first = -(-first_block // factor) * factor
    end = end_block // factor * factor
    return (first, end) if first < end else (first_block, first_block)


def blocks_spanned(first_token: int, tokens: int, tokens_per_block: int) -> int:
    """How many blocks ``tokens`` tokens touch that begin at ``first_token``."""
    if tokens == 0:
        return 0
    return (first_token + tokens - 1) // tokens_per_block - first_token // tokens_per_block + 1


def most_blocks_spanned(tokens: int, tokens_per_block: int) -> int:
    """The most blocks that a window of ``tokens`` tokens can touch, wherever it begins.

    One more than ``ceil(tokens / tokens_per_block)``, unless a single token is looked at: a window
    that is not aligned leaves a part in a block at either end.
    """
    return blocks_spanned(tokens_per_block - 1, tokens, tokens_per_block)
