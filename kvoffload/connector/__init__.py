"""The two protocols between an engine's scheduler and its workers.

:mod:`kvoffload.connector.jobs` names every transfer by a job id; stores are deferred to the start
of the next step. :mod:`kvoffload.connector.events` names all loads, and all stores, of a step by
one event index; both are launched off the engine's thread after the model's launch.

Both have the same names: ``SchedulerSide`` makes one ``Metadata`` a step, ``WorkerSide`` follows it
and answers with a ``WorkerMetadata`` that adds up across workers.
"""

from kvoffload.connector.acknowledgements import Acknowledgements
from kvoffload.connector.aggregate import aggregate
from kvoffload.connector.scheduler_side import Outcome
from kvoffload.connector.statistics import Statistics, TransferRecord
from kvoffload.connector.worker_side import Finished, common_num_chunks

__all__ = [
    "Acknowledgements",
    "Finished",
    "Outcome",
    "Statistics",
    "TransferRecord",
    "aggregate",
    "common_num_chunks",
]
