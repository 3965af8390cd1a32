"""The manager of host memory in vLLM's terms: key by key, and by the bytes of a key.

Nothing here imports vLLM. Three things differ from the manager underneath:

* vLLM asks for one key at a time, and loads what it found before it stores anything else. So a
  lookup promises nothing; a load does.
* After a reset vLLM never tells how the transfers ended that ran before it. Their chunks are given
  back by :meth:`HostChunks.settle`; the core lets no later transfer overtake them.
* vLLM does not say that a transfer failed. Whoever knows says so with :meth:`HostChunks.distrust`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvoffload.core.specs import IntArray
from kvoffload.scheduler.host_manager import HostOffloadingManager
from kvoffload.scheduler.keys import OffloadKey
from kvoffload.scheduler.manager import KeyState, RequestContext
from kvoffload.scheduler.policy import CachePolicy

RawKey = bytes
"""A key as vLLM has it: the hash of a chunk's content, and its group in the last four bytes."""


@dataclass(frozen=True)
class KeyEvent:
    """Keys that lookups find from now on, or no more.

    Attributes:
        keys: in the order in which it happened.
        removed: no more.
    """

    keys: list[RawKey]
    removed: bool


@dataclass(frozen=True)
class StoreOutput:
    """Where to store.

    Attributes:
        keys: those that are neither stored nor being stored, in the order given.
        chunk_ids: int64, one for each.
        evicted: what went to make room.
    """

    keys: list[RawKey]
    chunk_ids: IntArray
    evicted: list[RawKey]


@dataclass
class ChunkCounts:
    """What happened since it was last asked for.

    Attributes:
        allocations: chunks asked for, by each call that asked for any.
        skipped: chunks not stored because they had not been offered often enough.
        failed_loads, failed_stores: transfers that failed.
    """

    allocations: list[int] = field(default_factory=list)
    skipped: int = 0
    failed_loads: int = 0
    failed_stores: int = 0


@dataclass(frozen=True)
class ChunkUsage:
    """Parts of all chunks, from 0 to 1, that transfers hold now."""

    reading: float
    writing: float


_Transfers = dict[tuple[RequestContext, RawKey], None]


class HostChunks:
    """Keeps account of the chunks in host memory.

    Args:
        chunks: how many there are; all groups share them.
        groups: vLLM's numbers of the groups.
        policy: makes the order of eviction.
        events: note what becomes visible and what goes.
        store_threshold: store a chunk when it is offered for the so-manieth time.
        max_tracker_size: keys whose offers are counted.
    """

    def __init__(
        self,
        chunks: int,
        groups: Sequence[int],
        policy: Callable[[], CachePolicy],
        *,
        events: bool = False,
        store_threshold: int = 0,
        max_tracker_size: int = 1,
    ) -> None:
        self._manager = HostOffloadingManager(
            [chunks] * len(groups), pool_of_group=[0] * len(groups), policy=policy
        )
        self._capacity = chunks
        self._group_of = {number.to_bytes(4, "big"): index for index, number in enumerate(groups)}
        self._events: list[KeyEvent] | None = [] if events else None
        self._threshold = store_threshold
        self._max_tracked = max_tracker_size
        self._offers: OrderedDict[RawKey, int] = OrderedDict()
        self._generation = 0
        self._loading: _Transfers = {}
        self._storing: _Transfers = {}
        self._stale_loads: _Transfers = {}
        self._stale_stores: _Transfers = {}
        self._distrusted: set[tuple[str, RawKey, bool]] = set()
        self._counts = ChunkCounts()

    def _key(self, raw: RawKey) -> OffloadKey:
        return OffloadKey(raw, self._group_of[raw[-4:]])

    def _keys(self, raws: Collection[RawKey]) -> list[OffloadKey]:
        return [self._key(raw) for raw in raws]

    def _context(self, request_id: str) -> RequestContext:
        # What a request did before a reset is nothing that its later calls may complete.
        return RequestContext(f"{request_id}#{self._generation}")

    def state(self, key: RawKey) -> KeyState:
        """What is known of the key; nothing is promised."""
        return self._manager.state(self._key(key))

    def prepare_load(
        self, keys: Sequence[RawKey], request_id: str, by_place: Sequence[RawKey] | None = None
    ) -> IntArray:
        """The chunks of ``keys``, in use until :meth:`complete_load`.

        Args:
            keys: in the order in which their chunks are wanted.
            request_id: whose they are.
            by_place: the same keys from the head of the prefix to its tail, if that differs.

        Raises:
            KeyNotReadyError: a key's bytes are not in place. Nothing has changed.
        """
        context = self._context(request_id)
        spec = self._manager.prepare_load(self._keys(keys), context)
        self._loading.update(((context, key), None) for key in keys)
        self._manager.touch(self._keys(by_place or keys), context)
        return spec.block_ids

    def complete_load(self, keys: Collection[RawKey], request_id: str) -> None:
        """The load has ended; what was distrusted is not found any more."""
        context = self._context(request_id)
        good, bad = self._judged(keys, request_id, is_store=False)
        for key in keys:
            self._loading.pop((context, key), None)
        self._manager.complete_load(self._keys(good), context)
        found = [key for key in bad if self.state(key) is KeyState.READY]
        self._manager.complete_load(self._keys(bad), context, success=False)
        # Not what was stored anew since the load began.
        gone = [key for key in found if self.state(key) is KeyState.MISSING]
        self._note(gone, removed=True)

    def prepare_store(
        self, keys: Sequence[RawKey], request_id: str, by_place: Sequence[RawKey] | None = None
    ) -> StoreOutput | None:
        """Chunks for the keys that are not stored yet.

        Args:
            keys, request_id, by_place: as in :meth:`prepare_load`.

        Returns:
            None if there is no room for all of them. Nothing has changed.
        """
        context = self._context(request_id)
        wanted = self._offered_enough(keys)
        new = sum(self.state(key) is KeyState.MISSING for key in dict.fromkeys(wanted))
        if new:
            self._counts.allocations.append(new)
        ordered = wanted
        if by_place is not None:
            chosen = set(wanted)
            ordered = [key for key in by_place if key in chosen]
        output = self._manager.prepare_store(self._keys(ordered), context)
        if output is None:
            return None
        # vLLM wants them in its own order.
        pairs = zip(output.keys_to_store, output.store_spec.block_ids.tolist(), strict=True)
        found = {key.block_hash: chunk for key, chunk in pairs}
        stored = [key for key in dict.fromkeys(wanted) if key in found]
        evicted = [key.block_hash for key in output.evicted_keys]
        self._storing.update(((context, key), None) for key in stored)
        self._note(evicted, removed=True)
        ids = np.array([found[key] for key in stored], dtype=np.int64)
        return StoreOutput(stored, ids, evicted)

    def complete_store(
        self, keys: Collection[RawKey], request_id: str, success: bool = True
    ) -> None:
        """The store has ended: its keys are visible now, or their chunks free again."""
        context = self._context(request_id)
        good, bad = self._judged(keys, request_id, is_store=True)
        if not success:
            good, bad = [], list(keys)
        for key in keys:
            self._storing.pop((context, key), None)
        self._manager.complete_store(self._keys(good), context)
        self._manager.complete_store(self._keys(bad), context, success=False)
        self._note(good, removed=False)

    def distrust(self, keys: Collection[RawKey], request_id: str, *, is_store: bool) -> None:
        """A transfer of these keys has failed on some worker: do not believe its completion."""
        named = {(request_id, key, is_store) for key in keys}
        if named <= self._distrusted:
            return  # another worker said so
        self._distrusted |= named
        if is_store:
            self._counts.failed_stores += 1
        else:
            self._counts.failed_loads += 1

    def _judged(
        self, keys: Collection[RawKey], request_id: str, *, is_store: bool
    ) -> tuple[list[RawKey], list[RawKey]]:
        """The keys of a transfer that can be believed, and the others."""
        if not self._distrusted:
            return list(keys), []
        good: list[RawKey] = []
        bad: list[RawKey] = []
        for key in keys:
            name = (request_id, key, is_store)
            (bad if name in self._distrusted else good).append(key)
            self._distrusted.discard(name)
        return good, bad

    def _offered_enough(self, keys: Sequence[RawKey]) -> list[RawKey]:
        """Count one more offer of each; those that are stored, or are to be."""
        if self._threshold < 2:
            return list(keys)
        offers = self._offers
        for key in dict.fromkeys(keys):
            offers[key] = offers.pop(key, 0) + 1
        enough = [
            key
            for key in keys
            if offers[key] >= self._threshold or self.state(key) is not KeyState.MISSING
        ]
        self._counts.skipped += len(keys) - len(enough)
        while len(offers) > self._max_tracked:
            offers.popitem(last=False)
        return enough

    def finish(self, request_id: str) -> None:
        """The request is over; its transfers in flight still have to be completed."""
        self._manager.release(self._context(request_id))

    def reset(self) -> None:
        """Forget every key. Transfers in flight hold their chunks until :meth:`settle`."""
        self._note([key.block_hash for key in self._manager.contents()], removed=True)
        self._manager.reset()
        self._stale_loads |= self._loading
        self._stale_stores |= self._storing
        self._loading, self._storing = {}, {}
        self._distrusted.clear()
        self._offers.clear()
        self._generation += 1

    def settle(self) -> None:
        """What ran before the last reset has ended, or will before anything later begins."""
        for context, key in self._stale_loads:
            self._manager.complete_load([self._key(key)], context, success=False)
        for context, key in self._stale_stores:
            self._manager.complete_store([self._key(key)], context, success=False)
        self._stale_loads, self._stale_stores = {}, {}

    def _note(self, keys: list[RawKey], *, removed: bool) -> None:
        if keys and self._events is not None:
            self._events.append(KeyEvent(keys, removed))

    def take_events(self) -> list[KeyEvent]:
        """What became visible and what went since the last call, in order."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    def take_counts(self) -> ChunkCounts:
        """What happened since the last call."""
        counts, self._counts = self._counts, ChunkCounts()
        return counts

    def usage(self) -> ChunkUsage:
        """What transfers hold now."""
        writing = len(self._storing) + len(self._stale_stores)
        reading = self._manager.usage().in_use - writing
        return ChunkUsage(reading / self._capacity, writing / self._capacity)
