"""The engine: lanes, order, and the life of every job.

A job is submitted once and ends exactly once, with success or a typed error. Submitting only
enqueues; polling costs one query per lane and the jobs that have ended.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch

from kvoffload.core.backend import Backend, Event, HostOrder, Stream
from kvoffload.core.buffers import BufferPool
from kvoffload.core.errors import (
    AlreadyBoundError,
    BlockWithheldError,
    CancelledError,
    ClosedError,
    ConfigurationError,
    CopyError,
    DependencyError,
    DuplicateJobError,
    ForkedError,
    GraphCaptureError,
    SpecError,
    StalledError,
    SubmitError,
    TransferError,
)
from kvoffload.core.host_memory import check_available
from kvoffload.core.host_pool import HostLayout, HostPool
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.lanes import Lane
from kvoffload.core.ordering import OrderingTable
from kvoffload.core.plan import CopyPlan, Geometry, Side, plan_transfer
from kvoffload.core.sizes import parse_bytes
from kvoffload.core.specs import IntArray, LoadStoreSpec

logger = logging.getLogger(__name__)

LAUNCHED_PER_LANE = 128
"""Jobs that are on a lane's stream at a time; more wait on the host, where they cost nothing."""
WORK_PER_JOB = 5
"""Pieces of work that a job puts onto its stream beside its copies: three waits, two events."""
KEPT_EVENTS = 4 * LAUNCHED_PER_LANE
"""Idle events kept for later."""
POLL_SECONDS = 0.001
"""How often a wait that must not last for ever looks again."""


class CurrentStream(Enum):
    """The type of :data:`CURRENT_STREAM`."""

    TOKEN = "current stream"

    def __repr__(self) -> str:
        return "CURRENT_STREAM"


CURRENT_STREAM: Final = CurrentStream.TOKEN
"""``after=CURRENT_STREAM``: start after all that the calling thread's stream holds now."""

After: TypeAlias = Event | CurrentStream | None
"""What a transfer starts after: the caller's stream as it is now, an event recorded earlier (which
makes a call from another thread safe; one that was never recorded counts as reached), or None, by
which the caller says that nothing needs waiting for."""


class EngineUsage(NamedTuple):
    """What a transfer engine holds; all but the last are 0 when it is idle.

    Attributes:
        in_flight: jobs without a result.
        running: jobs that have not stopped, those that stalled included.
        buffers: descriptor buffers of such jobs.
        idle_events: events kept for later jobs.
    """

    in_flight: int
    running: int
    buffers: int
    idle_events: int


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


class _State(Enum):
    WAITING = 1  # for room in its lane's stream, or for a job that is waiting itself
    LAUNCHED = 2  # all of it, or what could be of it, is on the stream
    ENDED = 3  # nothing of it runs any more


@dataclass(eq=False)
class _Job:
    """One transfer, from submission until it has stopped."""

    number: int
    job_id: int
    plan: CopyPlan
    lane: _Lane
    transfer_type: tuple[str, str]
    submitted: float
    suspects: list[_Job]
    previous: _Job | None
    after: Event | None = None
    owns_mark: bool = False
    work: int = 0  # pieces of it on the stream
    dependencies: list[int] = field(default_factory=list)
    error: TransferError | None = None
    state: _State = _State.WAITING
    start: Event | None = None
    end: Event | None = None
    held: list[Any] = field(default_factory=list)
    cancelled: bool = False
    waiters: int = 0  # threads that wait for its end outside of the lock
    reported: bool = False

    def keep(self, value: Any) -> Any:
        self.held.append(value)
        return value


@dataclass(eq=False)
class _Lane:
    """The jobs of one direction, oldest first, and what was reported of them."""

    index: int
    stream: Stream
    jobs: collections.deque[_Job] = field(default_factory=collections.deque)
    waiting: collections.deque[_Job] = field(default_factory=collections.deque)
    results: list[tuple[_Job, TransferResult]] = field(default_factory=list)
    work: int = 0  # pieces of it on the stream, at most

    @property
    def launched(self) -> int:
        """Jobs that are on the stream, or whose turn came and that failed."""
        return len(self.jobs) - len(self.waiting)


_busy: set[TransferEngine] = set()
"""Engines with jobs that have not stopped: those keep caches and host memory alive."""


class TransferEngine:
    """Moves blocks of one set of caches to host memory and back.

    Safe to call from several threads. It owns the backend: :meth:`shutdown` closes it.

    Args:
        backend: available on this machine.
        caches: the engine's KV cache; kept alive as long as a job may use it.
        host_bytes: the budget of host memory, a number of bytes or a string such as ``"4GiB"``;
            all of it that holds whole chunks is used.
        block_size_factor: device blocks per chunk.
        host_order: how chunks lie; by default what the backend prefers.
        null_block: the device block that stands for "nothing here", where the engine has one.
        tokens_per_block: of each group (or one number for all), to report capacity in tokens and
            to divide the budget by it.
        longest_request: tokens of the longest request; a warning says if it cannot be kept.
        numa_node: where host memory belongs; by default wherever suits the backend.
        job_deadline: seconds after which a job that has not ended is reported as stalled; by
            default there is no limit.
        clock: tells the time for deadlines, in seconds.

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
        host_bytes: int | str,
        block_size_factor: int = 1,
        host_order: HostOrder | None = None,
        null_block: int | None = None,
        tokens_per_block: int | Sequence[int] | None = None,
        longest_request: int | None = None,
        numa_node: int | None = None,
        job_deadline: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if backend.bound:
            raise AlreadyBoundError("the backend serves other caches; unregister those first")
        if not caches.tensors:
            raise ConfigurationError("there is no layer to offload")
        if not _serves(backend.device, caches.device):
            raise ConfigurationError(
                f"the caches are on {caches.device}, but the backend serves {backend.device}"
            )
        if job_deadline is not None and not (_is_number(job_deadline) and job_deadline > 0):
            raise ConfigurationError(f"job_deadline must be positive, not {job_deadline!r}")
        blocks = min(entry.tensor.shape[0] for entry in caches.tensors)
        for name, value, end in (
            ("null_block", null_block, blocks),
            ("longest_request", longest_request, None),
            ("numa_node", numa_node, None),
        ):
            if value is not None and not _is_whole(value, end):
                raise ConfigurationError(
                    f"{name} must be a whole number of at least 0"
                    + (f" and below {end}" if end is not None else "")
                    + f", not {value!r}"
                )
        budget = parse_bytes(host_bytes, "host_bytes")
        check_available(budget, "a host budget")
        if host_order is not None and not isinstance(host_order, HostOrder):
            raise ConfigurationError(f"host_order must be a HostOrder, not {host_order!r}")
        page_bytes = np.array([t.page_size_bytes for t in caches.tensors], dtype=np.int64)
        groups = [
            np.array(sorted({ref.tensor_idx for ref in refs}), dtype=np.int64)
            for refs in caches.group_data_refs
        ]
        layout = HostLayout.within(
            budget,
            page_bytes,
            groups,
            factor=block_size_factor,
            order=host_order or backend.capabilities.host_order,
            tokens_per_block=tokens_per_block
            if tokens_per_block is None or isinstance(tokens_per_block, Sequence)
            else [tokens_per_block] * len(groups),
        )
        self.backend = backend
        self.caches = caches
        self.host = HostPool(layout, lambda nbytes: backend.allocate_host(nbytes, numa_node))
        self._null_block = null_block
        self._buffers = BufferPool()
        _log_capacity(self.host, longest_request)
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._deadline, self._clock = job_deadline, clock
        self._newest = 0  # number of the newest job
        self._in_flight: dict[int, _Job] = {}  # by job id: no result has been made
        self._running: dict[int, _Job] = {}  # by number: it has not stopped
        self._unreported: dict[int, _Job] = {}  # by number: the caller has not seen its result
        self._withheld: list[_Job] = []  # reported, but not stopped
        self._free_events: list[Event] = []
        self._closed = False  # nothing more is accepted
        self._let_go = False  # of the caches and of host memory
        self._closing = threading.RLock()
        try:
            self.geometry = Geometry(page_bytes, groups, _device_side(caches), self.host.side())
            backend.bind(self.geometry, caches, self.host.memory)
            self._order = OrderingTable(len(Lane), self.geometry.num_resources)
            self._lanes = {
                lane: _Lane(index, backend.new_stream(lane)) for index, lane in enumerate(Lane)
            }
            backend.bound = True
        except BaseException:
            for undo in (backend.unbind, self.host.release, backend.close):
                with contextlib.suppress(Exception):
                    undo()
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

        The copy starts after the work named by ``after``, after the earlier jobs of its direction,
        and after every unfinished job that shares a block or chunk with it. A failure to enqueue
        is a failed result, not an exception.

        Args:
            job_id: any integer that is not in flight.
            src, dst: on the device or the host. Their ids are read now and not later.
            after: see :data:`After`. An event must not be recorded again before the job has ended.

        Raises:
            ClosedError: after :meth:`unregister` or :meth:`shutdown`.
            ForkedError: in another process than the one that made the engine.
            GraphCaptureError: the caller's stream is being captured.
            SpecError: the arguments are wrong; no job was created.
        """
        if isinstance(job_id, bool) or not isinstance(job_id, int | np.integer):
            raise SpecError(f"a job id is an integer, not {job_id!r}")
        job_id = int(job_id)
        self._check_process()
        if not (after is None or after is CURRENT_STREAM or hasattr(after, "synchronize")):
            raise SpecError(f"after must be an event, CURRENT_STREAM or None, not {after!r}")
        with self._lock:
            if self._closed:
                raise ClosedError("the transfer engine was shut down")
            if job_id in self._in_flight:
                raise DuplicateJobError(f"job {job_id} is in flight")
            if after is CURRENT_STREAM and self.backend.is_capturing():
                raise GraphCaptureError(
                    "the current stream is being captured into a graph; transfer outside of it"
                )
            plan = plan_transfer(
                self.geometry, src, dst, null_block=self._null_block, buffers=self._buffers
            )
            reads, writes = plan.resources()
            self._check_withheld(reads, writes)
            job = self._new_job(job_id, plan, (src.medium(), dst.medium()), reads, writes)
            try:
                self._publish(job)
                if not len(reads):
                    self._end(job)
                    return
                self._order.add(job.lane.index, job.number, reads, writes)
                self._mark(job, after)
                self._launch_waiting()
            except BaseException:
                self._interrupted(job)
                raise

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ForkedError(
                f"this engine belongs to process {self._process}; make one in this process"
            )

    def _check_withheld(self, reads: IntArray, writes: IntArray) -> None:
        for job in self._withheld:
            theirs = np.concatenate(job.plan.resources())
            if np.isin(theirs, reads).any() or np.isin(theirs, writes).any():
                raise BlockWithheldError(
                    f"job {job.job_id} stalled, and may still be using some of these blocks"
                )

    def _new_job(
        self,
        job_id: int,
        plan: CopyPlan,
        transfer_type: tuple[str, str],
        reads: IntArray,
        writes: IntArray,
    ) -> _Job:
        lane = self._lanes[plan.lane]
        suspects = self._suspects(reads)
        plan.settled = all(job.state is _State.ENDED for job in suspects)
        return _Job(
            number=self._newest + 1,
            job_id=job_id,
            plan=plan,
            lane=lane,
            transfer_type=transfer_type,
            submitted=self._clock(),
            suspects=suspects,
            previous=lane.jobs[-1] if lane.jobs else None,
            dependencies=self._order.dependencies(lane.index, reads, writes),
        )

    def _publish(self, job: _Job) -> None:
        """From here on the job exists: plain assignments, the one that makes it known the last."""
        self._newest = job.number
        self._unreported[job.number] = job
        if len(job.plan.src_units):
            _busy.add(self)
            self._running[job.number] = job
            job.lane.jobs.append(job)
            job.lane.waiting.append(job)
        self._in_flight[job.job_id] = job

    def _suspects(self, reads: IntArray) -> list[_Job]:
        """Jobs that write what is read, and that may have failed without the caller knowing."""
        if not self._unreported:
            return []
        oldest = next(iter(self._unreported))
        numbers = self._order.writers(reads, since=oldest - 1)
        return [self._unreported[number] for number in numbers if number in self._unreported]

    def _interrupted(self, job: _Job) -> None:
        """A submission was broken off: what has not begun will not; what has ends as any other."""
        if job.state is not _State.WAITING:
            return
        job.error = job.error or SubmitError("the submission was interrupted")
        if job in job.lane.waiting:
            job.lane.waiting.remove(job)
        if job in job.lane.jobs:
            job.state = _State.LAUNCHED  # its turn came and went: nothing of it runs
        else:
            for known in (self._running, self._unreported):
                known.pop(job.number, None)
            self._in_flight.pop(job.job_id, None)

    def _mark(self, job: _Job, after: After) -> None:
        """Note what the job starts after."""
        if after is not CURRENT_STREAM:
            job.after = after
            return
        try:
            mark = self._event()
            self.backend.current_stream().record_event(mark)
            job.after, job.owns_mark = mark, True
        except Exception as error:  # noqa: BLE001 - a vendor's code may raise anything
            job.error = _wrap(SubmitError, "marking the caller's stream failed", error)

    def _event(self) -> Event:
        return self._free_events.pop() if self._free_events else self.backend.new_event()

    def _launch_waiting(self, up_to: int = 0) -> None:
        """Put waiting jobs onto their streams, as long as those have room.

        Args:
            up_to: the jobs up to this number are launched, room or not.
        """
        progress = True
        while progress:
            progress = False
            for lane in self._lanes.values():
                while lane.waiting:
                    job = lane.waiting[0]
                    if job.state is not _State.WAITING:  # an interrupt came in between
                        lane.waiting.popleft()
                        continue
                    if job.number > up_to and not self._has_room(lane, job):
                        break
                    if any(self._is_waiting(number) for number in job.dependencies):
                        break
                    self._launch(job)
                    lane.waiting.popleft()
                    progress = True

    def _has_room(self, lane: _Lane, job: _Job) -> bool:
        """Enqueuing the job would not block; one that is alone has all the room there is."""
        depth = self.backend.capabilities.queue_depth
        if depth is not None and lane.work and lane.work + self._work_of(job) > depth:
            return False
        return lane.launched < LAUNCHED_PER_LANE

    def _work_of(self, job: _Job) -> int:
        """Pieces of work that the job takes at most, if none of its pages are adjacent."""
        capabilities = self.backend.capabilities
        if capabilities.queue_depth is None:
            return 0  # nobody asks
        if not capabilities.batch_copy:
            return WORK_PER_JOB + job.plan.most_copies
        if capabilities.max_batch is None:
            return WORK_PER_JOB + 1
        return WORK_PER_JOB + -(-job.plan.most_copies // capabilities.max_batch)

    def _is_waiting(self, number: int) -> bool:
        job = self._running.get(number)
        return job is not None and job.state is _State.WAITING

    def _launch(self, job: _Job) -> None:
        job.state = _State.LAUNCHED
        if job.error is not None or job.cancelled:
            return
        job.work = self._work_of(job)
        job.lane.work += job.work
        # A job has failed until its launch is complete: no interruption makes it a success.
        job.error = SubmitError("the launch was interrupted")
        stream = job.lane.stream
        try:
            self._order_after(job, stream)
            # Both before anything is enqueued: a copy always has an end that can be asked for.
            job.start, end = self._event(), self._event()
            # After the waits, so that the seconds between start and end are the copy's own.
            stream.record_event(job.start)
            try:
                self.backend.swap_blocks(job.plan, stream, job.keep)
            finally:
                # Also after a failure: part of the copy may be running, and the job ends after it.
                self._record_end(job, stream, end)
            job.error = None
        except Exception as error:  # noqa: BLE001 - a vendor's code may raise anything
            job.error = _wrap(SubmitError, "enqueuing the copy failed", error)

    def _order_after(self, job: _Job, stream: Stream) -> None:
        """Let the stream wait for the caller's mark and for the jobs that this one must follow."""
        if job.after is not None:
            stream.wait_event(job.after)
            if job.owns_mark:
                self._free_events.append(job.after)
            job.after = None
        for number in job.dependencies:
            other = self._running.get(number)
            # One that never got onto its stream has no end; what it would have followed has.
            while other is not None and other.end is None:
                other = other.previous
            if other is not None and other.end is not None:
                stream.wait_event(other.end)

    def _record_end(self, job: _Job, stream: Stream, end: Event) -> None:
        try:
            stream.record_event(end)
        except Exception:  # noqa: BLE001 - a vendor's code may raise anything
            # Perhaps it was the event. If not, the device is gone, and runs nothing any more.
            end = self.backend.new_event()
            stream.record_event(end)
        except BaseException:
            # Interrupted, perhaps before it was recorded: once more does no harm.
            stream.record_event(end)
            job.end = end
            raise
        job.end = end

    def finished(self, lane: Lane | None = None) -> list[TransferResult]:
        """Results of the jobs that ended since the last call; never waits.

        Args:
            lane: only of this direction; the results of others are kept.

        Raises:
            ForkedError: in another process than the one that made the engine; as for all else that
                asks about jobs.
        """
        self._check_process()
        with self._lock:
            self._collect()
            results = []
            for each in self._lanes.values() if lane is None else [self._lanes[lane]]:
                results += each.results
                each.results = []
            for job, _ in results:
                self._unreported.pop(job.number, None)
            return [result for _, result in results]

    def _collect(self) -> None:
        """End the jobs that have stopped, launch those that waited for room, look at the clock."""
        self._launch_waiting()
        progress = True
        while progress:
            progress = False
            for lane in self._lanes.values():
                while lane.jobs and self._has_stopped(lane.jobs[0]):
                    self._end(lane.jobs[0])
                    lane.jobs.popleft()
                    progress = True
        self._launch_waiting()
        if self._deadline is not None:
            self._report_stalled(self._clock() - self._deadline)

    def _has_stopped(self, job: _Job) -> bool:
        # What a job depends on ends first, so that its failure is known.
        if job.state is _State.WAITING or any(n in self._running for n in job.dependencies):
            return False
        if job.end is None:
            return True
        try:
            # What went wrong with the waits shows at the start.
            return self.backend.is_reached(job.end) and (
                job.start is None or self.backend.is_reached(job.start)
            )
        except Exception as error:  # noqa: BLE001 - a vendor's code may raise anything
            job.error = job.error or _wrap(CopyError, "the copy failed", error)
            return True

    def _end(self, job: _Job) -> None:
        """Nothing of the job runs any more: settle how it ended, and let go of what it held."""
        seconds = self._seconds(job)
        if job.error is None and job.cancelled:
            job.error = CancelledError(f"job {job.job_id} was cancelled")
        culprit = next((other for other in job.suspects if other.error is not None), None)
        if job.error is None and culprit is not None:
            job.error = DependencyError(
                f"job {job.job_id} read what job {culprit.job_id} should have written, which "
                f"failed: {culprit.error}"
            )
        if not job.reported:
            self._report(job, seconds)
        job.state = _State.ENDED
        if job.error is None:
            # The events of a failed job may carry its error into the next one: let them go.
            events = (job.start, None if job.waiters else job.end)
            self._free_events += [event for event in events if event is not None]
            del self._free_events[KEPT_EVENTS:]
        job.held.clear()
        job.suspects.clear()
        job.previous = job.after = job.start = job.end = None
        job.plan.release()
        job.lane.work -= job.work
        job.work = 0
        self._running.pop(job.number, None)
        if job in self._withheld:
            self._withheld.remove(job)
        if not self._running:
            _busy.discard(self)

    def _seconds(self, job: _Job) -> float | None:
        if (
            job.error is not None
            or job.start is None
            or job.end is None
            or not self.backend.capabilities.timing_events
        ):
            return None
        try:
            return self.backend.seconds_between(job.start, job.end)
        except Exception as error:  # noqa: BLE001 - a vendor's code may raise anything
            job.error = _wrap(CopyError, "reading the copy's events failed", error)
            return None

    def _report(self, job: _Job, seconds: float | None) -> None:
        success = job.error is None
        result = TransferResult(
            job_id=job.job_id,
            success=success,
            transfer_size=job.plan.nbytes if success else 0,
            transfer_time=seconds if success else None,
            transfer_type=job.transfer_type,
            error=job.error,
        )
        job.lane.results.append((job, result))
        job.reported = True
        self._in_flight.pop(job.job_id, None)

    def _report_stalled(self, before: float) -> None:
        """Report the jobs submitted before that time that have not ended."""
        for lane in self._lanes.values():
            for job in lane.jobs:
                if job.submitted > before:
                    break
                if not job.reported:
                    self._give_up(job, f"job {job.job_id} passed its deadline")

    def _give_up(self, job: _Job, why: str) -> None:
        """Report a job that has not stopped; its blocks are withheld until it has."""
        if job.state is _State.WAITING:
            job.lane.waiting.remove(job)
            job.state = _State.LAUNCHED  # its turn came and went: nothing of it runs
            why += " before it began"
        else:
            self._withheld.append(job)
            why += "; its blocks are withheld until it has stopped"
        job.error = StalledError(why)
        self._report(job, None)

    def cancel(self, job_ids: Iterable[int]) -> None:
        """Let the jobs fail as cancelled, once nothing of them runs any more.

        One that is on its stream already runs to its end: its blocks are free with its result, and
        not before. Ids that are not in flight are ignored.
        """
        self._check_process()
        with self._lock:
            for job_id in job_ids:
                if job_id in self._in_flight:
                    self._in_flight[job_id].cancelled = True

    def wait(self, job_ids: Iterable[int]) -> None:
        """Block until the jobs have ended; their results still come from :meth:`finished`.

        With a deadline, a job that stalls has ended when it is reported. Ids that are not in
        flight are ignored.
        """
        self._check_process()
        for job_id in job_ids:
            while (job := self._next_to_end(job_id)) is not None:
                try:
                    if self._deadline is not None:
                        time.sleep(POLL_SECONDS)
                    elif job.end is not None:
                        self.backend.wait_for(job.end)
                except Exception as error:  # noqa: BLE001 - a vendor's code may raise anything
                    self._could_not_wait(job, error)
                finally:
                    with self._lock:
                        job.waiters -= 1

    def _next_to_end(self, job_id: int) -> _Job | None:
        """The job to wait for next until this one has ended; None when it has.

        Its end is not used for another job until its ``waiters`` are gone.
        """
        with self._lock:
            self._collect()
            job = self._in_flight.get(job_id)
            while job is not None and job.end is None:
                # It waits for room, or for another that does: the oldest running job goes first.
                running = next((r for r in self._running.values() if r.end is not None), None)
                if running is not None:
                    job = running
                    break
                self._collect()
                job = self._in_flight.get(job_id)
            if job is not None:
                job.waiters += 1
            return job

    def _could_not_wait(self, job: _Job, error: Exception) -> None:
        """Mostly the error is the job's own, and ends it. If it has not, nobody waits for ever."""
        with self._lock:
            self._collect()
            if not job.reported:
                self._give_up(job, f"waiting for job {job.job_id} failed ({error})")

    def fence(self, job_ids: Iterable[int]) -> None:
        """Make the caller's current stream wait for the jobs; the calling thread goes on.

        For device work that reads what a load writes, or overwrites what a store still reads. Ids
        of jobs that have stopped are ignored.

        Raises:
            CopyError: the device refused.
        """
        self._check_process()
        with self._lock:
            wanted = set(job_ids)
            # Also those that were reported as stalled: what they may still write is withheld.
            jobs = [job for job in self._running.values() if job.job_id in wanted]
            if not jobs:
                return
            self._launch_waiting(up_to=max(job.number for job in jobs))
            ends = [job.end for job in jobs if job.end is not None]
        # Not under the lock: a caller that is its own stream waits right here.
        try:
            stream = self.backend.current_stream()
            for end in ends:
                stream.wait_event(end)
        except Exception as error:
            raise _wrap(CopyError, "fencing failed", error) from error

    @property
    def in_flight(self) -> list[int]:
        """Ids of the jobs that have no result yet."""
        with self._lock:
            return list(self._in_flight)

    def usage(self) -> EngineUsage:
        """What the engine holds now."""
        with self._lock:
            return EngineUsage(
                in_flight=len(self._in_flight),
                running=len(self._running),
                buffers=self._buffers.lent,
                idle_events=len(self._free_events),
            )

    def reset(self) -> None:
        """Cancel all jobs, and block until nothing of them runs any more.

        Raises:
            StalledError: some passed their deadline, and may still be running.
        """
        self._check_process()
        with self._lock:
            jobs = list(self._in_flight)
            self.cancel(jobs)
        self.wait(jobs)
        with self._lock:
            if self._withheld:
                raise StalledError(f"{len(self._withheld)} transfers have not stopped")

    def unregister(self, timeout: float | None = None) -> None:
        """Wait for all jobs, let go of the caches, and give host memory back. Works twice.

        Results of the jobs that were in flight still come from :meth:`finished`. The backend stays
        open: another engine can be made with it, as when an engine wakes from a sleep in which it
        gave its memory away.

        Args:
            timeout: seconds to wait; what runs then is reported as stalled, and host memory stays
                allocated for it. By default as long as it takes, but not for what was reported as
                stalled before.
        """
        self._unregister(timeout)

    def _unregister(self, timeout: float | None) -> bool:
        """Whether nothing runs any more."""
        if timeout is not None and (isinstance(timeout, bool) or not _is_number(timeout)):
            raise ConfigurationError(f"timeout must be a number of seconds, not {timeout!r}")
        if os.getpid() != self._process:
            return False  # the parent's jobs are the parent's to end
        with self._lock:
            self._closed = True
        self._drain(timeout)
        with self._closing, self._lock:
            self._collect()
            self._free_events.clear()
            if self._running:
                logger.error(
                    "%d transfers have not stopped; host memory stays allocated for them",
                    len(self._running),
                )
                return False
            if not self._let_go:
                self._let_go = True
                try:
                    self.backend.unbind()
                finally:
                    self.backend.bound = False
                    self.caches = CanonicalKVCaches([], [])
                    self.host.release()
            return True

    def _drain(self, timeout: float | None) -> None:
        if timeout is None:
            self.wait(self.in_flight)
            return
        end = time.monotonic() + timeout
        while True:
            with self._lock:
                self._collect()
                if not self._running:
                    return
                if time.monotonic() >= end:
                    for job in list(self._in_flight.values()):
                        self._give_up(job, f"job {job.job_id} ran when the engine was shut down")
                    self._collect()
                    return
            time.sleep(POLL_SECONDS)

    def shutdown(self, timeout: float | None = None) -> None:
        """:meth:`unregister`, and close the backend. Works twice."""
        try:
            quiet = self._unregister(timeout)
        except Exception:
            self.backend.close()  # nothing runs any more: it was the clean-up that failed
            raise
        if quiet:
            self.backend.close()


def _is_number(value: object) -> bool:
    """At least 0, and not NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _is_whole(value: object, end: int | None) -> bool:
    """A whole number from 0 to below ``end``."""
    return (
        isinstance(value, int)
        and not isinstance(value, bool)
        and value >= 0
        and (end is None or value < end)
    )


def _log_capacity(host: HostPool, longest_request: int | None) -> None:
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


def _serves(mine: torch.device | None, theirs: torch.device) -> bool:
    return mine is None or (mine.type == theirs.type and (mine.index or 0) == (theirs.index or 0))


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
    chain: list[BaseException | None] = [error]
    while (link := chain.pop()) is not None:
        link.__traceback__ = None
        chain += [link.__context__ if link.__cause__ is None else link.__cause__]
    wrapped = kind(f"{what}: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
