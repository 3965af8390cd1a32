"""The full benchmark of an accelerator, against the largest single pinned copy of the same run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvoffload.bench import product, submit
from kvoffload.bench.burst import JOBS, burst
from kvoffload.bench.cold import Flush
from kvoffload.bench.copy import (
    DIRECTIONS,
    Step,
    is_accelerator,
    one_copy,
    one_copy_bytes,
)
from kvoffload.bench.memory import Room, fit
from kvoffload.bench.pool import Pool
from kvoffload.bench.product import ProductRow
from kvoffload.bench.submit import SubmitRow
from kvoffload.bench.timing import in_turn
from kvoffload.core.backend import Backend
from kvoffload.core.errors import ConfigurationError
from kvoffload.core.lanes import Lane
from kvoffload.rig import DeviceRig

PAGES = tuple(1 << power for power in range(11, 22))
"""Bytes: 2 KiB to 2 MiB."""
JOB_BYTES = 256 << 20
"""Bytes of a job at most."""
BOTH = "both"
PATTERNS = ("random", "contiguous")


@dataclass(frozen=True)
class GpuRow:
    """Several jobs in flight, from the first submission to the last end; medians, GB are 10^9
    bytes.

    Attributes:
        page_bytes: of one block; there is one tensor.
        ids: ``"random"``: blocks lie anywhere; ``"contiguous"``: those of a job are adjacent.
        way: of copying; None where the backend has one only.
        direction: ``"store"``, ``"load"``, or ``"both"``: half of the jobs go either way.
        blocks: of one job.
        gbps: GB/s of all jobs.
        one_copy_gbps: GB/s of the largest single pinned copy in this direction; of the faster
            direction for both.
        ratio: ``gbps`` to ``one_copy_gbps``.
        note: why it is fewer blocks than were asked for; else None.
    """

    page_bytes: int
    ids: str
    way: str | None
    direction: str
    blocks: int
    gbps: float
    one_copy_gbps: float
    ratio: float
    note: str | None


@dataclass
class GpuReport:
    """What was measured.

    Attributes:
        pinned: all host memory was page-locked.
        one_copy_bytes: of the single copy.
        rows: copies.
        submits: the host's part of a submit.
        products: matrix products beside copies.
        products_note: why there are none of those; else None.
    """

    pinned: bool = True
    one_copy_bytes: int = 0
    rows: list[GpuRow] = field(default_factory=list)
    submits: list[SubmitRow] = field(default_factory=list)
    products: list[ProductRow] = field(default_factory=list)
    products_note: str | None = None


def ways_of(backend: Backend) -> list[str | None]:
    """The ways of copying to measure: None for a backend that has one."""
    ways = getattr(backend, "copy_ways", None)
    return list(ways()) if callable(ways) else [None]


def run(
    backend: Backend,
    rig: DeviceRig,
    *,
    pages: Sequence[int] = PAGES,
    blocks: int = 2000,
    rounds: int = 5,
    product_size: int = product.SIZE,
    seed: int = 0,
    step: Step = lambda _, __: None,
) -> GpuReport:
    """Measure all of it.

    Args:
        step: each of the three parts counts anew.

    Raises:
        ConfigurationError: the backend's device is no accelerator, or a page is too large.
        TransferError: a transfer failed, or moved wrong bytes.
    """
    if not is_accelerator(backend):
        raise ConfigurationError(f"{backend.device} is no accelerator")
    room = Room.of(rig)
    ways = ways_of(backend)
    report = GpuReport()
    before = getattr(backend, "way", None)

    def set_way(way: str | None) -> None:
        if way is not None:
            backend.way = way  # type: ignore[attr-defined] # as copy_ways says

    try:
        copies = _Copies(backend, rig, room, ways, set_way, blocks, rounds, seed, report)
        copies.run(pages, step)
        report.submits = submit.run(
            backend, rig, room=room, blocks=min(blocks, 1000), seed=seed, step=step
        )
        try:
            report.products = product.run(
                backend,
                rig,
                room=room,
                ways=ways,
                set_way=set_way,
                blocks=blocks,
                size=product_size,
                rounds=rounds,
                step=step,
            )
        except ConfigurationError as error:
            report.products_note = str(error)
    finally:
        set_way(before)
    return report


@dataclass
class _Copies:
    """The first part: every page size, pattern, way and direction."""

    backend: Backend
    rig: DeviceRig
    room: Room
    ways: Sequence[str | None]
    set_way: Callable[[str | None], None]
    blocks: int
    rounds: int
    seed: int
    report: GpuReport

    def run(self, pages: Sequence[int], step: Step) -> None:
        rng, flush = np.random.default_rng(self.seed), Flush()
        lanes = {lane.value: [lane] for lane in DIRECTIONS} | {BOTH: list(DIRECTIONS)}
        kinds = [(way, direction) for way in self.ways for direction in lanes]
        nbytes = one_copy_bytes(self.backend, JOB_BYTES, self.room)
        self.report.one_copy_bytes = nbytes
        alone = [one_copy(self.rig, nbytes, lane) for lane in DIRECTIONS]
        total, done = len(pages) * len(PATTERNS) * self.rounds * (len(kinds) + len(alone)), 0

        def before() -> None:
            nonlocal done
            step(done, total)
            done += 1
            self.rig.synchronize()
            flush()

        for page in pages:
            asked = max(min(self.blocks, JOB_BYTES // page), 1)
            size = fit(page, asked, self.room, jobs=JOBS)
            with Pool(
                self.backend, self.rig, page, size.pool, between=lambda: step(done, total)
            ) as pool:
                self.report.pinned &= pool.pinned
                for way in self.ways:
                    self.set_way(way)
                    pool.check(rng)
                for pattern in PATTERNS:
                    pieces = [
                        self._piece(
                            pool,
                            way,
                            lanes[direction],
                            size.blocks,
                            rng if pattern == "random" else None,
                        )
                        for way, direction in kinds
                    ]
                    seconds = in_turn([*pieces, *alone], self.rounds, before=before)
                    peaks = [nbytes / each / 1e9 for each in seconds[len(kinds) :]]
                    peak = dict(zip(lanes, [*peaks, max(peaks)], strict=True))
                    for (way, direction), taken in zip(kinds, seconds, strict=False):
                        gbps = JOBS * size.blocks * page / taken / 1e9
                        self.report.rows.append(
                            GpuRow(
                                page_bytes=page,
                                ids=pattern,
                                way=way,
                                direction=direction,
                                blocks=size.blocks,
                                gbps=gbps,
                                one_copy_gbps=peak[direction],
                                ratio=gbps / peak[direction],
                                note=size.note,
                            )
                        )
        step(total, total)

    def _piece(
        self,
        pool: Pool,
        way: str | None,
        lanes: Sequence[Lane],
        blocks: int,
        rng: np.random.Generator | None,
    ) -> Callable[[], None]:
        work = burst(pool, lanes, blocks, rounds=self.rounds, rng=rng)

        def piece() -> None:
            self.set_way(way)
            work()

        return piece
