"""What a result says of time is about right."""

from __future__ import annotations

import time

from kvoffload.core.lanes import Lane
from kvoffload.testing.conformance.check import Guarantee, check, require, skip
from kvoffload.testing.conformance.lab import Cache, Lab

FACTOR = 100
"""Seconds that are so far off are of another unit, or of another thing."""
TRIES = 5
"""One of which a loaded machine leaves alone."""


@check(
    Guarantee.CAPABILITIES,
    needs=("timing_events",),
    cache=Cache(pages=(1 << 20,) * 4, groups=((0, 1, 2, 3),), blocks=4, chunks=4),
)
def seconds_of_a_large_transfer_are_of_the_order_of_what_it_took(lab: Lab) -> None:
    if lab.rig.one_copy(4096, Lane.STORE) is None:
        skip("time means nothing on this device")
    lab.fill_all()
    lab.succeed(lab.store(range(4), range(4)), lab.load(range(4), range(4)))  # touch it all
    for lane in (Lane.STORE, Lane.LOAD):
        told = []
        for _ in range(TRIES):
            lab.rig.synchronize()
            began = time.perf_counter()
            stores = lane is Lane.STORE
            job = lab.store(range(4), range(4)) if stores else lab.load(range(4), range(4))
            (result,) = lab.finish(job)
            told.append((float(result.transfer_time or 0), time.perf_counter() - began))
            seconds, wall = told[-1]
            require(seconds <= wall + 1e-3, f"a {lane.value} of {wall} s is said to take {seconds}")
            if seconds * FACTOR >= wall:
                break
        else:
            require(False, f"seconds of a {lane.value}, and seconds that it took: {told}")
