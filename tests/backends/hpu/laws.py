"""What the hpu backend owes its device, as functions: for the backend, and for its mutants."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

from kvoffload.backends.hpu.backend import HpuBackend
from kvoffload.core.lanes import Lane
from kvoffload.testing.conformance.lab import Cache, Lab
from kvoffload.testing.fake_device import load
from kvoffload.testing.fake_device.hpu import DEVICE, FakeHabana, Recompiles

Make: TypeAlias = Callable[[FakeHabana], HpuBackend]

LARGEST = 64
"""Blocks of the largest transfer."""
CACHE = Cache(pages=(64, 24, 104), blocks=LARGEST, chunks=LARGEST)


def real(habana: FakeHabana) -> HpuBackend:
    """The backend as it is."""
    return HpuBackend(DEVICE, habana)


@contextlib.contextmanager
def lab_on(make: Make, *, lazy: bool, cache: Cache = CACHE) -> Iterator[tuple[Lab, FakeHabana]]:
    """A lab whose every block holds a tag of its own, and the bridge that it runs on."""
    habana = FakeHabana(load(), lazy=lazy)
    with Lab(make(habana), cache) as lab:
        lab.fill_all()
        lab.rig.synchronize()
        yield lab, habana


def random_transfers(lab: Lab, count: int) -> Iterator[int]:
    """Submit stores, loads and copies of random lengths; their job ids."""
    most = lab.cache.blocks // 2
    for number in range(count):
        blocks = lab.rng.permutation(lab.cache.blocks).tolist()
        chunks = lab.rng.permutation(lab.cache.chunks).tolist()
        rows = int(lab.rng.integers(1, most + 1))
        lane = list(Lane)[number % len(Lane)]
        if lane is Lane.STORE:
            yield lab.store(blocks[:rows], chunks[:rows])
        elif lane is Lane.LOAD:
            yield lab.load(chunks[:rows], blocks[:rows])
        else:
            yield lab.copy(blocks[:rows], blocks[most : most + rows])


def one_step_per_transfer(make: Make) -> None:
    """In lazy mode each transfer is a step, marked on its own stream, and nothing else marks one
    but the events that order it."""
    with lab_on(make, lazy=True) as (lab, habana), habana.watch():
        lanes = {lab.backend.new_stream(lane).stream_id for lane in Lane}  # type: ignore[attr-defined]
        for done, job in enumerate(random_transfers(lab, 12), start=1):
            assert habana.counts.steps == done
            lab.succeed(job)
        assert set(habana.counts.steps_on) == lanes
        assert habana.counts.stray == 0, "operations were left for another stream's step"
        assert habana.counts.implied_steps == 3 * 12, "a mark, a start and an end"


def events_are_polled_and_streams_are_not(make: Make) -> None:
    """No stream is asked about that is not the current one."""
    with lab_on(make, lazy=True) as (lab, habana):
        for job in random_transfers(lab, 6):
            lab.worker.get_finished()
            lab.worker.wait([job])
        assert habana.counts.foreign == 0


def nothing_waits_for_the_device(make: Make) -> None:
    """Neither submitting nor polling waits for a stream or the device."""
    with lab_on(make, lazy=False) as (lab, habana):
        lab.succeed(*random_transfers(lab, 3))  # staging is there by now
        before = habana.fake.counts().synchronizations
        for _ in random_transfers(lab, 9):
            lab.worker.get_finished()
        assert habana.fake.counts().synchronizations == before
        assert habana.counts.device_synchronizations == 0
        lab.worker.wait(lab.engine.in_flight)
        lab.check()


def shapes_are_bounded(make: Make) -> None:
    """However many lengths of transfers there are, the device sees log2 of the largest, and one."""
    with lab_on(make, lazy=False) as (lab, habana):
        for lane in (Lane.STORE, Lane.LOAD):
            with habana.watch() as seen:
                for rows in range(1, LARGEST + 1):
                    scattered = lab.rng.permutation(LARGEST)[:rows].tolist()
                    for blocks, chunks in ((scattered, range(rows)), (range(rows), scattered)):
                        if lane is Lane.STORE:
                            lab.succeed(lab.store(blocks, chunks))
                        else:
                            lab.succeed(lab.load(chunks, blocks))
            _check_lengths(seen, LARGEST)
        lab.check()


def shapes_of_several_groups_are_bounded(make: Make) -> None:
    """So it is where groups are of different lengths, and enter inside of chunks."""
    cache = Cache(pages=(64, 24, 104), groups=((0, 1), (2,)), blocks=LARGEST, chunks=32, factor=2)
    with lab_on(make, lazy=False, cache=cache) as (lab, habana):
        everything = (range(LARGEST), range(32))
        lab.succeed(lab.store_groups({0: everything, 1: everything}))
        with habana.watch() as seen:
            for _ in range(150):
                first, second = (int(n) for n in lab.rng.integers(1, 33, 2))
                left, right = (lab.rng.permutation(32).tolist() for _ in range(2))
                lab.succeed(
                    lab.load_groups(
                        {
                            0: (left[:first], range(2 * first), 0),
                            1: (right[:second], range(1, 2 * second), 1),
                        }
                    )
                )
        _check_lengths(seen, 2 * LARGEST)
        lab.check()


def _check_lengths(seen: Recompiles, largest: int) -> None:
    for operation, lengths in _lengths(seen).items():
        assert len(lengths) <= math.log2(largest) + 1, (operation, sorted(lengths))


def _lengths(seen: Recompiles) -> dict[Any, set[Any]]:
    """The lengths that were seen, by operation and what its operands look like but for those."""
    found: dict[Any, set[Any]] = defaultdict(set)
    for name, operands in seen.shapes:
        pages = tuple(shape[1:] for _, shape, _, _ in operands)
        strides = tuple(stride for _, _, stride, _ in operands)
        found[name, pages].add((operands[-1][1][0], strides))
    return found


def ids_go_up_once(make: Make) -> None:
    """A transfer uploads its ids in one piece, however many layers there are."""
    cache = Cache(pages=(64,) * 20, groups=(tuple(range(20)),), blocks=16, chunks=16)
    with lab_on(make, lazy=False, cache=cache) as (lab, habana):
        for rows in (1, 5, 8):
            with habana.watch() as seen:
                lab.succeed(lab.store(range(rows), range(rows)))
                lab.succeed(lab.load(range(rows), range(16 - rows, 16)))
            uploads = [name for name, operands in seen.operations if len(operands[0][1]) == 1]
            assert uploads.count("_to_copy") == 2


def padding_writes_no_other_block(make: Make) -> None:
    """Whatever the length, exactly the named blocks change, and to what they should be."""
    with lab_on(make, lazy=False, cache=Cache(blocks=40, chunks=40)) as (lab, _):
        lab.succeed(lab.store(range(40), lab.rng.permutation(40).tolist()))
        for rows in (*range(1, 10), 15, 17, 31, 33):
            lab.fill_all(100 + rows)
            chunks, blocks = (lab.rng.permutation(40)[:rows].tolist() for _ in range(2))
            lab.succeed(lab.load(chunks, blocks))
            lab.check()
            lab.succeed(lab.store(blocks, chunks[::-1]))
            lab.check()
        assert np.all(lab.host >= 0)
