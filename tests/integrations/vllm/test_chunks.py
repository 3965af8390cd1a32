"""The manager in vLLM's terms, sentence by sentence."""

from __future__ import annotations

import pytest

from kvoffload.core.errors import KeyNotReadyError
from kvoffload.integrations.vllm.chunks import HostChunks, KeyEvent, StoreOutput
from kvoffload.scheduler.manager import KeyState
from kvoffload.scheduler.policy import LRUPolicy


def raw(*names: object, group: int = 0) -> list[bytes]:
    return [str(name).encode() + group.to_bytes(4, "big") for name in names]


def make(chunks: int = 4, groups: tuple[int, ...] = (0,), **options: int) -> HostChunks:
    return HostChunks(chunks, groups, LRUPolicy, events=True, **options)


def prepared(chunks: HostChunks, keys: list[bytes], request: str = "a") -> StoreOutput:
    output = chunks.prepare_store(keys, request)
    assert output is not None
    return output


def stored(chunks: HostChunks, keys: list[bytes], request: str = "a") -> StoreOutput:
    output = prepared(chunks, keys, request)
    chunks.complete_store(set(output.keys), request)
    chunks.finish(request)
    return output


def test_a_key_is_pending_until_its_store_is_complete() -> None:
    chunks = make()
    assert chunks.state(raw(1)[0]) is KeyState.MISSING
    prepared(chunks, raw(1))
    assert chunks.state(raw(1)[0]) is KeyState.PENDING
    with pytest.raises(KeyNotReadyError):
        chunks.prepare_load(raw(1), "b")
    chunks.complete_store(raw(1), "a")
    assert chunks.state(raw(1)[0]) is KeyState.READY


def test_keys_keep_their_order_and_groups_share_the_chunks() -> None:
    chunks = make(4, groups=(0, 3))
    keys = raw(1, 2) + raw(1, 2, group=3)
    output = stored(chunks, keys)
    assert output.keys == keys
    assert sorted(output.chunk_ids.tolist()) == [0, 1, 2, 3]
    assert chunks.prepare_store(raw(5, 6, 7, 8, 9), "b") is None, "more than there are"
    assert chunks.prepare_load(keys[::-1], "b").tolist() == output.chunk_ids.tolist()[::-1]


def test_what_was_loaded_last_is_evicted_last() -> None:
    chunks = make(4)
    stored(chunks, raw(1, 2), "a")
    stored(chunks, raw(3, 4), "b")
    chunks.prepare_load(raw(1, 2), "c")
    chunks.complete_load(raw(1, 2), "c")
    assert stored(chunks, raw(5), "d").evicted == raw(4)


def test_the_tail_goes_first_in_whatever_groups_it_is() -> None:
    chunks = make(4, groups=(0, 1))
    head, tail = raw(1) + raw(1, group=1), raw(2) + raw(2, group=1)
    keys = [head[0], tail[0], head[1], tail[1]]
    output = chunks.prepare_store(keys, "a", by_place=head + tail)
    assert output is not None
    chunks.complete_store(keys, "a")
    chunks.finish("a")
    assert set(stored(chunks, raw(8, 9), "b").evicted) == set(tail)


def test_a_failed_store_is_seen_by_nobody() -> None:
    chunks = make(1)
    prepared(chunks, raw(1))
    chunks.distrust(raw(1), "a", is_store=True)
    chunks.complete_store(raw(1), "a")
    assert chunks.state(raw(1)[0]) is KeyState.MISSING
    assert chunks.take_events() == []
    assert stored(chunks, raw(2)).evicted == [], "its chunk was lost"
    prepared(chunks, raw(1), "b")
    chunks.complete_store(raw(1), "b", success=False)
    assert chunks.take_counts().failed_stores == 1


def test_a_failed_load_is_not_trusted_again_and_others_of_its_request_are() -> None:
    chunks = make()
    stored(chunks, raw(1, 2, 3))
    chunks.take_events()
    chunks.prepare_load(raw(1, 2, 3), "b")
    for _ in range(2):  # two workers say so
        chunks.distrust(raw(2), "b", is_store=False)
    chunks.complete_load(set(raw(1, 2, 3)), "b")
    assert [chunks.state(key) for key in raw(1, 2, 3)] == [
        KeyState.READY,
        KeyState.MISSING,
        KeyState.READY,
    ]
    assert chunks.take_events() == [KeyEvent(raw(2), removed=True)]
    assert chunks.take_counts().failed_loads == 1
    assert chunks.usage().reading == 0


def test_what_was_stored_anew_during_a_load_that_fails_stays() -> None:
    chunks = make()
    stored(chunks, raw(1))
    for request in "bc":
        chunks.prepare_load(raw(1), request)
        chunks.distrust(raw(1), request, is_store=False)
    chunks.complete_load(raw(1), "b")
    stored(chunks, raw(1), "d")
    chunks.take_events()
    chunks.complete_load(raw(1), "c")
    assert chunks.state(raw(1)[0]) is KeyState.READY
    assert chunks.take_events() == []


def test_events_come_once_each_and_in_order() -> None:
    chunks = make(2)
    stored(chunks, raw(1, 2), "a")
    stored(chunks, raw(2), "b")
    stored(chunks, raw(3), "c")
    chunks.reset()
    events = chunks.take_events()
    assert [(set(event.keys), event.removed) for event in events] == [
        (set(raw(1, 2)), False),
        (set(raw(1)), True),
        (set(raw(3)), False),
        (set(raw(2, 3)), True),
    ]
    assert chunks.take_events() == []


@pytest.mark.parametrize("late", [False, True])
def test_a_reset_during_transfers_gives_all_chunks_back(late: bool) -> None:
    chunks = make(3)
    stored(chunks, raw(1))
    chunks.prepare_load(raw(1), "b")
    prepared(chunks, raw(2), "b")
    chunks.reset()
    if not late:
        chunks.settle()
    assert chunks.state(raw(1)[0]) is KeyState.MISSING
    # The same request goes on with the same keys; what it did before is nothing to it.
    output = prepared(chunks, raw(2), "b")
    if late:
        assert output.chunk_ids.tolist() == [2], "a chunk that is still written was given out"
        chunks.settle()
    chunks.complete_store(raw(2), "b")
    chunks.prepare_load(raw(2), "b")
    chunks.complete_load(raw(2), "b")
    chunks.finish("b")
    assert chunks.state(raw(2)[0]) is KeyState.READY
    assert (chunks.usage().reading, chunks.usage().writing) == (0, 0)
    assert len(stored(chunks, raw(4, 5, 6), "c").keys) == 3


def test_a_chunk_is_stored_when_it_was_offered_often_enough() -> None:
    chunks = make(4, store_threshold=2, max_tracker_size=2)
    assert prepared(chunks, raw(1, 2)).keys == []
    assert prepared(chunks, raw(1)).keys == raw(1)
    assert chunks.take_counts().skipped == 2
    assert prepared(chunks, raw(3, 4)).keys == [], "1 and 2 are not counted any more"
    assert prepared(chunks, raw(2)).keys == []


def test_usage_tells_reading_from_writing() -> None:
    chunks = make(4)
    stored(chunks, raw(1))
    chunks.prepare_load(raw(1), "b")
    prepared(chunks, raw(2, 3), "b")
    usage = chunks.usage()
    assert (usage.reading, usage.writing) == (0.25, 0.5)
    assert chunks.take_counts().allocations == [1, 2]
