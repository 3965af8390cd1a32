"""The manager of host memory."""

from __future__ import annotations

import operator
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvoffload.core.errors import (
    CapacityError,
    KeyNotReadyError,
    UnknownGroupError,
    UnknownTransferError,
)
from kvoffload.core.specs import HostLoadStoreSpec
from kvoffload.scheduler.free_ids import FreeIds
from kvoffload.scheduler.keys import OffloadKey
from kvoffload.scheduler.manager import (
    KeyState,
    LookupResult,
    OffloadingManager,
    PrepareStoreOutput,
    RequestContext,
    Usage,
)
from kvoffload.scheduler.policy import CachePolicy, LRUPolicy


@dataclass(slots=True, eq=False)
class _Chunk:
    """A chunk with content, or with content to come."""

    key: OffloadKey
    chunk_id: int
    ref_cnt: int  # promises, loads, and the store
    ready: bool = False  # its bytes are in place
    known: bool = True  # lookups may find it; not so after a reset or a failure


@dataclass(eq=False)
class _Pool:
    """Chunk ids of the groups that share tensors."""

    capacity: int
    policy: CachePolicy
    free: FreeIds
    evictable: int = 0
    in_use: int = 0


_Transfers: TypeAlias = defaultdict[tuple[str, OffloadKey], deque[_Chunk]]


@dataclass(eq=False)
class _Moving:
    """The chunks of each (request, key) that are moving in one direction, oldest first."""

    chunks: _Transfers = field(default_factory=lambda: defaultdict(deque))

    def begin(self, context: RequestContext, chunk: _Chunk) -> None:
        self.chunks[context.request_id, chunk.key].append(chunk)

    def end(self, keys: Sequence[OffloadKey], context: RequestContext, verb: str) -> list[_Chunk]:
        names = [(context.request_id, key) for key in keys]
        for name in set(names):
            if len(self.chunks.get(name, ())) < names.count(name):
                raise UnknownTransferError(
                    f"request {context.request_id!r} is not {verb} {name[1]}"
                )
        ended = []
        for name in names:
            ended.append(self.chunks[name].popleft())
            if not self.chunks[name]:
                del self.chunks[name]
        return ended


def _whole_numbers(values: int | Sequence[int]) -> list[int]:
    """One number for each group; none if something else is among them."""
    listed = values if isinstance(values, Sequence) else [values]
    try:
        return [operator.index(value) for value in listed if not isinstance(value, bool)]
    except TypeError:
        return []


class HostOffloadingManager(OffloadingManager):
    """Keeps chunks of host memory, and evicts by a policy.

    Args:
        num_chunks: chunk ids per group, as ``OffloadingWorker.num_chunks`` gives them, or one
            number for a single group.
        pool_of_group: groups with the same number share chunk ids.
        policy: makes the order of eviction, one for each pool.

    Raises:
        CapacityError: a group has no chunks.
    """

    def __init__(
        self,
        num_chunks: int | Sequence[int],
        *,
        pool_of_group: Sequence[int] | None = None,
        policy: Callable[[], CachePolicy] = LRUPolicy,
    ) -> None:
        per_group = _whole_numbers(num_chunks)
        if not per_group or min(per_group) < 1:
            raise CapacityError(
                f"num_chunks must be a whole number of at least 1 for every group, "
                f"not {num_chunks!r}"
            )
        pools = [0] * len(per_group) if pool_of_group is None else [int(p) for p in pool_of_group]
        if len(pools) != len(per_group):
            raise CapacityError(f"{len(per_group)} num_chunks for {len(pools)} pool_of_group")
        by_number: dict[int, _Pool] = {}
        for capacity, number in zip(per_group, pools, strict=True):
            pool = by_number.setdefault(number, _Pool(capacity, policy(), FreeIds(capacity)))
            if pool.capacity != capacity:
                raise CapacityError(
                    f"groups of pool {number} have {pool.capacity} and {capacity} chunks"
                )
        self._pools = list(by_number.values())
        self._pool_of_group = [by_number[number] for number in pools]
        self._chunks: dict[OffloadKey, _Chunk] = {}
        self._promised: dict[str, dict[OffloadKey, _Chunk]] = {}
        self._loads = _Moving()
        self._stores = _Moving()

    def _pool(self, key: OffloadKey) -> _Pool:
        if not 0 <= key.group < len(self._pool_of_group):
            raise UnknownGroupError(
                f"{key} is of group {key.group}; there are {len(self._pool_of_group)}, from 0"
            )
        return self._pool_of_group[key.group]

    def _acquire(self, chunk: _Chunk) -> None:
        if chunk.ref_cnt == 0:
            pool = self._pool(chunk.key)
            pool.evictable -= 1
            pool.in_use += 1
            pool.policy.hold(chunk.key)
        chunk.ref_cnt += 1

    def _release(self, chunk: _Chunk) -> None:
        chunk.ref_cnt -= 1
        if chunk.ref_cnt == 0:
            pool = self._pool(chunk.key)
            pool.in_use -= 1
            if chunk.known:
                pool.evictable += 1
                pool.policy.free(chunk.key)
            else:
                pool.free.give_back([chunk.chunk_id])

    def _disown(self, chunk: _Chunk) -> None:
        """Lookups find the chunk no more; it is in use, and free once it is not."""
        if chunk.known:
            chunk.known = False
            del self._chunks[chunk.key]
            self._pool(chunk.key).policy.forget([chunk.key])

    def _access(self, keys: Sequence[OffloadKey], context: RequestContext) -> None:
        for pool in self._pools:
            pool.policy.access(
                context.request_id,
                [key for key in keys if key in self._chunks and self._pool(key) is pool],
            )

    def lookup(self, keys: Sequence[OffloadKey], context: RequestContext) -> LookupResult:
        keys = list(keys)
        promised: dict[OffloadKey, _Chunk] = {}
        pending = False
        hits = 0
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is None or not chunk.ready:
                pending = chunk is not None
                break
            if key not in promised:
                promised[key] = chunk
                self._acquire(chunk)
            hits += 1
        # The new promise is made before the old one is dropped: what is in both stays in use.
        before = self._promised.pop(context.request_id, {})
        if promised:
            self._promised[context.request_id] = promised
        for chunk in before.values():
            self._release(chunk)
        self._access(keys[:hits], context)
        return LookupResult(hits, pending)

    def prepare_load(
        self, keys: Sequence[OffloadKey], context: RequestContext
    ) -> HostLoadStoreSpec:
        promised = self._promised.get(context.request_id, {})
        chunks = [self._chunks.get(key) for key in keys]
        ready = [chunk for chunk in chunks if chunk is not None and chunk.ready]
        if len(ready) < len(keys):
            missing = next(
                key for key, c in zip(keys, chunks, strict=True) if c is None or not c.ready
            )
            raise KeyNotReadyError(
                f"request {context.request_id!r} cannot load {missing}: its bytes are not in place"
            )
        for chunk in ready:
            self._acquire(chunk)
            self._loads.begin(context, chunk)
            before = promised.pop(chunk.key, None)
            if before is not None:
                self._release(before)  # not always the same chunk: it may have been stored anew
        if not promised:
            self._promised.pop(context.request_id, None)
        return HostLoadStoreSpec([chunk.chunk_id for chunk in ready])

    def complete_load(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        for chunk in self._loads.end(keys, context, "loading"):
            if not success:
                self._disown(chunk)
            self._release(chunk)

    def prepare_store(
        self, keys: Sequence[OffloadKey], context: RequestContext
    ) -> PrepareStoreOutput | None:
        named = dict.fromkeys(keys)
        new = [key for key in named if key not in self._chunks]
        victims: list[OffloadKey] = []
        for pool in self._pools:
            short = sum(self._pool(key) is pool for key in new) - len(pool.free)
            if short <= 0:
                continue
            found = pool.policy.victims(short, named, context.request_id)
            if found is None:
                return None
            victims += found
        for key in victims:
            chunk = self._chunks.pop(key)
            pool = self._pool(key)
            pool.policy.forget([key])
            pool.evictable -= 1
            pool.free.give_back([chunk.chunk_id])
        chunk_ids = self._take_chunks(new)
        for key, chunk_id in zip(new, chunk_ids, strict=True):
            chunk = self._chunks[key] = _Chunk(key, chunk_id, ref_cnt=1)
            self._pool(key).in_use += 1
            self._pool(key).policy.hold(key)
            self._stores.begin(context, chunk)
        self._access(list(named), context)
        return PrepareStoreOutput(new, HostLoadStoreSpec(chunk_ids), victims)

    def _take_chunks(self, keys: Sequence[OffloadKey]) -> list[int]:
        """A free chunk for each key, ascending within a pool."""
        taken = {
            id(pool): iter(pool.free.take(sum(self._pool(key) is pool for key in keys)))
            for pool in self._pools
        }
        return [next(taken[id(self._pool(key))]) for key in keys]

    def complete_store(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        for chunk in self._stores.end(keys, context, "storing"):
            chunk.ready = True
            if not success:
                self._disown(chunk)
            self._release(chunk)

    def touch(self, keys: Sequence[OffloadKey], context: RequestContext) -> None:
        self._access(keys, context)

    def release(self, context: RequestContext) -> None:
        for chunk in self._promised.pop(context.request_id, {}).values():
            self._release(chunk)
        for pool in self._pools:
            pool.policy.finish(context.request_id)

    def reset(self) -> None:
        for chunk in self._chunks.values():
            chunk.known = False
            if chunk.ref_cnt == 0:
                pool = self._pool(chunk.key)
                pool.evictable -= 1
                pool.free.give_back([chunk.chunk_id])
        self._chunks.clear()
        for pool in self._pools:
            pool.policy.clear()
        promised, self._promised = self._promised, {}
        for chunks in promised.values():
            for chunk in chunks.values():
                self._release(chunk)

    def state(self, key: OffloadKey) -> KeyState:
        """What a lookup of this key would find; nothing is promised, and nothing counts as used.

        For an engine that asks key by key, and loads before it stores anything else.
        """
        chunk = self._chunks.get(key)
        if chunk is None:
            return KeyState.MISSING
        return KeyState.READY if chunk.ready else KeyState.PENDING

    def contents(self) -> dict[OffloadKey, int]:
        """The chunk id of every key that lookups find."""
        return {key: chunk.chunk_id for key, chunk in self._chunks.items() if chunk.ready}

    def usage(self) -> Usage:
        # Each is counted by itself, so that a chunk lost on the way shows.
        return Usage(
            capacity=sum(pool.capacity for pool in self._pools),
            free=sum(len(pool.free) for pool in self._pools),
            evictable=sum(pool.evictable for pool in self._pools),
            in_use=sum(pool.in_use for pool in self._pools),
        )
