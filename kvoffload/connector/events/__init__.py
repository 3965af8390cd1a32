"""The protocol by event index: one number for all loads of a step, and one for all its stores.

Both are launched off the engine's thread once the model was launched, so that what it costs to
build the copies hides behind compute. They start after a mark that was recorded on the engine's
thread and stream.
"""

from kvoffload.connector.events.launcher import Launcher, ThreadLauncher
from kvoffload.connector.events.metadata import NO_EVENT, Metadata, WorkerMetadata
from kvoffload.connector.events.scheduler_side import SchedulerSide
from kvoffload.connector.events.worker_side import WorkerSide

__all__ = [
    "NO_EVENT",
    "Launcher",
    "Metadata",
    "SchedulerSide",
    "ThreadLauncher",
    "WorkerMetadata",
    "WorkerSide",
]
