"""How fast a backend copies, as a ratio to one large copy on the same device in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
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
        lab.fill_all()
        blocks, chunks = (lab.rng.permutation(CACHE.blocks).tolist() for _ in range(2))
        ratios = []
        for lane in (Lane.STORE, Lane.LOAD):
            one_copy = lab.rig.one_copy(nbytes, lane)
            if one_copy is None:
                return None

            def transfer(lane: Lane = lane) -> None:
                stores = lane is Lane.STORE
                lab.succeed(lab.store(blocks, chunks) if stores else lab.load(chunks, blocks))

            transfer()  # memory is touched for the first time
            lab.rig.synchronize()
            pairs = [(_seconds(one_copy), _seconds(transfer)) for _ in range(ROUNDS)]
            ratios.append(statistics.median(alone / ours for alone, ours in pairs))
        return Speed(*ratios)


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
