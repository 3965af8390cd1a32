"""Streams and events on worker threads: a base for whatever torch has no streams for.

A :class:`ThreadStream` is a first-in-first-out queue that one thread works off. A backend on this
base implements ``probe`` and ``swap_blocks``, and enqueues its copy with ``stream.submit(work)``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch

from kvoffload.core.backend import Backend, Capabilities, Stream
from kvoffload.core.errors import ClosedError
from kvoffload.core.lanes import Lane

Work: TypeAlias = Callable[[], None]


class _DiedError(RuntimeError):
    """A piece of work raised what would have ended its thread."""


class _Latch:
    """Set once. As ``threading.Event``, at a fraction of what that takes to make."""

    def __init__(self) -> None:
        self._set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        if not self._set:
            self._set = True
            self._lock.release()

    def wait(self, timeout: float = -1) -> bool:
        """Block until it is set, or for so many seconds; whether it is."""
        if not self._set and self._lock.acquire(timeout=timeout):
            self._lock.release()  # whoever waits as well is next
        return self._set


class _Point:
    """One recording of an event. Whoever waits holds the point, so that recording the event again
    does not disturb an earlier wait."""

    def __init__(self) -> None:
        self.reached = _Latch()
        self.error: Exception | None = None
        self.seconds = 0.0

    def reach(self, error: Exception | None = None) -> None:
        self.error = error
        self.seconds = time.perf_counter()
        self.reached.set()


class ThreadEvent:
    """A point in a thread stream's work; unrecorded it counts as done, as ``torch.Event`` does."""

    def __init__(self) -> None:
        self.point = _Point()
        self.point.reach()

    def query(self) -> bool:
        """False while running, True when done; raises the error of the work before it."""
        point = self.point
        if not point.reached.is_set():
            return False
        if point.error is not None:
            raise point.error
        return True

    def synchronize(self) -> None:
        """Block until the work before it is done or has failed; :meth:`query` tells which."""
        self.point.reached.wait()

    def elapsed_time(self, end: ThreadEvent) -> float:
        """Milliseconds from this event to ``end``, on the host's monotonic clock."""
        return (end.point.seconds - self.point.seconds) * 1e3


class ThreadStream:
    """A queue of work that one daemon thread runs in order.

    An error is told by the next event recorded after the work that failed; work in between is
    skipped.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._error: Exception | None = None
        self._spoilt = False  # work has failed, or was skipped, since the error
        self._closed = False
        # The thread holds the queue and not the stream, so that it ends with a stream nobody holds.
        self._thread = threading.Thread(
            target=_work_off, args=(self._queue,), name=name, daemon=True
        )
        self._thread.start()

    def __del__(self) -> None:
        self._queue.put(None)

    def _enqueue(self, step: Work) -> None:
        if self._closed:
            raise ClosedError(f"the stream {self._thread.name} was closed")
        self._queue.put(step)

    def _attempt(self, work: Work) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the thread must outlive anything
            self._error = error if isinstance(error, Exception) else _DiedError(repr(error))

    def submit(self, work: Work) -> None:
        """Run ``work`` on the stream's thread after everything enqueued before.

        What it raises fails the job that it belongs to, and no later one.

        Raises:
            ClosedError: after :meth:`close`; as for all else that enqueues.
        """

        def step() -> None:
            if self._error is None:
                self._attempt(work)
            self._spoilt = self._error is not None

        self._enqueue(step)

    def record_event(self, event: ThreadEvent) -> ThreadEvent:
        """Reach ``event`` after the stream's work so far, with that work's error if it had one."""
        point = event.point = _Point()

        def step() -> None:
            point.reach(self._error)
            if self._spoilt:
                self._error, self._spoilt = None, False

        self._enqueue(step)
        return event

    def wait_event(self, event: Any) -> None:
        """Start later work after ``event``; an event of another kind is synchronised with.

        Where that fails, the work that waited for it is skipped, and its event tells why.
        """
        if isinstance(event, ThreadEvent):
            reached = event.point.reached
            if not reached.is_set():  # waking the thread for nothing costs more than looking
                self._enqueue(lambda: void(reached.wait()))
        else:
            self._enqueue(lambda: self._attempt(event.synchronize))

    def synchronize(self) -> None:
        """Block until the stream's work so far is done or has failed."""
        if self._closed:
            return  # it was finished before the thread was joined
        reached = threading.Event()
        self._enqueue(reached.set)
        reached.wait()

    def close(self) -> None:
        """Finish what is enqueued and join the thread. Works twice."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()


def _work_off(queue: SimpleQueue[Work | None]) -> None:
    while True:
        step = queue.get()
        if step is None:
            return
        step()
        del step  # it holds the stream


def void(_: object) -> None:
    """Drop a value, where only the doing counts."""


class CallerStream:
    """The calling thread itself as a stream: what it did before is done, and it waits by blocking.

    The current stream of a thread that computes on the host and named no other.
    """

    def record_event(self, event: ThreadEvent) -> ThreadEvent:
        """Reach ``event`` at once: the caller's earlier work is done."""
        event.point = _Point()
        event.point.reach()
        return event

    def wait_event(self, event: Any) -> None:
        """Block the calling thread until ``event``."""
        event.synchronize()


class ThreadBackend(Backend):
    """Base of a backend whose streams are worker threads.

    Its device is ``cpu``, since that is where torch sees memory that the host can address.
    """

    device = torch.device("cpu")
    capabilities = Capabilities(asynchronous=True, timing_events=True)
    copy_threads: int = 1
    """Threads that copy in one direction: what a benchmark compares with."""

    def __init__(self) -> None:
        self.streams: dict[Lane, ThreadStream] = {}
        """Those that were asked for and are open."""
        self._current = threading.local()

    def new_stream(self, lane: Lane) -> ThreadStream:
        if lane not in self.streams:
            self.streams[lane] = ThreadStream(f"kvoffload-{lane.value}")
        return self.streams[lane]

    def new_event(self) -> ThreadEvent:
        return ThreadEvent()

    def current_stream(self) -> Stream:
        stream: Stream = getattr(self._current, "stream", None) or CallerStream()
        return stream

    @contextlib.contextmanager
    def use_stream(self, stream: Stream) -> Iterator[None]:
        """Make ``stream`` the calling thread's current stream within a ``with`` block."""
        before = getattr(self._current, "stream", None)
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def close(self) -> None:
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.close()
