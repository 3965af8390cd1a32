"""A pool that is only measured takes a part of the memory that is free, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.bench.cold import UNKNOWN, cache_bytes
from kvoffload.bench.memory import ONE_COPY_BYTES, OVERHEAD, Room, available_bytes, fit
from kvoffload.core.errors import ConfigurationError

MiB = 1 << 20
GiB = 1 << 30


def test_what_fits_is_taken_as_it_was_asked_for() -> None:
    size = fit(4096, 2000, Room(GiB, None))
    assert (size.pool, size.blocks, size.note) == (4096, 2000, None)


@pytest.mark.parametrize("room", [Room(GiB, None), Room(GiB, GiB // 2), Room(GiB, 64 * GiB)])
@pytest.mark.parametrize("page", [4096, 65536, MiB, 3 * MiB])
@pytest.mark.parametrize("jobs", [2, 4])
def test_less_is_taken_where_memory_would_be_exceeded(room: Room, page: int, jobs: int) -> None:
    size = fit(page, 100_000, room, jobs=jobs)
    job = size.blocks * (page + OVERHEAD)
    assert size.pool * (page + OVERHEAD) + 2 * min(job, ONE_COPY_BYTES) <= room.per_side
    assert size.blocks * jobs <= size.pool
    assert size.note is not None
    assert f"{size.blocks:,} instead of 100,000" in size.note


def test_a_smaller_pool_that_still_holds_the_jobs_needs_no_note() -> None:
    whole = fit(MiB, 65, Room(64 * GiB, None), jobs=4)
    assert (whole.pool, whole.blocks) == (512, 65)
    tight = fit(MiB, 64, Room(900 * MiB, None), jobs=4)
    assert (tight.pool, tight.blocks, tight.note) == (256, 64, None)


def test_a_page_that_does_not_fit_at_all_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--pages 1 GiB: .* smaller page"):
        fit(GiB, 1, Room(GiB, None))


def test_two_sides_share_host_memory_unless_the_device_has_its_own() -> None:
    assert Room(100, None).per_side == 50
    assert Room(100, 400).per_side == 100
    assert Room(100, 30).per_side == 30


def test_available_memory_is_what_the_system_says_and_no_limit_forbids(tmp_path: Path) -> None:
    most = available_bytes(tmp_path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   7 kB\n")
    assert available_bytes(tmp_path) == 7 * 1024
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {most} kB\n")
    assert available_bytes(tmp_path) == most


def test_the_largest_cache_counts(tmp_path: Path) -> None:
    assert cache_bytes(tmp_path) == UNKNOWN
    for index, size in enumerate(("48K\n", "nonsense", "32768K\n", "2048K\n")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(size)
    assert cache_bytes(tmp_path) == 32 * MiB
