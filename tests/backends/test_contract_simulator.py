"""The simulator is a backend as any other: it holds the contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvoffload.testing.simulator import SimBackend, World
from tests.backends.contract import CONTRACT
from tests.lab import Lab


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("sentence", CONTRACT, ids=lambda f: f.__name__)
def test_contract_on_the_simulator(sentence: Callable[[Lab], None], seed: int) -> None:
    world = World(seed)
    with Lab(SimBackend(world)) as lab:
        sentence(lab)
    assert world.violations == []
