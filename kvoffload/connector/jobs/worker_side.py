"""The worker's side of the protocol by job id."""

from __future__ import annotations

import logging

from kvoffload.connector.jobs.metadata import Job, Metadata, WorkerMetadata
from kvoffload.connector.worker_side import (
    BaseWorkerSide,
    Finished,
    InFlight,
    MakeWorker,
    never_finished,
    refused,
)

logger = logging.getLogger(__name__)


class WorkerSide(BaseWorkerSide[Metadata, WorkerMetadata]):
    """Submits loads when a step starts, and stores when the next one does."""

    def __init__(self, make_worker: MakeWorker, *, writes: bool = True) -> None:
        super().__init__(make_worker, writes=writes)
        self._deferred: list[Job] = []
        self._completed: dict[int, int] = {}
        self._failed: dict[int, int] = {}

    def handle_preemptions(self, metadata: Metadata) -> None:
        if not metadata.flush:
            return
        # What is to be waited for may not have begun.
        self._submit_all()
        if self._worker is not None:
            self._worker.wait(sorted(metadata.flush))

    def _start(self, metadata: Metadata) -> None:
        self._submit_all()
        for job in metadata.loads:
            self._submit(job, is_load=True)

    def _finish(self, metadata: Metadata) -> None:
        if self._moves(is_load=False):
            self._deferred += metadata.stores
        else:
            for job in metadata.stores:
                self._acknowledge(_in_flight(job, is_load=False), success=True)

    def _abandon(self, metadata: Metadata) -> None:
        for job in metadata.stores:
            self._fail(_in_flight(job, is_load=False), never_finished())

    def _submit_all(self) -> None:
        deferred, self._deferred = self._deferred, []
        for job in deferred:
            self._submit(job, is_load=False)

    def _submit(self, job: Job, *, is_load: bool) -> None:
        known = _in_flight(job, is_load)
        if self._worker is None or not self._moves(is_load):
            self._settle(known, success=True)
            return
        try:
            self._worker.transfer_async(job.job_id, (job.src, job.dst))
        except Exception as error:  # noqa: BLE001 - whatever it is, the job ends as failed
            self._fail(known, refused(error))
        else:
            self._in_flight[job.job_id] = known

    def _acknowledge(self, job: InFlight, success: bool) -> None:
        self._completed[job.name] = 1
        if not success:
            self._failed[job.name] = 1

    def _as_finished(self, loaded: set[str]) -> Finished:
        return Finished(set(), loaded)

    def take_worker_metadata(self) -> WorkerMetadata | None:
        if not self._completed:
            return None
        taken = WorkerMetadata(self._completed, self._failed)
        self._completed, self._failed = {}, {}
        return taken

    def has_pending_work(self) -> bool:
        return bool(self._deferred or self._completed) or super().has_pending_work()

    def _forget(self) -> None:
        if self._deferred:
            logger.info("%d deferred stores were dropped", len(self._deferred))
        self._deferred.clear()
        self._completed.clear()
        self._failed.clear()


def _in_flight(job: Job, is_load: bool) -> InFlight:
    return InFlight(
        job.job_id,
        is_load,
        job.request_id if is_load else None,
        job.dst if is_load else job.src,
    )
