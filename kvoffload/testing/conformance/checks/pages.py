"""Guarantee 5: every byte of a page moves, and no other, whatever the layout."""

from __future__ import annotations

import itertools

import numpy as np

from kvoffload.core.backend import HostOrder
from kvoffload.core.errors import CapacityError
from kvoffload.core.kv_caches import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from kvoffload.core.specs import DeviceLoadStoreSpec, HostLoadStoreSpec
from kvoffload.core.worker import OffloadingWorker
from kvoffload.rig import rig_for
from kvoffload.testing.conformance.check import (
    Guarantee,
    MakeBackend,
    check,
    require,
    skip,
)
from kvoffload.testing.conformance.lab import Cache, Lab

ORDERS = {"planes": HostOrder.PLANES, "tensor-major": HostOrder.TENSOR_MAJOR,
          "block-major": HostOrder.BLOCK_MAJOR}  # fmt: skip


def _round_trips(lab: Lab) -> None:
    """Random stores, and loads that enter and leave inside a chunk, compared byte by byte."""
    rng, factor, groups = lab.rng, lab.cache.factor, len(lab.cache.groups)
    lab.fill_all()
    for trial in range(6):
        group = trial % groups
        count = int(rng.integers(1, 6))
        chunks = rng.permutation(lab.cache.chunks)[:count].tolist()
        blocks = rng.permutation(lab.cache.blocks)[: count * factor].tolist()
        store = lab.store(blocks, chunks, group=group)
        first = int(rng.integers(factor))
        most = count * factor - first
        wanted = most - (int(rng.integers(factor)) if most >= factor else 0)
        targets = rng.permutation(lab.cache.blocks)[:wanted].tolist()
        load = lab.load(chunks, targets, group=group, first=first)
        lab.succeed(store, load)
        lab.check()


def _register_round_trips() -> None:
    layouts = {"apart": {}, "padded": {"gap": 8}, "interleaved": {"interleaved": True, "gap": 16}}
    for order, factor, layout in itertools.product(ORDERS, (1, 4), layouts):
        cache = Cache(blocks=32, factor=factor, order=ORDERS[order], **layouts[layout])  # type: ignore[arg-type]
        name = f"blocks round trip: {order}, {factor} per chunk, tensors {layout}"
        check(Guarantee.BYTES, cache=cache, name=name)(_round_trips)


_register_round_trips()


@check(
    Guarantee.BYTES,
    cache=Cache(pages=(64, 32, 96, 16), groups=((0, 1), (2, 3)), blocks=32, factor=2),
)
def groups_with_tensors_of_their_own_round_trip(lab: Lab) -> None:
    _round_trips(lab)


@check(
    Guarantee.BYTES,
    cache=Cache(pages=(64, 32, 96), groups=((0, 1), (1, 2)), blocks=32, factor=2),
)
def groups_that_share_a_tensor_round_trip(lab: Lab) -> None:
    _round_trips(lab)


@check(
    Guarantee.BYTES,
    cache=Cache(
        pages=(64, 32, 96),
        groups=((0, 1), (1, 2)),
        blocks=32,
        factor=2,
        order=HostOrder.BLOCK_MAJOR,
    ),
)
def groups_that_share_a_tensor_round_trip_in_rows(lab: Lab) -> None:
    _round_trips(lab)


@check(
    Guarantee.BYTES,
    cache=Cache(pages=(64, 32, 96, 16), groups=((0, 1), (2, 3)), blocks=24, factor=2),
)
def one_transfer_moves_several_groups(lab: Lab) -> None:
    lab.fill_all()
    store = lab.store_groups({0: ([9, 2, 7, 4], [3, 0]), 1: ([11, 1], [5])})
    lab.succeed(store)
    lab.fill_all(100)
    load = lab.load_groups({0: ([3, 0], [20, 6, 13], 1), 1: ([5], [9], 1)})
    second = lab.load_groups({1: ([5], [3, 2], 0)})
    lab.succeed(load, second)
    lab.check()


@check(Guarantee.BYTES, cache=Cache(pages=(48, 80), groups=((0, 1),), factor=4, blocks=16))
def a_load_skips_the_blocks_before_its_first(lab: Lab) -> None:
    lab.fill_all()
    lab.succeed(lab.store(range(8), [6, 2]))
    for first in range(4):
        for last in range(first + 1, 9):
            lab.fill_all(50)
            chunks = [6, 2][: -(-last // 4)]
            lab.succeed(lab.load(chunks, range(15, 15 - (last - first), -1), first=first))
            lab.check()


@check(Guarantee.BYTES, cache=Cache(pages=(64, 64), groups=((0, 1),)))
def tensors_of_equal_pages_are_not_confused(lab: Lab) -> None:
    _round_trips(lab)


@check(Guarantee.BYTES, cache=Cache(pages=(1, 7, 4096, 4097), groups=((0, 1, 2, 3),)))
def pages_of_any_size_round_trip(lab: Lab) -> None:
    _round_trips(lab)


@check(Guarantee.BYTES, cache=Cache(pages=(8, 40), groups=((0, 1),), blocks=80, chunks=40))
def transfers_of_any_length_round_trip(lab: Lab) -> None:
    lab.fill_all()
    jobs = []
    for count in range(1, 40):
        blocks, chunks = (lab.rng.permutation(n)[:count].tolist() for n in (80, 40))
        jobs.append(lab.store(blocks, chunks))
        jobs.append(lab.load(chunks, lab.rng.permutation(80)[:count].tolist()))
    lab.succeed(*jobs)
    lab.check()


@check(Guarantee.BYTES)
def consecutive_blocks_round_trip(lab: Lab) -> None:
    lab.fill_all()
    lab.succeed(lab.store(range(8), range(8)))
    lab.fill_all(100)
    lab.succeed(lab.load(range(8), range(4, 12)))
    lab.check()


@check(Guarantee.BYTES)
def the_first_and_the_last_block_and_chunk_move(lab: Lab) -> None:
    lab.fill_all()
    jobs = [lab.store([11, 0], [7, 0]), lab.load([0, 7], [11, 0]), lab.copy([0, 11], [5, 6])]
    lab.succeed(*jobs)
    lab.check()


@check(Guarantee.BYTES)
def a_source_may_be_named_twice(lab: Lab) -> None:
    lab.fill_all()
    jobs = [lab.store([1, 1, 1], [0, 1, 5]), lab.load([5, 5], [2, 3]), lab.copy([4, 4], [9, 8])]
    lab.succeed(*jobs)
    lab.check()


@check(
    Guarantee.BYTES,
    cache=Cache(pages=(16, 48, 16), groups=((0, 1), (2,)), blocks=40, chunks=20, factor=2),
)
def blocks_are_copied_on_the_device(lab: Lab) -> None:
    lab.fill_all()
    for count in (1, 2, 3, 7, 20):
        ids = lab.rng.permutation(40).tolist()
        lab.succeed(lab.copy(ids[:count], ids[20 : 20 + count]))
        lab.check()


@check(
    Guarantee.BYTES,
    cache=Cache(pages=(16,) * 6, groups=(tuple(range(6)),), blocks=4096, chunks=4096),
)
def tens_of_thousands_of_scattered_pages_move_in_one_transfer(lab: Lab) -> None:
    lab.fill_all()
    blocks, chunks = (lab.rng.permutation(4096).tolist() for _ in range(2))
    store = lab.store(blocks, chunks)
    lab.succeed(store, lab.load(chunks[::-1], blocks))
    lab.check()


@check(Guarantee.BYTES, cache=None)
def blocks_beyond_four_gibibytes_move(make_backend: MakeBackend) -> None:
    backend = make_backend()
    rig = rig_for(backend)
    stride, page, blocks = (3 << 30) + 8, 64, 3
    try:
        memory = rig.allocate(stride * (blocks - 1) + page)
    except (CapacityError, MemoryError) as error:
        backend.close()
        skip(f"the device has not enough memory: {error}")
    tensor = memory.as_strided((blocks, page), (stride, 1))
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, page)], [[CanonicalKVCacheRef(0, page)]]
    )
    worker = OffloadingWorker.for_caches(backend, caches, host_bytes=blocks * page)
    rows = np.arange(blocks)
    pages = (rows[:, None] * 50 + np.arange(page)).astype(np.uint8)
    try:
        with rig:
            rig.write(tensor, rows, pages)
            worker.transfer_async(1, (DeviceLoadStoreSpec([2, 1]), HostLoadStoreSpec([0, 1])))
            worker.transfer_async(2, (HostLoadStoreSpec([0]), DeviceLoadStoreSpec([1])))
            worker.copy_blocks(3, DeviceLoadStoreSpec([2]), DeviceLoadStoreSpec([0]))
            worker.wait([1, 2, 3])
            for result in worker.get_finished():
                require(result.success, f"job {result.job_id} failed: {result.error}")
            require((rig.read(tensor, rows) == pages[2]).all(), "a block went somewhere else")
    finally:
        worker.shutdown(10)
