"""The protocol by job id: every transfer has a number of its own.

Loads are submitted at a step's start, stores at the start of the step after, so that they begin
after the sampled tokens were fetched and delay none.
"""

from kvoffload.connector.jobs.metadata import Job, Metadata, WorkerMetadata
from kvoffload.connector.jobs.scheduler_side import SchedulerSide
from kvoffload.connector.jobs.worker_side import WorkerSide

__all__ = ["Job", "Metadata", "SchedulerSide", "WorkerMetadata", "WorkerSide"]
