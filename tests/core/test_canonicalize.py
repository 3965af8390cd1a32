"""Canonicalisation, case by case. B01, B02, … are field failures it must not repeat; S1.3, S2.4, …
are points of the systems it replaces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvoffload.backends.cpu.backend import CpuBackend
from kvoffload.core import canonicalize as canonical
from kvoffload.core.canonicalize import (
    CacheRegistration,
    LayerCache,
    Part,
    canonicalize,
    parts_of,
    register_state_kind,
)
from kvoffload.core.errors import (
    AmbiguousLayoutError,
    BlockRangeError,
    ConfigurationError,
    LayoutError,
    OverlapError,
    UnsupportedStateError,
)
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.specs import DeviceLoadStoreSpec, HostLoadStoreSpec
from kvoffload.core.worker import OffloadingWorker


def register(
    blocks: int,
    groups: Sequence[dict[str, LayerCache]],
    slots: Sequence[Sequence[str]] = (),
) -> CanonicalKVCaches:
    layers = {name: layer for group in groups for name, layer in group.items()}
    return canonicalize(CacheRegistration(blocks, layers, [list(g) for g in groups], slots))


def shapes(caches: CanonicalKVCaches) -> list[tuple[int, int, int]]:
    """(page, row stride, offset in the storage) of every tensor, in bytes."""
    return [
        (t.page_size_bytes, t.tensor.stride(0), int(t.tensor.storage_offset()))
        for t in caches.tensors
    ]


def round_trip(
    caches: CanonicalKVCaches, moves: Sequence[Sequence[tuple[int, int]]], factor: int = 1
) -> None:
    """Store the first block of each pair, wipe the cache with 0xEE, load it into the second."""
    sizes = [len(group) for group in moves]
    row = sum(t.page_size_bytes for t in caches.tensors)
    worker = OffloadingWorker.for_caches(
        CpuBackend(), caches, host_bytes=row * factor * max(sizes) * 2, block_size_factor=factor
    )
    try:
        chunks = HostLoadStoreSpec(
            [
                c
                for size, offset in zip(sizes, np.cumsum(sizes) - sizes, strict=True)
                for c in range(offset, offset + size)
            ]
            if len(set(worker.pool_of_group)) == 1
            else [c for size in sizes for c in range(size)]
        )
        out = [b for group in moves for b, _ in group]
        back = [b for group in moves for _, b in group]
        worker.transfer_async(1, (DeviceLoadStoreSpec(out, sizes), chunks))
        worker.wait([1])
        for tensor in caches.tensors:
            tensor.tensor.fill_(-18)
        worker.transfer_async(2, (chunks, DeviceLoadStoreSpec(back, sizes)))
        worker.wait([2])
        for result in worker.get_finished():
            assert result.success, result
        rows = caches.tensors[0].tensor.shape[0]
        spec = DeviceLoadStoreSpec([rows], [1] + [0] * (len(sizes) - 1))
        with pytest.raises(BlockRangeError):
            worker.transfer_async(3, (spec, HostLoadStoreSpec([0])))
    finally:
        worker.shutdown()


def fill(storage: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Random bytes; a copy of them."""
    values = torch.from_numpy(
        rng.integers(0, 256, storage.numel() * storage.element_size(), dtype=np.uint8)
    )
    storage.view(torch.uint8).view(-1).copy_(values)
    return storage.clone()


def test_padded_uint8_pages_of_unequal_size_round_trip_to_the_last_block_B01(
    rng: np.random.Generator,
) -> None:
    n = 6
    stores = [torch.zeros(n * 1024, dtype=torch.uint8) for _ in range(2)]
    layers = [
        {"a": LayerCache(stores[0].as_strided((n, 576), (1024, 1)))},
        {"b": LayerCache(stores[1].as_strided((n, 584), (1024, 1)))},
    ]
    before = [fill(store, rng) for store in stores]
    caches = register(n, layers)
    assert shapes(caches) == [(576, 1024, 0), (584, 1024, 0)]
    round_trip(caches, [[(n - 1, 0)], [(n - 1, 0)]])
    for store, old, page in zip(stores, before, (576, 584), strict=True):
        now, was = store.view(n, 1024), old.view(n, 1024)
        assert torch.equal(now[0, :page], was[n - 1, :page])
        assert torch.equal(now[:, page:], was[:, page:]), "padding nobody declared was touched"


def test_declared_padding_travels_with_its_page_B01(rng: np.random.Generator) -> None:
    store = torch.zeros(4 * 1024, dtype=torch.uint8)
    layer = LayerCache(
        store.as_strided((4, 576), (1024, 1)), page_bytes=576, padded_page_bytes=1024
    )
    before = fill(store, rng)
    caches = register(4, [{"a": layer}])
    assert shapes(caches) == [(1024, 1024, 0)]
    assert caches.group_data_refs[0][0].page_size_bytes == 576
    round_trip(caches, [[(3, 0)]])
    assert torch.equal(store.view(4, 1024)[0], before.view(4, 1024)[3])


def test_chunk_ids_fit_every_tensor_and_the_budget_B02() -> None:
    page = 100
    tensors = [torch.zeros(9, page * k, dtype=torch.uint8) for k in (1, 2)]
    caches = register(9, [{"a": LayerCache(tensors[0])}, {"b": LayerCache(tensors[1])}])
    worker = OffloadingWorker.for_caches(CpuBackend(), caches, host_bytes=1999)
    try:
        assert worker.num_chunks == [7, 6]
        engine = worker.engine
        assert engine is not None
        assert engine.host.memory.nbytes == 1900
        assert engine.geometry.host.count.tolist() == [7, 6]
    finally:
        worker.shutdown()


def test_layers_interleaved_in_one_storage_B03(rng: np.random.Generator) -> None:
    blocks, layers, page = 5, 3, 40
    store = torch.zeros(blocks, layers, page, dtype=torch.int8)
    before = fill(store, rng)
    caches = register(blocks, [{f"l{i}": LayerCache(store[:, i]) for i in range(layers)}])
    assert shapes(caches) == [(page, layers * page, i * page) for i in range(layers)]
    round_trip(caches, [[(4, 1), (2, 3)]])
    assert torch.equal(store[1], before[4])
    assert torch.equal(store[3], before[2])
    assert (store[0] == -18).all()


def test_one_packed_tensor_for_all_layers_is_one_tensor_B03() -> None:
    store = torch.zeros(5, 3, 40, dtype=torch.int8)
    assert shapes(register(5, [{"all": LayerCache(store)}])) == [(120, 120, 0)]


def test_the_same_view_is_moved_once_and_other_regions_apart_B06(
    rng: np.random.Generator,
) -> None:
    page, n = 48, 4
    store = torch.zeros(n, 3 * page, dtype=torch.uint8)
    apart = {f"l{i}": LayerCache(store[:, i * page : (i + 1) * page]) for i in range(3)}
    assert len(register(n, [apart]).tensors) == 3
    shared = {f"l{i}": LayerCache(store[:, :page]) for i in range(3)}
    caches = register(n, [shared])
    assert len(caches.tensors) == 1
    assert [ref.tensor_idx for ref in caches.group_data_refs[0]] == [0, 0, 0]
    before = fill(store, rng)
    round_trip(register(n, [apart]), [[(3, 1)]])
    assert torch.equal(store[1], before[3])


def test_bytes_of_shared_layers_are_counted_once_S3_7() -> None:
    tensor = torch.zeros(4, 50, dtype=torch.uint8)
    caches = register(4, [{"a": LayerCache(tensor), "b": LayerCache(tensor)}])
    worker = OffloadingWorker.for_caches(CpuBackend(), caches, host_bytes=200)
    try:
        worker.transfer_async(1, (DeviceLoadStoreSpec([1, 2]), HostLoadStoreSpec([0, 1])))
        worker.wait([1])
        assert worker.get_finished()[0].transfer_size == 100
    finally:
        worker.shutdown()


def test_a_view_with_an_offset_and_padded_rows_leaves_its_neighbours_alone_B07(
    rng: np.random.Generator,
) -> None:
    n, big = 4, 30_000
    store = torch.zeros(8640 + n * big, dtype=torch.uint8)
    view = store.as_strided((n, 64, 132), (big, 132, 1), 8640)
    before = fill(store, rng)
    caches = register(n, [{"a": LayerCache(view)}])
    assert shapes(caches) == [(64 * 132, big, 8640)]
    round_trip(caches, [[(2, 3)]])
    expected = before.clone()
    pages = expected.as_strided((n, 64 * 132), (big, 1), 8640)
    moved = pages[2].clone()
    pages.fill_(0xEE)
    pages[3] = moved
    assert torch.equal(store, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("blocks", [1, 2, 3, 64])
@pytest.mark.parametrize("outermost", ["K/V", "blocks"])
def test_the_block_dimension_does_not_depend_on_the_dtype_B09(
    dtype: torch.dtype, blocks: int, outermost: str, rng: np.random.Generator
) -> None:
    shape = (2, blocks, 16, 4) if outermost == "K/V" else (blocks, 2, 16, 4)
    tensor = torch.zeros(shape, dtype=dtype)
    dim = 1 if outermost == "K/V" else 0
    layer = LayerCache(tensor)
    if blocks == 2:
        with pytest.raises(AmbiguousLayoutError, match=r"'a'.*block_dim=0 or block_dim=1"):
            register(blocks, [{"a": layer}])
        layer = replace(layer, block_dim=dim)
    before = fill(tensor, rng)
    caches = register(blocks, [{"a": layer}])
    assert (
        sum(t.page_size_bytes for t in caches.tensors) * blocks == before.numel() * dtype.itemsize
    )
    round_trip(caches, [[(blocks - 1, 0)]])
    now, was = tensor.view(torch.uint8), before.view(torch.uint8)
    assert torch.equal(now.select(dim, 0), was.select(dim, blocks - 1))


@pytest.mark.parametrize(
    ("shape", "blocks", "says"),
    [
        ((2, 16, 576), 2, "block_dim=0 or block_dim=1"),
        ((64, 64, 576), 64, "block_dim=0 or block_dim=1"),
        ((8, 4, 16, 2), 4, "block_dim=0 or block_dim=1"),
        ((2, 3, 8), 1, "block_dim=0 or block_dim=1"),
        ((7, 8), 3, "rows_per_block"),
        ((5, 8), 1, "rows_per_block"),
        ((2, 8, 6, 16, 64), 5, "block_dim=1 or block_dim=2"),
        ((8, 5, 16, 64), 4, "block_dim=0 or block_dim=1"),
        ((32, 17, 16, 64), 16, "block_dim=0 or block_dim=1"),
        ((4, 3, 16, 64), 2, "block_dim=0 or block_dim=1"),
        ((8, 8, 16, 64), 4, "block_dim=0 or block_dim=1"),
    ],
)
def test_what_cannot_be_told_must_be_declared(
    shape: tuple[int, ...], blocks: int, says: str
) -> None:
    with pytest.raises(AmbiguousLayoutError, match=f"'odd'.*{says}"):
        register(blocks, [{"odd": LayerCache(torch.zeros(shape))}])


def test_the_halves_of_a_pair_have_their_own_base_and_stride_B10() -> None:
    n, page = 5, 24
    outer = torch.zeros(2, n, page, dtype=torch.uint8)
    assert shapes(register(n, [{"a": LayerCache(outer)}])) == [
        (page, page, 0),
        (page, page, n * page),
    ]
    assert shapes(register(n, [{"a": LayerCache(outer.unbind(0))}])) == [
        (page, page, 0),
        (page, page, n * page),
    ]
    inner = torch.zeros(n, 2, page, dtype=torch.uint8)
    assert shapes(register(n, [{"a": LayerCache(inner.unbind(1))}])) == [
        (page, 2 * page, 0),
        (page, 2 * page, page),
    ]
    # The same bytes seen with K/V first, as a permuted view: blocks still lie outermost.
    assert shapes(register(n, [{"a": LayerCache(inner.transpose(0, 1))}])) == [
        (2 * page, 2 * page, 0)
    ]


@pytest.mark.parametrize(
    "widths", [(512, 64), (96, 40, 8), (72,)], ids=["latent and rope", "states", "one"]
)
def test_tuples_and_lists_of_any_length_move_whole_B11(
    widths: tuple[int, ...], rng: np.random.Generator
) -> None:
    n = 4
    parts = [torch.zeros(n, width, dtype=torch.bfloat16) for width in widths]
    before = [fill(part, rng) for part in parts]
    caches = register(n, [{"a": LayerCache(parts)}])
    assert len(caches.tensors) == len(widths)
    round_trip(caches, [[(1, 2)]])
    for part, old in zip(parts, before, strict=True):
        assert torch.equal(part[2].view(torch.uint8), old[1].view(torch.uint8))


def test_nothing_found_is_an_error_that_names_the_layer_B11() -> None:
    for empty in (LayerCache([]), LayerCache(torch.zeros(0, 4))):
        with pytest.raises(LayoutError, match="layer 'empty'"):
            register(4, [{"empty": empty}])
    with pytest.raises(LayoutError, match=r"layer 'odd': expected tensors, found int"):
        register(4, [{"odd": LayerCache([3])}])  # type: ignore[list-item]


def test_an_unknown_kind_names_layer_and_kind_B18_S2_3() -> None:
    with pytest.raises(UnsupportedStateError, match=r"'ring'.*'rolling'.*register_state_kind"):
        register(4, [{"ring": LayerCache(torch.zeros(4, 8), kind="rolling")}])


def test_another_kind_of_state_can_be_registered_S2_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canonical, "_KINDS", dict(canonical._KINDS))

    def only_the_first_half(layer: LayerCache, blocks: int) -> list[Part]:
        assert isinstance(layer.tensors, torch.Tensor)
        return parts_of(layer.tensors[:, : layer.tensors.shape[1] // 2], blocks)

    register_state_kind("half", only_the_first_half)
    caches = register(4, [{"a": LayerCache(torch.zeros(4, 8, dtype=torch.int8), kind="half")}])
    assert shapes(caches) == [(4, 8, 0)]
    with pytest.raises(LayoutError, match="registered already"):
        register_state_kind("half", lambda layer, blocks: [])


def test_attention_and_recurrent_layers_register_together_B18() -> None:
    n, page = 6, 4096
    attention = {
        f"a{i}": LayerCache(torch.zeros(2, n, page // 2, dtype=torch.int8)) for i in range(3)
    }
    raw = torch.zeros(n * page, dtype=torch.int8)
    conv = raw.view(torch.bfloat16).as_strided((n, 3, 100), (page // 2, 100, 1))
    ssm = raw.view(torch.float32).as_strided((n, 8, 64), (page // 4, 64, 1), 152)
    mamba = LayerCache([conv, ssm], kind="state", page_bytes=600 + 2048, padded_page_bytes=page)
    caches = register(n, [attention, {"m": mamba}])
    assert shapes(caches)[-1] == (page, page, 0)
    assert caches.group_data_refs[1][0].page_size_bytes == 2648
    assert len(caches.tensors) == 7


def test_every_buffer_of_a_slot_is_listed_and_moved_B15(rng: np.random.Generator) -> None:
    slots = 5
    pool = [
        torch.zeros(slots, 10240, 9),
        torch.zeros(slots, 2, dtype=torch.int64),
        torch.zeros(slots, 7, dtype=torch.bfloat16),
    ]
    before = [fill(tensor, rng) for tensor in pool]
    caches = register(slots, [{"recurrent": LayerCache(pool, kind="state")}])
    listed = caches.describe()
    assert len(listed) == 3
    assert all("recurrent" in line for line in listed)
    assert "16 bytes" in listed[1]
    round_trip(caches, [[(4, 0)]])
    for tensor, old in zip(pool, before, strict=True):
        assert torch.equal(tensor[0].view(torch.uint8), old[4].view(torch.uint8))


def test_two_buffers_per_page_survive_fragmentation_B19(rng: np.random.Generator) -> None:
    n = 16
    store = torch.zeros(n, 656, dtype=torch.uint8)
    caches = register(n, [{"latent": LayerCache([store[:, :528], store[:, 528:]])}])
    worker = OffloadingWorker.for_caches(CpuBackend(), caches, host_bytes=656 * n)
    try:
        job = 0
        for _ in range(20):
            before = fill(store, rng)
            out, chunks, back = (rng.permutation(n) for _ in range(3))  # every id, every time
            for spec in (
                (DeviceLoadStoreSpec(out), HostLoadStoreSpec(chunks)),
                (HostLoadStoreSpec(chunks), DeviceLoadStoreSpec(back)),
            ):
                job += 1
                worker.transfer_async(job, spec)
                worker.wait([job])
            assert torch.equal(store[back], before[out])
        assert all(result.success for result in worker.get_finished())
    finally:
        worker.shutdown()


def test_partly_overlapping_layers_are_an_error_that_names_both() -> None:
    n = 6
    store = torch.zeros(4096, dtype=torch.uint8)

    def view(page: int, stride: int, offset: int) -> LayerCache:
        return LayerCache(store.as_strided((n, page), (stride, 1), offset))

    for first, second in (
        (view(40, 100, 0), view(40, 100, 39)),  # the end of one page, the start of another
        (view(40, 100, 0), view(40, 100, 70)),  # past the end, into the next block
        (view(40, 100, 0), view(40, 100, 239)),  # two blocks later
        (view(40, 100, 0), view(80, 100, 0)),  # one within the other
        (view(40, 100, 0), view(40, 110, 60)),  # other strides, that meet somewhere
    ):
        with pytest.raises(OverlapError, match="'one' and 'two'"):
            register(n, [{"one": first}, {"two": second}])
    for first, second in (
        (view(40, 100, 0), view(40, 100, 40)),
        (view(40, 100, 0), view(60, 100, 140)),
        (view(40, 100, 0), view(40, 100, 540)),
        (view(10, 100, 0), view(10, 110, 20)),
    ):
        assert len(register(n, [{"one": first}, {"two": second}]).tensors) == 2


def test_overlap_agrees_with_a_byte_map(rng: np.random.Generator) -> None:
    seen = set()
    for _ in range(4000):
        blocks = int(rng.integers(1, 5))
        parts = []
        for _ in range(2):
            page = int(rng.integers(1, 9))
            stride = page + int(rng.choice([0, 3, 8, 12]))
            parts.append(Part(1000 + int(rng.integers(0, 60)), stride, page, page, 0))
        maps = [
            {p.address + i * p.stride + k for i in range(blocks) for k in range(p.page_bytes)}
            for p in parts
        ]
        try:
            canonical._check_apart([("one", parts[0]), ("two", parts[1])], blocks)
            apart = True
        except OverlapError:
            apart = False
        assert apart == (not maps[0] & maps[1]), (parts, blocks)
        seen.add(apart)
    assert seen == {True, False}


def test_a_slot_is_verified_and_skips_absent_layers_S2_4() -> None:
    n, page = 4, 256
    store = torch.zeros(n, page, dtype=torch.uint8)
    attention = LayerCache(store, padded_page_bytes=page)
    small = LayerCache(store[:, :200], kind="state", page_bytes=200)
    slot = ["not here", "full", "window"]
    caches = register(n, [{"full": attention}, {"window": small}], [slot])
    assert shapes(caches) == [(page, page, 0)]
    assert [refs[0].page_size_bytes for refs in caches.group_data_refs] == [page, 200]
    elsewhere = LayerCache(torch.zeros(n, page, dtype=torch.uint8))
    with pytest.raises(LayoutError, match="'full' and 'window' share a slot"):
        register(n, [{"full": attention}, {"window": elsewhere}], [slot])
    with pytest.raises(LayoutError, match=r"'full' has pages of 256 bytes in a slot of 200"):
        register(n, [{"window": small}, {"full": attention}], [["window", "full"]])


def test_layers_of_several_groups_share_chunk_ids_if_they_share_tensors() -> None:
    n = 8
    store = torch.zeros(n, 32, dtype=torch.uint8)
    other = torch.zeros(n, 32, dtype=torch.uint8)
    caches = register(
        n, [{"a": LayerCache(store)}, {"b": LayerCache(store)}, {"c": LayerCache(other)}]
    )
    worker = OffloadingWorker.for_caches(CpuBackend(), caches, host_bytes=32 * 9)
    try:
        assert worker.pool_of_group == [0, 0, 1]
        # Two groups draw on the first pool, so it gets two chunks for each of the other's.
        assert worker.num_chunks == [6, 6, 3]
    finally:
        worker.shutdown()


def test_a_dimension_may_have_spare_blocks_or_smaller_kernel_blocks_S1_3_S3_8() -> None:
    n, page = 10, 32
    spare = torch.zeros(n + 1, page, dtype=torch.uint8)
    assert shapes(register(n, [{"a": LayerCache((spare, spare.clone()))}])) == [(32, 32, 0)] * 2
    halves = torch.zeros(n * 2, page, dtype=torch.uint8)
    assert shapes(register(n, [{"a": LayerCache(halves)}])) == [(64, 64, 0)]
    outer = torch.zeros(2, n * 2, page, dtype=torch.uint8)
    assert shapes(register(n, [{"a": LayerCache(outer)}])) == [(64, 64, 0), (64, 64, 640)]
    padded = torch.zeros(n * 2, page + 8, dtype=torch.uint8)[:, :page]
    assert shapes(register(n, [{"a": LayerCache(padded)}])) == [(32, 80, 0), (32, 80, 40)]


def strided(rows: int, width: int, stride: int) -> torch.Tensor:
    return torch.zeros(rows * stride, dtype=torch.uint8).as_strided((rows, width), (stride, 1))


def test_rows_per_block_follow_from_the_bytes_that_are_declared() -> None:
    # Padding lies between rows: one row a block, and as many to spare.
    spare = LayerCache(strided(64, 512, 1024), page_bytes=512, padded_page_bytes=1024)
    assert shapes(register(32, [{"a": spare}])) == [(1024, 1024, 0)]
    one = LayerCache(strided(2, 512, 1024), page_bytes=512, padded_page_bytes=1024)
    assert shapes(register(1, [{"a": one}])) == [(1024, 1024, 0)]
    # Two kernel rows a block, each with padding, and two rows to spare.
    kernel = LayerCache(strided(6, 512, 1024), page_bytes=1024, padded_page_bytes=2048)
    assert shapes(register(2, [{"a": kernel}])) == [(2048, 2048, 0)]
    only_padded = LayerCache(strided(6, 512, 1024), padded_page_bytes=2048)
    assert shapes(register(2, [{"a": only_padded}])) == [(2048, 2048, 0)]
    outer = LayerCache(torch.zeros(2, 8, 64, dtype=torch.uint8), padded_page_bytes=256)
    assert shapes(register(4, [{"a": outer}])) == [(128, 128, 0), (128, 128, 512)]
    # Token slots in K and V pools, a page of them spare.
    pools = LayerCache([torch.zeros(80, 2, 8, dtype=torch.bfloat16) for _ in "KV"], page_bytes=1024)
    assert shapes(register(4, [{"a": pools}])) == [(512, 512, 0)] * 2
    # A slot of state is one row, however many are spare.
    state = LayerCache(torch.zeros(8, 16, dtype=torch.uint8), kind="state")
    assert shapes(register(4, [{"a": state}])) == [(16, 16, 0)]


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (LayerCache(torch.zeros(2, 4, 8), page_bytes=7), "page_bytes 7"),
        (LayerCache(torch.zeros(4, 8), page_bytes=64), "4 blocks of 64 bytes"),
        (LayerCache(torch.zeros(4, 8), page_bytes=33), "page_bytes 33"),
        (LayerCache(torch.zeros(4, 8), block_dim="x"), "block_dim"),  # type: ignore[arg-type]
        (LayerCache(torch.zeros(4, 8), block_dim=True), "block_dim"),
        (LayerCache(torch.zeros(4, 8), rows_per_block=2.0), "rows_per"),  # type: ignore[arg-type]
        (LayerCache(torch.zeros(4, 8), padded_page_bytes=32.0), "padded"),  # type: ignore[arg-type]
        (LayerCache(None), "found NoneType"),  # type: ignore[arg-type]
        (LayerCache(torch.zeros(4, 8, device="meta")), "meta"),
        (torch.zeros(4, 8), "found Tensor"),
    ],
)
def test_declarations_that_contradict_the_tensors_are_refused(layer: LayerCache, says: str) -> None:
    with pytest.raises(LayoutError, match=f"'odd'.*{says}"):
        register(4, [{"odd": layer}])


def test_a_group_is_a_list_of_names() -> None:
    with pytest.raises(LayoutError, match="list of names"):
        canonicalize(CacheRegistration(4, {"a": LayerCache(torch.zeros(4, 8))}, ["a"]))


def test_a_registration_that_contradicts_itself_is_refused() -> None:
    layer = LayerCache(torch.zeros(4, 8))
    for blocks, layers, groups, says in (
        (0, {"a": layer}, [["a"]], "num_blocks"),
        (4, {"a": layer}, [["a", "b"]], "not registered.*'b'"),
        (4, {"a": layer, "b": layer}, [["a"]], "in no group.*'b'"),
        (4, {"a": layer}, [["a"], ["a"]], "more than one group.*'a'"),
        (5, {"a": LayerCache(torch.zeros(4, 3))}, [["a"]], "'a'.*5 rows"),
        (4, {"a": replace(layer, block_dim=1)}, [["a"]], None),
        (4, {"a": replace(layer, block_dim=2)}, [["a"]], "'a'.*dimension 2"),
        (4, {"a": replace(layer, rows_per_block=2)}, [["a"]], "'a'"),
        (4, {"a": replace(layer, padded_page_bytes=33)}, [["a"]], "'a'.*33"),
        (4, {"a": LayerCache(torch.zeros(1, 8).expand(4, 8))}, [["a"]], "'a'.*repeats"),
        (4, {"a": LayerCache(torch.zeros(4, 400, 2)[:, :, 0])}, [["a"]], "'a'.*400 pieces"),
    ):
        if says is None:
            canonicalize(CacheRegistration(blocks, layers, groups))
            continue
        with pytest.raises(LayoutError, match=says):
            canonicalize(CacheRegistration(blocks, layers, groups))


def test_padding_past_the_end_of_the_storage_is_refused() -> None:
    store = torch.zeros(3 * 100 + 60, dtype=torch.uint8)
    layer = LayerCache(store.as_strided((4, 60), (100, 1)), padded_page_bytes=100)
    with pytest.raises(LayoutError, match=r"'a'.*past the end of a storage of 360"):
        register(4, [{"a": layer}])


def test_an_empty_registration_is_a_warning_S1_1(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        caches = canonicalize(CacheRegistration(4, {}, []))
    assert "nothing to offload" in caplog.text
    assert (list(caches.tensors), list(caches.group_data_refs)) == ([], [])
    with pytest.raises(ConfigurationError, match="no layer"):
        OffloadingWorker.for_caches(CpuBackend(), caches, host_bytes=100)


def test_the_cache_is_never_copied() -> None:
    tensor = torch.zeros(4, 2, 16, dtype=torch.bfloat16)
    caches = register(4, [{"a": LayerCache(tensor.transpose(1, 2))}])
    (entry,) = caches.tensors
    assert entry.tensor.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def _flash_attention() -> tuple[int, list[dict[str, LayerCache]]]:
    return 10, [
        {f"l{i}": LayerCache(torch.zeros(2, 10, 16, 2, 8, dtype=torch.bfloat16)) for i in (0, 1)}
    ]


def _flash_infer() -> tuple[int, list[dict[str, LayerCache]]]:
    return 10, [{"l": LayerCache(torch.zeros(10, 2, 16, 2, 8, dtype=torch.bfloat16))}]


def _mla() -> tuple[int, list[dict[str, LayerCache]]]:
    return 10, [{"l": LayerCache(torch.zeros(10, 64, 576, dtype=torch.bfloat16))}]


def _packed_cross_layer() -> tuple[int, list[dict[str, LayerCache]]]:
    store = torch.zeros(10, 3, 2, 16, 8, dtype=torch.bfloat16)
    return 10, [{f"l{i}": LayerCache(store[:, i]) for i in range(3)}]


def _mamba_beside_attention() -> tuple[int, list[dict[str, LayerCache]]]:
    raw = torch.zeros(10 * 2048, dtype=torch.int8)
    attention = raw.view(torch.bfloat16).view(10, 2, 16, 32)
    conv = raw.view(torch.bfloat16).as_strided((10, 3, 96), (1024, 96, 1))
    ssm = raw.view(torch.float32).as_strided((10, 16, 16), (512, 16, 1), 144)
    state = LayerCache([conv, ssm], kind="state", page_bytes=1600, padded_page_bytes=2048)
    return 10, [{"attn": LayerCache(attention, padded_page_bytes=2048)}, {"mamba": state}]


def _gaudi() -> tuple[int, list[dict[str, LayerCache]]]:
    return 10, [{"l": LayerCache((torch.zeros(11, 128, 2, 8), torch.zeros(11, 128, 2, 4)))}]


def _sglang_pools() -> tuple[int, list[dict[str, LayerCache]]]:
    pools = [torch.zeros(10 * 16 + 16, 2, 8, dtype=torch.bfloat16) for _ in range(2)]
    return 10, [{"l": LayerCache(pools, rows_per_block=16)}]


def _transformers_paged() -> tuple[int, list[dict[str, LayerCache]]]:
    flat = [torch.zeros((10 + 2) * 32, 2, 8, dtype=torch.bfloat16) for _ in range(2)]
    return 10, [{"l": LayerCache(flat, rows_per_block=32)}]


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (_flash_attention, [(512, 512, 0), (512, 512, 5120)] * 2),
        (_flash_infer, [(1024, 1024, 0)]),
        (_mla, [(73728, 73728, 0)]),
        (_packed_cross_layer, [(512, 1536, 0), (512, 1536, 512), (512, 1536, 1024)]),
        (_mamba_beside_attention, [(2048, 2048, 0)]),
        (_gaudi, [(8192, 8192, 0), (4096, 4096, 0)]),
        (_sglang_pools, [(512, 512, 0)] * 2),
        (_transformers_paged, [(1024, 1024, 0)] * 2),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_layouts_of_real_engines_keep_their_description_B05(
    engine: Callable[[], tuple[int, list[dict[str, LayerCache]]]],
    expected: list[tuple[int, int, int]],
    rng: np.random.Generator,
) -> None:
    blocks, groups = engine()
    caches = register(blocks, groups)
    assert shapes(caches) == expected
    for entry in caches.tensors:
        shape = tuple(entry.tensor.shape)
        entry.tensor.copy_(torch.from_numpy(rng.integers(-128, 128, shape, dtype=np.int8)))
    before = [entry.tensor.clone() for entry in caches.tensors]
    shared = len(groups) > 1 and len(caches.tensors) == 1
    moves = [[(9, 0)], [(7, 1)]] if shared else [[(9, 0)] for _ in groups]
    round_trip(caches, moves)
    for entry, old in zip(caches.tensors, before, strict=True):
        assert torch.equal(entry.tensor[0], old[9])


def test_the_last_block_of_a_sparse_file_of_5_gib_round_trips_C06(tmp_path: Path) -> None:
    page, blocks = 1 << 20, 5 << 10
    file = np.memmap(tmp_path / "sparse", dtype=np.uint8, mode="w+", shape=(blocks, page))
    file[-1] = np.arange(page, dtype=np.uint64).astype(np.uint8)
    caches = register(blocks, [{"a": LayerCache(torch.from_numpy(file))}])
    worker = OffloadingWorker.for_caches(CpuBackend(), caches, host_bytes=2 * page)
    try:
        last = blocks - 1
        worker.transfer_async(1, (DeviceLoadStoreSpec([last]), HostLoadStoreSpec([1])))
        worker.transfer_async(2, (HostLoadStoreSpec([1]), DeviceLoadStoreSpec([last - 1])))
        worker.wait([1, 2])
        assert all(result.success for result in worker.get_finished())
        assert (file[-2] == file[-1]).all()
        assert not file[-3].any()
    finally:
        worker.shutdown()
