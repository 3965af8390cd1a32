"""How large a pool may be that is only there to be measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvoffload.core.errors import ConfigurationError
from kvoffload.core.host_memory import memory_limit
from kvoffload.core.plan import power_of_two
from kvoffload.core.sizes import format_bytes
from kvoffload.rig import DeviceRig

SHARE = 4
"""One part in so many of what is free is used."""
ONE_COPY_BYTES = 256 << 20
"""Bytes of the contiguous copy that everything is compared with, at most."""
OVERHEAD = 256
"""Bytes for each block beside its pages: ids and descriptors, of all jobs in flight."""


def available_bytes(root: Path = Path("/")) -> int:
    """Host memory that can be had now without swapping.

    Args:
        root: where ``proc`` and ``sys`` are found.
    """
    most = memory_limit(root).nbytes
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return most
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return min([most, *(int(words[1]) * 1024 for words in found)])


@dataclass(frozen=True)
class Room:
    """Bytes that a benchmark may take.

    Attributes:
        host: of host memory.
        device: of device memory; None where that is host memory, and shares its bytes.
    """

    host: int
    device: int | None

    @classmethod
    def of(cls, rig: DeviceRig) -> Room:
        """A quarter of what is free."""
        free = rig.free_bytes()
        return cls(available_bytes() // SHARE, None if free is None else free // SHARE)

    @property
    def per_side(self) -> int:
        """Bytes for each of the two sides."""
        return self.host // 2 if self.device is None else min(self.host, self.device)


@dataclass(frozen=True)
class Size:
    """What fits.

    Attributes:
        pool: blocks on the device, and as many chunks in host memory; a power of two.
        blocks: of one job.
        note: why they are fewer than was asked for; None if they are not.
    """

    pool: int
    blocks: int
    note: str | None


def fit(page_bytes: int, blocks: int, room: Room, *, jobs: int = 2, pages: int = 1) -> Size:
    """The largest pool that holds ``jobs`` jobs of as many of these blocks as fit.

    Args:
        page_bytes: of one block in one tensor.
        blocks: of one job, as asked for.
        room: what may be taken; also by two contiguous copies, as large as a job but no more
            than :data:`ONE_COPY_BYTES`.
        pages: tensors.

    Raises:
        ConfigurationError: not even one block fits.
    """
    each = page_bytes * pages + OVERHEAD
    wanted = pool = power_of_two(jobs * blocks)

    def taken() -> int:
        return pool * each + 2 * min(pool // jobs * each, ONE_COPY_BYTES)

    while pool >= jobs and taken() > room.per_side:
        pool //= 2
    if pool < jobs:
        raise ConfigurationError(
            f"--pages {format_bytes(page_bytes)}: {jobs} blocks of that, and two single copies as "
            f"large as one, are more than {format_bytes(room.per_side)}, a quarter of the memory "
            "that is free on each side; give a smaller page"
        )
    if pool == wanted:
        return Size(pool, blocks, None)
    fewer = min(blocks, pool // jobs)
    if fewer == blocks:
        return Size(pool, blocks, None)
    return Size(
        pool,
        fewer,
        f"{fewer:,} instead of {blocks:,} blocks, so that each side takes no more than "
        f"{format_bytes(room.per_side)}: a quarter of the memory that is free is used",
    )
