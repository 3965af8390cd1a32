"""Guarantee 1: what a transfer starts after."""

from __future__ import annotations

from kvoffload.core.lanes import Lane
from kvoffload.testing.conformance.check import Guarantee, check, require
from kvoffload.testing.conformance.lab import Cache, Lab


def _nothing_has_ended(lab: Lab) -> None:
    ended = lab.collect()  # asked first: a hold may end by itself
    if lab.rig.holding:
        require(not ended, "a transfer ended before what it must wait for")


@check(Guarantee.ORDER)
def a_store_waits_for_earlier_compute(lab: Lab) -> None:
    lab.fill([3], [1])
    lab.rig.synchronize()
    lab.hold()
    lab.fill([3], [2])
    job = lab.store([3], [0])
    _nothing_has_ended(lab)
    lab.rig.release()
    lab.succeed(job)
    lab.check()


@check(Guarantee.ORDER)
def a_load_waits_for_earlier_compute(lab: Lab) -> None:
    lab.fill([3, 5], [1, 9])
    lab.succeed(lab.store([3], [0]))
    lab.hold()
    seen = lab.peek([5])
    job = lab.load([0], [5])
    _nothing_has_ended(lab)
    lab.rig.release()
    lab.succeed(job)
    lab.rig.synchronize()
    for number, page in enumerate(seen):
        require((page == lab.content([9], number)).all(), "the load overtook compute that reads")
    lab.check()


@check(Guarantee.ORDER)
def a_copy_on_the_device_waits_for_earlier_compute(lab: Lab) -> None:
    lab.fill([3], [1])
    lab.rig.synchronize()
    lab.hold()
    lab.fill([3], [2])
    job = lab.copy([3], [4])
    _nothing_has_ended(lab)
    lab.rig.release()
    lab.succeed(job)
    lab.check()


@check(Guarantee.ORDER)
def transfers_that_share_blocks_run_in_the_order_of_their_submission(lab: Lab) -> None:
    lab.fill([3, 4], [33, 44])
    lab.rig.synchronize()
    lab.hold()
    jobs = [
        lab.store([3], [0]),
        lab.load([0], [5]),
        lab.store([5], [1]),
        lab.copy([5], [7]),
        lab.load([1], [3]),
        lab.store([4], [0]),
        lab.load([0], [6]),
        lab.load([1], [4]),
        lab.copy([6], [5]),
    ]
    lab.rig.release()
    lab.succeed(*jobs)
    lab.check()


@check(Guarantee.ORDER)
def transfers_of_one_direction_run_one_after_the_other(lab: Lab) -> None:
    lab.fill_all()
    lab.succeed(lab.store(range(8), range(8)))
    for lane in Lane:
        lab.hold()
        if lane is Lane.STORE:
            jobs = [lab.store([block], [7 - block]) for block in range(8)]
        elif lane is Lane.LOAD:
            jobs = [lab.load([chunk], [chunk + 4]) for chunk in range(8)]
        else:
            jobs = [lab.copy([0], [block + 4]) for block in range(8)]
        lab.rig.release()
        lab.worker.wait(jobs)
        ended = [result.job_id for result in lab.worker.get_finished()]
        require(ended == jobs, f"{lane.value}s {jobs} ended as {ended}")
    lab.check()


@check(Guarantee.ORDER)
def an_event_recorded_earlier_orders_a_transfer(lab: Lab) -> None:
    lab.fill([1], [1])
    lab.rig.synchronize()
    lab.hold()
    lab.fill([1], [2])
    mark = lab.backend.new_event()
    lab.backend.current_stream().record_event(mark)
    jobs = [lab.store([1], [0], after=mark), lab.load([0], [2], after=mark)]
    _nothing_has_ended(lab)
    lab.rig.release()
    lab.succeed(*jobs)
    lab.check()


@check(Guarantee.ORDER)
def whoever_waits_for_an_event_waits_for_the_recording_that_it_saw(lab: Lab) -> None:
    backend = lab.backend
    event, end = backend.new_event(), backend.new_event()
    waits, idle = backend.new_stream(Lane.STORE), backend.new_stream(Lane.LOAD)
    lab.hold()
    backend.current_stream().record_event(event)
    if not lab.rig.holding:
        return  # a device that is not held proves nothing
    waits.wait_event(event)
    idle.record_event(event)  # recorded again, behind nothing
    waits.record_event(end)
    reached = end.query()
    if backend.capabilities.asynchronous and lab.rig.holding:
        require(not reached, "recording an event again let go of a stream that waits for it")
    lab.rig.release()
    end.synchronize()
    require(end.query() is True, "an event that was synchronised with is not reached")


@check(Guarantee.ORDER, needs=("asynchronous",))
def without_an_event_a_transfer_does_not_wait_for_compute(lab: Lab) -> None:
    lab.fill([1], [1])
    lab.rig.synchronize()
    lab.hold()
    job = lab.store([1], [0], after=None)
    lab.succeed(job)
    require(lab.rig.holding, "the transfer waited for the stream that it was to pass")
    lab.check_host()  # a copy on the stream that is held has not run, whatever its event says
    lab.rig.release()
    lab.check()


@check(Guarantee.ORDER)
def a_fence_orders_compute_after_a_transfer(lab: Lab) -> None:
    lab.fill([1, 2], [1, 2])
    lab.succeed(lab.store([1], [0]))
    lab.hold()
    job = lab.load([0], [2])
    lab.worker.fence([job, 12345])
    seen = lab.peek([2])
    lab.rig.release()
    lab.succeed(job)
    lab.rig.synchronize()
    for number, page in enumerate(seen):
        require((page == lab.content([1], number)).all(), "compute read a block being loaded")


@check(Guarantee.ORDER, cache=Cache(blocks=24, chunks=10, factor=2))
def a_random_program_of_compute_and_transfers_agrees_with_a_model(lab: Lab) -> None:
    rng, tag = lab.rng, 0
    lab.fill_all()
    for _ in range(25):
        held = rng.random() < 0.5
        if held:
            lab.hold()
        jobs: list[int] = []
        for _ in range(8):
            count = int(rng.integers(1, 4))
            chunks = rng.permutation(10)[:count].tolist()
            blocks = rng.permutation(24)[: 2 * count].tolist()
            what = rng.integers(4)
            if what == 0:
                # Compute that follows a transfer is the engine's to order.
                lab.worker.fence(jobs)
                tag += 1
                lab.fill(blocks, [tag % 240] * len(blocks))
            elif what == 1:
                jobs.append(lab.store(blocks, chunks))
            elif what == 2:
                first = int(rng.integers(2))
                jobs.append(lab.load(chunks, blocks[first:], first=first))
            else:
                jobs.append(lab.copy(blocks[:count], blocks[count:]))
        lab.rig.release()
        lab.succeed(*jobs)
        lab.check()
