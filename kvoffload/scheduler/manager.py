"""What an engine's scheduler asks: what can be loaded, where to store, what to evict."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvoffload.core.specs import HostLoadStoreSpec
from kvoffload.scheduler.keys import OffloadKey


@dataclass(frozen=True)
class RequestContext:
    """Who asks.

    Attributes:
        request_id: unique among the requests that are running.
    """

    request_id: str


class KeyState(Enum):
    """What is known of one key, without a promise to anybody."""

    MISSING = "missing"
    PENDING = "pending"  # being stored
    READY = "ready"  # its bytes are in place


@dataclass(frozen=True)
class LookupResult:
    """What can be loaded.

    Attributes:
        hits: length of the leading run of keys whose bytes are in place. They are promised to the
            request: none is evicted before its load is complete or the promise is released.
        pending: the run ended at a key that is being stored; asking again later may find more.
    """

    hits: int
    pending: bool


@dataclass(frozen=True)
class PrepareStoreOutput:
    """Where to store.

    Attributes:
        keys_to_store: the keys that are neither stored nor being stored, in the order given.
        store_spec: their chunks, in the same order.
        evicted_keys: what went to make room.
    """

    keys_to_store: list[OffloadKey]
    store_spec: HostLoadStoreSpec
    evicted_keys: list[OffloadKey]


@dataclass(frozen=True)
class Usage:
    """Chunks by state; ``free + evictable + in_use == capacity`` after every operation."""

    capacity: int
    free: int
    evictable: int
    in_use: int


class OffloadingManager(ABC):
    """Keeps account of what is offloaded. It moves no bytes and never waits.

    For one request the calls come as ``lookup → prepare_load → complete_load`` and ``prepare_store
    → complete_store``, each pair around a transfer, and ``release`` at its end. Keys are given from
    the head of the prefix to its tail.
    """

    @abstractmethod
    def lookup(self, keys: Sequence[OffloadKey], context: RequestContext) -> LookupResult:
        """How many leading keys can be loaded; they are promised to the request.

        A request's later lookup replaces its earlier promise.
        """

    @abstractmethod
    def prepare_load(
        self, keys: Sequence[OffloadKey], context: RequestContext
    ) -> HostLoadStoreSpec:
        """The chunks of ``keys``, in use until :meth:`complete_load`.

        Raises:
            KeyNotReadyError: a key's bytes are not in place, or not any more: a promise is void
                after a reset, and after a failed load of the same chunk. Nothing has changed.
        """

    @abstractmethod
    def complete_load(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        """The load has ended. The chunks of a failed load are not trusted again: lookups miss, and
        what was promised to others of them is void.

        Raises:
            UnknownTransferError: the request is not loading one of the keys. Nothing has changed.
        """

    @abstractmethod
    def prepare_store(
        self, keys: Sequence[OffloadKey], context: RequestContext
    ) -> PrepareStoreOutput | None:
        """Chunks for the keys that are not stored yet; invisible until :meth:`complete_store`.

        No key of the call is evicted by it, and none in use.

        Returns:
            None if there is no room for all of them. Nothing has changed.
        """

    @abstractmethod
    def complete_store(
        self, keys: Sequence[OffloadKey], context: RequestContext, success: bool = True
    ) -> None:
        """The store has ended on every rank: the keys are visible now, or their chunks free again.

        Raises:
            UnknownTransferError: the request is not storing one of the keys. Nothing has changed.
        """

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey], context: RequestContext) -> None:
        """The request uses these keys, wherever they are; unknown ones are ignored."""

    @abstractmethod
    def release(self, context: RequestContext) -> None:
        """The request is over, or will not load what it looked up. Works twice.

        Its transfers in flight still have to be completed.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forget every key: all lookups miss from now on, and promises are void.

        Chunks in use are free when their transfers are complete, which they still have to be.
        """

    @abstractmethod
    def usage(self) -> Usage:
        """Chunks by state."""
