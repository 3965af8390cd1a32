"""A simulated engine: each protocol keeps its promises, and each promise, when broken, is found."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest

from kvoffload.cli import main
from kvoffload.connector import events, jobs, scheduler_side, worker_side
from kvoffload.connector.acknowledgements import Acknowledgements
from kvoffload.core.errors import ConfigurationError
from kvoffload.core.worker import OffloadingWorker
from kvoffload.testing.simulator.served import ServedProgram
from kvoffload.testing.simulator.simulate import MakeProgram, Simulation, simulate

PROTOCOLS = ("jobs", "events")
Mutate = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, tuple[Mutate, tuple[str, ...]]] = {}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")


def run(protocol: str, seeds: int) -> Simulation:
    program: MakeProgram = functools.partial(ServedProgram, protocol=protocol)
    return simulate(range(seeds), make_program=program)


def mutant(*protocols: str) -> Callable[[Mutate], Mutate]:
    def register(mutate: Mutate) -> Mutate:
        MUTANTS[mutate.__name__] = (mutate, protocols or PROTOCOLS)
        return mutate

    return register


# --------------------------------------------------------------------------------- at preemption
@mutant("events")
def a_flush_forgets_what_is_queued(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(events.WorkerSide, "_submit_all", lambda self: None)


@mutant("events")
def a_flush_waits_for_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(events.WorkerSide, "flush", lambda self: None)


@mutant("jobs")
def deferred_stores_are_not_submitted_at_preemption(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: Any, metadata: jobs.Metadata) -> None:
        if metadata.flush and self._worker is not None:
            self._worker.wait(metadata.flush)

    patch.setattr(jobs.WorkerSide, "handle_preemptions", mutated)


@mutant("jobs")
def a_preemption_waits_for_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(jobs.WorkerSide, "handle_preemptions", lambda self, metadata: None)


@mutant()
def reallocated_blocks_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler_side.BaseSchedulerSide, "allocated", lambda self, ids: None)


@mutant()
def stores_of_what_is_never_computed_go_on(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: Any, planned: Any) -> None:
        return None

    patch.setattr(scheduler_side.BaseSchedulerSide, "_drop_store", mutated)


@mutant()
def stores_are_tried_again_from_blocks_of_others(patch: pytest.MonkeyPatch) -> None:
    allocated = scheduler_side.BaseSchedulerSide.allocated

    def mutated(self: Any, ids: Any) -> None:
        kept, self._offers = self._offers, type(self._offers)()
        allocated(self, ids)
        self._offers = kept

    patch.setattr(scheduler_side.BaseSchedulerSide, "allocated", mutated)


# ------------------------------------------------------------------------------- across workers
@mutant()
def the_first_rank_speaks_for_all(patch: pytest.MonkeyPatch) -> None:
    said: dict[int, set[Any]] = {}

    def mutated(self: Any, name: Any, ended: int = 1, failed: int = 0) -> bool | None:
        done = said.setdefault(id(self), set())
        if name in done:
            return None
        done.add(name)
        return not failed

    patch.setattr(Acknowledgements, "add", mutated)


@mutant()
def the_failure_of_one_rank_is_lost(patch: pytest.MonkeyPatch) -> None:
    add = Acknowledgements.add

    def mutated(self: Any, name: Any, ended: int = 1, failed: int = 0) -> bool | None:
        return add(self, name, ended)

    patch.setattr(Acknowledgements, "add", mutated)


@mutant()
def ranks_that_do_not_write_say_nothing(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: Any, job: Any, success: bool) -> None:
        if self._moves(job.is_load):
            settle(self, job, success)

    settle = worker_side.BaseWorkerSide._settle
    acknowledge = jobs.WorkerSide._acknowledge

    def silent(self: Any, job: Any, success: bool) -> None:
        if self._moves(job.is_load):
            acknowledge(self, job, success)

    patch.setattr(worker_side.BaseWorkerSide, "_settle", mutated)
    patch.setattr(jobs.WorkerSide, "_acknowledge", silent)


# ---------------------------------------------------------------------------------------- loads
@mutant()
def blocks_of_an_aborted_load_are_free_at_once(patch: pytest.MonkeyPatch) -> None:
    finished = scheduler_side.BaseSchedulerSide.request_finished

    def mutated(self: Any, request_id: str, *, aborted: bool = False) -> bool:
        if finished(self, request_id, aborted=aborted):
            self._requests.pop(request_id).held = False
        return False

    patch.setattr(scheduler_side.BaseSchedulerSide, "request_finished", mutated)


@mutant("events")
def a_load_of_an_earlier_step_loses_its_request(patch: pytest.MonkeyPatch) -> None:
    start = events.WorkerSide._start

    def mutated(self: Any, metadata: events.Metadata) -> None:
        self._requests.clear()
        start(self, metadata)

    patch.setattr(events.WorkerSide, "_start", mutated)


@mutant()
def failed_loads_count_as_loaded(patch: pytest.MonkeyPatch) -> None:
    end = scheduler_side.BaseSchedulerSide._end

    def mutated(self: Any, planned: Any, success: bool, outcome: Any) -> None:
        end(self, planned, success or planned.is_load, outcome)

    patch.setattr(scheduler_side.BaseSchedulerSide, "_end", mutated)


@mutant()
def failed_stores_count_as_stored(patch: pytest.MonkeyPatch) -> None:
    end = scheduler_side.BaseSchedulerSide._end

    def mutated(self: Any, planned: Any, success: bool, outcome: Any) -> None:
        end(self, planned, success or not planned.is_load, outcome)

    patch.setattr(scheduler_side.BaseSchedulerSide, "_end", mutated)


@mutant()
def blocks_of_aborted_loads_are_never_released(patch: pytest.MonkeyPatch) -> None:
    end = scheduler_side.BaseSchedulerSide._end

    def mutated(self: Any, planned: Any, success: bool, outcome: Any) -> None:
        end(self, planned, success, outcome)
        outcome.released.clear()

    patch.setattr(scheduler_side.BaseSchedulerSide, "_end", mutated)


# ---------------------------------------------------------------------------------------- order
@mutant("events")
def launches_do_not_wait_for_the_mark(patch: pytest.MonkeyPatch) -> None:
    transfer = OffloadingWorker.transfer_async

    def mutated(self: Any, job_id: int, spec: Any, *, after: Any) -> bool:
        return transfer(self, job_id, spec, after=None)

    patch.setattr(OffloadingWorker, "transfer_async", mutated)


@mutant("events")
def the_mark_is_recorded_before_the_model_is_launched(patch: pytest.MonkeyPatch) -> None:
    start = events.WorkerSide._start

    def mutated(self: Any, metadata: events.Metadata) -> None:
        start(self, metadata)
        self._bound = None
        self._finish(metadata)

    patch.setattr(events.WorkerSide, "_start", mutated)


@mutant("jobs")
def stores_are_submitted_before_the_model_is_launched(patch: pytest.MonkeyPatch) -> None:
    start = jobs.WorkerSide._start

    def mutated(self: Any, metadata: jobs.Metadata) -> None:
        start(self, metadata)
        self._bound = None
        self._finish(metadata)
        self._submit_all()

    patch.setattr(jobs.WorkerSide, "_start", mutated)


@mutant()
def a_step_that_was_never_finished_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    for side in (jobs.WorkerSide, events.WorkerSide):
        patch.setattr(side, "_abandon", lambda self, metadata: None)


@mutant()
def a_poll_waits(patch: pytest.MonkeyPatch) -> None:
    collect = worker_side.BaseWorkerSide._collect

    def mutated(self: Any) -> None:
        if self._worker is not None:
            self._worker.wait(list(self._in_flight))
        collect(self)

    patch.setattr(worker_side.BaseWorkerSide, "_collect", mutated)


# ---------------------------------------------------------------------------------------- tests
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_simulated_engine_keeps_every_promise(protocol: str) -> None:
    simulation = run(protocol, 400)
    assert simulation.failed is None, simulation.failed
    assert simulation.schedules == 400
    assert simulation.median_jobs >= 5
    assert simulation.median_steps >= 100
    assert simulation.faults_injected > 200


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_same_seed_is_the_same_program(protocol: str) -> None:
    first, second = (ServedProgram(11, protocol=protocol).run() for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("name", "protocol"), [(name, p) for name, (_, ps) in MUTANTS.items() for p in ps]
)
def test_a_mutant_is_found_and_the_same_seed_is_clean_without(
    name: str, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        MUTANTS[name][0](patch)
        failed = run(protocol, 500).failed
    assert failed is not None, "nobody noticed"
    print(f"seed {failed.seed}: {failed.problems[0]}")
    assert failed.operations
    assert not ServedProgram(failed.seed, protocol=protocol).run().problems


def test_there_are_two_protocols() -> None:
    with pytest.raises(ConfigurationError, match="jobs, events"):
        ServedProgram(0, protocol="tokens")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_command_prints_what_came_of_it(
    protocol: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--protocol", protocol, "--seeds", "20", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["schedules"] == 20
    assert printed["jobs"] > 100
    assert (printed["corrupt_blocks"], printed["lost_jobs"], printed["leaks"]) == (0, 0, 0)
    broken = ["simulate", "--protocol", protocol, "--break", "stores-wait-for-compute"]
    # A store that starts after an event that it was given is not of that rule.
    broken[-1] = "given-events-are-waited-for" if protocol == "events" else broken[-1]
    assert main(broken) == 1
    said = capsys.readouterr().out
    again = next(line for line in said.splitlines() if line.startswith("Again: kvoffload "))
    assert f"--protocol {protocol} --seed " in again
    assert main([*again.removeprefix("Again: kvoffload ").split(), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failure"]["corrupt"]


def test_an_unknown_protocol_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--protocol", "tokens"]) == 2
    said = capsys.readouterr().err
    assert "--protocol tokens" in said
    assert said.count("\n") == 1
