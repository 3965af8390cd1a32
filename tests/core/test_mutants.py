"""The contract can fail: each mutant breaks the code in one way; the sentence named kills it."""

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
from tests.backends import contract
from tests.lab import Lab

Mutate = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, tuple[Mutate, Callable[[Lab], None]]] = {}


def mutant(killed_by: Callable[[Lab], None]) -> Callable[[Mutate], Mutate]:
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


@mutant(contract.a_store_waits_for_earlier_compute)
def stores_ignore_compute(patch: pytest.MonkeyPatch) -> None:
    _ignore_compute(patch, source_on_host=False)


@mutant(contract.a_load_waits_for_earlier_compute)
def loads_ignore_compute(patch: pytest.MonkeyPatch) -> None:
    _ignore_compute(patch, source_on_host=True)


@mutant(contract.an_event_recorded_earlier_orders_a_transfer)
def events_given_are_ignored(patch: pytest.MonkeyPatch) -> None:
    _ignore_compute(patch, source_on_host=True)
    _ignore_compute(patch, source_on_host=False)


@mutant(contract.jobs_that_share_blocks_run_in_the_order_of_their_submission)
def lanes_ignore_each_other(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OrderingTable, "dependencies", lambda self, lane, reads, writes: [])


@mutant(contract.a_store_waits_for_earlier_compute)
def jobs_end_before_their_copy(patch: pytest.MonkeyPatch) -> None:
    swap_blocks = CpuBackend.swap_blocks

    def mutated(self: CpuBackend, plan: Any, stream: Any, keep: Any) -> None:
        elsewhere = ThreadStream("kvoffload-elsewhere")
        swap_blocks(self, plan, elsewhere, keep)
        elsewhere.close()

    patch.setattr(CpuBackend, "swap_blocks", mutated)


@mutant(contract.every_failure_is_a_typed_result_and_the_next_job_works)
def failures_of_the_copy_are_swallowed(patch: pytest.MonkeyPatch) -> None:
    end = TransferEngine._end

    def mutated(self: TransferEngine, job: Any) -> Any:
        job.error = None
        return end(self, job)

    patch.setattr(TransferEngine, "_end", mutated)


@mutant(contract.every_job_ends_exactly_once)
def results_come_twice(patch: pytest.MonkeyPatch) -> None:
    finished = TransferEngine.finished
    patch.setattr(TransferEngine, "finished", lambda self, lane=None: finished(self, lane) * 2)


@mutant(contract.every_byte_round_trips_and_no_other_is_touched)
def the_last_byte_is_not_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        f"{CpuBackend.__module__}.lower",
        lambda plan: lower(plan)._replace(size=lower(plan).size - 1),
    )


@mutant(contract.every_byte_round_trips_and_no_other_is_touched)
def a_byte_too_many_is_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        f"{CpuBackend.__module__}.lower",
        lambda plan: lower(plan)._replace(size=lower(plan).size + 1),
    )


@mutant(contract.a_fence_orders_compute_after_a_transfer)
def fences_do_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransferEngine, "fence", lambda self, job_ids: None)


@mutant(contract.a_result_tells_bytes_media_and_seconds)
def bytes_of_the_last_tensor_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    finished = TransferEngine.finished

    def mutated(self: TransferEngine, lane: Lane | None = None) -> Any:
        results = finished(self, lane)
        return [replace(result, transfer_size=result.transfer_size - 100) for result in results]

    patch.setattr(TransferEngine, "finished", mutated)


@mutant(contract.events_are_reused)
def events_are_made_for_every_job(patch: pytest.MonkeyPatch) -> None:
    end = TransferEngine._end

    def mutated(self: TransferEngine, job: Any) -> None:
        end(self, job)
        self._free_events.clear()

    patch.setattr(TransferEngine, "_end", mutated)


@mutant(contract.submit_returns_while_the_device_is_busy)
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
def test_the_contract_kills(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, sentence = MUTANTS[name]
    with Lab(CpuBackend()) as lab:
        sentence(lab)  # and passes on the code as it is
    mutate(monkeypatch)
    # Where a mutant is a race, it loses within a few rounds.
    for _ in range(200):
        with Lab(CpuBackend()) as lab:
            try:
                sentence(lab)
            except (AssertionError, KeyError, pytest.fail.Exception):
                break
            finally:
                lab.rig.release()
    else:
        pytest.fail(f"the mutant {name} survived {sentence.__name__}")
