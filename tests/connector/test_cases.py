"""What went wrong elsewhere, on both protocols; the name of each case ends its test's name."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvoffload.connector import events, jobs
from kvoffload.core.backend import Backend
from kvoffload.core.errors import UnexpectedAcknowledgementError
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.lanes import Lane
from kvoffload.core.specs import DeviceLoadStoreSpec
from kvoffload.core.worker import OffloadingWorker
from kvoffload.rig import Fault, rig_for
from kvoffload.scheduler.host_manager import HostOffloadingManager
from kvoffload.scheduler.manager import RequestContext
from kvoffload.testing.conformance.lab import Cache
from kvoffload.testing.simulator.launcher import SteppedLauncher
from tests.connector.connected import PROTOCOLS, Connected, keys

Connect = Callable[..., Connected]


def report(protocol: str, lane: Lane, number: int, *, failed: bool = False) -> Any:
    """What one worker says of a transfer that has ended."""
    if protocol == "jobs":
        return jobs.WorkerMetadata({number: 1}, {number: 1} if failed else {})
    ended = {"loads" if lane is Lane.LOAD else "stores": {0: 1}}
    if failed:
        ended |= {f"failed_{name}": {0: 1} for name in ended}
    return events.WorkerMetadata(**ended)


def hits(lab: Connected, *numbers: int) -> int:
    """What a request that nobody waits for would find."""
    found: int = lab.scheduler.lookup("asks", keys(*numbers)).hits
    lab.scheduler.request_finished("asks")
    return found


@pytest.mark.parametrize("launched", [True, False])
def test_blocks_of_a_preempted_request_are_not_overwritten_before_its_store_A06(
    connect: Connect, protocol: str, launched: bool
) -> None:
    lab = connect(protocol, stepped=True)
    lab.scheduler.store("r", keys(5), [4])
    lab.begin()
    lab.fill([4], [5])
    lab.side.finish_step()
    if launched:
        lab.launcher.drain()
    lab.scheduler.preempted("r")
    lab.scheduler.allocated([4])
    lab.step(lambda: lab.fill([4], [6]))
    lab.settle()
    assert hits(lab, 5) == 1
    lab.load_into("s", [5], [2])
    lab.step()
    lab.settle()
    lab.expect([2, 4], [5, 6])


def test_a_store_that_was_not_begun_is_never_visible_after_a_preemption_A06(
    connect: Connect, protocol: str
) -> None:
    lab = connect(protocol)
    lab.scheduler.store("r", keys(5), [4])
    lab.scheduler.preempted("r")  # in the same scheduling: nothing of it is computed
    lab.scheduler.allocated([4])
    lab.step(lambda: lab.fill([4], [6]))
    lab.settle()
    assert hits(lab, 5) == 0
    assert lab.manager.usage().free == lab.manager.usage().capacity


def test_every_reallocation_is_fenced_whatever_it_is_for_A07(
    connect: Connect, protocol: str
) -> None:
    null = 0
    lab = connect(protocol, null_block=null)
    with lab.holding(Lane.STORE):
        lab.scheduler.store("r", keys(5), [2])
        lab.step(lambda: lab.fill([2], [5]))
        lab.begin(PROTOCOLS[protocol].Metadata())  # what was deferred is in flight now
        lab.end(None)
        lab.scheduler.request_finished("r")
        lab.scheduler.allocated([null])
        assert not lab.scheduler.build_metadata().flush
        # Nothing is loaded into it: another kind of transfer gets the block.
        lab.scheduler.allocated([2, null])
        metadata = lab.scheduler.build_metadata()
        assert metadata.flush
        assert lab.engine.in_flight
    lab.side.handle_preemptions(metadata)
    assert not lab.engine.in_flight
    lab.fill([2], [9])
    lab.settle()
    lab.load_into("s", [5], [3])
    lab.step()
    lab.settle()
    lab.expect([3], [5])


def test_a_store_tried_again_is_not_of_a_block_that_has_moved_on_A09(
    connect: Connect, protocol: str
) -> None:
    lab = connect(protocol, Cache(chunks=1))
    lab.keep([1], [5])
    holder = RequestContext("holder")
    assert lab.manager.lookup(keys(5), holder).hits == 1  # host memory is full, and all in use
    assert lab.scheduler.store("r", keys(6), [2]) is None
    lab.step(lambda: lab.fill([2], [6]))
    # The window moves on; the block is somebody else's now.
    lab.scheduler.allocated([2])
    lab.step(lambda: lab.fill([2], [7]))
    lab.manager.release(holder)
    lab.step()
    lab.settle()
    assert hits(lab, 6) == 0
    assert hits(lab, 5) == 1, "nothing was evicted for it"


def test_a_store_without_room_is_tried_again_as_long_as_its_block_stays_A09(
    connect: Connect, protocol: str
) -> None:
    lab = connect(protocol, Cache(chunks=1))
    lab.keep([1], [5])
    holder = RequestContext("holder")
    assert lab.manager.lookup(keys(5), holder).hits == 1
    assert lab.scheduler.store("r", keys(6), [2]) is None
    lab.step(lambda: lab.fill([2], [6]))
    lab.manager.release(holder)
    ended = lab.step().outcome.stored
    assert ended + lab.settle().stored == keys(6)
    lab.load_into("s", [6], [3])
    lab.step()
    lab.settle()
    lab.expect([3], [6])


def test_registered_memory_outlives_the_callers_references_A21(
    make_backend: Callable[[], Backend], protocol: str
) -> None:
    backend = make_backend()
    with rig_for(backend) as rig:
        tensor = rig.allocate(4 * 64).view(4, 64)
        page = np.arange(64, dtype=np.uint8)[None]
        rig.write(tensor, np.array([1]), page)
        options = {"launcher": SteppedLauncher()} if protocol == "events" else {}
        side = PROTOCOLS[protocol].WorkerSide(
            lambda caches: OffloadingWorker.for_caches(backend, caches, host_bytes=128), **options
        )
        side.register_kv_caches(CanonicalKVCaches.from_tensors([tensor]))
        scheduler = PROTOCOLS[protocol].SchedulerSide(HostOffloadingManager(side.num_chunks))
        scheduler.store("r", keys(5), [1])
        side.start_step(scheduler.build_metadata())
        del tensor
        gc.collect()
        side.finish_step()
        side.start_step(scheduler.build_metadata())
        side.finish_step()
        if protocol == "events":
            side.flush()
        side.worker.wait(side.worker.engine.in_flight)
        side.get_finished()
        assert scheduler.update(side.take_worker_metadata()).stored == keys(5)
        assert (side.worker.engine.host.memory.numpy()[:64] == page).all()
        side.shutdown()


def test_a_store_that_fails_on_one_rank_is_visible_on_none_A21(
    connect: Connect, protocol: str
) -> None:
    ranks = [connect(protocol), connect(protocol)]
    scheduler = PROTOCOLS[protocol].SchedulerSide(ranks[0].manager, workers=2)
    ranks[1].rig.inject(Fault.EXECUTE, Lane.STORE)
    scheduler.store("r", keys(5), [1])
    metadata, nothing = scheduler.build_metadata(), PROTOCOLS[protocol].Metadata()
    ended = []
    for lab in ranks:
        for step in (metadata, nothing):
            lab.side.start_step(step)
            lab.side.finish_step()
            lab.launcher.drain()
        lab.wait()
        lab.side.get_finished()
        ended.append(scheduler.update(lab.side.take_worker_metadata()))
        assert scheduler.lookup("s", keys(5)).hits == 0
    assert [outcome.not_stored for outcome in ended] == [[], keys(5)]
    assert ranks[0].manager.usage().free == ranks[0].manager.usage().capacity


def test_a_key_is_not_visible_before_its_data_and_an_abort_removes_it_A25(
    connect: Connect, protocol: str
) -> None:
    lab = connect(protocol)
    lab.scheduler.store("long prefill", keys(5), [1])
    assert hits(lab, 5) == 0
    assert not lab.scheduler.request_finished("long prefill", aborted=True)
    assert hits(lab, 5) == 0
    assert lab.manager.usage().free == lab.manager.usage().capacity
    metadata = lab.scheduler.build_metadata()
    assert not metadata.stores
    assert not lab.scheduler.has_pending_work()


@pytest.mark.parametrize("fails", [False, True])
def test_a_load_whose_request_is_gone_ends_once_and_then_frees_its_blocks_E09(
    connect: Connect, protocol: str, fails: bool
) -> None:
    lab = connect(protocol)
    lab.keep([1], [5])
    number = lab.load_into("r", [5], [2])
    with lab.holding(Lane.LOAD):
        if fails:
            lab.rig.inject(Fault.EXECUTE, Lane.LOAD)
        lab.step()
        assert lab.scheduler.request_finished("r", aborted=True), "its blocks must be kept"
        assert lab.scheduler.request_finished("r", aborted=True), "and again"
        assert lab.poll().outcome.released == []
        assert lab.manager.usage().in_use == 1
    lab.wait()
    ended = lab.poll()
    assert ended.finished.loaded == {"r"}
    assert ended.outcome.released == ["r"]
    assert ended.outcome.loaded == []
    assert ended.outcome.invalid_blocks == {}
    assert not lab.scheduler.request_finished("r", aborted=True)
    assert lab.manager.usage().in_use == 0
    assert lab.settle().released == []
    with pytest.raises(UnexpectedAcknowledgementError, match="not in flight"):
        lab.scheduler.update(report(protocol, Lane.LOAD, number))


def test_a_transfer_that_stalls_has_one_failed_result_however_late_it_ends_E09(
    connect: Connect, protocol: str
) -> None:
    lab = connect(protocol, job_deadline=0.05)
    lab.scheduler.store("r", keys(5), [1])
    with lab.holding(Lane.STORE):
        lab.step(lambda: lab.fill([1], [5]))
        lab.begin(PROTOCOLS[protocol].Metadata())
        ended = lab.end(None)
        while not ended.report:
            ended = lab.poll()  # the deadline passes; the test's own time limit is far off
        assert ended.outcome.not_stored == keys(5)
        assert lab.manager.usage().in_use == 0
    lab.rig.synchronize()
    assert lab.poll().report is None
    assert lab.engine.usage().running == 0
    assert hits(lab, 5) == 0


def test_keys_that_were_looked_up_and_not_used_are_released_once_E22(
    connect: Connect, protocol: str
) -> None:
    lab = connect(protocol)
    lab.keep([1, 2, 3, 4, 5], [11, 12, 13, 14, 15])
    five = keys(11, 12, 13, 14, 15)
    for request in ("first", "second"):
        assert lab.scheduler.lookup(request, five).hits == 5
        assert lab.manager.usage().in_use == 5
        lab.scheduler.load(request, five[:3], DeviceLoadStoreSpec([6, 7, 8]))
        lab.step()
        lab.settle()
        lab.scheduler.request_finished(request)
        lab.scheduler.request_finished(request)
        usage = lab.manager.usage()
        assert (usage.in_use, usage.evictable) == (0, 5)


@pytest.mark.parametrize("order", list(itertools.permutations((False, False, True))))
def test_the_failure_of_one_rank_wins_in_every_order_of_arrival_G07(
    protocol: str, order: tuple[bool, ...]
) -> None:
    manager = HostOffloadingManager(4)
    scheduler = PROTOCOLS[protocol].SchedulerSide(manager, workers=3)
    number = scheduler.store("w", keys(1), [9])
    scheduler.build_metadata()
    for _ in range(3):
        scheduler.update(report(protocol, Lane.STORE, number))
    assert scheduler.lookup("r", keys(1)).hits == 1
    number = scheduler.load("r", keys(1), DeviceLoadStoreSpec([5]))
    scheduler.build_metadata()
    outcomes = [
        scheduler.update(report(protocol, Lane.LOAD, number, failed=failed)) for failed in order
    ]
    assert [outcome.loaded for outcome in outcomes] == [[], [], ["r"]]
    assert [outcome.invalid_blocks for outcome in outcomes] == [{}, {}, {"r": {0: [5]}}]
    with pytest.raises(UnexpectedAcknowledgementError):
        scheduler.update(report(protocol, Lane.LOAD, number))


def test_an_idle_engine_is_neither_blocked_nor_forgotten_J06(
    connect: Connect, protocol: str
) -> None:
    lab = connect(protocol)
    nothing = PROTOCOLS[protocol].Metadata()
    lab.keep([7], [1])
    with lab.holding(Lane.STORE):  # a slow tier
        for number in range(5):
            lab.scheduler.store("last", keys(11 + number), [1 + number])
        lab.step(lambda: lab.fill([1, 2, 3, 4, 5], [11, 12, 13, 14, 15]))
        lab.scheduler.request_finished("last")
        lab.step(metadata=nothing)
        assert lab.poll().report is None
        assert lab.scheduler.has_pending_work()
        assert lab.side.has_pending_work()
        # A new request is served meanwhile.
        lab.load_into("new", [1], [8])
        loaded = lab.step().outcome.loaded
        while not loaded:
            lab.advance()
            loaded = lab.poll().outcome.loaded
        assert loaded == ["new"]
        assert lab.scheduler.has_pending_work()
    assert len(lab.settle().stored) == 5
    assert not lab.scheduler.has_pending_work()
    assert not lab.side.has_pending_work()


@pytest.mark.parametrize("seconds", [0, 0.02])
def test_shutdown_takes_no_longer_than_it_may_J06(
    connect: Connect, protocol: str, seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    lab = connect(protocol)
    with lab.holding(Lane.STORE):
        lab.scheduler.store("r", keys(5), [1])
        lab.step()
        lab.step(metadata=PROTOCOLS[protocol].Metadata())
        lab.side.shutdown(seconds)  # with the lane held it would last for ever
        assert "have not stopped" in caplog.text
        assert lab.engine.usage().running == 1
    lab.advance()


def test_shutdown_with_all_the_time_it_wants_leaves_nothing_J06(
    connect: Connect, protocol: str
) -> None:
    lab = connect(protocol)
    lab.scheduler.store("r", keys(5), [1])
    lab.step()
    lab.step(metadata=PROTOCOLS[protocol].Metadata())
    lab.advance()
    lab.side.shutdown(30.0)
    assert lab.engine.usage()[:3] == (0, 0, 0)
