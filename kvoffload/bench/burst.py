"""Several jobs in flight, as an engine has them: the host prepares one while others are copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvoffload.bench.pool import Pool
from kvoffload.core.lanes import Lane

JOBS = 4
"""Of one burst; they share no block."""


def burst(
    pool: Pool,
    lanes: Sequence[Lane],
    blocks: int,
    *,
    rounds: int,
    rng: np.random.Generator | None = None,
) -> Callable[[], None]:
    """A function that submits :data:`JOBS` jobs and waits for all; it may be called so many times.

    Args:
        lanes: that the jobs take in turn.
        blocks: of each job.
        rounds: how often it can be called.
        rng: picks other blocks each time; by default those of a job are adjacent on both sides.
    """

    def ids() -> tuple[np.ndarray[tuple[int, int], np.dtype[np.int64]], ...]:
        shape = (JOBS, blocks)
        count = JOBS * blocks
        if rng is None:
            return np.arange(count).reshape(shape), np.arange(count).reshape(shape)
        return tuple(rng.permutation(pool.blocks)[:count].reshape(shape) for _ in range(2))

    prepared = [ids() for _ in range(rounds)]

    def run() -> None:
        device, host = prepared.pop()
        pool.finish(
            [
                pool.submit(lanes[job % len(lanes)], device[job], host[job])
                for job in range(len(device))
            ]
        )

    return run
