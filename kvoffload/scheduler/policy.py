"""Which chunk goes when space is short."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kvoffload.scheduler.keys import OffloadKey


class CachePolicy(Protocol):
    """An order of eviction. It holds keys only; what may be evicted is the manager's to say."""

    def access(self, request_id: str, keys: Sequence[OffloadKey]) -> None:
        """``request_id`` uses ``keys``, given from the head of its prefix to the tail."""

    def victims(
        self, count: int, evictable: Callable[[OffloadKey], bool]
    ) -> list[OffloadKey] | None:
        """The ``count`` keys to evict first among the evictable ones; None if there are fewer."""

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """The keys are gone; unknown ones are ignored."""

    def finish(self, request_id: str) -> None:
        """The request is over; its keys stay. Unknown requests are ignored."""

    def clear(self) -> None:
        """All keys are gone."""


class LRUPolicy:
    """Least recently used request first, and of one request the tail of the prefix first.

    A prefix is worth nothing without its head, so recency belongs to requests and not to chunks:
    keys are kept per request that used them last, in the order of the prefix. One request counts
    as one access, however many calls it makes and in whatever order its transfers end.

    Access, forget and finish cost O(1) per key. Victims cost O(1) each plus the keys in use that
    are passed over on the way.
    """

    def __init__(self) -> None:
        # Cold to hot. The number is that of the access, since a request's name may come again.
        self._accesses: OrderedDict[int, OrderedDict[OffloadKey, None]] = OrderedDict()
        self._access_of: dict[OffloadKey, int] = {}
        self._running: dict[str, int] = {}
        self._numbers = itertools.count()

    def access(self, request_id: str, keys: Sequence[OffloadKey]) -> None:
        if not keys:
            return
        number = self._running.get(request_id)
        if number is None or number not in self._accesses:
            number = next(self._numbers)
            self._running[request_id] = number
            self._accesses[number] = OrderedDict()
        mine = self._accesses[number]
        self._accesses.move_to_end(number)
        # A call that names all the request's keys sets their order; one that names a part extends.
        whole = len(keys) > len(mine) and mine.keys() <= set(keys)
        for key in keys:
            before = self._access_of.get(key)
            if before == number:
                if whole:
                    mine.move_to_end(key)
                continue
            if before is not None:
                self._remove(key, before)
            mine[key] = None
            self._access_of[key] = number

    def _remove(self, key: OffloadKey, number: int) -> None:
        keys = self._accesses[number]
        del keys[key]
        if not keys:
            del self._accesses[number]

    def victims(
        self, count: int, evictable: Callable[[OffloadKey], bool]
    ) -> list[OffloadKey] | None:
        if count == 0:
            return []
        found = []
        for keys in self._accesses.values():
            for key in reversed(keys):
                if evictable(key):
                    found.append(key)
                    if len(found) == count:
                        return found
        return None

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            number = self._access_of.pop(key, None)
            if number is not None:
                self._remove(key, number)

    def finish(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def clear(self) -> None:
        self._accesses.clear()
        self._access_of.clear()
        self._running.clear()
