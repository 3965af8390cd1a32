"""Random programs: the engine keeps every promise, and each promise, when broken, is found."""

from __future__ import annotations

import pytest

from kvoffload.core.backend import Keep, Stream
from kvoffload.core.plan import CopyPlan
from kvoffload.testing.simulator import SimBackend, SimStream, World
from kvoffload.testing.simulator.program import Program
from kvoffload.testing.simulator.rules import RULES
from kvoffload.testing.simulator.simulate import simulate


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")


def test_random_programs_keep_every_promise() -> None:
    simulation = simulate(range(2000))
    assert simulation.failed is None, simulation.failed
    assert simulation.schedules == 2000
    assert simulation.median_jobs >= 8
    assert simulation.median_steps >= 40
    assert simulation.faults_injected > 500


def test_the_same_seed_is_the_same_program() -> None:
    first, second = (Program(11).run() for _ in range(2))
    assert first == second


def test_there_is_a_rule_for_every_guarantee_that_an_engine_can_break() -> None:
    assert {rule.guarantee for rule in RULES.values()} == {1, 2, 3, 4, 5, 6, 7, 9}
    assert all(name == name.lower() and " " not in name for name in RULES)
    assert all(rule.sentence for rule in RULES.values())


@pytest.mark.parametrize("name", RULES)
def test_a_broken_rule_is_found_and_the_same_seed_is_clean_without(name: str) -> None:
    with RULES[name].break_():
        failed = simulate(range(1000)).failed
    assert failed is not None, f"{RULES[name].sentence} Nobody noticed that it was broken"
    assert failed.problems
    assert failed.operations
    assert not Program(failed.seed).run().problems


class IgnoresWaits(SimBackend):
    """Copies on a stream of its own, which nobody told to wait."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._own = SimStream(world, "own")
        world.counters.streams -= 1

    def swap_blocks(self, plan: CopyPlan, stream: Stream, keep: Keep[object]) -> None:
        super().swap_blocks(plan, self._own, keep)


class TakesTheCurrentStream(SimBackend):
    """Copies on the caller's stream, behind whatever the caller enqueues."""

    def swap_blocks(self, plan: CopyPlan, stream: Stream, keep: Keep[object]) -> None:
        super().swap_blocks(plan, self.current_stream(), keep)


class DropsWhatItKeeps(SimBackend):
    """Does not hold what its copies need."""

    def swap_blocks(self, plan: CopyPlan, stream: Stream, keep: Keep[object]) -> None:
        super().swap_blocks(plan, stream, lambda value: value)


class WaitsForTheDevice(SimBackend):
    """Returns when the copy has run."""

    def swap_blocks(self, plan: CopyPlan, stream: Stream, keep: Keep[object]) -> None:
        super().swap_blocks(plan, stream, keep)
        self.world.drain()


@pytest.mark.parametrize(
    "backend", [IgnoresWaits, TakesTheCurrentStream, DropsWhatItKeeps, WaitsForTheDevice]
)
def test_a_wrong_backend_is_found(backend: type[SimBackend]) -> None:
    failed = simulate(range(200), backend).failed
    assert failed is not None
    assert failed.problems


def test_what_is_found_is_made_short_and_names_who_overtook_whom() -> None:
    with RULES["stores-wait-for-compute"].break_():
        failed = simulate(range(1000)).failed
    assert failed is not None
    assert len(failed.operations) < 15
    assert any(
        "the store of" in line and "overtook compute that writes" in line
        for line in failed.overtaking
    )
