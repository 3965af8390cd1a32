"""Which page size a kernel is used up to: the arithmetic, and a run on a backend of two ways."""

from __future__ import annotations

import pytest

from kvoffload.backends.cpu.backend import CpuBackend
from kvoffload.bench.burst import JOBS
from kvoffload.bench.calibrate import CalibrationRow, crossover, run, two_ways
from kvoffload.core.errors import ConfigurationError
from kvoffload.rig import rig_for
from tests.bench.two_ways import TwoWays


def rows(**ratios: float) -> list[CalibrationRow]:
    """``p4=1.5``: at pages of 4 bytes the kernel is 1.5 times as fast."""
    return [
        CalibrationRow(int(name[1:].partition("_")[0]), 1, 1.0, ratio, ratio)
        for name, ratio in ratios.items()
    ]


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (rows(p1=3, p2=2, p4=1.5, p8=0.9), 4),
        (rows(p8=0.9, p2=2, p4=1.5, p1=3), 4),
        (rows(p1=3, p2=0.9, p4=1.5, p8=0.9), 1),
        (rows(p1=3, p2=2, p2_again=0.9), 1),
        (rows(p1=3, p2=2), 2),
        (rows(p1=0.9, p2=2), None),
        (rows(p1=1.0), None),
        (rows(p1=3, p2=float("nan")), 1),
        ([], None),
    ],
)
def test_the_kernel_wins_up_to_the_last_size_before_it_loses(
    measured: list[CalibrationRow], expected: int | None
) -> None:
    assert crossover(measured) == expected


@pytest.mark.parametrize("backend", [CpuBackend(), TwoWays(("dma",)), TwoWays(())])
def test_with_one_way_there_is_nothing_to_calibrate(backend: CpuBackend) -> None:
    with pytest.raises(ConfigurationError, match=r"backend b copies in one way only.*nothing to"):
        two_ways(backend, "b")


def test_both_ways_are_measured_and_the_way_of_before_comes_back() -> None:
    backend = TwoWays()
    steps: list[tuple[int, int]] = []
    with rig_for(backend) as rig:
        made = run(
            backend,
            rig,
            ways=two_ways(backend, "b"),
            pages=[4096, 8192],
            blocks=4,
            rounds=2,
            step=lambda done, total: steps.append((done, total)),
        )
    backend.close()
    assert [row.page_bytes for row in made] == [4096, 8192]
    for row in made:
        assert min(row.dma_gbps, row.kernel_gbps) > 0
        assert row.ratio == pytest.approx(row.kernel_gbps / row.dma_gbps)
    assert backend.way == "auto"
    assert min(backend.used.count(way) for way in ("dma", "kernel")) >= 2 * 2 * JOBS
    assert sorted(set(steps)) == [(done, 8) for done in range(9)]
    assert steps == sorted(steps)
