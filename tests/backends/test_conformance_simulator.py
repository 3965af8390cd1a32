"""The simulator is a backend as any other: the kit passes it, whatever its scheduler chooses."""

from __future__ import annotations

import pytest

from kvoffload.testing.conformance import CHECKS, run_check
from kvoffload.testing.conformance.run import FAILED
from kvoffload.testing.simulator import SimBackend, World


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", CHECKS)
def test_the_simulator(name: str, seed: int) -> None:
    worlds: list[World] = []

    def make_backend() -> SimBackend:
        worlds.append(World(seed))
        return SimBackend(worlds[-1])

    outcome = run_check(CHECKS[name], make_backend, seed=seed)
    assert outcome.outcome != FAILED, outcome.reason
    assert [world.violations for world in worlds if world.violations] == []
