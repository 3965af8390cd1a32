"""How long a plan and its lowering take, against the least that numpy could take.

The floor is what no lowering can do without: for every layer and block one source address, one
destination address and one size, written into arrays that are there already.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvoffload.bench.timing import in_turn
from kvoffload.core.backend import HostOrder
from kvoffload.core.buffers import BufferPool
from kvoffload.core.host_pool import HostLayout
from kvoffload.core.plan import Geometry, Side, plan_transfer
from kvoffload.core.specs import DeviceLoadStoreSpec, HostLoadStoreSpec

PAGE_BYTES = 16384
DEVICE_BASE, HOST_BASE = 1 << 44, 1 << 41  # nothing is allocated: addresses are only computed


@dataclass(frozen=True)
class PlanRow:
    """One measurement; times in microseconds, medians.

    Attributes:
        ids: which device blocks and chunks: ``"random"`` or ``"consecutive"``.
        order: of host memory.
        descriptors: copies that the plan lowers to.
        plan_us: checking the ids and pairing them.
        lowering_us: computing the descriptors.
        floor_us: writing the uncoalesced addresses with numpy, in the same run.
        ratio: lowering to floor.
    """

    ids: str
    order: str
    layers: int
    blocks: int
    factor: int
    descriptors: int
    plan_us: float
    lowering_us: float
    floor_us: float
    ratio: float


def measure(
    *, ids: str, order: HostOrder, factor: int, layers: int, blocks: int, seed: int, rounds: int
) -> PlanRow:
    """Plan and lower a load of ``blocks`` blocks in ``layers`` layers."""
    rng = np.random.default_rng(seed)
    pages = np.full(layers, PAGE_BYTES, dtype=np.int64)
    groups = [np.arange(layers)]
    pool = 4 * blocks
    chunks = -(-blocks // factor)
    budget = PAGE_BYTES * layers * factor * 4 * chunks
    layout = HostLayout.within(budget, pages, groups, factor=factor, order=order)
    span = np.arange(layers) * PAGE_BYTES * pool
    whole = np.zeros(layers, dtype=np.int64)
    geometry = Geometry(
        pages,
        groups,
        Side(
            base=DEVICE_BASE + span,
            hi=pages,
            lo=whole,
            factor=1,
            count=whole + pool,
            start=DEVICE_BASE + span,
            end=DEVICE_BASE + span + PAGE_BYTES * pool,
        ),
        Side(
            base=HOST_BASE + layout.offset,
            hi=layout.hi,
            lo=layout.lo,
            factor=factor,
            count=layout.count,
            start=whole + HOST_BASE,
            end=whole + HOST_BASE + budget,
        ),
    )
    if ids == "random":
        device, host = rng.permutation(pool)[:blocks], rng.permutation(4 * chunks)[:chunks]
    else:
        device, host = np.arange(blocks), np.arange(chunks)
    src, dst = HostLoadStoreSpec(host), DeviceLoadStoreSpec(device)
    buffers = BufferPool()
    plan = plan_transfer(geometry, src, dst, buffers=buffers)
    descriptors = len(plan.descriptors().size)
    plan.release()

    def lower() -> None:
        plan.descriptors()
        plan.release()

    out = np.empty((3, layers, blocks), dtype=np.int64)
    base, offsets = DEVICE_BASE + span, device * PAGE_BYTES

    def floor() -> None:
        np.add.outer(base, offsets, out=out[0])
        np.add.outer(base, offsets, out=out[1])
        out[2] = PAGE_BYTES

    planning, lowering, least = in_turn(
        [lambda: plan_transfer(geometry, src, dst, buffers=buffers), lower, floor], rounds
    )
    return PlanRow(
        ids=ids,
        order=order.value,
        layers=layers,
        blocks=blocks,
        factor=factor,
        descriptors=descriptors,
        plan_us=planning * 1e6,
        lowering_us=lowering * 1e6,
        floor_us=least * 1e6,
        ratio=lowering / least,
    )


def run(*, layers: int = 64, blocks: int = 1000, seed: int = 0, rounds: int = 200) -> list[PlanRow]:
    """Random and consecutive ids, chunks of 1 and of 16 blocks, in every order of host memory."""
    return [
        measure(
            ids=ids,
            order=order,
            factor=factor,
            layers=layers,
            blocks=blocks,
            seed=seed,
            rounds=rounds,
        )
        for ids in ("random", "consecutive")
        for factor in (1, 16)
        for order in HostOrder
    ]
