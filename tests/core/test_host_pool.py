"""A budget, and what it buys: B02, D01, D10, guarantee 8."""

from __future__ import annotations

import logging
import mmap
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvoffload.backends.cpu.backend import CpuBackend
from kvoffload.core import host_memory, host_pool
from kvoffload.core.backend import HostOrder
from kvoffload.core.errors import CapacityError, ConfigurationError
from kvoffload.core.host_memory import memory_limit
from kvoffload.core.host_pool import HostLayout
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.specs import IntArray
from kvoffload.core.worker import OffloadingWorker


def columns(groups: Sequence[Sequence[int]]) -> list[IntArray]:
    return [np.array(group, dtype=np.int64) for group in groups]


def layout(
    budget: int, pages: Sequence[int], groups: Sequence[Sequence[int]], **options: object
) -> HostLayout:
    return HostLayout.within(
        budget,
        np.array(pages, dtype=np.int64),
        columns(groups),
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("order", HostOrder)
@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize(
    "groups", [[[0, 1, 2]], [[0], [1, 2]], [[0, 1], [1], [2]], [[2], [0], [1]]]
)
def test_every_byte_belongs_to_one_page(
    order: HostOrder, factor: int, groups: list[list[int]]
) -> None:
    pages = [7, 16, 5]
    made = layout(4000, pages, groups, factor=factor, order=order)
    owner = np.zeros(made.capacity.nbytes, dtype=np.int64)
    for tensor, page in enumerate(pages):
        for chunk in range(made.count[tensor]):
            for piece in range(factor):
                at = made.offset[tensor] + chunk * made.hi[tensor] + piece * made.lo[tensor]
                owner[at : at + page] += 1
    assert (owner == 1).all(), "a byte belongs to no page, or to two"


def resident_kilobytes() -> int:
    """Of this process, as the operating system counts them."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0])


def test_a_budget_is_met_exactly_and_measured_D01() -> None:
    budget = 33 << 20
    tensors = [torch.zeros(2048, width, dtype=torch.uint8) for width in (4096, 1000, 7, 640, 9001)]
    before = resident_kilobytes()
    worker = OffloadingWorker.for_caches(
        CpuBackend(), CanonicalKVCaches.from_tensors(tensors), host_bytes=budget
    )
    try:
        engine = worker.engine
        assert engine is not None
        row = sum(t.shape[1] for t in tensors)
        memory = engine.host.memory
        assert budget - row < memory.nbytes <= budget
        # Everything that was mapped, whether or not the engine would use it.
        mapped = memory.numpy()
        mapped[:] = 1
        grown = (resident_kilobytes() - before) * 1024
        assert grown <= budget * 1.02
        assert memory.nbytes * 0.98 <= grown
        assert abs(worker.host_bytes_resident() - memory.nbytes) < mmap.PAGESIZE
        del mapped
    finally:
        worker.shutdown()


def test_small_groups_do_not_take_large_chunks_D10() -> None:
    budget, tokens = 1 << 20, 16
    made = layout(budget, [16384, 1024], [[0], [1]], tokens_per_block=[tokens, tokens])
    ideal = budget / (16384 + 1024) * tokens
    assert made.capacity.tokens is not None
    assert made.capacity.tokens >= 0.8 * ideal
    assert made.capacity.chunks == (60, 60)


def test_the_budget_is_divided_by_what_a_sequence_needs_D10() -> None:
    # Per 64 tokens: four small blocks of the first group, one large block of the second.
    made = layout(64_000, [100, 1200], [[0], [1]], tokens_per_block=[16, 64])
    assert made.capacity.chunks == (160, 40)
    assert made.capacity.tokens == 2560
    # Two groups that share a tensor draw on one pool.
    shared = layout(90_000, [100, 100], [[0], [0], [1]], tokens_per_block=[16, 16, 16])
    assert shared.capacity.chunks == (600, 600, 300)
    assert shared.capacity.tokens == 300 * 16


@pytest.mark.parametrize("budget", [1300, 1301, 1999, 2599, 2600, 10_000])
def test_a_small_budget_still_gives_every_group_a_chunk(budget: int) -> None:
    made = layout(budget, [100, 1200], [[0], [1]], tokens_per_block=[1000, 1])
    assert min(made.capacity.chunks) >= 1
    assert made.capacity.nbytes <= budget


def test_what_rounding_leaves_over_goes_where_it_is_short_D10() -> None:
    made = layout(7978, [100, 8], [[0], [1]], factor=3, tokens_per_block=[1, 16])
    assert made.capacity.chunks == (26, 2)
    assert made.capacity.tokens == 78


@pytest.mark.parametrize("budget", [0, -1, 1299])
def test_a_budget_below_one_chunk_is_refused_with_every_number_F07(budget: int) -> None:
    with pytest.raises(CapacityError, match=rf"budget of {budget} bytes.*\[100, 1200\]"):
        layout(budget, [100, 1200], [[0], [1]])


def test_a_budget_above_the_limit_is_refused_before_anything_is_allocated() -> None:
    limit = memory_limit().nbytes
    backend = CpuBackend()
    backend.allocate_host = lambda *_: pytest.fail("allocated")  # type: ignore[method-assign]
    caches = CanonicalKVCaches.from_tensors([torch.zeros(10, 100, dtype=torch.uint8)])
    with pytest.raises(CapacityError, match=f"budget of {limit + 1}.*{limit}"):
        OffloadingWorker.for_caches(backend, caches, host_bytes=limit + 1)


@pytest.mark.parametrize(
    "options",
    [
        {"factor": 0},
        {"factor": True},
        {"factor": 1.5},
        {"tokens_per_block": [16]},
        {"tokens_per_block": [16, 0]},
    ],
)
def test_settings_that_mean_nothing_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        layout(10_000, [100, 100], [[0], [1]], **options)


def warned(caplog: pytest.LogCaptureFixture, longest: int) -> str:
    caplog.clear()
    caches = CanonicalKVCaches.from_tensors([torch.zeros(10, 100, dtype=torch.uint8)])
    with caplog.at_level(logging.INFO):
        worker = OffloadingWorker.for_caches(
            CpuBackend(),
            caches,
            host_bytes=1000,
            block_size_factor=2,
            tokens_per_block=16,
            longest_request=longest,
        )
    worker.shutdown()
    assert worker.capacity.tokens == 160
    assert worker.capacity.blocks == (10,)
    assert "160 tokens" in caplog.text, "the capacity is reported"
    return " ".join(r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)


def test_a_longest_request_that_cannot_fit_is_a_warning_with_the_numbers_D10(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert warned(caplog, 160) == ""
    assert "160 tokens" in warned(caplog, 161)
    assert "161" in warned(caplog, 161)


def test_a_mapping_above_its_budget_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant of guarantee 8: memory is rounded up to a power of two, as caching allocators do."""
    monkeypatch.setattr(
        host_memory, "_map", lambda nbytes: mmap.mmap(-1, 1 << (nbytes - 1).bit_length())
    )
    with pytest.raises(AssertionError):
        test_a_budget_is_met_exactly_and_measured_D01()


def test_a_pool_above_its_budget_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another: the number of chunks is rounded up."""
    divide = host_pool._divide

    def rounded_up(*args: Any) -> list[int]:
        return [1 << (chunks - 1).bit_length() for chunks in divide(*args)]

    monkeypatch.setattr(host_pool, "_divide", rounded_up)
    with pytest.raises(AssertionError):
        test_a_budget_is_met_exactly_and_measured_D01()
