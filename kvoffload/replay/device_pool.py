"""The engine's own cache: device blocks with prefix reuse and LRU eviction."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.scheduler.free_ids import FreeIds
from kvoffload.scheduler.keys import OffloadKey
from kvoffload.scheduler.policy import LRUPolicy


class DevicePool:
    """Device blocks, found by key.

    Args:
        num_blocks: how many there are.
    """

    def __init__(self, num_blocks: int) -> None:
        self._blocks: dict[OffloadKey, int] = {}
        self._users: dict[OffloadKey, int] = {}
        self._free = FreeIds(num_blocks)
        self._policy = LRUPolicy()

    def prefix(self, keys: Sequence[OffloadKey]) -> int:
        """Length of the longest prefix that is resident."""
        for length, key in enumerate(keys):
            if key not in self._blocks:
                return length
        return len(keys)

    def fits(self, keys: Sequence[OffloadKey]) -> bool:
        """All of ``keys`` can be resident without taking a block that is in use."""
        named = set(keys)
        resident = [key for key in named if key in self._blocks]
        spared = sum(key not in self._users for key in resident)
        idle = len(self._blocks) - len(self._users) - spared
        return len(named) - len(resident) <= len(self._free) + idle

    def acquire(self, request_id: str, keys: Sequence[OffloadKey]) -> list[int]:
        """The block of each key, kept until :meth:`release`; those not resident get new blocks."""
        new = [key for key in keys if key not in self._blocks]
        short = max(len(new) - len(self._free), 0)
        victims = self._policy.victims(short, set(keys), request_id)
        if victims is None:
            raise ValueError("ask fits() first")
        self._policy.forget(victims)
        self._free.give_back(self._blocks.pop(key) for key in victims)
        self._blocks.update(zip(new, self._free.take(len(new)), strict=True))
        for key in keys:
            users = self._users[key] = self._users.get(key, 0) + 1
            if users == 1:
                self._policy.hold(key)
        self._policy.access(request_id, keys)
        return [self._blocks[key] for key in keys]

    def release(self, request_id: str, keys: Sequence[OffloadKey]) -> None:
        """The request is over; its blocks stay resident until they are evicted."""
        for key in keys:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._policy.free(key)
        self._policy.finish(request_id)
