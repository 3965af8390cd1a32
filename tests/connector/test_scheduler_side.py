"""What an engine's scheduler asks of either protocol, and what it hears."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from kvoffload.connector import Acknowledgements, common_num_chunks
from kvoffload.core.errors import (
    BlockCountError,
    BlockRangeError,
    ConfigurationError,
    KeyNotReadyError,
    UnexpectedAcknowledgementError,
)
from kvoffload.core.lanes import Lane
from kvoffload.core.specs import DeviceLoadStoreSpec
from kvoffload.testing.conformance.lab import Cache
from tests.connector.connected import PROTOCOLS, Connected, key, keys

Connect = Callable[..., Connected]


def test_chunks_of_several_groups_are_stored_and_loaded_in_any_order(
    connect: Connect, protocol: str
) -> None:
    lab = connect(protocol, Cache(groups=((0,), (1, 2)), factor=2, blocks=16))
    mixed = [key(1, group=1), key(2), key(3, group=1)]
    lab.scheduler.store("r", mixed, [1, 2, 3, 4, 5, 6])
    lab.step(lambda: lab.fill([1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]))
    lab.settle()
    sorted_by_group = [key(2), key(1, group=1), key(3, group=1)]
    assert lab.scheduler.lookup("s", sorted_by_group).hits == 3
    # Group 1 is entered behind its first block.
    target = DeviceLoadStoreSpec([8, 9, 11, 12, 13], [2, 3], [0, 1])
    lab.scheduler.load("s", sorted_by_group, target)
    ended = lab.step().outcome.loaded
    assert ended + lab.settle().loaded == ["s"]
    lab.device[0, [8, 9]] = [13, 14]
    lab.device[1:, [11, 12, 13]] = [12, 15, 16]
    lab.check_device()


def test_what_is_stored_or_being_stored_is_left_out(connect: Connect, protocol: str) -> None:
    lab = connect(protocol)
    lab.keep([1], [5])
    assert lab.scheduler.store("r", keys(5, 6), [1, 2]) is not None
    assert lab.scheduler.store("s", keys(6, 5), [3, 4]) is None
    assert lab.scheduler.store("s", [], []) is None
    lab.step(lambda: lab.fill([2], [6]))
    lab.settle()
    lab.load_into("t", [5, 6], [7, 8])
    lab.step()
    lab.settle()
    lab.expect([7, 8], [5, 6])


def test_wrong_arguments_change_nothing(connect: Connect, protocol: str) -> None:
    lab = connect(protocol, null_block=0)
    lab.keep([1], [5])
    with pytest.raises(KeyNotReadyError):
        lab.scheduler.load("r", keys(6), DeviceLoadStoreSpec([2]))
    with pytest.raises(BlockRangeError, match="null block"):
        lab.scheduler.load("r", keys(5), DeviceLoadStoreSpec([0]))
    with pytest.raises(BlockCountError, match="2 blocks for 1 chunks"):
        lab.scheduler.store("r", keys(7), [2, 3])
    assert not lab.scheduler.has_pending_work()
    assert lab.manager.usage().in_use == 0


def test_a_chunk_with_a_null_block_is_not_stored(connect: Connect, protocol: str) -> None:
    lab = connect(protocol, Cache(factor=2), null_block=0)
    assert lab.scheduler.store("r", keys(5, 6), [1, 0, 2, 3]) is not None
    lab.step(lambda: lab.fill([2, 3], [6, 6]))
    lab.settle()
    assert lab.scheduler.lookup("s", keys(5)).hits == 0
    assert lab.scheduler.lookup("s", keys(6)).hits == 1
    assert lab.scheduler.store("r", keys(5), [0, 1]) is None


def test_what_a_preempted_request_wanted_in_this_step_is_not_begun(
    connect: Connect, protocol: str
) -> None:
    lab = connect(protocol)
    lab.keep([1], [5])
    lab.load_into("r", [5], [2])
    lab.scheduler.store("r", keys(6), [3])
    lab.scheduler.preempted("r")
    lab.scheduler.preempted("unknown")
    metadata = lab.scheduler.build_metadata()
    assert not metadata.loads
    assert not metadata.stores
    assert not metadata.flush
    assert lab.manager.usage().in_use == 0


def test_a_preempted_request_that_was_loading_is_not_loaded(
    connect: Connect, protocol: str
) -> None:
    lab = connect(protocol)
    lab.keep([1], [5])
    lab.load_into("r", [5], [2])
    lab.begin()
    lab.side.finish_step()
    lab.scheduler.preempted("r")
    lab.scheduler.allocated([2])
    flushing = lab.scheduler.build_metadata()
    assert flushing.flush
    lab.side.handle_preemptions(flushing)
    lab.fill([2], [9])
    outcome = lab.step(metadata=flushing).outcome
    assert (outcome.loaded, outcome.released) == ([], [])
    assert lab.manager.usage().in_use == 0
    lab.expect([2], [9])


def test_a_request_may_have_the_name_of_one_whose_blocks_are_kept(
    connect: Connect, protocol: str
) -> None:
    lab = connect(protocol)
    lab.keep([1], [5])
    with lab.holding(Lane.LOAD):
        lab.load_into("r", [5], [2])
        lab.step()
        assert lab.scheduler.request_finished("r", aborted=True)
        lab.load_into("r", [5], [3])
        lab.step()
    outcome = lab.settle()
    assert (outcome.released, outcome.loaded) == (["r"], ["r"])
    assert not lab.scheduler.request_finished("r")


def test_after_a_reset_everything_misses_and_what_is_in_flight_ends(
    connect: Connect, protocol: str
) -> None:
    lab = connect(protocol)
    lab.keep([1], [5])
    lab.scheduler.store("r", keys(6), [2])
    lab.step(lambda: lab.fill([2], [6]))
    lab.scheduler.reset()
    lab.settle()
    assert lab.scheduler.lookup("s", keys(5)).hits == 0
    assert lab.scheduler.lookup("s", keys(6)).hits == 0
    assert lab.manager.usage().free == lab.manager.usage().capacity


def test_a_rank_that_does_not_write_acknowledges_stores_at_once(
    connect: Connect, protocol: str
) -> None:
    lab = connect(protocol, writes=False)
    with lab.holding(Lane.STORE):
        lab.scheduler.store("r", keys(5), [1])
        assert lab.step().outcome.stored == keys(5)
        assert not lab.side.has_pending_work()


def test_an_event_of_which_a_part_failed_has_failed(connect: Connect) -> None:
    lab = connect("events")
    lab.scheduler.store("r", keys(5), [1])
    lab.scheduler.store("s", keys(6), [99])  # the worker refuses it
    at_once = lab.step(lambda: lab.fill([1], [5])).outcome
    outcome = lab.settle()
    assert at_once.stored + outcome.stored == []
    assert at_once.not_stored + outcome.not_stored == keys(5, 6)
    assert lab.scheduler.lookup("t", keys(5)).hits == 0


def test_a_transfer_ends_with_the_last_worker_and_only_then() -> None:
    acknowledgements: Acknowledgements[str] = Acknowledgements(3)
    acknowledgements.expect("a")
    assert acknowledgements.add("a") is None
    assert acknowledgements.add("a", 2) is True
    assert len(acknowledgements) == 0
    acknowledgements.expect("b")
    assert acknowledgements.add("b", 2, failed=1) is None
    assert list(acknowledgements) == ["b"]
    with pytest.raises(UnexpectedAcknowledgementError, match="1 have not ended"):
        acknowledgements.add("b", 2)
    assert acknowledgements.add("b") is False
    with pytest.raises(UnexpectedAcknowledgementError, match="not in flight"):
        acknowledgements.add("b")
    for workers in (0, -1, True, 1.5):
        with pytest.raises(ConfigurationError, match="workers"):
            Acknowledgements(workers)  # type: ignore[arg-type]


def test_the_manager_has_what_every_rank_has() -> None:
    assert common_num_chunks([[4, 8], None, [5, 6]]) == [4, 6]
    for ranks in ([], [None], [[4], [4, 5]]):
        with pytest.raises(ConfigurationError, match="in common"):
            common_num_chunks(ranks)


def test_both_protocols_have_the_same_names() -> None:
    names = {"Metadata", "SchedulerSide", "WorkerMetadata", "WorkerSide"}
    for module in PROTOCOLS.values():
        assert names <= set(module.__all__)
    public = [
        {
            name
            for side in (module.SchedulerSide, module.WorkerSide)
            for name in dir(side)
            if not name.startswith("_")
        }
        for module in PROTOCOLS.values()
    ]
    assert public[1] - public[0] == {"flush", "load_mark", "store_mark"}
    assert not public[0] - public[1]


def test_the_log_is_quiet_until_somebody_listens() -> None:
    script = (
        "import kvoffload\n"
        "from kvoffload.connector import jobs\n"
        "side = jobs.WorkerSide(None)\n"
        "side.register_kv_caches(kvoffload.CanonicalKVCaches([], []))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=50
    )
    assert done.stderr == ""
