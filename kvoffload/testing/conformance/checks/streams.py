"""Guarantees 1 and 3, where there is more than one stream: the caller's, and those of the lanes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvoffload.core.errors import GraphCaptureError
from kvoffload.core.lanes import Lane
from kvoffload.testing.conformance.check import Guarantee, check, require, skip
from kvoffload.testing.conformance.lab import Cache, Lab

PATIENCE = 2.0
"""Seconds in which a transfer ends that waits for nobody."""
TRIES = 3
"""Where a device goes on by itself, before anything could be seen."""


def _passes(lab: Lab, submit: Callable[[], tuple[list[int], list[int]]]) -> bool:
    """Whether transfers end while others wait for the held device.

    Args:
        submit: submits both; returns those that wait, and those that must not.
    """
    for _ in range(TRIES):
        lab.rig.synchronize()
        lab.hold()
        waiting, free = submit()
        left = set(free)
        end = time.monotonic() + PATIENCE
        while left and lab.rig.holding and time.monotonic() < end:
            lab.rig.step()
            left -= {result.job_id for result in lab.collect()}
        held = lab.rig.holding  # asked last: what came, came while it was held
        lab.rig.release()
        lab.succeed(*waiting, *free)
        if held:
            return not left
    return False


def _in_a_thread(work: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=run, name="caller")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _at_once(work: Callable[[], None]) -> None:
    work()


def _waits_for_the_callers_stream(lab: Lab, call: Callable[[Callable[[], None]], None]) -> None:
    lab.fill_all()
    lab.succeed(lab.store([1], [1]), lab.load([1], [2]))  # from the first stream
    lab.rig.synchronize()
    jobs: list[int] = []

    def submit() -> None:
        with lab.rig.other_stream():
            lab.hold()
            lab.fill([3, 5], [30, 50])
            jobs.extend([lab.store([3], [0]), lab.load([1], [5]), lab.copy([3], [4])])

    call(submit)
    ended = lab.collect()
    if lab.rig.holding:
        require(not ended, "a transfer did not wait for its caller's stream")
    lab.rig.release()
    lab.succeed(*jobs)
    lab.check()


def _waits_for_no_other_stream(lab: Lab, call: Callable[[Callable[[], None]], None]) -> None:
    lab.fill_all()
    lab.succeed(lab.store([1], [1]))  # from the first stream

    def submit() -> tuple[list[int], list[int]]:
        jobs: list[int] = []

        def from_the_other() -> None:
            with lab.rig.other_stream():
                lab.fill([4], [40])
                jobs.append(lab.store([4], [2]))

        call(from_the_other)
        return [], jobs

    require(_passes(lab, submit), "a transfer waited for a stream that was not the caller's")
    lab.check()


@check(Guarantee.ORDER)
def a_transfer_waits_for_the_stream_that_is_current(lab: Lab) -> None:
    _waits_for_the_callers_stream(lab, _at_once)


@check(Guarantee.ORDER)
def a_transfer_from_another_thread_waits_for_the_stream_that_is_current_there(lab: Lab) -> None:
    _waits_for_the_callers_stream(lab, _in_a_thread)


@check(Guarantee.ORDER, needs=("asynchronous",))
def a_transfer_waits_for_no_stream_but_the_current_one(lab: Lab) -> None:
    _waits_for_no_other_stream(lab, _at_once)


@check(Guarantee.ORDER, needs=("asynchronous",))
def a_transfer_from_another_thread_waits_for_no_stream_of_the_first(lab: Lab) -> None:
    _waits_for_no_other_stream(lab, _in_a_thread)


@check(Guarantee.ORDER)
def a_transfer_during_a_graph_capture_is_refused(lab: Lab) -> None:
    lab.fill_all()
    capturing = lab.rig.capturing()
    if capturing is None:
        skip("the rig of this device cannot capture a graph")
        return
    with capturing:
        for lane in Lane:
            try:
                lab.submit(lane)
            except GraphCaptureError:
                continue
            require(False, f"a {lane.value} was accepted while the stream was being captured")
    lab.succeed(lab.store([1], [0]), lab.load([0], [2]))
    lab.check()


@check(Guarantee.ASYNCHRONY, needs=("asynchronous",))
def a_transfer_of_one_direction_holds_up_no_other_direction(lab: Lab) -> None:
    lab.fill_all()
    lab.succeed(lab.store([1, 2], [0, 1]))

    def start(lane: Lane, number: int, *, waits: bool) -> int:
        if lane is Lane.STORE:
            job = lab.store([3], [2 + number]) if waits else lab.store([3], [5], after=None)
        elif lane is Lane.LOAD:
            job = lab.load([0], [8]) if waits else lab.load([1], [9], after=None)
        else:
            job = lab.copy([4], [10]) if waits else lab.copy([4], [11], after=None)
        return job

    for number, held in enumerate(Lane):

        def submit(held: Lane = held, number: int = number) -> tuple[list[int], list[int]]:
            waiting = [start(held, number, waits=True)]
            return waiting, [start(lane, number, waits=False) for lane in Lane if lane is not held]

        require(
            _passes(lab, submit),
            f"a {held.value} that waits holds up transfers that it has nothing to do with",
        )
    lab.check()


@check(
    Guarantee.ASYNCHRONY,
    needs=("asynchronous",),
    cache=Cache(pages=(96 * 1024, 32 * 1024), groups=((0, 1),), blocks=24, chunks=8),
)
def large_copies_are_enqueued_while_the_device_is_busy(lab: Lab) -> None:
    lab.fill_all()
    lab.succeed(lab.store(range(8), range(8)))
    lab.rig.synchronize()
    lab.hold()
    jobs = [lab.copy(range(8), range(16, 24)), lab.store(range(8), range(8))]
    jobs.append(lab.load(range(8), range(8, 16)))
    require(lab.rig.holding, "submitting took until the device was free")
    lab.rig.release()
    lab.succeed(*jobs)
    lab.check()


@check(Guarantee.CAPABILITIES)
def lanes_have_the_lowest_priority(lab: Lab) -> None:
    answers = {lane: lab.rig.is_lowest_priority(lab.backend.new_stream(lane)) for lane in Lane}
    if None in answers.values():
        skip("nobody tells the priority of a stream of this device")
    urgent = [lane.value for lane, lowest in answers.items() if not lowest]
    require(not urgent, f"{' and '.join(urgent)} streams are more urgent than need be")
