"""The worker side in vLLM's terms. Nothing here imports vLLM.

A load of several groups becomes one job of the core for each group, so that a failure is known by
its group. vLLM sees one job.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvoffload.core.blocks import chunks_touched
from kvoffload.core.engine import TransferResult
from kvoffload.core.errors import KVOffloadError, StalledError
from kvoffload.core.specs import (
    BlockIds,
    DeviceLoadStoreSpec,
    HostLoadStoreSpec,
    IntArray,
    LoadStoreSpec,
)
from kvoffload.core.worker import OffloadingWorker
from kvoffload.integrations.vllm.failures import LoadFailure

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finished:
    """How a job of vLLM ended.

    Attributes:
        job_id: vLLM's.
        is_store: its direction.
        nbytes: bytes moved; 0 unless it succeeded.
        seconds: what the copies took, or None where the backend cannot tell.
        error: why it failed; None if it succeeded.
        failures: what did not arrive, of a load.
    """

    job_id: int
    is_store: bool
    nbytes: int
    seconds: float | None
    error: KVOffloadError | None
    failures: tuple[LoadFailure, ...] = ()


@dataclass(eq=False)
class _Part:
    """One job of the core: all of a store, or one group of a load."""

    job: _Job
    group: int = 0
    first_position: int = 0
    block_ids: IntArray | None = None  # of a load


@dataclass(eq=False)
class _Job:
    job_id: int
    is_store: bool
    parts: dict[int, _Part] = field(default_factory=dict)  # that have not ended
    nbytes: int = 0
    seconds: float | None = 0.0
    error: KVOffloadError | None = None
    failures: list[LoadFailure] = field(default_factory=list)


class Transfers:
    """Submits vLLM's jobs to the core, and tells how each ended.

    Args:
        worker: holds the caches; :meth:`shutdown` shuts it down.
        blocks_per_chunk: as the worker was made with.
    """

    def __init__(self, worker: OffloadingWorker, blocks_per_chunk: int) -> None:
        self.worker = worker
        self._factor = blocks_per_chunk
        self._numbers = itertools.count()
        self._jobs: dict[int, _Job] = {}
        self._parts: dict[int, _Part] = {}
        self._ended: list[_Job] = []
        self.submit_seconds: list[float] | None = None
        """Where the time of each submission is noted, if somebody wants to know."""

    def submit_store(
        self, job_id: int, blocks: BlockIds, sizes: BlockIds, firsts: BlockIds, chunks: BlockIds
    ) -> None:
        """Start a store; whatever is wrong with it is told by :meth:`get_finished`.

        Args:
            job_id: vLLM's; not in flight.
            blocks: device blocks of all groups, those of group 0 first.
            sizes: how many each group has.
            firsts: for each group the logical index of its first block. Its first chunk may lack
                blocks at its head, where the engine has none; nobody will load them.
            chunks: the chunks that they fill, group after group.
        """
        began = time.perf_counter()
        job = self._jobs[job_id] = _Job(job_id, is_store=True)
        src = self._whole_chunks(blocks, sizes, firsts)
        self._submit(_Part(job), (src, HostLoadStoreSpec(chunks)))
        self._submitted(job, began)

    def submit_load(
        self, job_id: int, blocks: BlockIds, sizes: BlockIds, firsts: BlockIds, chunks: BlockIds
    ) -> None:
        """Start a load; as :meth:`submit_store`, but it may enter and leave inside a chunk."""
        began = time.perf_counter()
        job = self._jobs[job_id] = _Job(job_id, is_store=False)
        dst = DeviceLoadStoreSpec(blocks, sizes, firsts)
        filled = [group for group, size in enumerate(dst.group_sizes.tolist()) if size]
        if len(filled) == 1:
            (group,) = filled
            part = _Part(job, group, int(dst.block_indices[group]), dst.block_ids)
            self._submit(part, (HostLoadStoreSpec(chunks), dst))
        else:
            self._submit_each(job, dst, np.asarray(chunks), filled)
        self._submitted(job, began)

    def _submit_each(
        self, job: _Job, dst: DeviceLoadStoreSpec, chunks: IntArray, filled: Sequence[int]
    ) -> None:
        sizes, firsts = dst.group_sizes, dst.block_indices
        block_end = np.cumsum(sizes)
        touched = chunks_touched(sizes, firsts, self._factor)
        chunk_end = np.cumsum(touched)
        for group in filled:
            mine = dst.block_ids[block_end[group] - sizes[group] : block_end[group]]
            own_sizes = np.zeros_like(sizes)
            own_sizes[group] = sizes[group]
            # The last takes what is left, so that chunks too many do not go unnoticed.
            end = len(chunks) if group == filled[-1] else chunk_end[group]
            self._submit(
                _Part(job, group, int(firsts[group]), mine),
                (
                    HostLoadStoreSpec(chunks[chunk_end[group] - touched[group] : end]),
                    DeviceLoadStoreSpec(mine, own_sizes, firsts),
                ),
            )

    def _whole_chunks(
        self, blocks: BlockIds, sizes: BlockIds, firsts: BlockIds
    ) -> DeviceLoadStoreSpec:
        """A store fills whole chunks: what a group lacks at the head of its first one is filled
        with its first block once more."""
        src = DeviceLoadStoreSpec(blocks, sizes, firsts)
        if self._factor == 1:
            return src
        lacking = np.where(src.group_sizes > 0, src.block_indices % self._factor, 0)
        if not lacking.any():
            return src
        begin = np.cumsum(src.group_sizes) - src.group_sizes
        repeats = np.ones(len(src.block_ids), dtype=np.int64)
        filled = src.group_sizes > 0
        repeats[begin[filled]] += lacking[filled]
        return DeviceLoadStoreSpec(
            np.repeat(src.block_ids, repeats),
            src.group_sizes + lacking,
            src.block_indices - lacking,
        )

    def _submit(self, part: _Part, spec: tuple[LoadStoreSpec, LoadStoreSpec]) -> None:
        number = next(self._numbers)
        part.job.parts[number] = self._parts[number] = part
        try:
            self.worker.transfer_async(number, spec)
        except KVOffloadError as error:
            self._end(number, error)

    def _submitted(self, job: _Job, began: float) -> None:
        if not job.parts:  # nothing to move, or all of it refused
            self._ended.append(self._jobs.pop(job.job_id))
        if self.submit_seconds is not None:
            self.submit_seconds.append(time.perf_counter() - began)

    def _end(self, number: int, error: KVOffloadError | None) -> _Job:
        part = self._parts.pop(number)
        job = part.job
        del job.parts[number]
        if error is not None:
            job.error = job.error or error
            if part.block_ids is not None:
                job.failures.append(
                    LoadFailure(
                        job.job_id,
                        part.group,
                        part.first_position,
                        tuple(part.block_ids.tolist()),
                        str(error),
                    )
                )
        return job

    def get_finished(self) -> list[Finished]:
        """How the jobs that ended since the last call did; never waits.

        Raises:
            StalledError: a load passed its deadline and may still be writing. Nobody can compute
                into blocks that may change later, so there is no going on.
        """
        for result in self.worker.get_finished():
            self._take(result)
        ended, self._ended = self._ended, []
        return [
            Finished(
                job.job_id,
                job.is_store,
                job.nbytes if job.error is None else 0,
                job.seconds if job.error is None else None,
                job.error,
                tuple(job.failures),
            )
            for job in ended
        ]

    def _take(self, result: TransferResult) -> None:
        job = self._end(result.job_id, result.error)
        if isinstance(result.error, StalledError) and not job.is_store:
            raise result.error
        job.nbytes += result.transfer_size
        if result.transfer_time is None:
            job.seconds = None
        elif job.seconds is not None:
            job.seconds += result.transfer_time
        if not job.parts:
            self._ended.append(self._jobs.pop(job.job_id))

    def wait(self, job_ids: Collection[int]) -> None:
        """Block until the jobs have ended; unknown ids are ignored. Results come as always."""
        self.worker.wait(
            [number for i in job_ids if i in self._jobs for number in self._jobs[i].parts]
        )

    def shutdown(self) -> None:
        """End all jobs and give host memory back. Works twice."""
        self.worker.shutdown()
