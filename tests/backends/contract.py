"""What every backend must do, one function a sentence. Each takes a fresh :class:`Lab`.

They are plain functions so that they can also be run against code that is broken on purpose: see
``tests/core/test_mutants.py``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest

from kvoffload.core.errors import (
    AlreadyBoundError,
    BlockCountError,
    BlockRangeError,
    ClosedError,
    CopyError,
    DuplicateBlockError,
    DuplicateJobError,
    SpecError,
    SubmitError,
    UnroutableError,
)
from kvoffload.core.lanes import Lane
from kvoffload.core.specs import DeviceLoadStoreSpec, HostLoadStoreSpec
from kvoffload.rig import Fault
from tests.lab import BLOCKS, CHUNKS, PAGES, Lab


def every_byte_round_trips_and_no_other_is_touched(lab: Lab) -> None:
    rng = np.random.default_rng(5)
    everywhere = list(range(BLOCKS))
    for trial in range(10):
        tags = [trial * 20 + b for b in everywhere]
        lab.fill(everywhere, tags)
        sources = rng.permutation(BLOCKS)[:5].tolist()
        chunks = rng.permutation(CHUNKS)[:5].tolist()
        targets = rng.permutation(BLOCKS)[:5].tolist()
        store = lab.store(sources, chunks)
        load = lab.load(chunks, targets)
        lab.succeed(store, load)
        after = list(tags)
        for source, target in zip(sources, targets, strict=True):
            after[target] = tags[source]
        lab.expect(everywhere, after)


def consecutive_blocks_round_trip(lab: Lab) -> None:
    everywhere = list(range(BLOCKS))
    lab.fill(everywhere, everywhere)
    lab.succeed(lab.store(everywhere[:CHUNKS], list(range(CHUNKS))))
    lab.fill(everywhere, [99] * BLOCKS)
    lab.succeed(lab.load(list(range(CHUNKS)), everywhere[4:]))
    lab.expect(everywhere, [99] * 4 + list(range(CHUNKS)))


def a_store_waits_for_earlier_compute(lab: Lab) -> None:
    lab.fill([3], [1])
    lab.rig.synchronize()
    lab.rig.hold()
    lab.fill([3], [2])
    job = lab.store([3], [0])
    assert lab.worker.get_finished() == []
    lab.rig.release()
    lab.succeed(job, lab.load([0], [7]))
    lab.expect([7], [2])


def a_load_waits_for_earlier_compute(lab: Lab) -> None:
    lab.fill([3, 5], [1, 9])
    lab.succeed(lab.store([3], [0]))
    lab.rig.hold()
    seen = lab.peek([5])
    job = lab.load([0], [5])
    assert lab.worker.get_finished() == []
    lab.rig.release()
    lab.succeed(job)
    lab.rig.synchronize()
    for number, page in enumerate(seen):
        assert (page == lab.content([9], number)).all(), "the load overtook a read"
    lab.expect([5], [1])


def submit_returns_while_the_device_is_busy(lab: Lab) -> None:
    if not lab.backend.capabilities.asynchronous:
        pytest.skip("the backend does not claim to be asynchronous")
    lab.rig.hold()
    jobs = [lab.store([1], [0]), lab.load([0], [2]), lab.store([2], [1])]
    # Getting here is the proof: the device cannot go on before the release.
    assert lab.worker.get_finished() == []
    assert sorted(lab.engine.in_flight) == jobs
    lab.rig.release()
    lab.succeed(*jobs)


def jobs_that_share_blocks_run_in_the_order_of_their_submission(lab: Lab) -> None:
    lab.fill([3, 4], [33, 44])
    lab.rig.synchronize()
    lab.rig.hold()
    jobs = [
        lab.store([3], [0]),
        lab.load([0], [5]),
        lab.store([5], [1]),
        lab.load([1], [3]),
        lab.store([4], [0]),
        lab.load([0], [6]),
        lab.load([1], [4]),
    ]
    lab.rig.release()
    lab.succeed(*jobs)
    lab.expect([3, 4, 5, 6], [33, 33, 33, 44])


def inputs_are_taken_at_submit(lab: Lab) -> None:
    lab.fill([1, 6], [10, 60])
    blocks, chunks = np.array([1]), np.array([2])
    lab.rig.hold()
    job = lab.store(blocks, chunks)  # type: ignore[arg-type]
    blocks[0], chunks[0] = 6, 5
    lab.rig.release()
    lab.succeed(job, lab.load([2], [7]))
    lab.expect([7], [10])


def an_event_recorded_earlier_orders_a_transfer(lab: Lab) -> None:
    lab.fill([1], [1])
    lab.rig.synchronize()
    lab.rig.hold()
    lab.fill([1], [2])
    mark = lab.backend.new_event()
    lab.backend.current_stream().record_event(mark)
    job = lab.store([1], [0], after=mark)
    load = lab.load([0], [2], after=mark)
    assert lab.worker.get_finished() == []
    lab.rig.release()
    lab.succeed(job, load)
    lab.expect([2], [2])


def without_an_event_a_transfer_does_not_wait_for_compute(lab: Lab) -> None:
    if not lab.backend.capabilities.asynchronous:
        pytest.skip("the backend does not claim to be asynchronous")
    lab.fill([1], [1])
    lab.rig.synchronize()
    lab.rig.hold()
    lab.succeed(lab.store([1], [0], after=None))
    lab.rig.release()


def a_fence_orders_compute_after_a_transfer(lab: Lab) -> None:
    lab.fill([1, 2], [1, 2])
    lab.succeed(lab.store([1], [0]))
    lab.rig.hold()
    job = lab.load([0], [2])
    lab.worker.fence([job, 12345])
    seen = lab.peek([2])
    lab.rig.release()
    lab.succeed(job)
    lab.rig.synchronize()
    for number, page in enumerate(seen):
        assert (page == lab.content([1], number)).all(), "compute read a block being loaded"


def wrong_arguments_raise_and_create_no_job(lab: Lab) -> None:
    def device(*ids: int) -> DeviceLoadStoreSpec:
        return DeviceLoadStoreSpec(list(ids))

    def host(*ids: int) -> HostLoadStoreSpec:
        return HostLoadStoreSpec(list(ids))

    wrong = (
        (device(BLOCKS), host(0), BlockRangeError),
        (device(-1), host(0), BlockRangeError),
        (device(0), host(CHUNKS), BlockRangeError),
        (host(-1), device(0), BlockRangeError),
        (device(0, 1), host(0), BlockCountError),
        (device(0, 1), host(2, 2), DuplicateBlockError),
        (host(0, 1), device(3, 3), DuplicateBlockError),
        (host(0), host(1), UnroutableError),
        (device(0, 1), device(1, 2), DuplicateBlockError),
        (device(0, 1), device(2, 2), DuplicateBlockError),
        (device(0), device(1, 2), BlockCountError),
        (DeviceLoadStoreSpec([0, 1], [1, 1]), host(0, 1), BlockCountError),
    )
    for src, dst, error in wrong:
        with pytest.raises(error):
            lab.worker.transfer_async(1, (src, dst))
    for job_id in ("1", True, 1.0, None):
        with pytest.raises(SpecError):
            lab.worker.transfer_async(job_id, (device(0), host(0)))  # type: ignore[arg-type]
    assert lab.engine.in_flight == []
    assert lab.worker.get_finished() == []
    lab.rig.hold()
    job = lab.store([0], [0])
    with pytest.raises(DuplicateJobError):
        lab.worker.transfer_async(job, (device(1), host(1)))
    lab.rig.release()
    lab.succeed(job)


def the_same_source_may_be_named_twice(lab: Lab) -> None:
    lab.fill([1], [17])
    lab.succeed(lab.store([1, 1], [0, 1]), lab.load([0, 1], [2, 3]))
    lab.expect([2, 3], [17, 17])


def every_failure_is_a_typed_result_and_the_next_job_works(lab: Lab) -> None:
    for fault, error in ((Fault.SUBMIT, SubmitError), (Fault.EXECUTE, CopyError)):
        for lane in Lane:
            lab.fill([1], [7])
            lab.rig.inject(fault, lane)
            job = lab.submit(lane)
            (result,) = lab.finish(job)
            assert not result.success
            assert isinstance(result.error, error), result
            assert (result.transfer_size, result.transfer_time) == (0, None)
            lab.succeed(lab.store([1], [0]), lab.load([0], [2]))
            lab.expect([2], [7])


def every_job_ends_exactly_once(lab: Lab) -> None:
    jobs = [lab.store([n % BLOCKS], [n % CHUNKS]) for n in range(20)]
    jobs += [lab.load([n % CHUNKS], [n % BLOCKS]) for n in range(20)]
    lab.worker.wait([*jobs, 99999])
    ended = [result.job_id for result in lab.worker.get_finished()]
    assert sorted(ended) == jobs
    assert lab.worker.get_finished() == []
    assert lab.engine.in_flight == []


def a_transfer_of_nothing_ends_at_once(lab: Lab) -> None:
    lab.rig.hold()
    (result,) = lab.finish(lab.store([], []))
    assert (result.success, result.transfer_size) == (True, 0)
    lab.rig.release()


def a_result_tells_bytes_media_and_seconds(lab: Lab) -> None:
    stored, loaded = lab.finish(lab.store([1, 2, 3], [0, 1, 2]), lab.load([0, 1], [4, 5]))
    assert (stored.transfer_size, loaded.transfer_size) == (3 * sum(PAGES), 2 * sum(PAGES))
    assert stored.transfer_type == ("device", "host")
    assert loaded.transfer_type == ("host", "device")
    for result in (stored, loaded):
        assert result.error is None
        if lab.backend.capabilities.timing_events:
            assert result.transfer_time is not None
            assert result.transfer_time >= 0
        else:
            assert result.transfer_time is None


def a_job_keeps_the_caches_alive(lab: Lab) -> None:
    lab.fill([1], [5])
    lab.rig.hold()
    job = lab.store([1], [0])
    lab.tensors.clear()
    gc.collect()
    lab.rig.release()
    lab.succeed(job)


def events_are_reused(lab: Lab) -> None:
    made = 0
    new_event = lab.backend.new_event

    def count() -> object:
        nonlocal made
        made += 1
        return new_event()

    lab.backend.new_event = count  # type: ignore[method-assign, assignment]
    for _ in range(100):
        lab.succeed(lab.store([1], [0]))
        lab.succeed(lab.load([0], [1]))
    assert made <= 6, f"{made} events for one job at a time"


def shutdown_drains_and_works_twice(lab: Lab) -> None:
    lab.fill([1], [5])
    lab.rig.hold()
    jobs = [lab.store([1], [0]), lab.load([0], [2])]
    lab.rig.release()
    lab.worker.shutdown()
    assert sorted(r.job_id for r in lab.worker.get_finished() if r.success) == jobs
    lab.worker.shutdown()
    assert lab.worker.get_finished() == []
    with pytest.raises(ClosedError):
        lab.store([1], [0])
    lab.expect([2], [5])


def caches_can_be_registered_again_after_they_were_unregistered(lab: Lab) -> None:
    with pytest.raises(AlreadyBoundError):
        lab.register()
    lab.fill([1], [5])
    lab.rig.hold()
    job = lab.store([1], [0])
    lab.rig.release()
    lab.worker.unregister()
    lab.worker.unregister()
    assert [r.job_id for r in lab.worker.get_finished() if r.success] == [job]
    with pytest.raises(ClosedError):
        lab.store([1], [0])
    lab.worker = lab.register()
    lab.fill([1], [6])
    lab.succeed(lab.store([1], [0]), lab.load([0], [2]))
    lab.expect([2], [6])


CONTRACT: tuple[Callable[[Lab], None], ...] = (
    every_byte_round_trips_and_no_other_is_touched,
    consecutive_blocks_round_trip,
    a_store_waits_for_earlier_compute,
    a_load_waits_for_earlier_compute,
    submit_returns_while_the_device_is_busy,
    jobs_that_share_blocks_run_in_the_order_of_their_submission,
    inputs_are_taken_at_submit,
    an_event_recorded_earlier_orders_a_transfer,
    without_an_event_a_transfer_does_not_wait_for_compute,
    a_fence_orders_compute_after_a_transfer,
    wrong_arguments_raise_and_create_no_job,
    the_same_source_may_be_named_twice,
    every_failure_is_a_typed_result_and_the_next_job_works,
    every_job_ends_exactly_once,
    a_transfer_of_nothing_ends_at_once,
    a_result_tells_bytes_media_and_seconds,
    a_job_keeps_the_caches_alive,
    events_are_reused,
    caches_can_be_registered_again_after_they_were_unregistered,
    shutdown_drains_and_works_twice,
)
