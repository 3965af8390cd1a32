"""Up to which page size a kernel loads faster than DMA does, on the device at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvoffload.backends.calibration import DMA, KERNEL, CopiesInTwoWays
from kvoffload.bench.burst import JOBS, burst
from kvoffload.bench.cold import Flush
from kvoffload.bench.copy import Step
from kvoffload.bench.memory import Room, fit
from kvoffload.bench.pool import Pool
from kvoffload.bench.timing import in_turn
from kvoffload.core.backend import Backend
from kvoffload.core.errors import ConfigurationError
from kvoffload.core.lanes import Lane
from kvoffload.rig import DeviceRig

PAGES = tuple(1 << power for power in range(10, 21))
"""Bytes: 1 KiB to 1 MiB. The first at which DMA wins ends what the kernel is used for."""
JOB_BYTES = 64 << 20
"""Bytes of a job at most."""


@dataclass(frozen=True)
class CalibrationRow:
    """Loads of random blocks of one size, several jobs in flight; medians, GB are 10^9 bytes.

    Attributes:
        page_bytes: of one block.
        blocks: of one job.
        dma_gbps, kernel_gbps: GB/s in each way, in turn within one run.
        ratio: kernel to DMA.
    """

    page_bytes: int
    blocks: int
    dma_gbps: float
    kernel_gbps: float
    ratio: float


def crossover(rows: Sequence[CalibrationRow]) -> int | None:
    """Bytes of the largest page up to which the kernel wins at every size that was measured.

    A win above a size at which DMA won is taken for noise; so is a win at a size that was measured
    again and lost. A tie is DMA's, which leaves the device's cores to others.

    Returns:
        None if DMA wins at the smallest size already.
    """
    lost = min((row.page_bytes for row in rows if not row.ratio > 1), default=None)
    won = [row.page_bytes for row in rows if lost is None or row.page_bytes < lost]
    return max(won, default=None)


def two_ways(backend: Backend, name: str) -> CopiesInTwoWays:
    """The backend as one that copies in two ways.

    Raises:
        ConfigurationError: it does not, or not on this machine.
    """
    ways = getattr(backend, "copy_ways", None)
    found = tuple(ways()) if callable(ways) else ()
    if {DMA, KERNEL} - set(found):
        only = f" here ({found[0]})" if found else ""
        raise ConfigurationError(
            f"backend {name} copies in one way only{only}; there is nothing to calibrate"
        )
    either: CopiesInTwoWays = backend  # type: ignore[assignment] # as copy_ways says
    return either


def run(
    backend: Backend,
    rig: DeviceRig,
    *,
    ways: CopiesInTwoWays,
    pages: Sequence[int] = PAGES,
    blocks: int = 2000,
    rounds: int = 7,
    seed: int = 0,
    step: Step = lambda _, __: None,
) -> list[CalibrationRow]:
    """Load blocks of every size in both ways; the way of before comes back.

    Args:
        ways: the backend once more, as :func:`two_ways` returned it.

    Raises:
        ConfigurationError: a page is too large for this machine.
        TransferError: a transfer failed, or moved wrong bytes.
    """
    rng = np.random.default_rng(seed)
    room, flush = Room.of(rig), Flush()
    total, done = len(pages) * rounds * 2, 0

    def before() -> None:
        nonlocal done
        step(done, total)
        done += 1
        rig.synchronize()
        flush()

    def in_way(way: str, work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            ways.way = way
            work()

        return run

    rows = []
    way_before = ways.way
    try:
        for page in pages:
            size = fit(page, max(min(blocks, JOB_BYTES // page), 1), room, jobs=JOBS)
            with Pool(backend, rig, page, size.pool, between=lambda: step(done, total)) as pool:
                pieces = []
                for way in (DMA, KERNEL):
                    in_way(way, lambda pool=pool: pool.check(rng))()  # type: ignore[misc]
                    work = burst(pool, [Lane.LOAD], size.blocks, rounds=rounds, rng=rng)
                    pieces.append(in_way(way, work))
                medians = in_turn(pieces, rounds, before=before)
            dma, kernel = (JOBS * page * size.blocks / seconds / 1e9 for seconds in medians)
            rows.append(CalibrationRow(page, size.blocks, dma, kernel, kernel / dma))
    finally:
        ways.way = way_before
    step(done, total)
    return rows
