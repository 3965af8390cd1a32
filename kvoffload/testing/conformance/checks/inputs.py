"""Guarantees 2 and 3: inputs are taken at submit, and submit only enqueues."""

from __future__ import annotations

import threading

import numpy as np

from kvoffload.core.lanes import Lane
from kvoffload.testing.conformance.check import Guarantee, check, require
from kvoffload.testing.conformance.lab import Cache, Lab


@check(Guarantee.INPUTS)
def the_caller_may_change_its_arrays_at_once(lab: Lab) -> None:
    lab.fill([1, 6], [10, 60])
    blocks, chunks = np.array([1]), np.array([2])
    lab.hold()
    job = lab.store(blocks, chunks)  # type: ignore[arg-type]
    blocks[0], chunks[0] = 6, 5
    lab.rig.release()
    lab.succeed(job)
    lab.check()


@check(Guarantee.INPUTS, cache=Cache(blocks=64, chunks=32))
def transfers_in_flight_keep_their_own_blocks(lab: Lab) -> None:
    lab.fill_all()
    lab.rig.synchronize()
    lab.hold()
    # Of one direction, so that they share whatever that direction shares.
    jobs = [lab.store([block], [31 - block]) for block in range(16)]
    jobs.append(lab.store(range(20, 36), range(16)))
    jobs += [lab.load([chunk], [40 + chunk]) for chunk in range(8)]
    jobs += [lab.copy([block], [block + 50]) for block in range(8)]
    lab.rig.release()
    lab.succeed(*jobs)
    lab.check()


@check(Guarantee.ASYNCHRONY, needs=("asynchronous",))
def submit_returns_while_the_device_is_busy(lab: Lab) -> None:
    lab.fill([1], [5])
    lab.rig.synchronize()
    lab.hold()
    jobs = [lab.store([1], [0]), lab.load([0], [2]), lab.copy([2], [3]), lab.store([2], [1])]
    require(lab.rig.holding, "submitting took until the device was free")
    ended = lab.collect()
    require(lab.rig.holding, "polling took until the device was free")
    require(not ended, "a transfer ended while its device was held")
    lab.rig.release()
    lab.succeed(*jobs)
    lab.check()


@check(
    Guarantee.ASYNCHRONY,
    needs=("asynchronous",),
    cache=Cache(pages=(512,) * 8, groups=((0, 1, 2, 3), (4, 5, 6, 7)), blocks=512, chunks=512),
)
def a_large_transfer_is_enqueued_while_the_device_is_busy(lab: Lab) -> None:
    scattered = lab.rng.permutation(512).tolist()
    everything = {0: (range(512), scattered), 1: (scattered, range(512))}
    lab.fill_all()
    lab.rig.synchronize()
    lab.hold()
    jobs = [lab.store_groups(everything)]
    jobs.append(lab.load_groups({0: (range(512), range(512), 0), 1: (scattered, scattered, 0)}))
    require(lab.rig.holding, "submitting took until the device was free")
    lab.rig.release()
    lab.succeed(*jobs)
    lab.check()


@check(Guarantee.ASYNCHRONY, cache=Cache(blocks=64, chunks=32))
def several_threads_may_submit_and_poll(lab: Lab) -> None:
    lab.fill_all()
    lab.rig.synchronize()
    stored: list[int] = []
    errors: list[BaseException] = []

    def submit(number: int) -> None:
        try:
            for chunk in range(8 * number, 8 * number + 8):
                stored.append(lab.store([chunk], [chunk]))
                lab.worker.fence([])
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    threads = [threading.Thread(target=submit, args=[n], name=f"submit-{n}") for n in range(4)]
    for thread in threads:
        thread.start()
    results = {}
    while any(thread.is_alive() for thread in threads):
        results.update({result.job_id: result for result in lab.worker.get_finished()})
    for thread in threads:
        thread.join()
    require(not errors, f"submitting from a thread raised {errors[:1]}")
    lab.worker.wait(stored)
    results.update({result.job_id: result for result in lab.worker.get_finished()})
    require(sorted(results) == sorted(stored), "some jobs have no result")
    require(all(r.success for r in results.values()), f"failed: {results}")
    lab.check()


@check(Guarantee.ASYNCHRONY)
def an_event_says_no_while_the_device_is_held_and_yes_afterwards(lab: Lab) -> None:
    event = lab.backend.new_event()
    require(event.query() is True, "an event that was never recorded is not reached")
    lab.hold()
    lab.backend.current_stream().record_event(event)
    answer = event.query()
    if lab.rig.holding:
        require(answer is False, f"an event behind a held stream says {answer!r}, not False")
    lab.rig.release()
    event.synchronize()
    require(event.query() is True, "an event that was synchronised with is not reached")
    stream = lab.backend.new_stream(Lane.LOAD)
    require(stream is lab.backend.new_stream(Lane.LOAD), "a lane's stream is not kept")
