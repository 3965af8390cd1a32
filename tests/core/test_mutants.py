"""The kit sees what the core breaks: each mutant is killed by the check that it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvoffload.backends.cpu.backend import CpuBackend
from kvoffload.backends.cpu.blocks import lower
from kvoffload.backends.thread_base import ThreadStream
from kvoffload.core.engine import TransferEngine
from kvoffload.core.lanes import Lane
from kvoffload.core.ordering import OrderingTable
from kvoffload.core.specs import HostLoadStoreSpec
from kvoffload.testing.conformance import CHECKS, run_check
from kvoffload.testing.conformance.run import FAILED, PASSED

Mutate = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, tuple[Mutate, str]] = {}


def mutant(killed_by: str) -> Callable[[Mutate], Mutate]:
    def register(mutate: Mutate) -> Mutate:
        MUTANTS[mutate.__name__] = (mutate, killed_by)
        return mutate

    return register


def _ignore_compute(patch: pytest.MonkeyPatch, source_on_host: bool) -> None:
    submit = TransferEngine.submit

    def mutated(self: TransferEngine, job_id: int, src: Any, dst: Any, *, after: Any) -> None:
        if isinstance(src, HostLoadStoreSpec) is source_on_host:
            after = None
        submit(self, job_id, src, dst, after=after)

    patch.setattr(TransferEngine, "submit", mutated)


@mutant("a store waits for earlier compute")
def stores_ignore_compute(patch: pytest.MonkeyPatch) -> None:
    _ignore_compute(patch, source_on_host=False)


@mutant("a load waits for earlier compute")
def loads_ignore_compute(patch: pytest.MonkeyPatch) -> None:
    _ignore_compute(patch, source_on_host=True)


@mutant("an event recorded earlier orders a transfer")
def events_given_are_ignored(patch: pytest.MonkeyPatch) -> None:
    _ignore_compute(patch, source_on_host=True)
    _ignore_compute(patch, source_on_host=False)


@mutant("transfers that share blocks run in the order of their submission")
def lanes_ignore_each_other(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OrderingTable, "dependencies", lambda self, lane, reads, writes: [])


@mutant("a store waits for earlier compute")
def jobs_end_before_their_copy(patch: pytest.MonkeyPatch) -> None:
    swap_blocks = CpuBackend.swap_blocks

    def mutated(self: CpuBackend, plan: Any, stream: Any, keep: Any) -> None:
        elsewhere = ThreadStream("kvoffload-elsewhere")
        swap_blocks(self, plan, elsewhere, keep)
        elsewhere.close()

    patch.setattr(CpuBackend, "swap_blocks", mutated)


@mutant("a copy that fails on the device fails and the next job works")
def failures_of_the_copy_are_swallowed(patch: pytest.MonkeyPatch) -> None:
    end = TransferEngine._end

    def mutated(self: TransferEngine, job: Any) -> Any:
        job.error = None
        return end(self, job)

    patch.setattr(TransferEngine, "_end", mutated)


@mutant("every job ends exactly once")
def results_come_twice(patch: pytest.MonkeyPatch) -> None:
    finished = TransferEngine.finished
    patch.setattr(TransferEngine, "finished", lambda self, lane=None: finished(self, lane) * 2)


@mutant("pages of any size round trip")
def the_last_byte_is_not_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        f"{CpuBackend.__module__}.lower",
        lambda plan: lower(plan)._replace(size=lower(plan).size - 1),
    )


@mutant("pages of any size round trip")
def a_byte_too_many_is_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        f"{CpuBackend.__module__}.lower",
        lambda plan: lower(plan)._replace(size=lower(plan).size + 1),
    )


@mutant("a fence orders compute after a transfer")
def fences_do_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransferEngine, "fence", lambda self, job_ids: None)


@mutant("a result tells bytes media and seconds")
def bytes_of_the_last_tensor_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    finished = TransferEngine.finished

    def mutated(self: TransferEngine, lane: Lane | None = None) -> Any:
        results = finished(self, lane)
        return [replace(result, transfer_size=result.transfer_size - 1) for result in results]

    patch.setattr(TransferEngine, "finished", mutated)


@mutant("events are reused")
def events_are_made_for_every_job(patch: pytest.MonkeyPatch) -> None:
    end = TransferEngine._end

    def mutated(self: TransferEngine, job: Any) -> None:
        end(self, job)
        self._free_events.clear()

    patch.setattr(TransferEngine, "_end", mutated)


@mutant("submit returns while the device is busy")
def submit_waits_for_the_copy(patch: pytest.MonkeyPatch) -> None:
    submit = TransferEngine.submit

    def mutated(self: TransferEngine, job_id: int, *specs: Any, after: Any) -> None:
        submit(self, job_id, *specs, after=after)
        stream: Any = self._lanes[Lane.STORE].stream
        reached: Any = stream.record_event(self.backend.new_event()).point.reached
        if not reached.wait(0.2):
            raise AssertionError("submit would wait for ever")

    patch.setattr(TransferEngine, "submit", mutated)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_kit_kills(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, killed_by = MUTANTS[name]
    assert run_check(CHECKS[killed_by], CpuBackend).outcome == PASSED  # on the code as it is
    mutate(monkeypatch)
    # Where a mutant is a race, it loses within a few rounds.
    for seed in range(200):
        if run_check(CHECKS[killed_by], CpuBackend, seed=seed).outcome == FAILED:
            return
    pytest.fail(f"the mutant {name} survived: {killed_by}")
