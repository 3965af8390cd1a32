"""Plans against a reference that walks one kernel block after the other: C01, C02, C05, S3.4."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvoffload.core.blocks import (
    blocks_spanned,
    chunks_touched,
    most_blocks_spanned,
    whole_chunks,
)
from kvoffload.core.errors import BlockCountError, BlockRangeError
from kvoffload.core.plan import CopyPlan, Geometry, Side, plan_transfer
from kvoffload.core.specs import DeviceLoadStoreSpec, HostLoadStoreSpec, as_ids

Pair = tuple[int, int, int]  # group, device unit, host unit


def side(tensors: int, factor: int, count: int, base: int = 0) -> Side:
    """Dense pages of one byte; their addresses do not matter here."""
    index = np.arange(tensors, dtype=np.int64)
    span = factor * count
    return Side(
        base=base + index * span,
        hi=np.full(tensors, factor, dtype=np.int64),
        lo=np.ones(tensors, dtype=np.int64),
        factor=factor,
        count=np.full(tensors, count, dtype=np.int64),
        start=np.full(tensors, base, dtype=np.int64),
        end=np.full(tensors, base + tensors * span, dtype=np.int64),
    )


def geometry(groups: int, factor: int, pieces: int = 1, blocks: int = 99) -> Geometry:
    """``groups`` groups of one tensor; ``factor`` blocks a chunk, ``pieces`` pieces a block."""
    return Geometry(
        page_bytes=np.ones(groups, dtype=np.int64),
        groups=[np.array([g]) for g in range(groups)],
        device=side(groups, pieces, blocks),
        host=side(groups, factor * pieces, blocks),
    )


def walk(
    blocks: Sequence[int],
    chunks: Iterator[int],
    group: int,
    first: int,
    factor: int,
    pieces: int,
) -> Iterator[Pair]:
    """One kernel block after the other, as a person would."""
    position = first * pieces  # in kernel blocks, from the start of the request
    chunk = None
    for block in blocks:
        for piece in range(pieces):
            inside = position % (factor * pieces)
            if chunk is None or inside == 0:
                chunk = next(chunks)
            yield group, block * pieces + piece, chunk * factor * pieces + inside
            position += 1


def pairs(plan: CopyPlan) -> list[Pair]:
    device, host = (
        (plan.src_units, plan.dst_units) if plan.dst_on_host else (plan.dst_units, plan.src_units)
    )
    group = np.repeat(np.arange(len(plan.bounds) - 1), np.diff(plan.bounds))
    return list(zip(group.tolist(), device.tolist(), host.tolist(), strict=True))


@pytest.mark.parametrize("factor", range(1, 9))
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_every_load_agrees_with_a_walk_C02_S3_4(factor: int, pieces: int) -> None:
    extents = list(itertools.product(range(3 * factor + 1), range(3 * factor + 1)))
    rng = np.random.default_rng(factor * 10 + pieces)
    for groups in (1, 2, 3):
        here = geometry(groups, factor, pieces)
        # One group sees every extent; with more, the others see them in another order.
        orders = [extents] + [
            [extents[i] for i in rng.permutation(len(extents))] for _ in range(groups - 1)
        ]
        for point in zip(*orders, strict=True):
            firsts, counts = [first for first, _ in point], [count for _, count in point]
            ids = [rng.permutation(99)[:count].tolist() for count in counts]
            touched = chunks_touched(as_ids(counts, ""), as_ids(firsts, ""), factor).tolist()
            assert touched == [
                len({(first + i) // factor for i in range(count)}) for first, count in point
            ]
            chunks = [rng.permutation(99)[:n].tolist() for n in touched]
            expected = [
                pair
                for g in range(groups)
                for pair in walk(ids[g], iter(chunks[g]), g, firsts[g], factor, pieces)
            ]
            device = DeviceLoadStoreSpec(list(itertools.chain(*ids)), counts, firsts)
            host = HostLoadStoreSpec(list(itertools.chain(*chunks)))
            assert pairs(plan_transfer(here, host, device)) == expected
            whole = all(f % factor == 0 and c % factor == 0 for f, c in point if c)
            if whole and all(c % factor == 0 for c in counts):
                assert pairs(plan_transfer(here, device, host)) == expected
            elif factor > 1:
                with pytest.raises(BlockCountError, match="whole chunks"):
                    plan_transfer(here, device, host)


def test_a_load_that_starts_inside_a_chunk_C01() -> None:
    plan = plan_transfer(
        geometry(1, 4),
        HostLoadStoreSpec([10, 11]),
        DeviceLoadStoreSpec([3, 4, 5, 6, 7, 8], None, [2]),
    )
    host = [10 * 4 + 2, 10 * 4 + 3, 11 * 4, 11 * 4 + 1, 11 * 4 + 2, 11 * 4 + 3]
    assert plan.src_units.tolist() == host
    assert plan.dst_units.tolist() == [3, 4, 5, 6, 7, 8]


def test_a_window_that_is_not_aligned_spans_a_block_more_C04() -> None:
    assert blocks_spanned(98012 - 4096, 4096, 32) == 129
    assert most_blocks_spanned(4096, 32) == 129
    rng = np.random.default_rng(4)
    for _ in range(2000):
        window, block, first = (int(rng.integers(1, high)) for high in (300, 40, 1000))
        spanned = len({(first + t) // block for t in range(window)})
        assert blocks_spanned(first, window, block) == spanned
        assert spanned <= most_blocks_spanned(window, block) <= -(-window // block) + 1
    assert blocks_spanned(5, 0, 4) == 0
    # Such a window is planned as any other.
    ids = list(range(129))
    spec = DeviceLoadStoreSpec(ids, None, [98012 // 32 - 128])
    assert (
        len(plan_transfer(geometry(1, 1, blocks=200), HostLoadStoreSpec(ids), spec).src_units)
        == 129
    )


def test_null_blocks_are_neither_stored_nor_loaded_C05() -> None:
    here = geometry(1, 2)
    store = DeviceLoadStoreSpec([0, 0, 7, 8])
    plan = plan_transfer(here, store, HostLoadStoreSpec([5]), null_block=0)
    assert plan.src_units.tolist() == [7, 8]
    assert plan.dst_units.tolist() == [10, 11]
    assert plan.bounds.tolist() == [0, 2]
    with pytest.raises(BlockRangeError, match="block 0 is the null block"):
        plan_transfer(here, HostLoadStoreSpec([5, 6]), store, null_block=0)
    # Without a null block declared, 0 is a block as any other.
    assert (
        len(plan_transfer(here, DeviceLoadStoreSpec([0, 1]), HostLoadStoreSpec([5])).src_units) == 2
    )


def test_a_chunk_with_a_null_block_is_left_out_of_its_group_C05() -> None:
    here = geometry(3, 2)
    store = DeviceLoadStoreSpec([9, 0, 3, 4, 0, 0, 5, 6, 0, 1], [4, 4, 2], [0, 8, 2])
    plan = plan_transfer(here, store, HostLoadStoreSpec([1, 2]), null_block=0)
    assert pairs(plan) == [(0, 3, 2), (0, 4, 3), (1, 5, 4), (1, 6, 5)]
    assert plan.bounds.tolist() == [0, 2, 4, 4]


def test_trimming_to_whole_chunks_twice_is_trimming_once_C13() -> None:
    for factor in range(1, 9):
        for first, end in itertools.product(range(20), repeat=2):
            once = whole_chunks(first, end, factor)
            assert whole_chunks(*once, factor) == once
            inside = [c for c in range(20) if first <= c * factor and (c + 1) * factor <= end]
            assert list(range(*once, factor)) == [c * factor for c in inside]
