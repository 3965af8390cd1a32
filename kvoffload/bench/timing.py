"""Timing several things in turn, so that a machine that drifts does so for all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence


def in_turn(
    pieces: Sequence[Callable[[], object]],
    rounds: int,
    *,
    before: Callable[[], object] | None = None,
) -> list[float]:
    """Median seconds of each piece, run one after the other for so many rounds.

    Args:
        before: called before each run of a piece, outside of its time.
    """
    seconds: list[list[float]] = [[] for _ in pieces]
    for _ in range(rounds):
        for piece, taken in zip(pieces, seconds, strict=True):
            if before is not None:
                before()
            began = time.perf_counter()
            piece()
            taken.append(time.perf_counter() - began)
    return [statistics.median(taken) for taken in seconds]
