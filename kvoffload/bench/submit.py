"""What a submit costs the host, without the call of a driver.

The seam is ``swap_blocks``: the engine checks, plans, orders and records events as always, and the
copy is replaced by its lowering alone. What a backend adds is its driver's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvoffload.bench.copy import Step
from kvoffload.bench.memory import Room, fit
from kvoffload.bench.pool import Pool
from kvoffload.bench.timing import in_turn
from kvoffload.core.backend import Backend, Keep, Stream
from kvoffload.core.lanes import Lane
from kvoffload.core.plan import CopyPlan
from kvoffload.rig import DeviceRig

PAGE_BYTES = 4096
TENSORS = (1, 32)


@dataclass(frozen=True)
class SubmitRow:
    """Loads of random blocks; medians.

    Attributes:
        tensors: pages of a block.
        blocks: of the job.
        descriptors: contiguous copies that the job lowers to.
        submit_us: microseconds until submit returns.
        us_per_1000: of them for 1,000 descriptors.
    """

    tensors: int
    blocks: int
    descriptors: int
    submit_us: float
    us_per_1000: float


@contextlib.contextmanager
def without_copies(backend: Backend) -> Iterator[list[int]]:
    """Within, the backend's jobs lower their plan and copy nothing.

    Yields:
        How many descriptors each job came to.
    """
    counts: list[int] = []

    def lower(plan: CopyPlan, stream: Stream, keep: Keep[Any]) -> None:  # noqa: ARG001
        counts.append(len(plan.descriptors().size))

    name = Backend.swap_blocks.__name__
    before = vars(backend).get(name)
    setattr(backend, name, lower)
    try:
        yield counts
    finally:
        delattr(backend, name)
        if before is not None:
            setattr(backend, name, before)


def run(
    backend: Backend,
    rig: DeviceRig,
    *,
    room: Room,
    blocks: int = 1000,
    rounds: int = 20,
    seed: int = 0,
    step: Step = lambda _, __: None,
) -> list[SubmitRow]:
    """Submit loads of so many blocks, of one tensor and of many."""
    rng = np.random.default_rng(seed)
    rows = []
    for number, tensors in enumerate(TENSORS):
        size = fit(PAGE_BYTES, blocks, room, pages=tensors)
        with Pool(backend, rig, PAGE_BYTES, size.pool, tensors=tensors) as pool:
            ids = [[rng.permutation(size.pool)[: size.blocks] for _ in range(2)]
                   for _ in range(rounds)]  # fmt: skip
            flying: list[int] = []

            def finish(pool: Pool = pool, flying: list[int] = flying, number: int = number) -> None:
                step(number, len(TENSORS))
                pool.finish(flying)
                flying.clear()
                rig.synchronize()

            def submit(pool: Pool = pool, flying: list[int] = flying, ids: Any = ids) -> None:
                flying.append(pool.submit(Lane.LOAD, *ids.pop()))

            with without_copies(backend) as counts:
                (seconds,) = in_turn([submit], rounds, before=finish)
                finish()
        descriptors = int(np.median(counts))
        rows.append(
            SubmitRow(tensors, size.blocks, descriptors, seconds * 1e6, seconds * 1e9 / descriptors)
        )
    step(len(TENSORS), len(TENSORS))
    return rows
