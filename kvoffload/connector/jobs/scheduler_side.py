"""The scheduler's side of the protocol by job id."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.connector.acknowledgements import Acknowledgements
from kvoffload.connector.jobs.metadata import Job, Metadata, WorkerMetadata
from kvoffload.connector.scheduler_side import BaseSchedulerSide, Outcome, Planned
from kvoffload.scheduler.manager import OffloadingManager


class SchedulerSide(BaseSchedulerSide[Metadata, WorkerMetadata]):
    """Plans loads and stores, and hears how each of them ended."""

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
        self._acknowledgements: Acknowledgements[int] = Acknowledgements(workers)

    def _hand_out(
        self, loads: Sequence[Planned], stores: Sequence[Planned], flush: Sequence[Planned]
    ) -> Metadata:
        for planned in (*loads, *stores):
            self._acknowledgements.expect(planned.number)
        return Metadata(
            loads=tuple(_job(planned) for planned in loads),
            stores=tuple(_job(planned) for planned in stores),
            flush=frozenset(planned.number for planned in flush),
        )

    def update(self, report: WorkerMetadata | None) -> Outcome:
        outcome = Outcome()
        if report is None:
            return outcome
        for job_id, ended in report.completed.items():
            success = self._acknowledgements.add(job_id, ended, report.failed.get(job_id, 0))
            if success is not None:
                self._end(self._handed_out[job_id], success, outcome)
        return outcome


def _job(planned: Planned) -> Job:
    return Job(planned.number, planned.request.request_id, planned.src, planned.dst)
