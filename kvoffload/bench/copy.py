"""How fast a backend copies blocks, as a ratio to one contiguous copy in the same run.

Every measurement is cold: each round takes other blocks, and the CPU's caches are flushed before
each copy, the contiguous one included. A job is timed from its submission until its result is
there, so that the host's part counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvoffload.bench.cold import Flush
from kvoffload.bench.memory import ONE_COPY_BYTES, Room, fit
from kvoffload.bench.pool import Pool
from kvoffload.bench.timing import in_turn
from kvoffload.core.backend import Backend
from kvoffload.core.errors import ConfigurationError
from kvoffload.core.lanes import Lane
from kvoffload.core.specs import IntArray
from kvoffload.rig import DeviceRig

DIRECTIONS = (Lane.STORE, Lane.LOAD)

Step = Callable[[int, int], None]
"""Called with how many measurements are done and how many there are; it may raise to end this."""


@dataclass(frozen=True)
class CopyRow:
    """One measurement; medians. GB are 10^9 bytes.

    Attributes:
        page_bytes: of one block; there is one tensor.
        direction: ``"store"`` or ``"load"``.
        blocks: of one job, at random places on both sides.
        gbps: GB/s of the job.
        memcpy_gbps: GB/s of one contiguous copy: on the host of as many bytes (256 MiB at most),
            with as many threads; on an accelerator of 256 MiB, from and to pinned memory.
        threads: that copy in one direction; 1 where a device copies by itself.
        ratio: ``gbps`` to ``memcpy_gbps``.
        note: why it is fewer blocks than were asked for; else None.
    """

    page_bytes: int
    direction: str
    blocks: int
    gbps: float
    memcpy_gbps: float
    threads: int
    ratio: float
    note: str | None


def run(
    backend: Backend,
    rig: DeviceRig,
    *,
    pages: Sequence[int],
    blocks: int = 2000,
    rounds: int = 5,
    seed: int = 0,
    step: Step = lambda _, __: None,
) -> list[CopyRow]:
    """Measure stores and loads for every page size.

    Raises:
        ConfigurationError: a page is too large for this machine, or time means nothing here.
        TransferError: a transfer failed, or moved wrong bytes.
    """
    rng = np.random.default_rng(seed)
    room, flush = Room.of(rig), Flush()
    total, done = len(pages) * rounds * 2 * len(DIRECTIONS), 0

    def before() -> None:
        nonlocal done
        step(done, total)
        done += 1
        rig.synchronize()
        flush()

    rows = []
    for page in pages:
        size = fit(page, blocks, room)
        with Pool(backend, rig, page, size.pool, between=lambda: step(done, total)) as pool:
            pool.check(rng)
            jobs = [_job(pool, lane, size.blocks, rounds, rng) for lane in DIRECTIONS]
            nbytes = one_copy_bytes(backend, page * size.blocks, room)
            alone = [one_copy(rig, nbytes, lane) for lane in DIRECTIONS]
            # Each beside what it is compared with.
            pieces = [piece for pair in zip(jobs, alone, strict=True) for piece in pair]
            medians = in_turn(pieces, rounds, before=before)
        for lane, seconds, memcpy in zip(DIRECTIONS, medians[::2], medians[1::2], strict=True):
            gbps, memcpy_gbps = page * size.blocks / seconds / 1e9, nbytes / memcpy / 1e9
            rows.append(
                CopyRow(
                    page_bytes=page,
                    direction=lane.value,
                    blocks=size.blocks,
                    gbps=gbps,
                    memcpy_gbps=memcpy_gbps,
                    threads=getattr(backend, "copy_threads", 1),
                    ratio=gbps / memcpy_gbps,
                    note=size.note,
                )
            )
    step(done, total)
    return rows


def one_copy_bytes(backend: Backend, job_bytes: int, room: Room) -> int:
    """Bytes of the contiguous copy that jobs of so many bytes are compared with.

    For an accelerator that is its peak, whatever the job.
    """
    if is_accelerator(backend):
        return min(ONE_COPY_BYTES, max(room.per_side // 8, 1))
    return min(ONE_COPY_BYTES, job_bytes)


def is_accelerator(backend: Backend) -> bool:
    """Its device has memory of its own, as far as torch knows."""
    return backend.device is not None and backend.device.type != "cpu"


def one_copy(rig: DeviceRig, nbytes: int, lane: Lane) -> Callable[[], None]:
    """The contiguous copy, made once already.

    Raises:
        ConfigurationError: time means nothing on this device.
    """
    copy = rig.one_copy(nbytes, lane)
    if copy is None:
        raise ConfigurationError(f"time means nothing to {type(rig).__name__}: nothing to measure")
    copy()
    return copy


def _job(
    pool: Pool, lane: Lane, blocks: int, rounds: int, rng: np.random.Generator
) -> Callable[[], None]:
    """A transfer of random blocks, of others each time."""
    ids: list[tuple[IntArray, IntArray]] = [
        (rng.permutation(pool.blocks)[:blocks], rng.permutation(pool.blocks)[:blocks])
        for _ in range(rounds)
    ]

    def job() -> None:
        pool.transfer(lane, *ids.pop())

    return job
