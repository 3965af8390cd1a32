"""What ordering costs at a submit: who must be waited for, and noting what the job touches.

It must not depend on how many jobs have finished before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvoffload.bench.timing import in_turn
from kvoffload.core.lanes import Lane
from kvoffload.core.ordering import OrderingTable

POOL = 100_000  # device blocks, and as many chunks


@dataclass(frozen=True)
class OrderingRow:
    """One measurement.

    Attributes:
        blocks: of the job.
        finished: jobs that were ordered before.
        ordering_us: median microseconds for one job.
        ratio: to the first row, of the same run.
    """

    blocks: int
    finished: int
    ordering_us: float
    ratio: float


def run(
    *,
    blocks: int = 1000,
    seed: int = 0,
    rounds: int = 300,
    finished: tuple[int, ...] = (0, 1000, 100_000),
) -> list[OrderingRow]:
    """Order stores of ``blocks`` random blocks, after so many jobs each."""
    rng = np.random.default_rng(seed)
    tables = []
    for count in finished:
        table = OrderingTable(len(Lane), 2 * POOL)
        for number in range(1, count + 1):
            touched = rng.integers(0, POOL, 8)
            table.add(number % len(Lane), number, touched, touched + POOL)
        tables.append((table, count))
    reads = rng.permutation(POOL)[:blocks]
    writes = rng.permutation(POOL)[:blocks] + POOL

    def order(table: OrderingTable, number: int) -> None:
        # The worst case: what is read was just written, and nothing has been reported.
        table.writers(reads, since=0)
        table.dependencies(0, reads, writes)
        table.add(0, number, writes, reads)

    medians = in_turn(
        [lambda table=table, count=count: order(table, count + 1) for table, count in tables],  # type: ignore[misc]
        rounds,
    )
    return [
        OrderingRow(blocks, count, seconds * 1e6, seconds / medians[0])
        for (_, count), seconds in zip(tables, medians, strict=True)
    ]
