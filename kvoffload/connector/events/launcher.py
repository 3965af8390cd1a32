"""Launching off the engine's thread."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

from kvoffload.core.errors import ClosedError

logger = logging.getLogger(__name__)

Launch: TypeAlias = Callable[[], None]


class Launcher(ABC):
    """Runs launches in their order, some time after they were handed over."""

    @abstractmethod
    def submit(self, launch: Launch) -> None:
        """Have it run; returns at once.

        Raises:
            ClosedError: after :meth:`close`.
        """

    @abstractmethod
    def drain(self) -> None:
        """Block until everything that was handed over has been launched."""

    @abstractmethod
    def close(self) -> None:
        """:meth:`drain`, and give the thread back. Works twice."""


class ThreadLauncher(Launcher):
    """One daemon thread, started with the first launch."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Launch | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, launch: Launch) -> None:
        if self._closed:
            raise ClosedError("the launcher was closed")
        if self._thread is None:
            # The thread holds the queue alone, so that it keeps no connector alive.
            self._thread = threading.Thread(
                target=_work_off, args=(self._queue,), name="kvoffload-launcher", daemon=True
            )
            self._thread.start()
        self._queue.put(launch)

    def drain(self) -> None:
        if self._thread is not None and not self._closed:
            reached = threading.Event()
            self._queue.put(reached.set)
            reached.wait()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            if self._thread is not None:
                self._thread.join()


def _work_off(queue: SimpleQueue[Launch | None]) -> None:
    while True:
        launch = queue.get()
        if launch is None:
            return
        try:
            launch()
        except BaseException:
            # Launches report their own failures; the thread must outlive whatever else comes.
            logger.exception("a launch was broken off")
        del launch  # it holds caches
