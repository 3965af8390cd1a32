"""The conformance kit, on the backend that ``--kv-backend`` names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvoffload.core.backend import Backend
from kvoffload.plugins.registry import BackendRegistry
from kvoffload.testing.conformance.suite import BackendConformance


class TestLane(BackendConformance):
    @pytest.fixture(autouse=True)
    def _lane(self, make_backend: Callable[[], Backend], pytestconfig: pytest.Config) -> None:
        self.make_backend = make_backend  # type: ignore[method-assign]
        self.seed = pytestconfig.getoption("kv_seed")


def test_the_lane_runs_on_the_backend_it_names(
    backend: Backend, pytestconfig: pytest.Config
) -> None:
    named = BackendRegistry().create(pytestconfig.getoption("kv_backend"))
    assert type(backend) is type(named)
    assert backend.probe().available
