"""What goes down to every worker once a step, and what comes up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvoffload.connector.aggregate import Counts, add_counts
from kvoffload.core.specs import TransferSpec

NO_EVENT = -1
"""The index of a step that has nothing to load, or nothing to store."""


@dataclass(frozen=True, eq=False)
class Metadata:
    """Of one step. It can be pickled.

    Attributes:
        load_event: index of its loads; indices of a direction only grow.
        store_event: index of its stores.
        loads: source and destination blocks of its loads, a pair for each request.
        stores: source and destination blocks of its stores.
        load_requests: by load event, whom it serves, in the order of ``loads``.
        flush: wait for everything in flight before anything of this step runs.
    """

    load_event: int = NO_EVENT
    store_event: int = NO_EVENT
    loads: tuple[TransferSpec, ...] = ()
    stores: tuple[TransferSpec, ...] = ()
    load_requests: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    flush: bool = False


@dataclass(frozen=True)
class WorkerMetadata:
    """What ended on some workers since they last said so: by event index, how many workers.

    Attributes:
        loads, stores: that have ended it, failed or not.
        failed_loads, failed_stores: those of them where a part of it failed.
    """

    loads: Counts = field(default_factory=dict)
    stores: Counts = field(default_factory=dict)
    failed_loads: Counts = field(default_factory=dict)
    failed_stores: Counts = field(default_factory=dict)

    def __add__(self, other: WorkerMetadata) -> WorkerMetadata:
        return WorkerMetadata(
            add_counts(self.loads, other.loads),
            add_counts(self.stores, other.stores),
            add_counts(self.failed_loads, other.failed_loads),
            add_counts(self.failed_stores, other.failed_stores),
        )
