"""Ctrl-C, as the command line takes it.

Only what the interpreter itself needs is imported here: the handler is in place before anything
else is loaded.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType


class Interrupt:
    """What Ctrl-C has asked for so far; it is the signal's handler.

    The first only sets a flag, which is acted on where that tears nothing. The second raises
    KeyboardInterrupt, once. What comes later is ignored, so that nothing tears the cleaning up.
    """

    def __init__(self) -> None:
        # Plain attributes: a lock could be held by the very code that the handler interrupts.
        self._asked = False
        self._may_raise = True
        self._at_once = False

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        first, self._asked = not self._asked, True
        if self._may_raise and (self._at_once or not first):
            self._may_raise = False
            raise KeyboardInterrupt

    def is_set(self) -> bool:
        """Somebody wants to end this. Stays true."""
        return self._asked

    def check(self) -> None:
        """Raise KeyboardInterrupt if somebody wants to end this."""
        if self._asked:
            self._may_raise = False
            raise KeyboardInterrupt

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within, the first raises already: nothing is in flight that it could tear."""
        self._at_once = True
        try:
            self.check()
            yield
        finally:
            self._at_once = False

    def calm(self) -> None:
        """From here on none raises: what is left is short and must be whole."""
        self._may_raise = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within, it handles Ctrl-C and is :func:`current`; the handler of before comes back.

        Python lets only its main thread handle signals; elsewhere this changes no handler.
        """
        token = _current.set(self)
        # None: a handler that Python did not set, and could not put back.
        before = signal.getsignal(signal.SIGINT)
        handles = before is not None and threading.current_thread() is threading.main_thread()
        if handles:
            signal.signal(signal.SIGINT, self)
        try:
            yield
        finally:
            if handles:
                signal.signal(signal.SIGINT, before)
            _current.reset(token)


# Of its own in each thread, as callers of main() in several threads are strangers to each other.
_current: ContextVar[Interrupt] = ContextVar("kvoffload-interrupt")


def current() -> Interrupt:
    """The one that the running command is to look at."""
    return _current.get(Interrupt())
