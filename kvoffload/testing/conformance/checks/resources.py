"""Guarantees 7 and 8: everything taken is given back, and host memory is what was asked for."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from typing import Any

from kvoffload.core.lanes import Lane
from kvoffload.testing.conformance.check import Guarantee, MakeBackend, check, require, skip
from kvoffload.testing.conformance.lab import Cache, Lab

MOST_EVENTS = 6
"""For one job at a time: a mark, a start and an end, and as many for the next."""


def _one_round(lab: Lab) -> None:
    blocks = lab.rng.permutation(12).tolist()
    count = int(lab.rng.integers(1, 6))
    chunks = lab.rng.permutation(8)[:count].tolist()
    lab.succeed(lab.store(blocks[:count], chunks))
    lab.succeed(lab.load(chunks, blocks[6 : 6 + count]))
    lab.succeed(lab.copy(blocks[:count], blocks[6 : 6 + count]))


@check(Guarantee.ACCOUNTING)
def events_are_reused(lab: Lab) -> None:
    made = 0
    new_event = lab.backend.new_event

    def count() -> Any:
        nonlocal made
        made += 1
        return new_event()

    lab.backend.new_event = count  # type: ignore[method-assign]
    for _ in range(40):
        lab.succeed(lab.store([1], [0]))
        lab.succeed(lab.load([0], [1]))
    require(made <= MOST_EVENTS, f"{made} events for one job at a time")


@check(Guarantee.ACCOUNTING)
def what_a_job_holds_is_let_go_when_it_has_ended(lab: Lab) -> None:
    plans: list[weakref.ref[Any]] = []
    swap_blocks = lab.backend.swap_blocks

    def watch(plan: Any, stream: Any, keep: Any) -> None:
        plans.append(weakref.ref(plan))
        swap_blocks(plan, stream, keep)

    lab.backend.swap_blocks = watch  # type: ignore[method-assign]
    lab.fill_all()
    for _ in range(5):
        _one_round(lab)
    lab.rig.synchronize()
    gc.collect()
    alive = [plan for plan in plans if plan() is not None]
    require(len(plans) == 15, f"{len(plans)} plans for 15 jobs")
    require(not alive, f"{len(alive)} of {len(plans)} plans outlive their jobs")


@check(Guarantee.ACCOUNTING)
def nothing_grows_with_the_number_of_jobs(lab: Lab) -> None:
    lab.fill_all()

    def held() -> tuple[int, int]:
        for _ in range(100):
            _one_round(lab)
        lab.rig.synchronize()
        gc.collect()
        return sys.getallocatedblocks(), lab.rig.allocated_bytes() or 0

    # Each time 300 jobs: whatever one of them leaves behind is there 300 times, every time.
    objects, nbytes = zip(*(held() for _ in range(4)), strict=True)
    grown = min(after - before for before, after in itertools.pairwise(objects))
    require(grown < 250, f"300 jobs leave {grown} objects behind")
    require(nbytes[-1] <= nbytes[0], f"device bytes in use, as jobs go by: {nbytes}")
    usage = lab.engine.usage()
    require((usage.in_flight, usage.running, usage.buffers) == (0, 0, 0), f"still in use: {usage}")
    lab.check()


@check(Guarantee.ACCOUNTING)
def failed_jobs_give_everything_back(lab: Lab) -> None:
    if not lab.rig.faults:
        skip("the rig of this device cannot inject faults")
    lab.fill_all()

    def held() -> int:
        lab.rig.synchronize()
        gc.collect()
        return lab.rig.allocated_bytes() or 0

    def fail_everywhere() -> None:
        for fault in lab.rig.faults:
            for lane in Lane:
                lab.rig.inject(fault, lane)
                lab.finish(lab.submit(lane))

    _one_round(lab)
    fail_everywhere()
    before = held()
    for _ in range(10):
        fail_everywhere()
    after = held()
    require(after <= before, f"{after - before} bytes of the device more than before")
    usage = lab.engine.usage()
    require((usage.in_flight, usage.running, usage.buffers) == (0, 0, 0), f"still in use: {usage}")


@check(Guarantee.ACCOUNTING, cache=None)
def a_closed_backend_has_given_everything_back(make_backend: MakeBackend) -> None:
    def one_life() -> int:
        with Lab(make_backend(), Cache()) as lab:
            lab.fill_all()
            _one_round(lab)
            lab.rig.synchronize()
            rig = lab.rig
        del lab
        gc.collect()
        rig.synchronize()
        return rig.allocated_bytes() or 0

    first = one_life()
    later = [one_life() for _ in range(5)]
    require(max(later) <= first, f"bytes in use after each life: {[first, *later]}")


@check(Guarantee.MEMORY, cache=None)
def host_memory_is_zeroed_and_of_the_size_asked_for(make_backend: MakeBackend) -> None:
    backend = make_backend()
    try:
        for nbytes in (1, 4096, 65536, 1 << 20):
            memory = backend.allocate_host(nbytes)
            array = memory.numpy()
            require(array.shape == (nbytes,), f"{array.shape[0]} bytes instead of {nbytes}")
            require(memory.nbytes == nbytes, f"it says {memory.nbytes} bytes, not {nbytes}")
            require(not array.any(), "it is not zeroed")
            require(memory.address == array.ctypes.data, "its address is not that of its bytes")
            array[:] = 1
            most = 1.02 * nbytes + 4096
            require(memory.resident_bytes() <= most, f"{memory.resident_bytes()} are resident")
            del array
            memory.release()
            memory.release()
    finally:
        backend.close()
