"""The manager, sentence by sentence. Names ending in A13, E01, … are field failures it must not
repeat."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from kvoffload.core.errors import (
    CapacityError,
    KeyNotReadyError,
    UnknownGroupError,
    UnknownTransferError,
)
from kvoffload.scheduler.host_manager import HostOffloadingManager
from kvoffload.scheduler.keys import OffloadKey
from kvoffload.scheduler.manager import PrepareStoreOutput, RequestContext, Usage

A, B, C = (RequestContext(name) for name in "ABC")


def keys(*names: object) -> list[OffloadKey]:
    return [OffloadKey(str(name).encode()) for name in names]


def prepared(
    manager: HostOffloadingManager, names: list[OffloadKey], context: RequestContext = A
) -> PrepareStoreOutput:
    output = manager.prepare_store(names, context)
    assert output is not None
    return output


def stored(
    manager: HostOffloadingManager, names: list[OffloadKey], context: RequestContext = A
) -> PrepareStoreOutput:
    """``names`` are in place, and the request is over."""
    output = prepared(manager, names, context)
    manager.complete_store(output.keys_to_store, context)
    manager.release(context)
    return output


def hits(manager: HostOffloadingManager, names: list[OffloadKey]) -> int:
    """What a lookup finds, without keeping it."""
    found = manager.lookup(names, RequestContext("probe")).hits
    manager.release(RequestContext("probe"))
    return found


def test_a_key_is_visible_only_after_its_store_is_complete_A25() -> None:
    manager = HostOffloadingManager(2)
    output = prepared(manager, keys(1))
    found = manager.lookup(keys(1), B)
    assert (found.hits, found.pending) == (0, True)
    manager.complete_store(output.keys_to_store, A)
    assert manager.lookup(keys(1), B).hits == 1


def test_an_aborted_store_leaves_no_key_and_frees_its_chunk_A25() -> None:
    manager = HostOffloadingManager(1)
    output = prepared(manager, keys(1))
    manager.complete_store(output.keys_to_store, A, success=False)
    manager.release(A)
    assert hits(manager, keys(1)) == 0
    assert manager.usage() == Usage(capacity=1, free=1, evictable=0, in_use=0)


def test_chunks_being_loaded_are_no_victims_A13() -> None:
    manager = HostOffloadingManager(2)
    stored(manager, keys(1, 2))
    assert manager.lookup(keys(1, 2), A).hits == 2
    manager.prepare_load(keys(1, 2), A)
    manager.release(A)  # the request is gone; its load still runs
    assert manager.prepare_store(keys(3), B) is None
    assert hits(manager, keys(1, 2)) == 2
    manager.complete_load(keys(1, 2), A)
    assert prepared(manager, keys(3), B).evicted_keys == keys(2)


def test_a_load_that_could_not_be_submitted_gives_its_chunks_back_A13() -> None:
    manager = HostOffloadingManager(2)
    stored(manager, keys(1, 2))
    manager.lookup(keys(1, 2), A)
    manager.prepare_load(keys(1, 2), A)
    manager.complete_load(keys(1, 2), A, success=False)
    manager.release(A)
    assert manager.usage() == Usage(capacity=2, free=2, evictable=0, in_use=0)


def test_no_key_of_the_call_is_a_victim_E01() -> None:
    manager = HostOffloadingManager(4)
    for number in (2, 1, 6, 7):
        stored(manager, keys(number), RequestContext(str(number)))
    output = prepared(manager, keys(2, 3, 4, 5))
    assert output.keys_to_store == keys(3, 4, 5)
    assert output.evicted_keys == keys(1, 6, 7)
    assert hits(manager, keys(2)) == 1


def test_no_key_of_the_call_is_a_victim_even_if_nothing_else_is_left_E01() -> None:
    manager = HostOffloadingManager(2)
    stored(manager, keys(1, 2))
    assert manager.prepare_store(keys(1, 2, 3), A) is None
    assert hits(manager, keys(1, 2)) == 2


def test_a_hit_is_promised_until_its_load_E05() -> None:
    manager = HostOffloadingManager(4)
    stored(manager, keys(1, 2, 3, 4))
    assert manager.lookup(keys(1, 2, 3, 4), A).hits == 4
    assert manager.prepare_store(keys(5, 6, 7, 8), B) is None
    assert len(manager.prepare_load(keys(1, 2, 3, 4), A)) == 4
    manager.complete_load(keys(1, 2, 3, 4), A)
    assert manager.usage() == Usage(capacity=4, free=0, evictable=4, in_use=0)


def test_a_promise_ends_with_the_request_E05() -> None:
    manager = HostOffloadingManager(4)
    stored(manager, keys(1, 2, 3, 4))
    manager.lookup(keys(1, 2, 3, 4), A)
    manager.release(A)
    assert manager.usage().in_use == 0
    assert len(prepared(manager, keys(5, 6, 7, 8), B).evicted_keys) == 4


def test_a_key_being_stored_is_not_stored_again_E06() -> None:
    manager = HostOffloadingManager(4)
    first = prepared(manager, keys("K"), A)
    second = prepared(manager, keys("K"), B)
    assert second.keys_to_store == []
    assert manager.usage().in_use == 1
    manager.complete_store(first.keys_to_store, A)
    assert manager.lookup(keys("K"), A).hits == 1
    assert manager.lookup(keys("K"), B).hits == 1


def test_what_was_stored_in_steps_is_found_whole_and_once_E07() -> None:
    manager = HostOffloadingManager(300)
    chain = keys(*range(217))
    count = 0
    for step in range(0, 217, 8):
        output = prepared(manager, chain[: step + 8])
        count += len(output.keys_to_store)
        manager.complete_store(output.keys_to_store, A)
    assert prepared(manager, chain).keys_to_store == []
    assert count == 217
    assert hits(manager, chain) == 217


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_the_tail_of_a_prefix_goes_first_whatever_order_its_stores_end_in_E14(
    order: tuple[int, ...],
) -> None:
    for need, victims in ((1, "d"), (2, "dc"), (3, "dcb")):
        manager = HostOffloadingManager(4)
        chain = keys(*"abcd")
        prepared(manager, chain)
        for index in order:
            manager.complete_store([chain[index]], A)
        for length in (1, 3, 2):  # touches of single steps change nothing
            manager.touch(chain[:length], A)
        manager.release(A)
        output = prepared(manager, keys(*range(need)), B)
        assert output.evicted_keys == keys(*victims)


def test_the_tail_goes_first_when_the_prefix_was_stored_in_steps_E14() -> None:
    manager = HostOffloadingManager(4)
    for part in (keys("a", "b"), keys("c", "d")):
        manager.complete_store(prepared(manager, part).keys_to_store, A)
    manager.release(A)
    assert prepared(manager, keys(1, 2, 3), B).evicted_keys == keys("d", "c", "b")


def test_the_tail_goes_first_when_the_head_was_touched_last_E14() -> None:
    manager = HostOffloadingManager(4)
    manager.complete_store(prepared(manager, keys("c", "d")).keys_to_store, A)
    manager.complete_store(prepared(manager, keys(*"abcd")).keys_to_store, A)
    manager.release(A)
    assert prepared(manager, keys(1, 2, 3), B).evicted_keys == keys("d", "c", "b")


def test_the_request_that_was_served_longest_ago_goes_first() -> None:
    manager = HostOffloadingManager(4)
    stored(manager, keys("a1", "a2"), A)
    stored(manager, keys("b1", "b2"), B)
    manager.lookup(keys("a1", "a2"), C)
    manager.release(C)
    assert prepared(manager, keys(1, 2), A).evicted_keys == keys("b2", "b1")


def test_counts_balance_after_loads_that_use_a_part_E22() -> None:
    manager = HostOffloadingManager(5)
    chain = keys(*range(5))
    stored(manager, chain)
    for context in (A, B):  # the second identical request finds everything too
        assert manager.lookup(chain, context).hits == 5
        manager.prepare_load(chain[:3], context)
        manager.complete_load(chain[:3], context)
        manager.release(context)
        manager.release(context)  # works twice, counts once
        assert manager.usage() == Usage(capacity=5, free=0, evictable=5, in_use=0)
    assert hits(manager, chain) == 5


def test_a_completion_too_many_is_an_error_and_changes_nothing_E22() -> None:
    manager = HostOffloadingManager(2)
    stored(manager, keys(1))
    manager.lookup(keys(1), A)
    manager.prepare_load(keys(1), A)
    manager.complete_load(keys(1), A)
    before = manager.usage()
    with pytest.raises(UnknownTransferError):
        manager.complete_load(keys(1), A)
    with pytest.raises(UnknownTransferError):
        manager.complete_store(keys(1), A)
    output = prepared(manager, keys(2))
    with pytest.raises(UnknownTransferError):
        manager.complete_store(keys(2, 3), A)
    assert manager.usage().in_use == before.in_use + 1
    manager.complete_store(output.keys_to_store, A)


def test_empty_chunks_are_used_before_any_key_goes_E25() -> None:
    manager = HostOffloadingManager(4)
    stored(manager, keys(1, 2, 3), A)
    output = prepared(manager, keys(4), B)
    manager.complete_store(output.keys_to_store, B, success=False)
    assert prepared(manager, keys(5), B).evicted_keys == []
    assert hits(manager, keys(1, 2, 3)) == 3


@pytest.mark.parametrize("capacity", [0, -1, [], True, 4.5, "4", ["4"], [4, 0], [4, 2.0], None])
def test_a_capacity_below_one_chunk_is_refused_F07(capacity: object) -> None:
    with pytest.raises(CapacityError, match="at least 1"):
        HostOffloadingManager(capacity)  # type: ignore[arg-type]


def test_a_capacity_may_be_any_whole_number() -> None:
    assert HostOffloadingManager(np.int64(4)).usage().capacity == 4  # type: ignore[arg-type]


@pytest.mark.parametrize("group", [-1, 2, 99])
def test_a_key_of_an_unknown_group_is_refused_and_changes_nothing(group: int) -> None:
    manager = HostOffloadingManager([4, 4])
    key = OffloadKey(b"a", group)
    with pytest.raises(UnknownGroupError, match=f"group {group}"):
        manager.prepare_store([OffloadKey(b"b", 0), key], A)
    assert manager.lookup([key], A).hits == 0
    manager.touch([key], A)
    assert manager.usage().in_use == 0


def test_a_capacity_of_billions_costs_nothing() -> None:
    manager = HostOffloadingManager(1 << 40)
    assert stored(manager, keys(1, 2)).store_spec.block_ids.tolist() == [0, 1]


def test_a_request_that_outgrows_the_pool_keeps_the_head_of_its_prefix() -> None:
    manager = HostOffloadingManager(4)
    stored(manager, keys("x", "y"), B)
    for part in (keys("a", "b"), keys("c"), keys("d")):
        manager.complete_store(prepared(manager, part).keys_to_store, A)
    assert hits(manager, keys("a", "b", "c", "d")) == 4


def test_keys_may_come_from_a_generator() -> None:
    manager = HostOffloadingManager(4)
    stored(manager, keys(1, 2))
    assert manager.lookup((key for key in keys(1, 2)), A).hits == 2  # type: ignore[arg-type]


def test_a_store_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    manager = HostOffloadingManager(3)
    stored(manager, keys(1, 2, 3))
    manager.lookup(keys(1), A)
    before = manager.usage()
    assert manager.prepare_store(keys(4, 5, 6), B) is None
    assert manager.usage() == before
    assert hits(manager, keys(1, 2, 3)) == 3


def test_loading_what_is_not_in_place_is_an_error_and_changes_nothing() -> None:
    manager = HostOffloadingManager(3)
    stored(manager, keys(1))
    prepared(manager, keys(2), B)
    before = manager.usage()
    for names in (keys(1, 2), keys(1, 9)):
        with pytest.raises(KeyNotReadyError):
            manager.prepare_load(names, A)
    assert manager.usage() == before


def test_a_failed_load_is_not_offered_again() -> None:
    manager = HostOffloadingManager(3)
    stored(manager, keys(1, 2))
    for context in (A, B):
        manager.lookup(keys(1, 2), context)
        manager.prepare_load(keys(1, 2), context)
    manager.complete_load(keys(1, 2), A, success=False)
    assert hits(manager, keys(1, 2)) == 0
    assert manager.usage().free == 1, "the other request is still reading the chunks"
    manager.complete_load(keys(1, 2), B)
    assert manager.usage() == Usage(capacity=3, free=3, evictable=0, in_use=0)


def test_a_promise_of_a_chunk_that_was_stored_anew_is_given_back() -> None:
    manager = HostOffloadingManager(3)
    stored(manager, keys(1))
    manager.lookup(keys(1), A)
    manager.prepare_load(keys(1), A)
    manager.lookup(keys(1), B)
    manager.complete_load(
        keys(1), A, success=False
    )  # B's promise is void: the bytes are not trusted
    with pytest.raises(KeyNotReadyError):
        manager.prepare_load(keys(1), B)
    stored(manager, keys(1), C)
    manager.prepare_load(keys(1), B)
    manager.complete_load(keys(1), B)
    manager.release(B)
    assert manager.usage() == Usage(capacity=3, free=2, evictable=1, in_use=0)


def test_reset_forgets_everything_and_waits_for_what_is_in_use() -> None:
    manager = HostOffloadingManager(4)
    stored(manager, keys(1, 2))
    manager.lookup(keys(1), A)
    manager.prepare_load(keys(1), A)
    storing = prepared(manager, keys(3), B)
    manager.lookup(keys(2), C)
    manager.reset()
    assert hits(manager, keys(1, 2, 3)) == 0
    assert manager.usage() == Usage(capacity=4, free=2, evictable=0, in_use=2)
    with pytest.raises(KeyNotReadyError):
        manager.prepare_load(keys(2), C)
    again = prepared(manager, keys(3), C)  # the same key, while its old store still runs
    manager.complete_store(storing.keys_to_store, B)
    assert hits(manager, keys(3)) == 0, "the old store must not make the new key visible"
    manager.complete_store(again.keys_to_store, C)
    manager.complete_load(keys(1), A)
    assert manager.usage() == Usage(capacity=4, free=3, evictable=1, in_use=0)


def test_the_same_request_stores_again_after_a_reset() -> None:
    manager = HostOffloadingManager(4)
    prepared(manager, keys(1), A)
    manager.reset()
    prepared(manager, keys(1), A)
    manager.complete_store(keys(1), A)  # ends the older transfer, which was first submitted
    assert hits(manager, keys(1)) == 0
    manager.complete_store(keys(1), A)
    assert hits(manager, keys(1)) == 1


def test_groups_that_share_no_tensors_have_chunk_ids_of_their_own() -> None:
    manager = HostOffloadingManager([2, 2], pool_of_group=[0, 1])
    wide = [OffloadKey(b"a", 0), OffloadKey(b"b", 0)]
    narrow = [OffloadKey(b"a", 1), OffloadKey(b"b", 1)]
    first = prepared(manager, wide, A)
    second = prepared(manager, narrow, B)
    assert sorted(first.store_spec.block_ids.tolist()) == [0, 1]
    assert sorted(second.store_spec.block_ids.tolist()) == [0, 1]
    manager.complete_store(wide, A)
    manager.complete_store(narrow, B)
    output = prepared(manager, [OffloadKey(b"c", 1)], C)
    assert output.evicted_keys == [OffloadKey(b"b", 1)]


def test_chunks_of_one_store_ascend_so_that_neighbours_coalesce() -> None:
    manager = HostOffloadingManager(8)
    stored(manager, keys(*range(8)), A)
    output = prepared(manager, keys(*"abcdefgh"), B)
    assert output.store_spec.block_ids.tolist() == list(range(8))
