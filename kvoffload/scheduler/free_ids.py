"""Ids that nobody uses, however many there are."""

from __future__ import annotations

from collections.abc import Iterable


class FreeIds:
    """The ids ``0 … count - 1``, given out and taken back.

    Ids that were used before are given out first, so that memory behind the others stays untouched.
    It costs what is in use, and not what could be.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._untouched = 0  # the first that was never given out
        self._returned: list[int] = []

    def __len__(self) -> int:
        return len(self._returned) + self._count - self._untouched

    def take(self, count: int) -> list[int]:
        """So many ids, ascending, so that neighbours coalesce. There must be as many."""
        used = min(count, len(self._returned))
        ids = sorted(self._returned[len(self._returned) - used :])
        del self._returned[len(self._returned) - used :]
        first, self._untouched = self._untouched, self._untouched + count - used
        return ids + list(range(first, self._untouched))

    def give_back(self, ids: Iterable[int]) -> None:
        """Nobody uses these any more."""
        self._returned.extend(ids)
