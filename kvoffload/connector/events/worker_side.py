"""The worker's side of the protocol by event index."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import TypeAlias

from kvoffload.connector.events.direction import Direction
from kvoffload.connector.events.launcher import Launcher, ThreadLauncher
from kvoffload.connector.events.metadata import NO_EVENT, Metadata, WorkerMetadata
from kvoffload.connector.worker_side import (
    BaseWorkerSide,
    Finished,
    InFlight,
    MakeWorker,
    never_finished,
    refused,
)
from kvoffload.core.backend import Event
from kvoffload.core.canonicalize import CacheRegistration
from kvoffload.core.errors import StateError
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.specs import TransferSpec
from kvoffload.core.worker import OffloadingWorker

_Launch: TypeAlias = tuple[int, TransferSpec]
"""A job's id and what it moves."""


class WorkerSide(BaseWorkerSide[Metadata, WorkerMetadata]):
    """Launches a step's loads and stores after its model, off the engine's thread.

    Args:
        make_worker: see there; it must make a worker over caches, whose backend records the mark.
        writes: see :class:`BaseWorkerSide`.
        launcher: runs the launches; by default a thread of its own. It is closed with this side.
    """

    def __init__(
        self, make_worker: MakeWorker, *, writes: bool = True, launcher: Launcher | None = None
    ) -> None:
        super().__init__(make_worker, writes=writes)
        self._launcher = launcher or ThreadLauncher()
        self._loads, self._stores = Direction(), Direction()
        self._job_ids = itertools.count(1)
        self._requests: dict[int, tuple[str, ...]] = {}  # by load event that has not ended
        # Jobs that the worker refused, told by the launcher's thread to the engine's.
        self._refused: deque[tuple[int, Exception]] = deque()

    def register_kv_caches(self, caches: CacheRegistration | CanonicalKVCaches) -> None:
        super().register_kv_caches(caches)
        if self._worker is not None and self._worker.engine is None:
            self._worker, self._registered = None, False
            raise StateError("the worker has no transfer engine, so that no mark can be recorded")

    @property
    def load_mark(self) -> int:
        """All load events up to this one have ended, as far as was polled."""
        return self._loads.mark

    @property
    def store_mark(self) -> int:
        """All store events up to this one have ended, as far as was polled."""
        return self._stores.mark

    def handle_preemptions(self, metadata: Metadata) -> None:
        if metadata.flush:
            self.flush()

    def flush(self) -> None:
        """Wait until everything has ended that was handed over, launched or not.

        The marks move at once; the next :meth:`get_finished` and :meth:`take_worker_metadata`
        report what has ended.
        """
        self._submit_all()
        if self._worker is not None:
            self._worker.wait(list(self._in_flight))
        self._collect()

    def _start(self, metadata: Metadata) -> None:
        # Nothing runs before the model was launched; that the indices are pending is known now, and
        # whom they serve is kept until they have ended, in whatever step that is.
        self._requests.update(metadata.load_requests)
        if metadata.load_event != NO_EVENT:
            self._loads.bind(metadata.load_event, len(metadata.loads))
            if not metadata.loads:
                self._serve(metadata.load_event)
        if metadata.store_event != NO_EVENT:
            self._stores.bind(metadata.store_event, len(metadata.stores))

    def _finish(self, metadata: Metadata) -> None:
        launches: list[_Launch] = []
        for job, spec in _transfers(metadata):
            if self._moves(job.is_load):
                launches.append((next(self._job_ids), spec))
                self._in_flight[launches[-1][0]] = job
            else:
                self._settle(job, success=True)
        if not launches or self._worker is None:
            return
        try:
            mark = _record_mark(self._worker)
            self._launcher.submit(partial(self._launch, self._worker, launches, mark))
        except Exception as error:  # noqa: BLE001 - whatever it is, the jobs end as failed
            for job_id, _ in launches:
                self._fail(self._in_flight.pop(job_id), refused(error))

    def _launch(self, worker: OffloadingWorker, launches: list[_Launch], mark: Event) -> None:
        """On the launcher's thread."""
        for job_id, spec in launches:
            if self._closed:
                return
            try:
                worker.transfer_async(job_id, spec, after=mark)
            except BaseException as error:  # noqa: BLE001 - a job that is not refused must end
                self._refused.append((job_id, refused(error)))

    def _abandon(self, metadata: Metadata) -> None:
        for job, _ in _transfers(metadata):
            self._fail(job, never_finished())

    def _submit_all(self) -> None:
        self._launcher.drain()

    def _collect(self) -> None:
        while self._refused:
            job_id, error = self._refused.popleft()
            job = self._in_flight.pop(job_id, None)
            if job is not None:  # it has not ended by itself, having begun before it was refused
                self._fail(job, error)
        super()._collect()

    def _acknowledge(self, job: InFlight, success: bool) -> None:
        if not job.is_load:
            self._stores.settle(job.name, success)
        elif self._loads.settle(job.name, success):
            self._serve(job.name)

    def _serve(self, load_event: int) -> None:
        """The requests of this event wait no longer."""
        self._loaded.update(self._requests.pop(load_event, ()))

    def _as_finished(self, loaded: set[str]) -> Finished:
        return Finished(None, loaded or None)

    def take_worker_metadata(self) -> WorkerMetadata | None:
        if not (self._loads.unreported or self._stores.unreported):
            return None
        loads, failed_loads = self._loads.take()
        stores, failed_stores = self._stores.take()
        return WorkerMetadata(loads, stores, failed_loads, failed_stores)

    def has_pending_work(self) -> bool:
        return self._loads.unreported or self._stores.unreported or super().has_pending_work()

    def _forget(self) -> None:
        self._launcher.close()  # what was not launched yet is not launched
        self._refused.clear()
        self._requests.clear()
        self._loads, self._stores = Direction(), Direction()


def _record_mark(worker: OffloadingWorker) -> Event:
    """An event after all that the calling thread's stream holds now."""
    if worker.engine is None:
        raise StateError("the worker has no transfer engine, so that no mark can be recorded")
    backend = worker.engine.backend
    mark = backend.new_event()
    backend.current_stream().record_event(mark)
    return mark


def _transfers(metadata: Metadata) -> Iterator[tuple[InFlight, TransferSpec]]:
    """A step's loads, and then its stores."""
    for spec in metadata.loads:
        yield InFlight(metadata.load_event, True, None, spec[1]), spec
    for spec in metadata.stores:
        yield InFlight(metadata.store_event, False, None, spec[0]), spec
