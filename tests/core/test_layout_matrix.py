"""Every layout of the matrix, byte by byte: B01, B02, B03, B07, B09, B10, B11, B13, B19."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvoffload.core.backend import Backend, HostOrder
from kvoffload.core.canonicalize import canonicalize
from kvoffload.core.errors import BlockRangeError
from kvoffload.core.specs import DeviceLoadStoreSpec, HostLoadStoreSpec
from kvoffload.core.worker import OffloadingWorker
from kvoffload.testing.simulator import SimBackend
from tests.core import layouts
from tests.core.layouts import Case, build

AXES: tuple[tuple[Any, ...], ...] = (
    layouts.STRUCTURES,
    layouts.PLACEMENTS,
    layouts.DTYPES,
    layouts.ODD_PAGES,
    layouts.GROUPS,
    layouts.FACTORS,
)
OUTER = list(itertools.product(*AXES[:4]))


def pairwise() -> list[Case]:
    """Cases in which every two values of two axes meet."""
    missing = {
        pair
        for (i, left), (j, right) in itertools.combinations(enumerate(AXES), 2)
        for pair in itertools.product([(i, v) for v in left], [(j, v) for v in right])
    }
    chosen = []
    points = list(itertools.product(*AXES))
    while missing:
        # Any point that still covers much will do; the first are good enough.
        point = max(points[:: max(len(points) // 400, 1)], key=lambda p: len(missing & _pairs(p)))
        if not missing & _pairs(point):
            point = next(p for p in points if missing & _pairs(p))
        missing -= _pairs(point)
        chosen.append(Case(*point))
    return chosen


def _pairs(point: tuple[Any, ...]) -> set[tuple[tuple[int, Any], tuple[int, Any]]]:
    return set(itertools.combinations(enumerate(point), 2))


def round_trip(
    make_backend: Callable[[], Backend], case: Case, order: HostOrder, device: str = "cpu"
) -> None:
    rng = np.random.default_rng(7)
    live, expected = build(case, device), build(case)
    blocks, factor = case.blocks, case.factor
    groups = len(live.registration.groups)
    caches = canonicalize(live.registration)
    if factor == 1:
        assert sum(t.page_size_bytes for t in caches.tensors) * blocks == layouts.unique_bytes(
            build(case)
        )
    row = sum(t.page_size_bytes for t in caches.tensors)
    worker = OffloadingWorker.for_caches(
        make_backend(),
        caches,
        host_bytes=row * factor * 4,
        block_size_factor=factor,
        host_order=order,
    )
    try:
        assert worker.num_chunks == [4] * groups
        original = torch.from_numpy(rng.integers(0, 256, len(live.storage), dtype=np.uint8))
        clobber = torch.from_numpy(rng.integers(0, 256, len(live.storage), dtype=np.uint8))
        live.storage.copy_(original)
        # Two chunks of every group go out, and come back into other blocks but for the first
        # `skip` and the last; what is not named stays as it is.
        out = [rng.permutation(blocks)[: 2 * factor] for _ in range(groups)]
        chunks = [rng.permutation(4)[:2] for _ in range(groups)]
        skip = factor // 2
        length = 2 * factor - skip - (factor > 2)
        back = [rng.permutation(blocks)[:length] for _ in range(groups)]
        host = HostLoadStoreSpec(np.concatenate(chunks))
        store = DeviceLoadStoreSpec(np.concatenate(out), [2 * factor] * groups, [0] * groups)
        load = DeviceLoadStoreSpec(np.concatenate(back), [length] * groups, [skip] * groups)

        worker.transfer_async(1, (store, host))
        worker.wait([1])
        live.storage.copy_(clobber)
        worker.transfer_async(2, (host, load))
        worker.wait([2])
        results = {r.job_id: r for r in worker.get_finished()}
        assert results[1].success
        assert results[2].success
        assert results[2].transfer_size == length * sum(
            caches.tensors[t].page_size_bytes
            for refs in caches.group_data_refs
            for t in {ref.tensor_idx for ref in refs}
        )

        expected.storage.copy_(clobber)
        source = build(case)
        source.storage.copy_(original)
        for group in range(groups):
            for b_from, b_to in zip(out[group][skip:], back[group], strict=False):
                for old, new in zip(
                    source.block(group, int(b_from)), expected.block(group, int(b_to)), strict=True
                ):
                    new.copy_(old)
        wrong = torch.nonzero(live.storage.cpu() != expected.storage).flatten().tolist()
        assert not wrong, f"{len(wrong)} bytes are wrong, the first at {wrong[0]}"

        beyond = DeviceLoadStoreSpec([blocks] * factor, [factor] + [0] * (groups - 1))
        with pytest.raises(BlockRangeError):
            worker.transfer_async(3, (beyond, HostLoadStoreSpec([0])))
    finally:
        worker.shutdown()


@pytest.mark.parametrize(
    ("structure", "placement", "dtype", "odd_page"),
    OUTER,
    ids=["-".join(map(str, point)).replace("torch.", "") for point in OUTER],
)
def test_every_layout_round_trips_byte_by_byte(
    make_backend: Callable[[], Backend],
    request: pytest.FixtureRequest,
    structure: str,
    placement: str,
    dtype: torch.dtype,
    odd_page: int,
) -> None:
    if request.config.getoption("kv_backend") != "cpu":
        pytest.skip("the whole matrix runs on the fastest lane; the others take every pair of it")
    orders = itertools.cycle(HostOrder)
    for groups, factor in itertools.product(layouts.GROUPS, layouts.FACTORS):
        case = Case(structure, placement, dtype, odd_page, groups, factor)
        round_trip(make_backend, case, next(orders))


def test_every_pair_of_the_matrix_round_trips_on_this_lane(
    make_backend: Callable[[], Backend],
) -> None:
    for case, order in zip(pairwise(), itertools.cycle(HostOrder), strict=False):
        round_trip(make_backend, case, order)


def test_every_pair_of_the_matrix_round_trips_on_the_simulator() -> None:
    cases = pairwise()
    assert len(cases) < 80
    for case, order in zip(cases, itertools.cycle(HostOrder), strict=False):
        round_trip(SimBackend, case, order)
