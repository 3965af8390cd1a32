# ruff: noqa: ARG001, ARG005 - what is broken ignores what it is given
"""What the engine under test can be made to break, one rule at a time.

Each rule is a sentence of the guarantees, and a patch that breaks it. The patches live here: there
is no switch in the core.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from kvoffload.core import specs
from kvoffload.core.engine import CURRENT_STREAM, TransferEngine
from kvoffload.core.lanes import Lane
from kvoffload.core.ordering import OrderingTable
from kvoffload.core.plan import CopyPlan
from kvoffload.core.specs import HostLoadStoreSpec
from kvoffload.scheduler.host_manager import HostOffloadingManager
from kvoffload.testing.simulator.backend import SimBackend
from kvoffload.testing.simulator.world import SimStream


@dataclass(frozen=True)
class Rule:
    """A promise that can be broken.

    Attributes:
        name: kebab-case.
        guarantee: number of the guarantee it belongs to.
        sentence: what is promised.
        break_: enters the world in which it is not kept.
    """

    name: str
    guarantee: int
    sentence: str
    break_: Callable[[], contextlib.AbstractContextManager[object]]


RULES: dict[str, Rule] = {}


def _rule(
    guarantee: int,
) -> Callable[[Callable[[contextlib.ExitStack], None]], Callable[[contextlib.ExitStack], None]]:
    """The function's name is the rule's, its docstring the sentence; it enters the patches."""

    def register(
        function: Callable[[contextlib.ExitStack], None],
    ) -> Callable[[contextlib.ExitStack], None]:
        @contextlib.contextmanager
        def broken() -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                function(stack)
                yield

        name = function.__name__.strip("_").replace("_", "-")
        RULES[name] = Rule(name, guarantee, (function.__doc__ or "").strip(), broken)
        return function

    return register


def _patch(stack: contextlib.ExitStack, owner: Any, name: str, new: Any) -> None:
    stack.enter_context(mock.patch.object(owner, name, new))


# ------------------------------------------------------------------------------------ 1: order
def _without_waiting_for_compute(stack: contextlib.ExitStack, lane: Lane) -> None:
    submit = TransferEngine.submit

    def mutated(self: Any, job_id: int, src: Any, dst: Any, *, after: Any = CURRENT_STREAM) -> None:
        mine = (
            Lane.LOAD
            if isinstance(src, HostLoadStoreSpec)
            else Lane.STORE
            if isinstance(dst, HostLoadStoreSpec)
            else Lane.COPY
        )
        submit(self, job_id, src, dst, after=None if mine is lane else after)

    _patch(stack, TransferEngine, "submit", mutated)


@_rule(1)
def stores_wait_for_compute(stack: contextlib.ExitStack) -> None:
    """A store starts after the compute that was enqueued before it."""
    _without_waiting_for_compute(stack, Lane.STORE)


@_rule(1)
def loads_wait_for_compute(stack: contextlib.ExitStack) -> None:
    """A load starts after the compute that was enqueued before it."""
    _without_waiting_for_compute(stack, Lane.LOAD)


@_rule(1)
def copies_wait_for_compute(stack: contextlib.ExitStack) -> None:
    """A copy starts after the compute that was enqueued before it."""
    _without_waiting_for_compute(stack, Lane.COPY)


@_rule(1)
def given_events_are_waited_for(stack: contextlib.ExitStack) -> None:
    """A transfer starts after the event that its caller gave."""
    submit = TransferEngine.submit

    def mutated(self: Any, *args: Any, after: Any = CURRENT_STREAM) -> None:
        submit(self, *args, after=after if after is CURRENT_STREAM else None)

    _patch(stack, TransferEngine, "submit", mutated)


@_rule(1)
def jobs_that_share_blocks_run_in_order(stack: contextlib.ExitStack) -> None:
    """A transfer starts after every unfinished one that shares a block or chunk with it."""

    def dependencies(self: Any, lane: int, reads: Any, writes: Any) -> list[int]:
        return []

    _patch(stack, OrderingTable, "dependencies", dependencies)


@_rule(1)
def lanes_run_in_order(stack: contextlib.ExitStack) -> None:
    """A transfer starts after the earlier ones of its direction."""
    launch = TransferEngine._launch

    def mutated(self: Any, job: Any) -> None:
        kept = job.lane.stream
        job.lane.stream = SimStream(self.backend.world, f"{kept.name} {job.job_id}")
        self.backend.world.counters.streams -= 1
        try:
            launch(self, job)
        finally:
            job.lane.stream = kept

    _patch(stack, TransferEngine, "_launch", mutated)


@_rule(1)
def fences_order_compute(stack: contextlib.ExitStack) -> None:
    """Compute after a fence starts after the jobs that it names."""
    _patch(stack, TransferEngine, "fence", lambda self, job_ids: None)


# ------------------------------------------------------------------------------------ 2: inputs
@_rule(2)
def inputs_are_taken_at_submit(stack: contextlib.ExitStack) -> None:
    """The caller may use its arrays for something else at once."""
    submit, finished = TransferEngine.submit, TransferEngine.finished
    late: dict[int, list[Any]] = {}

    def mutated_submit(self: Any, *args: Any, after: Any = CURRENT_STREAM) -> None:
        late.setdefault(id(self), []).append((args, after))

    def mutated_finished(self: Any, lane: Lane) -> Any:
        for args, after in late.pop(id(self), []):
            with contextlib.suppress(Exception):
                submit(self, *args, after=after)
        return finished(self, lane)

    _patch(stack, specs, "as_ids", lambda values, what: np.asarray(values))
    _patch(stack, TransferEngine, "submit", mutated_submit)
    _patch(stack, TransferEngine, "finished", mutated_finished)


# --------------------------------------------------------------------------- 3: only enqueues
@_rule(3)
def submit_only_enqueues(stack: contextlib.ExitStack) -> None:
    """Submitting does not wait for the device."""
    submit = TransferEngine.submit

    def mutated(self: Any, job_id: int, *args: Any, after: Any = CURRENT_STREAM) -> None:
        submit(self, job_id, *args, after=after)
        self.wait([job_id])

    _patch(stack, TransferEngine, "submit", mutated)


@_rule(3)
def polling_does_not_wait(stack: contextlib.ExitStack) -> None:
    """Polling does not wait for the device."""
    finished = TransferEngine.finished

    def mutated(self: Any, lane: Lane) -> Any:
        self.wait(self.in_flight)
        return finished(self, lane)

    _patch(stack, TransferEngine, "finished", mutated)


# ------------------------------------------------------------------------------- 4: ends once
@_rule(4)
def every_job_has_a_result(stack: contextlib.ExitStack) -> None:
    """Every job ends."""
    finished = TransferEngine.finished

    def mutated(self: Any, lane: Lane) -> Any:
        return [result for result in finished(self, lane) if result.job_id % 7 != 3]

    _patch(stack, TransferEngine, "finished", mutated)


@_rule(4)
def no_job_has_two_results(stack: contextlib.ExitStack) -> None:
    """Every job ends once."""
    finished = TransferEngine.finished
    _patch(stack, TransferEngine, "finished", lambda self, lane: finished(self, lane) * 2)


@_rule(4)
def failures_are_reported(stack: contextlib.ExitStack) -> None:
    """A job whose copy failed is not reported as moved."""
    end = TransferEngine._end

    def mutated(self: Any, job: Any) -> None:
        job.error = None
        end(self, job)

    _patch(stack, TransferEngine, "_end", mutated)


@_rule(4)
def half_launched_jobs_end_when_they_stop(stack: contextlib.ExitStack) -> None:
    """A job that failed half-way ends when what it launched has stopped."""
    stopped = TransferEngine._has_stopped

    def mutated(self: Any, job: Any) -> bool:
        return job.error is not None or stopped(self, job)

    _patch(stack, TransferEngine, "_has_stopped", mutated)


@_rule(4)
def readers_of_failures_fail(stack: contextlib.ExitStack) -> None:
    """A job that read what a failed one should have written fails too."""
    _patch(stack, TransferEngine, "_suspects", lambda self, reads: [])


@_rule(4)
def cancelled_jobs_end_when_they_stop(stack: contextlib.ExitStack) -> None:
    """A cancelled job ends when nothing of it runs any more."""
    stopped = TransferEngine._has_stopped

    def mutated(self: Any, job: Any) -> bool:
        return job.cancelled or stopped(self, job)

    _patch(stack, TransferEngine, "_has_stopped", mutated)


# ----------------------------------------------------------------------------------- 5: bytes
def _resize(stack: contextlib.ExitStack, by: int) -> None:
    descriptors = CopyPlan.descriptors

    def mutated(self: Any) -> Any:
        lowered = descriptors(self)
        return lowered._replace(size=lowered.size + np.uint64(by % 2**64))

    _patch(stack, CopyPlan, "descriptors", mutated)


@_rule(5)
def every_byte_moves(stack: contextlib.ExitStack) -> None:
    """Every byte of a page moves, the last one too."""
    _resize(stack, -1)


@_rule(5)
def no_other_byte_moves(stack: contextlib.ExitStack) -> None:
    """Bytes beside a page stay as they are."""
    _resize(stack, 1)


@_rule(5)
def sources_are_read_in_order_unless_settled(stack: contextlib.ExitStack) -> None:
    """A source that an unfinished transfer writes is not read early."""
    swap_blocks = SimBackend.swap_blocks

    def mutated(self: Any, plan: Any, stream: Any, keep: Any) -> None:
        object.__setattr__(plan, "settled", True)
        swap_blocks(self, plan, stream, keep)

    _patch(stack, SimBackend, "swap_blocks", mutated)


# ------------------------------------------------------------------------------ 6: visibility
@_rule(6)
def keys_are_visible_when_in_place(stack: contextlib.ExitStack) -> None:
    """A lookup finds a key only after its bytes are in place."""
    prepare_store = HostOffloadingManager.prepare_store

    def mutated(self: Any, keys: Any, context: Any) -> Any:
        output = prepare_store(self, keys, context)
        for key in output.keys_to_store if output else ():
            self._chunks[key].ready = True
        return output

    _patch(stack, HostOffloadingManager, "prepare_store", mutated)


@_rule(6)
def keys_in_use_stay(stack: contextlib.ExitStack) -> None:
    """A key that is being loaded is not evicted."""

    def acquire(self: Any, chunk: Any) -> None:
        return None

    def release(self: Any, chunk: Any) -> None:
        if chunk.ref_cnt == 1:  # the store's own
            kept(self, chunk)

    kept = HostOffloadingManager._release
    _patch(stack, HostOffloadingManager, "_acquire", acquire)
    _patch(stack, HostOffloadingManager, "_release", release)


@_rule(6)
def failed_stores_leave_no_key(stack: contextlib.ExitStack) -> None:
    """A failed store leaves no key that a lookup finds."""
    complete_store = HostOffloadingManager.complete_store

    def mutated(self: Any, keys: Any, context: Any, success: bool = True) -> None:
        complete_store(self, keys, context)

    _patch(stack, HostOffloadingManager, "complete_store", mutated)


# ------------------------------------------------------------------------------ 7: accounting
@_rule(7)
def chunks_are_given_back(stack: contextlib.ExitStack) -> None:
    """A chunk is free again when its transfer has ended, however it did."""
    complete_load = HostOffloadingManager.complete_load

    def mutated(self: Any, keys: Any, context: Any, success: bool = True) -> None:
        if success:
            complete_load(self, keys, context, success)

    _patch(stack, HostOffloadingManager, "complete_load", mutated)


@_rule(7)
def buffers_are_given_back(stack: contextlib.ExitStack) -> None:
    """Descriptor buffers are given back when the copy is done."""
    _patch(stack, CopyPlan, "release", lambda self: None)


@_rule(7)
def running_copies_keep_their_memory(stack: contextlib.ExitStack) -> None:
    """What a copy needs is kept until it has run."""
    launch = TransferEngine._launch

    def mutated(self: Any, job: Any) -> None:
        launch(self, job)
        job.held.clear()

    _patch(stack, TransferEngine, "_launch", mutated)


# ----------------------------------------------------------------------------- 9: quiet exit
@_rule(9)
def shutdown_waits_for_jobs(stack: contextlib.ExitStack) -> None:
    """Memory is given back after the last job has stopped."""

    def drain(self: Any, timeout: float | None) -> None:
        for job in list(self._running.values()):
            job.end = None
        self._collect()

    _patch(stack, TransferEngine, "_drain", drain)
