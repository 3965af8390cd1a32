"""What the worker sides of both protocols share: registration, results, and the end."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from kvoffload.connector.statistics import Statistics, StatisticsCollector
from kvoffload.core.canonicalize import CacheRegistration, canonicalize
from kvoffload.core.engine import TransferResult
from kvoffload.core.errors import (
    AlreadyBoundError,
    CancelledError,
    ClosedError,
    ConfigurationError,
    StateError,
    SubmitError,
    TransferError,
)
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.specs import DeviceLoadStoreSpec, LoadStoreSpec
from kvoffload.core.worker import OffloadingWorker

logger = logging.getLogger(__name__)

MakeWorker: TypeAlias = Callable[[CanonicalKVCaches], OffloadingWorker]
"""From the caches to the worker that moves their blocks, such as a call of
:meth:`OffloadingWorker.for_caches` or one that registers handlers of its own."""

M = TypeVar("M")
R = TypeVar("R")


class Finished(NamedTuple):
    """What a poll found.

    Attributes:
        stored: requests that waited for their stores. None ever does: stores are reported by
            :meth:`WorkerSide.take_worker_metadata`.
        loaded: requests whose loads have ended on this worker, those that failed included.
    """

    stored: set[str] | None
    loaded: set[str] | None


@dataclass(frozen=True, eq=False)
class InFlight:
    """A job of the worker's, as the protocol knows it.

    Attributes:
        name: of the transfer in the protocol: a job id or an event index.
        is_load: or a store.
        request_id: whom a load serves; None for a store.
        device: the blocks on the device.
    """

    name: int
    is_load: bool
    request_id: str | None
    device: LoadStoreSpec


class BaseWorkerSide(ABC, Generic[M, R]):
    """One rank's side of a protocol. Not to be called from several threads at once.

    A step is ``handle_preemptions → start_step → (the model is launched) → finish_step →
    get_finished → take_worker_metadata``. Only ``handle_preemptions`` waits for the device, and
    only where the metadata names something to wait for.

    Args:
        make_worker: see :data:`MakeWorker`.
        writes: whether this rank stores. One that does not, because another holds the same bytes,
            acknowledges stores at once.
    """

    def __init__(self, make_worker: MakeWorker, *, writes: bool = True) -> None:
        self._make_worker = make_worker
        self._writes = writes
        self._worker: OffloadingWorker | None = None
        self._registered = False
        self._closed = False
        self._bound: M | None = None
        self._in_flight: dict[int, InFlight] = {}  # by the worker's job id
        self._loaded: set[str] = set()
        self._invalid: dict[int, set[int]] = {}
        self._statistics = StatisticsCollector()

    # ------------------------------------------------------------------------------ registration
    def register_kv_caches(self, caches: CacheRegistration | CanonicalKVCaches) -> None:
        """Take the engine's caches, and make host memory for them.

        A rank without layers has nothing to move: it acknowledges everything at once, and a warning
        says so.

        Raises:
            AlreadyBoundError: there are some; :meth:`unregister_kv_caches` lets go of them.
            LayoutError: they cannot be described as blocks.
            CapacityError: the budget does not hold one chunk.
        """
        if self._closed:
            raise ClosedError("this side of the connector was shut down")
        if self._registered:
            raise AlreadyBoundError("caches are registered already; unregister those first")
        canonical = canonicalize(caches) if isinstance(caches, CacheRegistration) else caches
        if canonical.tensors:
            self._worker = self._make_worker(canonical)
        else:
            logger.warning("no KV caches were registered: nothing will be moved on this rank")
        self._registered = True

    def unregister_kv_caches(self, timeout: float | None = None) -> None:
        """End all transfers and let go of the caches and of host memory, as for a sleep.

        What was stored is gone: the manager is to be reset. Results come as always, and
        :meth:`register_kv_caches` may be called again.

        Args:
            timeout: seconds to wait for transfers; by default as long as it takes.
        """
        self._submit_all()
        if self._worker is not None:
            self._worker.unregister(timeout)
            self._collect()
        self._worker, self._registered = None, False

    @property
    def worker(self) -> OffloadingWorker | None:
        """What moves the blocks; None on a rank without layers, and before registration."""
        return self._worker

    @property
    def num_chunks(self) -> list[int] | None:
        """Chunks of each group in this rank's host memory; None on a rank without layers."""
        return None if self._worker is None else self._worker.num_chunks

    # ------------------------------------------------------------------------------------ a step
    @abstractmethod
    def handle_preemptions(self, metadata: M) -> None:
        """Wait for the transfers whose blocks this step reuses; before anything overwrites those.

        The transfers end as always, with the next :meth:`get_finished`.
        """

    def start_step(self, metadata: M) -> None:
        """Take the step's metadata; before the model is launched.

        A step that was started before and never finished, since the model failed, is given up: what
        it did not begin has failed.

        Raises:
            StateError: no caches were registered.
        """
        if not self._registered:
            raise StateError("register the KV caches before the first step")
        before, self._bound = self._bound, None
        if before is not None:
            logger.warning("a step was started and never finished: its transfers have failed")
            self._abandon(before)
        self._bound = metadata
        self._start(metadata)

    def finish_step(self) -> None:
        """The model was launched, on the calling thread's current stream."""
        metadata, self._bound = self._bound, None
        if metadata is not None:
            self._finish(metadata)

    def get_finished(self, finished_request_ids: Collection[str] = ()) -> Finished:
        """What has ended since the last call; never waits, and costs what has ended.

        Args:
            finished_request_ids: requests that the engine is done with. Not used: a transfer ends
                whether its request lives or not.
        """
        del finished_request_ids
        self._collect()
        loaded, self._loaded = self._loaded, set()
        return self._as_finished(loaded)

    @abstractmethod
    def take_worker_metadata(self) -> R | None:
        """What has ended, for the scheduler's side; once, and None if nothing has."""

    def take_statistics(self) -> Statistics | None:
        """What was moved since the last call; None if nothing was."""
        return self._statistics.take()

    def take_invalid_blocks(self) -> dict[int, list[int]]:
        """Of each group the device blocks that failed loads left without content, once."""
        taken, self._invalid = self._invalid, {}
        return {group: sorted(blocks) for group, blocks in sorted(taken.items())}

    def has_pending_work(self) -> bool:
        """Something has not ended or not been reported: the engine is to go on with empty steps."""
        return bool(self._in_flight or self._loaded)

    # ------------------------------------------------------------------------- for the protocols
    @abstractmethod
    def _start(self, metadata: M) -> None:
        """The step begins."""

    @abstractmethod
    def _finish(self, metadata: M) -> None:
        """The model was launched."""

    @abstractmethod
    def _abandon(self, metadata: M) -> None:
        """End, as failed, what the step has not begun."""

    @abstractmethod
    def _submit_all(self) -> None:
        """Hand to the worker whatever waits for it."""

    @abstractmethod
    def _forget(self) -> None:
        """Drop what waits; the worker is being shut down."""

    @abstractmethod
    def _acknowledge(self, job: InFlight, success: bool) -> None:
        """A job has ended on this rank."""

    @abstractmethod
    def _as_finished(self, loaded: set[str]) -> Finished:
        """As the protocol says it."""

    def _moves(self, is_load: bool) -> bool:
        """Whether this rank takes part in loads, or in stores."""
        return self._worker is not None and (is_load or self._writes)

    def _collect(self) -> None:
        if self._worker is not None:
            for result in self._worker.get_finished():
                self._ended(result)

    def _ended(self, result: TransferResult) -> None:
        job = self._in_flight.pop(result.job_id, None)
        if job is None:
            logger.debug("job %d is not of this connector", result.job_id)
            return
        self._statistics.add(result)
        if result.error is not None:
            self._note_failure(job, result.error)
        self._settle(job, result.success)

    def _fail(self, job: InFlight, error: Exception) -> None:
        """A job that the worker never had has failed."""
        self._note_failure(job, error)
        self._settle(job, success=False)

    def _settle(self, job: InFlight, success: bool) -> None:
        if job.request_id is not None:
            self._loaded.add(job.request_id)
        self._acknowledge(job, success)

    def _note_failure(self, job: InFlight, error: Exception) -> None:
        what = "load" if job.is_load else "store"
        logger.warning("the %s of transfer %d has failed: %s", what, job.name, error)
        if job.is_load and isinstance(job.device, DeviceLoadStoreSpec):
            for group, blocks in blocks_by_group(job.device).items():
                self._invalid.setdefault(group, set()).update(blocks)

    # ----------------------------------------------------------------------------------- the end
    def shutdown(self, timeout: float | None = None) -> None:
        """Drop what was not begun, end what was, and give everything back. Works twice.

        Args:
            timeout: seconds to wait for transfers; by default as long as it takes.
        """
        self._closed = True
        self._bound = None
        self._forget()
        worker, self._worker = self._worker, None
        try:
            if worker is not None:
                worker.shutdown(timeout)
        finally:
            self._in_flight.clear()
            self._loaded.clear()
            self._invalid.clear()
            self._statistics.take()


def refused(error: BaseException) -> TransferError:
    """Why a job failed that the worker did not accept."""
    return SubmitError(f"the transfer was refused: {type(error).__name__}: {error}")


def never_finished() -> TransferError:
    """Why a transfer failed whose step was started, but not finished."""
    return CancelledError("its step was never finished")


def blocks_by_group(device: DeviceLoadStoreSpec) -> dict[int, list[int]]:
    """Of each group that has any, its block ids."""
    blocks, start, found = device.block_ids.tolist(), 0, {}
    for group, size in enumerate(device.group_sizes.tolist()):
        if size:
            found[group] = blocks[start : start + size]
        start += size
    return found


def common_num_chunks(ranks: Iterable[Sequence[int] | None]) -> list[int]:
    """Chunks of each group that every rank has: what the manager is made with.

    Args:
        ranks: ``num_chunks`` of each rank's side; ranks without layers have none.

    Raises:
        ConfigurationError: no rank has layers, or they differ in their number of groups.
    """
    present = [list(rank) for rank in ranks if rank is not None]
    if not present or len({len(rank) for rank in present}) > 1:
        raise ConfigurationError(f"the ranks have no chunks in common: {present}")
    return [min(of_group) for of_group in zip(*present, strict=True)]
