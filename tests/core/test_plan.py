"""Both lowerings of a plan, in all orders of host memory, without moving a byte."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from kvoffload.core.backend import HostOrder
from kvoffload.core.blocks import expand_block_ids
from kvoffload.core.buffers import SMALLEST, BufferPool
from kvoffload.core.errors import BlockRangeError, LayoutError
from kvoffload.core.host_pool import HostLayout
from kvoffload.core.plan import CopyPlan, Geometry, Side, plan_transfer, power_of_two
from kvoffload.core.specs import DeviceLoadStoreSpec, HostLoadStoreSpec, IntArray

DEVICE, HOST = 1 << 44, 1 << 41  # bases; nothing is allocated there


def column(values: Sequence[int] | IntArray) -> IntArray:
    return np.array(values, dtype=np.int64)


def geometry(
    pages: Sequence[int],
    groups: Sequence[Sequence[int]],
    *,
    blocks: int,
    chunks: int,
    factor: int = 1,
    order: HostOrder = HostOrder.PLANES,
    padding: int = 0,
) -> Geometry:
    """Tensors one after the other on the device, and ``chunks`` chunks on the host."""
    page = column(pages)
    strides = page + padding
    spans = strides * blocks
    bases = DEVICE + np.cumsum(spans) - spans
    tensors = [column(g) for g in groups]
    budget = int(page.sum()) * factor * chunks
    layout = HostLayout.within(budget, page, tensors, factor=factor, order=order)
    everything = len(pages)
    return Geometry(
        page_bytes=page,
        groups=tensors,
        device=Side(
            bases,
            strides,
            column([0] * everything),
            1,
            column([blocks] * everything),
            bases,
            bases + spans,
        ),
        host=Side(
            HOST + layout.offset,
            layout.hi,
            layout.lo,
            factor,
            layout.count,
            column([HOST] * everything),
            column([HOST + budget] * everything),
        ),
    )


def address(side: Side, tensor: int, unit: int) -> int:
    """In Python's own integers."""
    block, piece = divmod(unit, side.factor)
    return int(side.base[tensor]) + block * int(side.hi[tensor]) + piece * int(side.lo[tensor])


def bytes_moved(plan: CopyPlan) -> set[tuple[int, int]]:
    """(source, destination) of every byte, from the pairs, one by one."""
    moved = set()
    for group, tensors in enumerate(plan.geometry.groups):
        for at in range(int(plan.bounds[group]), int(plan.bounds[group + 1])):
            for tensor in tensors.tolist():
                src = address(plan.src, tensor, int(plan.src_units[at]))
                dst = address(plan.dst, tensor, int(plan.dst_units[at]))
                moved |= {(src + i, dst + i) for i in range(int(plan.geometry.page_bytes[tensor]))}
    return moved


def bytes_described(plan: CopyPlan) -> set[tuple[int, int]]:
    described: list[tuple[int, int]] = []
    for src, dst, size in zip(*(column.tolist() for column in plan.descriptors()), strict=True):
        described += [(src + i, dst + i) for i in range(size)]
    assert len(set(described)) == len(described), "a byte is copied twice"
    return set(described)


@pytest.mark.parametrize("order", HostOrder)
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("factor", [1, 2, 4])
def test_descriptors_move_just_the_bytes_of_the_pairs(
    order: HostOrder, padding: int, factor: int, rng: np.random.Generator
) -> None:
    here = geometry(
        [5, 8, 3],
        [[0, 1], [2], [1]],
        blocks=24,
        chunks=6,
        factor=factor,
        order=order,
        padding=padding,
    )
    for trial in range(30):
        sizes = [int(rng.integers(0, 3)) * factor for _ in range(3)]
        firsts = [int(rng.integers(0, 9)) for _ in range(3)]
        consecutive = trial % 2
        ids = np.arange(24) if consecutive else rng.permutation(24)
        touched = [
            (-(-(f % factor + n) // factor)) if n else 0 for f, n in zip(firsts, sizes, strict=True)
        ]
        # Groups 0 and 2 share tensor 1, and so their ids; taking them all apart serves both.
        blocks = ids[: sum(sizes)]
        limit = int(here.blocks(here.host).min())
        if sum(touched) > limit:
            continue
        chunks = (np.arange(limit) if consecutive else rng.permutation(limit))[: sum(touched)]
        load = plan_transfer(
            here, HostLoadStoreSpec(chunks), DeviceLoadStoreSpec(blocks, sizes, firsts)
        )
        assert bytes_described(load) == bytes_moved(load)
        assert load.nbytes == len(bytes_moved(load))
        assert int(load.descriptors().size.sum()) == load.nbytes


def consecutive(order: HostOrder, first_chunk: int = 0) -> CopyPlan:
    here = geometry([4096] * 64, [list(range(64))], blocks=1000, chunks=63, factor=16, order=order)
    chunks = np.arange(63)
    return plan_transfer(here, HostLoadStoreSpec(chunks), DeviceLoadStoreSpec(np.arange(1000)))


def test_consecutive_blocks_coalesce_within_chunks_and_across_them() -> None:
    assert len(consecutive(HostOrder.PLANES).descriptors().size) == 64
    assert len(consecutive(HostOrder.TENSOR_MAJOR).descriptors().size) == 64 * 63 == 4032


def test_random_blocks_take_a_copy_per_page(rng: np.random.Generator) -> None:
    here = geometry([4096] * 64, [list(range(64))], blocks=4000, chunks=4000)
    ids = rng.permutation(2000)[:1000] * 2  # no two adjacent
    plan = plan_transfer(here, DeviceLoadStoreSpec(ids), HostLoadStoreSpec(ids[::-1].copy()))
    assert len(plan.descriptors().size) == 64_000


def test_one_copy_per_layer_where_both_sides_are_consecutive_L02() -> None:
    here = geometry([4096] * 32, [list(range(32))], blocks=512, chunks=512)
    ids = np.arange(512)
    plan = plan_transfer(here, DeviceLoadStoreSpec(ids), HostLoadStoreSpec(ids))
    assert len(plan.descriptors().size) == 32


def python_calls(blocks: int) -> int:
    """Calls that planning and lowering make, of Python functions and of C ones."""
    here = geometry([64] * 32, [list(range(32))], blocks=10_000, chunks=10_000)
    ids = np.random.default_rng(0).permutation(10_000)[:blocks]
    source, target = DeviceLoadStoreSpec(ids), HostLoadStoreSpec(ids)
    plan_transfer(here, source, target).descriptors()  # fills what is cached per geometry
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        plan_transfer(here, source, target).descriptors()
    finally:
        sys.setprofile(None)
    return calls


def test_the_number_of_calls_does_not_depend_on_the_number_of_blocks_L02() -> None:
    assert python_calls(100) == python_calls(1000) == python_calls(10_000)


def test_addresses_are_64_bit_all_the_way_C06() -> None:
    top = 2**31 - 1
    page, base = 1 << 20, 1 << 40
    one = column([1])
    side = Side(
        base=column([base]),
        hi=column([page]),
        lo=column([0]),
        factor=1,
        count=column([top + 1]),
        start=column([base]),
        end=column([base + page * (top + 1)]),
    )
    here = Geometry(one * page, [column([0])], side, side_with(side, base=base + 7))
    ids = np.array([0, 5, top], dtype=np.int32)
    plan = plan_transfer(here, DeviceLoadStoreSpec(ids), HostLoadStoreSpec(ids[::-1].copy()))
    src, dst, size = (column.tolist() for column in plan.descriptors())
    assert src == [base + page * i for i in (0, 5, top)]
    assert dst == [base + 7 + page * i for i in (top, 5, 0)]
    assert size == [page] * 3
    (indices,) = plan.indices()
    assert indices.src.dtype == np.int64
    assert expand_block_ids(ids, 1 << 20)[-1] == (top + 1) * (1 << 20) - 1
    with pytest.raises(BlockRangeError, match=str(top + 1)):
        plan_transfer(here, DeviceLoadStoreSpec([top + 1]), HostLoadStoreSpec([0]))


def side_with(side: Side, base: int) -> Side:
    moved = column([base])
    return Side(moved, side.hi, side.lo, side.factor, side.count, moved, moved + (1 << 52))


def test_indices_are_padded_to_buckets_by_repeating_the_last_pair() -> None:
    here = geometry([8, 8], [[0], [1]], blocks=64, chunks=64)
    plan = plan_transfer(
        here,
        DeviceLoadStoreSpec([5, 9, 2, 40, 41, 42, 43, 44], [3, 5]),
        HostLoadStoreSpec([1, 3, 2, 9, 8, 7, 6, 5]),
    )
    first, second = plan.indices()
    assert (first.group, first.pairs, second.group, second.pairs) == (0, 3, 1, 5)
    assert first.src.tolist() == [5, 9, 2, 2]
    assert first.dst.tolist() == [1, 3, 2, 2]
    assert len(second.src) == 8
    exact = list(plan.indices(bucket=lambda n: n))
    assert [len(group.src) for group in exact] == [3, 5]
    empty = plan_transfer(here, DeviceLoadStoreSpec([1], [0, 1]), HostLoadStoreSpec([1]))
    assert [group.group for group in empty.indices()] == [1]


def test_buckets_are_powers_of_two() -> None:
    assert [power_of_two(n) for n in (1, 2, 3, 4, 5, 1000)] == [1, 2, 4, 4, 8, 1024]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"base": -1}, "outside"),
        ({"end": 799}, "outside"),
        ({"hi": 99}, "overlap"),
        ({"hi": 101}, "outside"),
        ({"count": 0}, "outside"),
        ({"hi": -100}, "outside"),
        ({"factor": 2, "lo": 50, "end": 9000}, "overlap"),
        ({"factor": 2, "lo": 100}, "outside"),
        ({"factor": 2, "lo": 150, "count": 2}, "overlap"),
    ],
)
def test_a_side_is_proved_when_it_is_registered_B01(change: dict[str, int], says: str) -> None:
    """Eight pages of 100 bytes in 800 bytes, each time with one thing wrong."""
    good = {"base": 0, "hi": 100, "lo": 0, "factor": 1, "count": 8, "start": 0, "end": 800}

    def side(values: dict[str, int]) -> Side:
        columns = {k: column([v]) for k, v in values.items() if k != "factor"}
        return Side(**columns, factor=values["factor"])

    side(good).prove(column([100]), "device")
    with pytest.raises(LayoutError, match=f"device tensor 0.*{says}"):
        side(good | change).prove(column([100]), "device")


def test_a_geometry_proves_both_sides_B01() -> None:
    good = geometry([8], [[0]], blocks=4, chunks=4)
    for name in ("device", "host"):
        side = getattr(good, name)
        short = dataclasses.replace(side, end=side.end - 1)
        sides = {"device": good.device, "host": good.host} | {name: short}
        with pytest.raises(LayoutError, match=f"{name} tensor 0.*outside"):
            Geometry(good.page_bytes, good.groups, **sides)


def test_a_proof_does_not_wrap_around_C06() -> None:
    huge = Side(
        base=column([1 << 62]),
        hi=column([1 << 40]),
        lo=column([0]),
        factor=1,
        count=column([1 << 24]),
        start=column([0]),
        end=column([(1 << 63) - 1]),
    )
    with pytest.raises(LayoutError, match="outside"):
        huge.prove(column([8]), "device")


def test_descriptors_stay_as_they_are_until_they_are_released() -> None:
    here = geometry([8], [[0]], blocks=9000, chunks=9000)
    buffers = BufferPool()

    def plan(first: int) -> CopyPlan:
        ids = np.arange(first, first + 2000, 2)
        return plan_transfer(
            here, DeviceLoadStoreSpec(ids), HostLoadStoreSpec(ids), buffers=buffers
        )

    first, second = plan(0), plan(4000)
    one = first.descriptors()
    kept = one.src.copy()
    two = second.descriptors()
    assert (one.src == kept).all()
    assert not np.shares_memory(one.src, two.src)
    assert buffers.lent == 2
    for descriptors in (one, two):
        with pytest.raises(ValueError, match="read-only"):
            descriptors.src[0] = 0
    first.release()
    first.release()
    third = plan(10).descriptors()
    assert np.shares_memory(third.src, one.src), "a released buffer is used again"
    assert buffers.lent == 2


def test_buffers_are_reused_and_bounded() -> None:
    pool = BufferPool(keep=3)
    lent = [pool.borrow(n) for n in (10, 5000, 10, 70_000, 10)]
    assert [len(b) for b in lent] == [SMALLEST, 8192, SMALLEST, 131072, SMALLEST]
    for buffer in lent:
        pool.give_back(buffer)
    assert pool.lent == 0
    assert pool.idle_bytes == 8 * (SMALLEST + 8192 + 131072)
    assert pool.borrow(6000) is lent[1], "the smallest that fits"
    assert pool.borrow(6000) is lent[3]
