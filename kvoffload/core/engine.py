"""The engine: lanes, order, and the life of every job.

A job is submitted once and ends exactly once, with success or a typed error. Submitting only
enqueues; polling costs one query per lane and the jobs that have ended.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, TypeAlias

import numpy as np

from kvoffload.core.backend import Backend, Event, HostOrder, Lane, Stream
from kvoffload.core.buffers import BufferPool
from kvoffload.core.errors import (
    AlreadyBoundError,
    ClosedError,
    ConfigurationError,
    CopyError,
    DuplicateJobError,
    SpecError,
    SubmitError,
    TransferError,
)
from kvoffload.core.host_memory import check_available
from kvoffload.core.host_pool import HostLayout, HostPool
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.plan import CopyPlan, Geometry, Side, plan_transfer
from kvoffload.core.specs import IntArray, LoadStoreSpec

logger = logging.getLogger(__name__)


class CurrentStream(Enum):
    """The type of :data:`CURRENT_STREAM`."""

    TOKEN = "current stream"

    def __repr__(self) -> str:
        return "CURRENT_STREAM"


CURRENT_STREAM: Final = CurrentStream.TOKEN
"""``after=CURRENT_STREAM``: start after all that the calling thread's stream holds now."""

After: TypeAlias = Event | CurrentStream | None
"""What a transfer starts after: the caller's stream as it is now, an event recorded earlier (which
makes a call from another thread safe), or None, by which the caller says that nothing needs waiting
for."""


@dataclass(frozen=True)
class TransferResult:
    """How a job ended.

    Attributes:
        job_id: as submitted.
        success: every byte is in place.
        transfer_size: bytes moved, padding included; 0 unless it succeeded.
        transfer_time: seconds the copy took on the device, without the time it waited for other
            work; None where the backend cannot tell or the job did not succeed.
        transfer_type: the media of source and destination, such as ``("device", "host")``.
        error: why it failed; None if it succeeded.
    """

    job_id: int
    success: bool
    transfer_size: int
    transfer_time: float | None
    transfer_type: tuple[str, str]
    error: TransferError | None


@dataclass(eq=False)
class _Job:
    job_id: int
    plan: CopyPlan
    transfer_type: tuple[str, str]
    # A job has failed until its launch is complete, so that no interruption makes it a success.
    error: TransferError | None = field(
        default_factory=lambda: SubmitError("the submission was interrupted")
    )
    events: list[Event] = field(default_factory=list)
    start: Event | None = None
    end: Event | None = None
    held: list[Any] = field(default_factory=list)

    def keep(self, value: Any) -> Any:
        self.held.append(value)
        return value


@dataclass(eq=False)
class _Lane:
    stream: Stream
    jobs: collections.deque[_Job] = field(default_factory=collections.deque)
    results: list[TransferResult] = field(default_factory=list)


class TransferEngine:
    """Moves blocks of one set of caches to host memory and back.

    Safe to call from several threads. It owns the backend: :meth:`shutdown` closes it.

    Args:
        backend: available on this machine.
        caches: the engine's KV cache; kept alive as long as a job may use it.
        host_bytes: the budget of host memory; all of it that holds whole chunks is used.
        block_size_factor: device blocks per chunk.
        host_order: how chunks lie; by default what the backend prefers.
        null_block: the device block that stands for "nothing here", where the engine has one.
        tokens_per_block: of each group (or one number for all), to report capacity in tokens and
            to divide the budget by it.
        longest_request: tokens of the longest request; a warning says if it cannot be kept.
        numa_node: where host memory belongs; by default wherever suits the backend.

    Raises:
        CapacityError: the budget is below one chunk or above the machine's memory.
        ConfigurationError: the caches are not on the backend's device, or there are none.
        AlreadyBoundError: the backend serves other caches.
    """

    def __init__(
        self,
        backend: Backend,
        caches: CanonicalKVCaches,
        *,
        host_bytes: int,
        block_size_factor: int = 1,
        host_order: HostOrder | None = None,
        null_block: int | None = None,
        tokens_per_block: int | Sequence[int] | None = None,
        longest_request: int | None = None,
        numa_node: int | None = None,
    ) -> None:
        if backend.bound:
            raise AlreadyBoundError("the backend serves other caches; unregister those first")
        if not caches.tensors:
            raise ConfigurationError("there is no layer to offload")
        if backend.device is not None and backend.device.type != caches.device.type:
            raise ConfigurationError(
                f"the caches are on {caches.device}, but the backend serves {backend.device}"
            )
        check_available(host_bytes, "a host budget")
        page_bytes = np.array([t.page_size_bytes for t in caches.tensors], dtype=np.int64)
        groups = [
            np.array(sorted({ref.tensor_idx for ref in refs}), dtype=np.int64)
            for refs in caches.group_data_refs
        ]
        layout = HostLayout.within(
            host_bytes,
            page_bytes,
            groups,
            factor=block_size_factor,
            order=host_order or backend.capabilities.host_order,
            tokens_per_block=[tokens_per_block] * len(groups)
            if isinstance(tokens_per_block, int)
            else tokens_per_block,
        )
        self.backend = backend
        self.caches = caches
        self.host = HostPool(layout, lambda nbytes: backend.allocate_host(nbytes, numa_node))
        self._null_block = null_block
        self._buffers = BufferPool()
        _report(self.host, longest_request)
        self._lock = threading.RLock()
        self._in_flight: dict[int, _Job] = {}
        self._free_events: list[Event] = []
        self._closed = False
        try:
            self.geometry = Geometry(page_bytes, groups, _device_side(caches), self.host.side())
            backend.bind(self.geometry, caches, self.host.memory)
            self._lanes = {lane: _Lane(backend.new_stream(lane)) for lane in Lane}
            backend.bound = True
        except BaseException:
            self.host.release()
            raise

    def submit(
        self,
        job_id: int,
        src: LoadStoreSpec,
        dst: LoadStoreSpec,
        *,
        after: After = CURRENT_STREAM,
    ) -> None:
        """Enqueue a transfer; its result comes from :meth:`finished`, exactly once.

        The copy starts after the work named by ``after`` and after every unfinished job.
        A failure to enqueue is a failed result, not an exception.

        Args:
            job_id: any integer that is not in flight.
            src, dst: one on the device, one on the host. Their ids are read now and not later.
            after: see :data:`After`.

        Raises:
            ClosedError: after :meth:`shutdown`.
            SpecError: the arguments are wrong; no job was created.
        """
        if isinstance(job_id, bool) or not isinstance(job_id, int | np.integer):
            raise SpecError(f"a job id is an integer, not {job_id!r}")
        job_id = int(job_id)
        with self._lock:
            if self._closed:
                raise ClosedError("the transfer engine was shut down")
            if job_id in self._in_flight:
                raise DuplicateJobError(f"job {job_id} is in flight")
            plan = plan_transfer(
                self.geometry, src, dst, null_block=self._null_block, buffers=self._buffers
            )
            lane = self._lanes[Lane.STORE if plan.dst_on_host else Lane.LOAD]
            job = _Job(job_id, plan, (src.medium(), dst.medium()))
            self._in_flight[job_id] = job
            try:
                if len(plan.src_units):
                    self._launch(job, lane, after)
                job.error = None
            except Exception as error:  # noqa: BLE001 - a vendor's code may raise anything
                job.error = _wrap(SubmitError, "enqueuing the copy failed", error)
            finally:
                lane.jobs.append(job)

    def _launch(self, job: _Job, lane: _Lane, after: After) -> None:
        stream = lane.stream
        if after is CURRENT_STREAM:
            mark = self._event(job)
            self.backend.current_stream().record_event(mark)
            stream.wait_event(mark)
        elif after is not None:
            stream.wait_event(after)
        for event in self._dependencies(lane):
            stream.wait_event(event)
        # After the waits, so that the seconds between start and end are the copy's own.
        start, end = self._event(job), self._event(job)
        stream.record_event(start)
        job.start = start
        try:
            self.backend.swap_blocks(job.plan, stream, job.keep)
        finally:
            # Also after a failure: part of the copy may be running, and the job ends after it.
            stream.record_event(end)
            job.end = end

    def _dependencies(self, lane: _Lane) -> list[Event]:
        """Ends of the jobs of other lanes that the lane's next job must follow."""
        others = [other.jobs for other in self._lanes.values() if other is not lane]
        return [jobs[-1].end for jobs in others if jobs and jobs[-1].end is not None]

    def _event(self, job: _Job) -> Event:
        event = self._free_events.pop() if self._free_events else self.backend.new_event()
        job.events.append(event)
        return event

    def finished(self, lane: Lane) -> list[TransferResult]:
        """Results of the lane's jobs that ended since the last call; never waits."""
        with self._lock:
            for each in self._lanes.values():
                self._collect(each)
            mine = self._lanes[lane]
            results, mine.results = mine.results, []
            return results

    def _collect(self, lane: _Lane) -> None:
        while lane.jobs:
            job = lane.jobs[0]
            if job.end is not None:
                try:
                    if not job.end.query():
                        return
                except Exception as error:  # noqa: BLE001 - a vendor's code may raise anything
                    job.error = job.error or _wrap(CopyError, "the copy failed", error)
            lane.jobs.popleft()
            lane.results.append(self._end(job))

    def _end(self, job: _Job) -> TransferResult:
        seconds = None
        if (
            job.error is None
            and job.start is not None
            and job.end is not None
            and self.backend.capabilities.timing_events
        ):
            try:
                seconds = job.start.elapsed_time(job.end) / 1e3
            except Exception as error:  # noqa: BLE001 - a vendor's code may raise anything
                job.error = _wrap(CopyError, "reading the copy's events failed", error)
        if job.error is None:
            # The events of a failed job may carry its error into the next one: let them go.
            self._free_events.extend(job.events)
        del self._in_flight[job.job_id]
        job.held.clear()
        job.plan.release()
        return TransferResult(
            job_id=job.job_id,
            success=job.error is None,
            transfer_size=job.plan.nbytes if job.error is None else 0,
            transfer_time=seconds if job.error is None else None,
            transfer_type=job.transfer_type,
            error=job.error,
        )

    def wait(self, job_ids: Iterable[int]) -> None:
        """Block until the jobs have ended; their results still come from :meth:`finished`.

        Ids that are not in flight are ignored.
        """
        with self._lock:
            ends = [self._in_flight[i].end for i in job_ids if i in self._in_flight]
        for end in ends:
            if end is not None:
                # A failure is reported with the result.
                with contextlib.suppress(Exception):
                    end.synchronize()

    def fence(self, job_ids: Iterable[int]) -> None:
        """Make the caller's current stream wait for the jobs; the calling thread goes on.

        For device work that reads what a load writes, or overwrites what a store still reads. Ids
        that are not in flight are ignored.
        """
        with self._lock:
            jobs = [self._in_flight[i] for i in job_ids if i in self._in_flight]
            stream = self.backend.current_stream()
            for job in jobs:
                if job.end is not None:
                    stream.wait_event(job.end)

    @property
    def in_flight(self) -> list[int]:
        """Ids of the jobs that have no result yet."""
        with self._lock:
            return list(self._in_flight)

    def unregister(self) -> None:
        """Wait for all jobs, let go of the caches, and give host memory back. Works twice.

        Results of the jobs that were in flight still come from :meth:`finished`. The backend stays
        open: another engine can be made with it, as when an engine wakes from a sleep in which it
        gave its memory away.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.wait(list(self._in_flight))
            for lane in self._lanes.values():
                self._collect(lane)
            self._free_events.clear()
        try:
            self.backend.unbind()
        finally:
            self.backend.bound = False
            self.host.release()

    def shutdown(self) -> None:
        """:meth:`unregister`, and close the backend. Works twice."""
        try:
            self.unregister()
        finally:
            self.backend.close()


def _report(host: HostPool, longest_request: int | None) -> None:
    capacity = host.layout.capacity
    node = host.memory.numa_node
    logger.info(
        "host memory: %s, in %s, %s, NUMA node %s",
        capacity,
        host.layout.order.value,
        "pinned" if host.memory.pinned else "not pinned",
        "of the first use" if node is None else node,
    )
    if longest_request is not None and (capacity.tokens or 0) < longest_request:
        logger.warning(
            "host memory holds %s tokens of one sequence, but the longest request has %d: it can "
            "never be kept whole; give more host memory",
            "an unknown number of" if capacity.tokens is None else capacity.tokens,
            longest_request,
        )


def _device_side(caches: CanonicalKVCaches) -> Side:
    tensors = [entry.tensor for entry in caches.tensors]
    storages = [tensor.untyped_storage() for tensor in tensors]

    def column(values: Iterator[int]) -> IntArray:
        return np.fromiter(values, dtype=np.int64, count=len(tensors))

    start = column(s.data_ptr() for s in storages)
    return Side(
        base=column(t.data_ptr() for t in tensors),
        hi=column(t.stride(0) for t in tensors),
        lo=np.zeros(len(tensors), dtype=np.int64),
        factor=1,
        count=column(t.shape[0] for t in tensors),
        start=start,
        end=start + column(s.nbytes() for s in storages),
    )


def _wrap(kind: type[TransferError], what: str, error: Exception) -> TransferError:
    """The typed error of a result; without tracebacks, whose frames would pin staging memory."""
    wrapped = kind(f"{what}: {type(error).__name__}: {error}")
    wrapped.__cause__ = error.with_traceback(None)
    return wrapped


__all__ = [
    "After",
    "CURRENT_STREAM",
    "CurrentStream",
    "TransferEngine",
    "TransferResult",
]
