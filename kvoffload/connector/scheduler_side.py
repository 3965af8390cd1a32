"""What the scheduler sides of both protocols share: what a step moves, and how it ends."""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from kvoffload.connector.worker_side import blocks_by_group
from kvoffload.core.errors import BlockCountError, BlockRangeError
from kvoffload.core.specs import BlockIds, DeviceLoadStoreSpec, IntArray, LoadStoreSpec, as_ids
from kvoffload.scheduler.keys import OffloadKey
from kvoffload.scheduler.manager import LookupResult, OffloadingManager, RequestContext

logger = logging.getLogger(__name__)

M = TypeVar("M")
R = TypeVar("R")


@dataclass
class Outcome:
    """What ended on every worker.

    Attributes:
        loaded: requests all of whose loads have ended. They can go on; what a failed load left
            without content is to be computed first.
        invalid_blocks: by request, of each group the blocks that a failed load left without
            content.
        stored: keys that lookups find from now on.
        not_stored: keys whose store has failed.
        released: requests that had finished, and whose blocks are free from now on.
    """

    loaded: list[str] = field(default_factory=list)
    invalid_blocks: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    stored: list[OffloadKey] = field(default_factory=list)
    not_stored: list[OffloadKey] = field(default_factory=list)
    released: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Request:
    """One that has transfers."""

    request_id: str
    context: RequestContext
    loads: int = 0  # in flight, that it waits for or that write to its blocks
    held: bool = False  # it has finished, and its blocks are not free before its loads have ended


@dataclass(eq=False)
class Planned:
    """A transfer, from its planning until every worker has ended it.

    Attributes:
        number: its own.
        is_load: or a store.
        request: whom it serves.
        keys: what it moves.
        src, dst: from where to where.
        blocks: it reads or writes these on the device.
        orphaned: nobody waits for it any more.
    """

    number: int
    is_load: bool
    request: Request
    keys: list[OffloadKey]
    src: LoadStoreSpec
    dst: LoadStoreSpec
    blocks: frozenset[int]
    orphaned: bool = False


@dataclass(frozen=True, eq=False)
class _Offer:
    """What could not be stored yet, since there was no room."""

    request: Request
    keys: list[OffloadKey]
    blocks: IntArray
    sources: frozenset[int]


class BaseSchedulerSide(ABC, Generic[M, R]):
    """Makes one metadata a step out of what the engine asks for, and keeps the manager's account.

    Within a step's scheduling, call :meth:`allocated` for every block that is given to somebody,
    whatever for, before :meth:`load` and :meth:`store` name it. A block id means the same block in
    every group.

    Args:
        manager: of what is offloaded.
        workers: that report; ranks that do not write, or have no layers, count.
        groups: of layers.
        block_size_factor: device blocks per chunk.
        null_block: the block that stands for "nothing here", where the engine has one.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        *,
        groups: int,
        block_size_factor: int,
        null_block: int | None,
    ) -> None:
        self.manager = manager
        self._groups = groups
        self._factor = block_size_factor
        self._null = null_block
        self._numbers = itertools.count(1)
        self._requests: dict[str, Request] = {}
        self._loads: list[Planned] = []  # of this step
        self._stores: list[Planned] = []
        self._offers: deque[_Offer] = deque()
        self._handed_out: dict[int, Planned] = {}
        self._flush: dict[int, Planned] = {}

    # --------------------------------------------------------------------------- what is wanted
    def lookup(self, request_id: str, keys: Sequence[OffloadKey]) -> LookupResult:
        """How many leading keys can be loaded; see :meth:`OffloadingManager.lookup`."""
        return self.manager.lookup(keys, self._request(request_id).context)

    def load(self, request_id: str, keys: Sequence[OffloadKey], target: DeviceLoadStoreSpec) -> int:
        """Load chunks in this step; the request waits until :meth:`update` names it.

        Args:
            request_id: whom it serves.
            keys: looked up before, group after group.
            target: blocks that were allocated for it.

        Returns:
            The transfer's number.

        Raises:
            KeyNotReadyError: a key's bytes are not in place, or not any more.
            BlockRangeError: the null block is among the blocks.
        """
        blocks = frozenset(target.block_ids.tolist())
        if self._null in blocks:
            raise BlockRangeError(f"block {self._null} is the null block; nothing is loaded there")
        request = self._request(request_id)
        source = self.manager.prepare_load(keys, request.context)
        self.allocated(blocks)
        planned = Planned(next(self._numbers), True, request, list(keys), source, target, blocks)
        request.loads += 1
        self._loads.append(planned)
        return planned.number

    def store(self, request_id: str, keys: Sequence[OffloadKey], blocks: BlockIds) -> int | None:
        """Store chunks whose last block this step computes.

        What is stored already, or being stored, is left out, and so are chunks with a null block in
        them. Where there is no room now, it is tried again in later steps, as long as the request
        keeps the blocks.

        Args:
            request_id: who computes them.
            keys: of whole chunks, in any order.
            blocks: ``block_size_factor`` of each key, key after key.

        Returns:
            The transfer's number; None if nothing is stored in this step.

        Raises:
            BlockCountError: there are not as many blocks.
        """
        ids = as_ids(blocks, "blocks").reshape(-1)
        if len(ids) != len(keys) * self._factor:
            raise BlockCountError(
                f"{len(ids)} blocks for {len(keys)} chunks of {self._factor} blocks"
            )
        rows = ids.reshape(-1, self._factor)
        if self._null is not None:
            whole = np.flatnonzero((rows != self._null).all(axis=1))
            keys, rows = [keys[i] for i in whole.tolist()], rows[whole]
        if not keys:
            return None
        offer = _Offer(
            self._request(request_id), list(keys), rows, frozenset(rows.reshape(-1).tolist())
        )
        planned = self._take(offer)
        if planned is None:
            self._offers.append(offer)
        return planned.number if planned is not None and planned.keys else None

    def _take(self, offer: _Offer) -> Planned | None:
        """Plan the offer's store; None if there is no room for it."""
        output = self.manager.prepare_store(offer.keys, offer.request.context)
        if output is None:
            return None
        place: dict[OffloadKey, int] = {}
        for row, key in enumerate(offer.keys):
            place.setdefault(key, row)
        # Group after group, as a transfer has it.
        order = sorted(
            range(len(output.keys_to_store)), key=lambda i: output.keys_to_store[i].group
        )
        keys = [output.keys_to_store[i] for i in order]
        rows = offer.blocks[[place[key] for key in keys]].reshape(-1)
        sizes = np.bincount([key.group for key in keys], minlength=self._groups) * self._factor
        planned = Planned(
            next(self._numbers),
            False,
            offer.request,
            keys,
            DeviceLoadStoreSpec(rows, sizes),
            type(output.store_spec)(output.store_spec.block_ids[order]),
            frozenset(rows.tolist()),
        )
        if keys:
            self._stores.append(planned)
        return planned

    # ------------------------------------------------------------------------ what happens there
    def allocated(self, block_ids: Iterable[int]) -> None:
        """These blocks are given to somebody: a request, another transfer, whatever for.

        Transfers in flight that use them are waited for before the step runs. What was to be stored
        from them and has not begun is not stored.
        """
        ids = set(block_ids) - {self._null}
        for planned in self._handed_out.values():
            if not planned.blocks.isdisjoint(ids):
                self._flush[planned.number] = planned
        for planned in [p for p in self._stores if not p.blocks.isdisjoint(ids)]:
            self._drop_store(planned)
        if self._offers:
            self._offers = deque(o for o in self._offers if o.sources.isdisjoint(ids))

    def preempted(self, request_id: str) -> None:
        """The request loses its blocks, and will begin again later."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._drop_plans(request)
        for planned in self._handed_out.values():
            if planned.request is request:
                planned.orphaned = True
                self._flush[planned.number] = planned
        self.manager.release(request.context)

    def request_finished(self, request_id: str, *, aborted: bool = False) -> bool:
        """The request is over. Works twice.

        Args:
            request_id: whose.
            aborted: it ended early: what this step was to compute for it is not computed.

        Returns:
            Whether its blocks must be kept, until :meth:`update` says that they are released: a
            load still writes to them. Stores that read from them are seen to by :meth:`allocated`.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        if request.held:
            return True
        self._drop_plans(request, stores=aborted)
        for planned in self._handed_out.values():
            if planned.request is request:
                planned.orphaned = True
        self.manager.release(request.context)
        request.held = request.loads > 0
        if not request.held:
            del self._requests[request_id]
        return request.held

    def _request(self, request_id: str) -> Request:
        request = self._requests.get(request_id)
        if request is None or request.held:
            request = Request(request_id, RequestContext(request_id))
            self._requests[request_id] = request
        return request

    def _drop_plans(self, request: Request, *, stores: bool = True) -> None:
        """What the request wanted in this step, or when there is room, is not begun."""
        for planned in [p for p in self._stores if stores and p.request is request]:
            self._drop_store(planned)
        for planned in [p for p in self._loads if p.request is request]:
            self._loads.remove(planned)
            request.loads -= 1
            self.manager.complete_load(planned.keys, request.context)
        self._offers = deque(o for o in self._offers if o.request is not request)

    def _drop_store(self, planned: Planned) -> None:
        self._stores.remove(planned)
        self.manager.complete_store(planned.keys, planned.request.context, success=False)

    def reset(self) -> None:
        """Forget all that is offloaded; transfers in flight end as always."""
        self._offers.clear()
        self.manager.reset()

    # ------------------------------------------------------------------------------------ a step
    def build_metadata(self) -> M:
        """What every worker is told of this step; once a step, after its scheduling."""
        while self._offers and self._take(self._offers[0]) is not None:
            self._offers.popleft()
        loads, self._loads = self._loads, []
        stores, self._stores = self._stores, []
        flush = [p for p in self._flush.values() if p.number in self._handed_out]
        self._flush.clear()
        metadata = self._hand_out(loads, stores, flush)
        self._handed_out.update((planned.number, planned) for planned in (*loads, *stores))
        return metadata

    @abstractmethod
    def _hand_out(
        self, loads: Sequence[Planned], stores: Sequence[Planned], flush: Sequence[Planned]
    ) -> M:
        """The step's metadata; from now on its transfers are expected to be acknowledged."""

    @abstractmethod
    def update(self, report: R | None) -> Outcome:
        """What some workers say has ended, added up or one after the other.

        Raises:
            UnexpectedAcknowledgementError: it was not in flight.
        """

    def has_pending_work(self) -> bool:
        """A transfer has not ended on every worker: the engine is to go on with empty steps."""
        return bool(self._loads or self._stores or self._handed_out)

    def _end(self, planned: Planned, success: bool, outcome: Outcome) -> None:
        """Every worker has ended the transfer."""
        del self._handed_out[planned.number]
        request = planned.request
        if not success:
            what = "load" if planned.is_load else "store"
            logger.warning("a %s of request %r has failed", what, request.request_id)
        if not planned.is_load:
            self.manager.complete_store(planned.keys, request.context, success)
            (outcome.stored if success else outcome.not_stored).extend(planned.keys)
            return
        self.manager.complete_load(planned.keys, request.context, success)
        request.loads -= 1
        if request.held and not request.loads:
            outcome.released.append(request.request_id)
            if self._requests.get(request.request_id) is request:
                del self._requests[request.request_id]
        elif not planned.orphaned:
            if not success and isinstance(planned.dst, DeviceLoadStoreSpec):
                invalid = outcome.invalid_blocks.setdefault(request.request_id, {})
                for group, blocks in blocks_by_group(planned.dst).items():
                    invalid.setdefault(group, []).extend(blocks)
            if not request.loads:
                outcome.loaded.append(request.request_id)
