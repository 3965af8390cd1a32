"""What goes down to every worker once a step, and what comes up."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvoffload.connector.aggregate import Counts, add_counts
from kvoffload.core.specs import LoadStoreSpec


@dataclass(frozen=True, eq=False)
class Job:
    """One transfer.

    Attributes:
        job_id: its number.
        request_id: whom it serves.
        src, dst: what moves where.
    """

    job_id: int
    request_id: str
    src: LoadStoreSpec
    dst: LoadStoreSpec


@dataclass(frozen=True, eq=False)
class Metadata:
    """Of one step. It can be pickled.

    Attributes:
        loads: submitted at the step's start.
        stores: of what this step computes; submitted at the next step's start.
        flush: job ids to wait for before anything of this step runs.
    """

    loads: tuple[Job, ...] = ()
    stores: tuple[Job, ...] = ()
    flush: frozenset[int] = frozenset()


@dataclass(frozen=True)
class WorkerMetadata:
    """What ended on some workers since they last said so.

    Attributes:
        completed: by job id, how many workers have ended it, failed or not.
        failed: by job id, how many of those failed.
    """

    completed: Counts = field(default_factory=dict)
    failed: Counts = field(default_factory=dict)

    def __add__(self, other: WorkerMetadata) -> WorkerMetadata:
        return WorkerMetadata(
            add_counts(self.completed, other.completed), add_counts(self.failed, other.failed)
        )
