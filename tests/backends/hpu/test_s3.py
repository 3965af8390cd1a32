"""Point by point, what a pair of handlers for Gaudi does: all that the one before ours did, and
mended what was wrong with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import kvoffload as kv
from kvoffload.core.blocks import expand_block_ids
from kvoffload.core.errors import (
    AlreadyBoundError,
    BlockCountError,
    CapacityError,
    ConfigurationError,
    LayoutError,
    OverlapError,
)
from kvoffload.core.handler import SingleDirectionOffloadingHandler
from kvoffload.core.kv_caches import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from kvoffload.core.lanes import Lane
from kvoffload.core.specs import DeviceLoadStoreSpec, HostLoadStoreSpec
from kvoffload.core.worker import OffloadingWorker
from kvoffload.testing.conformance.lab import Cache, Lab
from kvoffload.testing.fake_device import load
from kvoffload.testing.fake_device.hpu import DEVICE, FakeHabana
from tests.backends.hpu.laws import lab_on, real

pytestmark = pytest.mark.fake

GROUPS = Cache(pages=(64, 24, 104), groups=((0, 1), (2,)), blocks=16, chunks=8, factor=4)


@pytest.fixture
def made() -> Iterator[tuple[Lab, FakeHabana]]:
    """Two groups, four blocks per chunk."""
    with lab_on(real, lazy=False, cache=GROUPS) as both:
        yield both


def test_host_memory_holds_whole_chunks_of_every_tensor_zeroed_and_pinned_S3_1(
    made: tuple[Lab, FakeHabana],
) -> None:
    lab, _ = made
    memory, side = lab.engine.host.memory, lab.engine.geometry.host
    assert memory.pinned
    assert memory.tensor.is_pinned()
    assert not memory.numpy().any()
    assert side.factor == 4
    assert all(count >= GROUPS.chunks for count in side.count.tolist())
    for lane in (Lane.STORE, Lane.LOAD):
        handler = SingleDirectionOffloadingHandler(lab.engine, lane)
        device = DeviceLoadStoreSpec([0, 1, 2, 3], [4, 0])
        host = HostLoadStoreSpec([0])
        spec = (device, host) if lane is Lane.STORE else (host, device)
        handler.transfer_async(1, spec)
        handler.wait([1])
        assert [result.success for result in handler.get_finished()] == [True]


def test_what_does_not_fit_is_a_typed_error_and_groups_are_as_many_as_there_are_S3_2(
    made: tuple[Lab, FakeHabana],
) -> None:
    tensor = torch.zeros(8, 64, dtype=torch.int8, device=DEVICE)
    for wrong in (
        lambda: CanonicalKVCacheTensor(tensor.view(-1), 64),
        lambda: CanonicalKVCacheTensor(tensor, 65),
        lambda: CanonicalKVCacheTensor(tensor.view(torch.int32), 64),
        lambda: CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 64)], [[]]),
    ):
        with pytest.raises(LayoutError):
            wrong()
    one = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 64)], [[CanonicalKVCacheRef(0, 64)]])
    with pytest.raises(CapacityError):
        OffloadingWorker.for_caches(real(FakeHabana(load(), lazy=False)), one, host_bytes=63)
    on_host = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor.cpu(), 64)], [[CanonicalKVCacheRef(0, 64)]]
    )
    with pytest.raises(ConfigurationError, match="the caches are on cpu"):
        OffloadingWorker.for_caches(real(FakeHabana(load(), lazy=False)), on_host, host_bytes=640)
    lab, _ = made
    lab.succeed(lab.store_groups({0: (range(4), [1]), 1: (range(8, 16), [0, 3])}))
    lab.check()


def test_ids_expand_without_a_loop_over_blocks_S3_3() -> None:
    assert expand_block_ids([0, 1, 3], 4).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15]
    assert expand_block_ids([2, 0], 4, skip_count=3).tolist() == [11, 0, 1, 2, 3]
    assert _lines_of_expanding(1) == _lines_of_expanding(1000)


def _lines_of_expanding(blocks: int) -> int:
    """Lines of Python that it takes."""
    ids = np.arange(blocks)
    count = 0

    def trace(*_: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        expand_block_ids(ids, 4)
    finally:
        sys.settrace(before)
    return count


def test_each_group_may_enter_inside_a_chunk_and_stores_are_whole_S3_4(
    made: tuple[Lab, FakeHabana],
) -> None:
    lab, _ = made
    lab.succeed(lab.store_groups({0: (range(8), [5, 2]), 1: (range(3, 15), [0, 7, 4])}))
    lab.fill_all(50)
    lab.succeed(
        lab.load_groups({0: ([5, 2], range(9, 14), 3), 1: ([7, 4], [0, 2, 4, 6, 8, 10, 1], 1)})
    )
    lab.check()
    with pytest.raises(BlockCountError, match="whole chunks"):
        lab.store([1, 2, 3], [0])


@pytest.mark.parametrize("lane", [Lane.STORE, Lane.LOAD])
def test_both_directions_wait_for_compute_and_for_those_before_them_S3_5(lane: Lane) -> None:
    with lab_on(real, lazy=True) as (lab, _):
        lab.succeed(lab.store([7], [0]))
        lab.hold()
        lab.fill([1], [200])  # what the store reads
        before = lab.peek([2])  # what the load overwrites
        first, second = lab.submit(lane), lab.submit(lane)
        assert lab.worker.get_finished() == []
        lab.rig.release()
        results = lab.finish(first, second)
        lab.check()
        old = lab.content([2], 0)
        assert np.array_equal(before[0], old)
        assert all(result.transfer_time is not None for result in results)


def test_a_copy_waits_for_nothing_uploads_once_and_touches_its_group_alone_S3_6(
    made: tuple[Lab, FakeHabana],
) -> None:
    lab, habana = made
    lab.succeed(lab.store(range(8), [1, 3]), lab.load([1, 3], range(8)))
    before = habana.fake.counts().synchronizations
    with habana.watch() as seen:
        lab.store(range(8), [1, 3])
        lab.load([3], range(8, 12))
        assert habana.fake.counts().synchronizations == before
    assert habana.counts.device_synchronizations == 0
    names = [name for name, _ in seen.operations]
    assert names.count("_to_copy") == 2, "one upload each"
    assert names.count("index_select") == 2, "a gather per tensor of the group"
    assert names.count("index_copy_") == 2
    assert not [name for name in names if name.startswith("host")], "nothing is gathered there"
    lab.worker.wait(lab.engine.in_flight)
    lab.check()


def test_a_tensor_with_two_references_is_moved_and_counted_once_S3_7() -> None:
    tensor = torch.zeros(8, 64, dtype=torch.int8, device=DEVICE)
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, 64)],
        [[CanonicalKVCacheRef(0, 64), CanonicalKVCacheRef(0, 48)]],
    )
    backend = real(FakeHabana(load(), lazy=False))
    worker = OffloadingWorker.for_caches(backend, caches, host_bytes=640)
    try:
        worker.transfer_async(1, (DeviceLoadStoreSpec([3, 5]), HostLoadStoreSpec([0, 1])))
        worker.wait([1])
        assert [result.transfer_size for result in worker.get_finished()] == [2 * 64]
    finally:
        worker.shutdown()


def test_tuples_spare_blocks_and_shared_layers_are_taken_as_they_are_S3_8() -> None:
    blocks = 6
    keys = torch.zeros(blocks + 1, 4, 8, dtype=torch.bfloat16, device=DEVICE)[:blocks]
    values = torch.zeros(blocks + 1, 4, 12, dtype=torch.bfloat16, device=DEVICE)[:blocks]
    strided = torch.zeros(blocks, 5, 16, dtype=torch.int8, device=DEVICE)[:, 1:3]
    state = torch.zeros(blocks, 20, device=DEVICE)
    caches = kv.canonicalize(
        kv.CacheRegistration(
            num_blocks=blocks,
            layers={
                "a": kv.LayerCache((keys, values)),
                "a again": kv.LayerCache((keys, values)),
                "b": kv.LayerCache(strided),
                "mamba": kv.LayerCache([state], "state"),
            },
            groups=[["a", "a again", "b"], ["mamba"]],
            slots=[["a", "a again", "reserved"]],
        )
    )
    pages = [tensor.page_size_bytes for tensor in caches.tensors]
    assert sorted(pages) == sorted([4 * 8 * 2, 4 * 12 * 2, 2 * 16, 80])
    assert {tensor.tensor.shape[0] for tensor in caches.tensors} == {blocks}
    addresses = {tensor.tensor.data_ptr() for tensor in caches.tensors}
    assert addresses == {each.data_ptr() for each in (keys, values, strided, state)}, "no copies"
    with pytest.raises((LayoutError, OverlapError)):
        kv.canonicalize(
            kv.CacheRegistration(
                num_blocks=blocks,
                layers={"a": kv.LayerCache(keys), "b": kv.LayerCache(values)},
                groups=[["a", "b"]],
                slots=[["a", "b"]],
            )
        )


def test_a_second_registration_is_refused_and_after_unregistering_it_works_S3_9(
    made: tuple[Lab, FakeHabana],
) -> None:
    lab, _ = made
    with pytest.raises(AlreadyBoundError):
        lab.register()
    lab.worker.unregister()
    lab.register_again()
    lab.succeed(lab.store(range(4), [2]))
    lab.fill_all(90)
    lab.succeed(lab.load([2], range(4, 8)))
    lab.check()
