"""The contract, on the backend that ``--kv-backend`` names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvoffload.plugins.registry import BackendRegistry
from tests.backends.contract import CONTRACT
from tests.lab import Lab


@pytest.mark.parametrize("sentence", CONTRACT, ids=lambda f: f.__name__)
def test_contract(sentence: Callable[[Lab], None], lab: Lab) -> None:
    sentence(lab)


def test_the_lane_runs_on_the_backend_it_names(lab: Lab, request: pytest.FixtureRequest) -> None:
    named = BackendRegistry().create(request.config.getoption("kv_backend"))
    assert type(lab.engine.backend) is type(named)
