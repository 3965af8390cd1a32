"""Many random programs, and what to say of one that goes wrong."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from kvoffload.testing.simulator.backend import SimBackend
from kvoffload.testing.simulator.program import MakeBackend, Outcome, Program


class Runs(Protocol):
    """A program that can be run."""

    def run(self) -> Outcome: ...


MakeProgram: TypeAlias = Callable[[int, MakeBackend, Collection[int]], Runs]
"""From a seed, the backend under test and the operations to leave out to a program."""


@dataclass
class Simulation:
    """What came of many programs.

    Attributes:
        schedules: programs that were run, each in one interleaving.
        steps, jobs, faults_injected, corrupt_blocks, lost_jobs, leaks, violations: in all.
        median_jobs, median_steps: per program.
        failed: the first program that went wrong, as short as it could be made.
    """

    schedules: int = 0
    steps: int = 0
    jobs: int = 0
    faults_injected: int = 0
    corrupt_blocks: int = 0
    lost_jobs: int = 0
    leaks: int = 0
    violations: int = 0
    median_jobs: float = 0
    median_steps: float = 0
    failed: Outcome | None = None
    interrupted: bool = False
    _jobs: list[int] = field(default_factory=list, repr=False)
    _steps: list[int] = field(default_factory=list, repr=False)

    def add(self, outcome: Outcome) -> None:
        self.schedules += 1
        self.steps += outcome.steps
        self.jobs += outcome.jobs
        self.faults_injected += outcome.faults
        self.corrupt_blocks += len(outcome.corrupt)
        self.lost_jobs += len(outcome.lost)
        self.leaks += len(outcome.leaks)
        self.violations += len(outcome.violations)
        self._jobs.append(outcome.jobs)
        self._steps.append(outcome.steps)
        self.median_jobs = statistics.median_low(self._jobs[-1000:])
        self.median_steps = statistics.median_low(self._steps[-1000:])


def simulate(
    seeds: Iterable[int],
    make_backend: MakeBackend = SimBackend,
    *,
    make_program: MakeProgram = Program,
    progress: Callable[[int], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> Simulation:
    """Run the programs of these seeds, until one goes wrong.

    Args:
        seeds: of the programs.
        make_backend: the backend under test, on the world it is given.
        make_program: of what kind they are.
        progress: called with the number of programs run, after each.
        stop: asked before each program; True ends the run.
    """
    simulation = Simulation()
    for seed in seeds:
        if stop():
            simulation.interrupted = True
            break
        outcome = make_program(seed, make_backend, ()).run()
        simulation.add(outcome)
        progress(simulation.schedules)
        if outcome.problems:
            simulation.failed = shorten(outcome, make_backend, make_program)
            break
    return simulation


def shorten(
    outcome: Outcome,
    make_backend: MakeBackend = SimBackend,
    make_program: MakeProgram = Program,
) -> Outcome:
    """The same program without the operations that it goes wrong without."""
    skip: set[int] = set()
    best = outcome
    for index in sorted({_index(line) for line in outcome.operations}, reverse=True):
        shorter = make_program(outcome.seed, make_backend, skip | {index}).run()
        if shorter.problems:
            skip.add(index)
            best = shorter
    return best


def _index(line: str) -> int:
    return int(line.split(maxsplit=1)[0])
