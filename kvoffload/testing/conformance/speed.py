"""How fast a backend copies, as a ratio to one large copy on the same device in the same run."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from kvoffload.core.lanes import Lane
from kvoffload.testing.conformance.check import MakeBackend
from kvoffload.testing.conformance.lab import Cache, Lab

CACHE = Cache(pages=(256 * 1024,) * 4, groups=((0, 1, 2, 3),), blocks=64, chunks=64)
"""64 MiB in pages as a 32-layer model of 8 billion parameters has them, and a power of two."""
ROUNDS = 5
FAST = 0.8
"""The ratio from which a backend is called fast, in both directions."""


@dataclass(frozen=True)
class Speed:
    """Median ratios of bytes per second, to one large copy.

    Attributes:
        store, load: of 64 scattered blocks of 1 MiB each, from submit to the end.
    """

    store: float
    load: float

    @property
    def fast(self) -> bool:
        """Both directions are."""
        return min(self.store, self.load) >= FAST


def measure(make_backend: MakeBackend) -> Speed | None:
    """Measure, in turn with the large copy; None where time means nothing."""
    with Lab(make_backend(), CACHE) as lab:
        nbytes = sum(CACHE.pages) * CACHE.blocks
        if lab.rig.seconds_of_one_copy(4096, Lane.STORE) is None:
            return None
        lab.fill_all()
        blocks, chunks = (lab.rng.permutation(CACHE.blocks).tolist() for _ in range(2))
        ratios: dict[Lane, list[float]] = {Lane.STORE: [], Lane.LOAD: []}
        for round_ in range(ROUNDS + 1):
            for lane, seen in ratios.items():
                lab.rig.synchronize()
                began = time.perf_counter()
                job = lab.store(blocks, chunks) if lane is Lane.STORE else lab.load(chunks, blocks)
                lab.succeed(job)
                seconds = time.perf_counter() - began
                alone = lab.rig.seconds_of_one_copy(nbytes, lane)
                if round_ and alone is not None:  # the first one touches memory for the first time
                    seen.append(alone / seconds)
        return Speed(statistics.median(ratios[Lane.STORE]), statistics.median(ratios[Lane.LOAD]))
