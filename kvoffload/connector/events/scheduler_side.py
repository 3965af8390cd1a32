"""The scheduler's side of the protocol by event index."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvoffload.connector.acknowledgements import Acknowledgements
from kvoffload.connector.aggregate import Counts
from kvoffload.connector.events.metadata import NO_EVENT, Metadata, WorkerMetadata
from kvoffload.connector.scheduler_side import BaseSchedulerSide, Outcome, Planned
from kvoffload.core.specs import TransferSpec
from kvoffload.scheduler.manager import OffloadingManager


class _Events:
    """The events of one direction: what each moves, and who has ended it."""

    def __init__(self, workers: int) -> None:
        self._indices = itertools.count()
        self._moves: dict[int, Sequence[Planned]] = {}
        self._acknowledgements: Acknowledgements[int] = Acknowledgements(workers)

    def begin(self, planned: Sequence[Planned]) -> int:
        """The index of a step that moves this."""
        if not planned:
            return NO_EVENT
        index = next(self._indices)
        self._moves[index] = planned
        self._acknowledgements.expect(index)
        return index

    def end(self, ended: Counts, failed: Counts) -> list[tuple[Planned, bool]]:
        """What all workers have ended now, and whether it succeeded on all of them."""
        found = []
        for index, count in ended.items():
            success = self._acknowledgements.add(index, count, failed.get(index, 0))
            if success is not None:
                found += [(planned, success) for planned in self._moves.pop(index)]
        return found


class SchedulerSide(BaseSchedulerSide[Metadata, WorkerMetadata]):
    """Plans loads and stores, and hears how those of each step ended, all in one.

    Where a part of an event fails, all of it has failed.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        *,
        workers: int = 1,
        groups: int = 1,
        block_size_factor: int = 1,
        null_block: int | None = None,
    ) -> None:
        super().__init__(
            manager, groups=groups, block_size_factor=block_size_factor, null_block=null_block
        )
        self._load_events, self._store_events = _Events(workers), _Events(workers)

    def _hand_out(
        self, loads: Sequence[Planned], stores: Sequence[Planned], flush: Sequence[Planned]
    ) -> Metadata:
        load_event = self._load_events.begin(loads)
        requests = tuple(planned.request.request_id for planned in loads)
        return Metadata(
            load_event=load_event,
            store_event=self._store_events.begin(stores),
            loads=tuple(TransferSpec(planned.src, planned.dst) for planned in loads),
            stores=tuple(TransferSpec(planned.src, planned.dst) for planned in stores),
            load_requests={load_event: requests} if loads else {},
            flush=bool(flush),
        )

    def update(self, report: WorkerMetadata | None) -> Outcome:
        outcome = Outcome()
        if report is not None:
            for planned, success in (
                *self._store_events.end(report.stores, report.failed_stores),
                *self._load_events.end(report.loads, report.failed_loads),
            ):
                self._end(planned, success, outcome)
        return outcome
