"""Thread streams and events keep the promises of device streams and events."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from kvoffload.backends import thread_base
from kvoffload.backends.thread_base import ThreadBackend, ThreadEvent, ThreadStream
from kvoffload.core.errors import CopyError


@pytest.fixture
def stream() -> Iterator[ThreadStream]:
    made = ThreadStream("kvoffload-test")
    yield made
    made.close()


def fail() -> None:
    raise CopyError("made to fail")


def test_work_runs_in_order_on_one_thread(stream: ThreadStream) -> None:
    seen: list[tuple[int, str]] = []

    def note(number: int) -> None:
        seen.append((number, threading.current_thread().name))

    for number in range(100):
        stream.submit(partial(note, number))
    stream.synchronize()
    assert seen == [(n, "kvoffload-test") for n in range(100)]


def test_an_event_that_was_never_recorded_is_done() -> None:
    event = ThreadEvent()
    assert event.query()
    event.synchronize()


def test_an_error_belongs_to_the_next_event_and_no_other(stream: ThreadStream) -> None:
    events = [ThreadEvent() for _ in range(3)]
    ran: list[int] = []
    stream.record_event(events[0])
    stream.submit(fail)
    stream.submit(lambda: ran.append(1))  # skipped: it is part of what failed
    stream.record_event(events[1])
    stream.submit(lambda: ran.append(2))
    stream.record_event(events[2])
    stream.synchronize()
    assert events[0].query()
    with pytest.raises(CopyError):
        events[1].query()
    assert events[2].query()
    assert ran == [2]


def test_a_wait_is_for_the_recording_it_saw(stream: ThreadStream) -> None:
    gate = threading.Event()
    other = ThreadStream("kvoffload-other")
    event = ThreadEvent()
    other.record_event(event)
    stream.wait_event(event)  # this recording, which comes at once
    other.submit(lambda: thread_base.void(gate.wait()))
    other.record_event(event)  # and not the later one, which needs the gate
    stream.synchronize()
    assert not event.query()
    gate.set()
    other.close()


def test_seconds_are_those_between_the_events(
    stream: ThreadStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    start, end = ThreadEvent(), ThreadEvent()
    next(clock)
    stream.record_event(start)
    stream.submit(lambda: thread_base.void([next(clock) for _ in range(5)]))
    stream.record_event(end)
    stream.synchronize()
    assert start.elapsed_time(end) == 6000


def test_closing_joins_the_thread_after_its_work(stream: ThreadStream) -> None:
    ran: list[int] = []
    stream.submit(lambda: ran.append(1))
    stream.close()
    stream.close()
    assert ran == [1]
    assert "kvoffload-test" not in [t.name for t in threading.enumerate()]


class Nothing(ThreadBackend):
    """The base, with nothing of its own."""

    def probe(self) -> object:  # type: ignore[override]
        raise NotImplementedError

    def swap_blocks(self, plan: object, stream: object, keep: object) -> None:
        raise NotImplementedError


def test_the_caller_is_its_own_stream_unless_it_names_one(stream: ThreadStream) -> None:
    backend = Nothing()
    event = backend.new_event()
    backend.current_stream().record_event(event)
    assert event.query()
    gate = threading.Event()
    with backend.use_stream(stream):
        stream.submit(lambda: thread_base.void(gate.wait()))
        backend.current_stream().record_event(event)
        assert not event.query()
        seen: list[object] = []
        thread = threading.Thread(target=lambda: seen.append(backend.current_stream()))
        thread.start()
        thread.join()
        assert seen[0] is not stream, "the current stream is the thread's own"
    assert backend.current_stream() is not stream
    gate.set()
    backend.current_stream().wait_event(event)
    assert event.query()


def test_an_event_of_another_kind_is_waited_for(stream: ThreadStream) -> None:
    class Foreign:
        def __init__(self) -> None:
            self.reached = threading.Event()

        def synchronize(self) -> None:
            self.reached.wait()

    foreign, mine = Foreign(), ThreadEvent()
    stream.wait_event(foreign)
    stream.record_event(mine)
    assert not mine.query()
    foreign.reached.set()
    mine.synchronize()
    assert mine.query()
