"""How far the events of one direction have come."""

from __future__ import annotations

from collections import deque

from kvoffload.connector.events.metadata import NO_EVENT


class Direction:
    """The event indices of one direction: bound, ended, reported.

    An index ends when the last of its transfers has. Those of a direction run in order, so that the
    mark, up to which all have ended, is all that most need to be asked for; one with nothing to
    move does not wait for those before it.
    """

    def __init__(self) -> None:
        self.mark = NO_EVENT
        """Every index up to this one has ended."""
        self._bound: deque[int] = deque()  # above the mark, oldest first
        self._open: dict[int, int] = {}  # transfers that have not ended
        self._failed: set[int] = set()
        self._ended: dict[int, int] = {}  # not reported yet
        self._failures: dict[int, int] = {}

    @property
    def pending(self) -> list[int]:
        """Indices that were bound and have not ended."""
        return list(self._open)

    def bind(self, index: int, transfers: int) -> None:
        """A step carries this index; none has carried it before."""
        self._bound.append(index)
        if transfers:
            self._open[index] = transfers
        else:
            self._end(index)

    def settle(self, index: int, success: bool) -> bool:
        """One of its transfers has ended; whether that was the last."""
        if not success:
            self._failed.add(index)
        self._open[index] -= 1
        if self._open[index]:
            return False
        del self._open[index]
        self._end(index)
        return True

    def _end(self, index: int) -> None:
        self._ended[index] = 1
        if index in self._failed:
            self._failed.discard(index)
            self._failures[index] = 1
        while self._bound and self._bound[0] not in self._open:
            self.mark = self._bound.popleft()

    @property
    def unreported(self) -> bool:
        """Something has ended that was not taken."""
        return bool(self._ended)

    def take(self) -> tuple[dict[int, int], dict[int, int]]:
        """``{index: 1}`` of all that have ended since, and of those that failed; once."""
        taken = self._ended, self._failures
        self._ended, self._failures = {}, {}
        return taken
