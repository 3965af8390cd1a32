"""Guarantee 5, where sizes are large, odd or many."""

from __future__ import annotations

import contextlib
import itertools

from kvoffload.core.backend import HostOrder
from kvoffload.core.errors import CapacityError
from kvoffload.core.host_memory import memory_limit
from kvoffload.testing.conformance.check import Guarantee, MakeBackend, check, require, skip
from kvoffload.testing.conformance.lab import Cache, Lab

KIB, MIB = 1 << 10, 1 << 20
LARGE = (256 * KIB + 8, 2 * MIB + 1, 1_799_999)
"""Pages; two of all of them are little less than a power of two, which can be pinned."""


def _odd_pages_round_trip(lab: Lab) -> None:
    chunks, factor = lab.cache.chunks, lab.cache.factor
    lab.fill_all()
    blocks = lab.rng.permutation(lab.cache.blocks).tolist()
    lab.succeed(lab.store(blocks[: 3 * factor], lab.rng.permutation(chunks)[:3].tolist()))
    lab.succeed(lab.store(range(chunks * factor), range(chunks)))
    lab.check()
    lab.fill_all(100)
    for first in range(factor):
        order = lab.rng.permutation(chunks).tolist()
        targets = lab.rng.permutation(lab.cache.blocks)[: chunks * factor - first - 1].tolist()
        lab.succeed(lab.load(order, targets, first=first))
        lab.check()


for _order, _factor in itertools.product(HostOrder, (3, 5)):
    check(
        Guarantee.BYTES,
        cache=Cache(pages=(7, 24, 33, 65), groups=((0, 1, 2, 3),), blocks=24, chunks=4,
                    factor=_factor, order=_order),
        name=f"pages of odd sizes round trip: {_order.value}, {_factor} per chunk",
    )(_odd_pages_round_trip)  # fmt: skip


@check(
    Guarantee.BYTES,
    cache=Cache(
        pages=(64, 32, 96, 16, 40), groups=((0,), (1,), (2,), (3,), (4,)), blocks=24, factor=2
    ),
)
def one_transfer_moves_five_groups(lab: Lab) -> None:
    lab.fill_all()
    chunks = [lab.rng.permutation(lab.cache.chunks)[: 1 + group].tolist() for group in range(5)]
    blocks = [lab.rng.permutation(24)[: 2 + 2 * group].tolist() for group in range(5)]
    lab.succeed(lab.store_groups({group: (blocks[group], chunks[group]) for group in range(5)}))
    lab.check()
    lab.fill_all(100)
    everything = {group: (chunks[group], blocks[group][::-1], 0) for group in range(5)}
    lab.succeed(lab.load_groups(everything))
    lab.check()
    lab.fill_all(50)
    lab.succeed(lab.load_groups({group: everything[group] for group in (1, 3, 4)}))
    lab.check()


@check(
    Guarantee.BYTES,
    cache=Cache(pages=LARGE, groups=((0, 1, 2),), blocks=4, chunks=2),
)
def large_pages_round_trip(lab: Lab) -> None:
    lab.fill_all()
    lab.succeed(lab.store([3, 0], [0, 1]), lab.load([1], [2]), lab.copy([3], [1]))
    lab.check()


@check(
    Guarantee.BYTES,
    cache=Cache(pages=(96 * KIB + 8, 32 * KIB - 8), groups=((0, 1),), blocks=40, chunks=32),
)
def long_runs_of_consecutive_blocks_round_trip(lab: Lab) -> None:
    lab.fill_all()
    lab.succeed(lab.store(range(32), range(32)), lab.load(range(32), range(8, 40)))
    lab.succeed(lab.copy(range(16), range(20, 36)))
    lab.check()


FAR = Cache(pages=(MIB,), groups=((0,),), blocks=4, chunks=4200)
"""Host memory of more than 4 GiB; only what is used of it is ever touched."""


@check(Guarantee.BYTES, cache=None)
def chunks_beyond_four_gibibytes_move(make_backend: MakeBackend) -> None:
    nbytes = sum(FAR.pages) * FAR.chunks
    with contextlib.closing(make_backend()) as backend:
        if backend.capabilities.pinned_memory:
            skip("the backend pins host memory, and so much of it would have to be there")
        if memory_limit().nbytes < 2 * nbytes:
            skip("there is not enough host memory")
    try:
        lab = Lab(make_backend(), FAR)
    except CapacityError as error:
        skip(f"there is not enough host memory: {error}")
        return
    with lab:
        chunks = [4199, 2049, 103, 4097]
        lab.fill_all()
        lab.succeed(lab.store([3, 1, 0, 2], chunks))
        lab.check_host([*chunks, 1, 2048, 4096])
        lab.fill_all(100)
        lab.succeed(lab.load(chunks[:2], [0, 3]))
        lab.check_device()
        require(lab.engine.host.memory.nbytes >= nbytes, "host memory is smaller than asked for")
