"""Guarantees 4 and 9: every job ends once, and shutdown is quiet."""

from __future__ import annotations

import gc
import threading
import time

from kvoffload.core.engine import TransferResult
from kvoffload.core.errors import (
    AlreadyBoundError,
    CancelledError,
    ClosedError,
    CopyError,
    DependencyError,
    StalledError,
    SubmitError,
    TransferError,
)
from kvoffload.core.lanes import Lane
from kvoffload.rig import Fault
from kvoffload.testing.conformance.check import Guarantee, MakeBackend, check, require, skip
from kvoffload.testing.conformance.lab import Cache, Lab

STALL_SECONDS = 0.1


def _told_by_the_device(lab: Lab) -> type[Exception]:
    """How a copy fails that fails when it runs; one that runs within submit fails there."""
    return CopyError if lab.backend.capabilities.asynchronous else TransferError


def _require_fault(lab: Lab, fault: Fault) -> None:
    if fault not in lab.rig.faults:
        skip(f"the rig of this device cannot inject a fault to {fault.value}")


@check(Guarantee.ENDS_ONCE)
def every_job_ends_exactly_once(lab: Lab) -> None:
    lab.fill_all()
    jobs = [lab.store([n % 12], [n % 8]) for n in range(20)]
    jobs += [lab.load([n % 8], [n % 12]) for n in range(20)]
    lab.worker.wait([*jobs, 99999])
    ended = [result.job_id for result in lab.worker.get_finished()]
    require(sorted(ended) == jobs, f"{len(jobs)} jobs ended as {ended}")
    require(lab.worker.get_finished() == [], "a result came twice")
    require(lab.engine.in_flight == [], "jobs with a result are still in flight")
    lab.check()


@check(Guarantee.ENDS_ONCE)
def a_transfer_of_nothing_ends_at_once(lab: Lab) -> None:
    lab.hold()
    (result,) = lab.finish(lab.store([], []))
    require((result.success, result.transfer_size) == (True, 0), f"it ended as {result}")
    lab.rig.release()


def _fails_as(lab: Lab, fault: Fault, error: type[Exception]) -> None:
    _require_fault(lab, fault)
    for lane in Lane:
        lab.fill_all()
        lab.succeed(lab.store([1], [0]))
        lab.rig.inject(fault, lane)
        (result,) = lab.finish(lab.submit(lane))
        require(not result.success, f"a {lane.value} that failed was reported as a success")
        require(isinstance(result.error, error), f"it failed as {result.error!r}")
        require(result.transfer_size == 0, f"it reports {result.transfer_size} bytes as moved")
        # What it should have written is anything; the next job works.
        lab.fill_all(20)
        lab.succeed(lab.store([1], [0]), lab.load([0], [2]), lab.copy([2], [4]))
        lab.check()


@check(Guarantee.ENDS_ONCE)
def a_copy_that_cannot_be_enqueued_fails_and_the_next_job_works(lab: Lab) -> None:
    _fails_as(lab, Fault.SUBMIT, SubmitError)


@check(Guarantee.ENDS_ONCE)
def a_copy_that_fails_on_the_device_fails_and_the_next_job_works(lab: Lab) -> None:
    _fails_as(lab, Fault.EXECUTE, _told_by_the_device(lab))


@check(Guarantee.ENDS_ONCE)
def what_read_the_bytes_of_a_failed_transfer_fails_too(lab: Lab) -> None:
    _require_fault(lab, Fault.EXECUTE)
    lab.fill_all()
    lab.rig.synchronize()
    lab.rig.inject(Fault.EXECUTE, Lane.STORE)
    lab.hold()
    failing, reader, other = lab.store([1], [0]), lab.load([0], [2]), lab.load([3], [5])
    lab.rig.release()
    first, second, third = lab.finish(failing, reader, other)
    expected = _told_by_the_device(lab)
    require(isinstance(first.error, expected), f"the store failed as {first.error!r}")
    require(isinstance(second.error, DependencyError), f"its reader ended as {second}")
    require(third.success, f"a load that shares nothing with it failed: {third.error}")


@check(Guarantee.ENDS_ONCE)
def a_cancelled_job_ends_once_and_its_blocks_are_free_then(lab: Lab) -> None:
    lab.fill_all()
    lab.rig.synchronize()
    lab.hold()
    job = lab.store([1], [0])
    lab.worker.cancel([job])
    lab.rig.release()
    (result,) = lab.finish(job)
    ended = result.success or isinstance(result.error, CancelledError)
    require(ended, f"it ended as {result.error!r}")
    lab.fill_all(30)
    lab.succeed(lab.store([1], [0]), lab.load([0], [2]))
    lab.check()


@check(Guarantee.ENDS_ONCE, needs=("asynchronous",), cache=None)
def a_transfer_that_hangs_is_reported_and_the_device_works_afterwards(
    make_backend: MakeBackend,
) -> None:
    with Lab(make_backend(), job_deadline=STALL_SECONDS) as lab:
        lab.fill_all()
        lab.rig.synchronize()
        lab.hold()
        job = lab.store([1], [0])
        results: list[TransferResult] = []
        end = time.monotonic() + 50 * STALL_SECONDS
        while not results and time.monotonic() < end:
            results = lab.worker.get_finished()
        if lab.rig.holding:
            require(results, "a transfer that hangs was never reported")
            error = results[0].error
            require(isinstance(error, StalledError), f"a hang was reported as {error!r}")
        lab.rig.release()
        lab.rig.synchronize()
        while lab.engine.usage().running:
            lab.worker.get_finished()
        jobs = [lab.store([1], [0]), lab.load([0], [2])]
        lab.rig.synchronize()
        lab.succeed(*jobs)
        require(job not in lab.engine.in_flight, "the job that hung is still in flight")
        lab.check()


@check(Guarantee.ENDS_ONCE)
def a_job_keeps_the_caches_alive(lab: Lab) -> None:
    lab.fill([1], [5])
    lab.rig.synchronize()
    lab.hold()
    job = lab.store([1], [0])
    lab.tensors.clear()
    gc.collect()
    lab.rig.release()
    lab.succeed(job)
    lab.check_host()


@check(Guarantee.QUIET_EXIT)
def shutdown_drains_and_works_twice(lab: Lab) -> None:
    lab.fill_all()
    lab.hold()
    jobs = [lab.store([1], [0]), lab.load([0], [2])]
    lab.rig.release()
    lab.worker.shutdown()
    ended = sorted(result.job_id for result in lab.worker.get_finished() if result.success)
    require(ended == jobs, f"jobs {jobs} were drained as {ended}")
    lab.worker.shutdown()
    require(lab.worker.get_finished() == [], "a result came after the shutdown")
    try:
        lab.store([1], [0])
    except ClosedError:
        pass
    else:
        require(False, "a transfer was accepted after the shutdown")
    lab.check_device()


@check(Guarantee.QUIET_EXIT)
def caches_can_be_registered_again(lab: Lab) -> None:
    try:
        lab.register()
    except AlreadyBoundError:
        pass
    else:
        require(False, "the backend serves two sets of caches")
    lab.fill_all()
    for round_ in range(3):
        lab.hold()
        job = lab.store([1 + round_], [0])
        lab.rig.release()
        lab.worker.unregister()
        lab.worker.unregister()
        ended = [result.job_id for result in lab.worker.get_finished() if result.success]
        require(ended == [job], f"job {job} ended as {ended}")
        lab.register_again()
        lab.succeed(lab.store([1], [0]), lab.load([0], [2]))
        lab.check()


@check(Guarantee.QUIET_EXIT, cache=None)
def a_backend_can_be_closed_twice_used_or_not(make_backend: MakeBackend) -> None:
    unused = make_backend()
    unused.close()
    unused.close()
    backend = make_backend()
    with Lab(backend) as lab:
        lab.fill_all()
        lab.succeed(lab.store([1], [0]))
    backend.close()


@check(Guarantee.QUIET_EXIT, cache=None)
def closing_joins_every_thread(make_backend: MakeBackend) -> None:
    before = set(threading.enumerate())
    for _ in range(3):
        with Lab(make_backend(), Cache()) as lab:
            lab.fill_all()
            lab.succeed(lab.store([1], [0]), lab.load([0], [2]), lab.copy([2], [3]))
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    require(not left, f"threads still running: {left}")
