"""Which chunk goes when space is short."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvoffload.scheduler.keys import OffloadKey


class CachePolicy(Protocol):
    """An order of eviction. It holds keys only; their owner says which are in use."""

    def access(self, request_id: str, keys: Sequence[OffloadKey]) -> None:
        """``request_id`` uses ``keys``, given from the head of its prefix to the tail."""

    def hold(self, key: OffloadKey) -> None:
        """The key is in use: it is no victim. Keys are in use until :meth:`free` says otherwise."""

    def free(self, key: OffloadKey) -> None:
        """The key is not in use any more."""

    def victims(
        self, count: int, spared: Collection[OffloadKey], request_id: str
    ) -> list[OffloadKey] | None:
        """The ``count`` keys to evict first, for ``request_id``; None if there are fewer."""

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """The keys are gone; unknown ones are ignored."""

    def finish(self, request_id: str) -> None:
        """The request is over; its keys stay. Unknown requests are ignored."""

    def clear(self) -> None:
        """All keys are gone."""


@dataclass(eq=False)
class _Access:
    """The keys that one request was the last to use, by their place in its prefix."""

    stamp: int = 0  # the greater, the later it was
    keys: dict[OffloadKey, int] = field(default_factory=dict)
    idle: int = 0  # those that are not in use
    sorted: bool = True


@dataclass(eq=False)
class _Running:
    """A request that may use more keys."""

    access: _Access
    places: dict[OffloadKey, int] = field(default_factory=dict)  # all keys it ever used
    taken: set[OffloadKey] = field(default_factory=set)  # those that others used since


class LRUPolicy:
    """Least recently used request first, and of one request the tail of the prefix first.

    A prefix is worth nothing without its head, so recency belongs to requests and not to chunks.
    One request counts as one access, however many calls it makes and in whatever order its
    transfers end: with each, its whole prefix is as recent as the call. What a request itself has
    used is evicted for it only when nothing else is left.

    Calls cost O(1) per key they name. A victim costs O(log requests), and the keys in use that lie
    behind it in the prefix of its own request.
    """

    def __init__(self) -> None:
        self._access_of: dict[OffloadKey, _Access] = {}
        self._in_use: set[OffloadKey] = set()
        self._running: dict[str, _Running] = {}
        self._owner: dict[_Access, _Running] = {}
        # (stamp, tie, access), the coldest first; an entry is void when the stamp has moved on.
        self._cold: list[tuple[int, int, _Access]] = []
        self._stamps = itertools.count(1)

    def access(self, request_id: str, keys: Sequence[OffloadKey]) -> None:
        if not keys:
            return
        running = self._running.get(request_id)
        if running is None:
            running = self._running[request_id] = _Running(_Access())
            self._owner[running.access] = running
        places = running.places
        if len(keys) > len(places) and places.keys() <= set(keys):
            # A call that names all the request's keys sets their order.
            places.update((key, place) for place, key in enumerate(keys))
            running.access.sorted = False
        mine = running.access
        mine.stamp = next(self._stamps)
        for key in (*keys, *running.taken):
            place = places.setdefault(key, len(places))
            before = self._access_of.get(key)
            if before is not mine:
                if before is not None:
                    self._remove(key, before)
                    owner = self._owner.get(before)
                    if owner is not None:
                        owner.taken.add(key)
                elif key in running.taken:
                    continue  # it was evicted
                self._access_of[key] = mine
                mine.idle += key not in self._in_use
                mine.sorted = False
            mine.keys[key] = place
        running.taken.clear()
        self._note(mine)

    def _remove(self, key: OffloadKey, access: _Access) -> None:
        del access.keys[key]
        access.idle -= key not in self._in_use

    def _note(self, access: _Access) -> None:
        """Let the access be found when victims are wanted."""
        if access.idle:
            heapq.heappush(self._cold, (access.stamp, id(access), access))
            if len(self._cold) > 4 * len(self._access_of) + 64:
                live = {id(entry[2]): entry for entry in self._cold if self._is_live(entry)}
                self._cold = sorted(live.values())

    @staticmethod
    def _is_live(entry: tuple[int, int, _Access]) -> bool:
        stamp, _, access = entry
        return stamp == access.stamp and access.idle > 0

    def hold(self, key: OffloadKey) -> None:
        self._in_use.add(key)
        access = self._access_of.get(key)
        if access is not None:
            access.idle -= 1

    def free(self, key: OffloadKey) -> None:
        self._in_use.discard(key)
        access = self._access_of.get(key)
        if access is not None:
            access.idle += 1
            if access.idle == 1:
                self._note(access)

    def victims(
        self, count: int, spared: Collection[OffloadKey], request_id: str
    ) -> list[OffloadKey] | None:
        found: list[OffloadKey] = []
        looked_at: dict[int, tuple[int, int, _Access]] = {}
        running = self._running.get(request_id)
        own = None if running is None else running.access
        while len(found) < count and self._cold:
            entry = heapq.heappop(self._cold)
            if self._is_live(entry) and id(entry[2]) not in looked_at:
                looked_at[id(entry[2])] = entry
                if entry[2] is not own:
                    self._add_victims(found, count, entry[2], spared)
        if own is not None and id(own) in looked_at:
            self._add_victims(found, count, own, spared)
        for entry in looked_at.values():
            heapq.heappush(self._cold, entry)
        return found if len(found) == count else None

    def _add_victims(
        self, found: list[OffloadKey], count: int, access: _Access, spared: Collection[OffloadKey]
    ) -> None:
        if not access.sorted:
            access.keys = dict(sorted(access.keys.items(), key=lambda item: item[1]))
            access.sorted = True
        for key in reversed(access.keys):
            if len(found) == count:
                return
            if key not in self._in_use and key not in spared:
                found.append(key)

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            access = self._access_of.pop(key, None)
            if access is not None:
                self._remove(key, access)
            self._in_use.discard(key)

    def finish(self, request_id: str) -> None:
        running = self._running.pop(request_id, None)
        if running is not None:
            del self._owner[running.access]

    def clear(self) -> None:
        self._access_of.clear()
        self._in_use.clear()
        self._running.clear()
        self._owner.clear()
        self._cold.clear()
