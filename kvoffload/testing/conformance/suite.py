"""The kit in a test suite: one class to subclass. The only module here that imports pytest."""

from __future__ import annotations

import pytest

from kvoffload.core.backend import Backend
from kvoffload.testing.conformance import CHECKS, run_check
from kvoffload.testing.conformance.run import FAILED, SKIPPED


class BackendConformance:
    """Every check as a test. Subclass it as ``TestMyBackend``, and say how to make a backend::

        class TestMine(BackendConformance):
            def make_backend(self):
                return MyBackend("xpu:0")

    A check that the capabilities rule out is skipped, with the reason.
    """

    deadline: float = 30.0
    """Seconds for each check."""
    seed: int = 0
    """Of everything random."""

    def make_backend(self) -> Backend:
        """A fresh backend for the device under test; called many times."""
        raise NotImplementedError("say how to make the backend under test")

    @pytest.mark.parametrize("name", list(CHECKS))
    def test(self, name: str) -> None:
        """The backend keeps this sentence."""
        outcome = run_check(CHECKS[name], self.make_backend, seed=self.seed, deadline=self.deadline)
        if outcome.outcome == SKIPPED:
            pytest.skip(outcome.reason)
        if outcome.outcome == FAILED:
            pytest.fail(f"[{outcome.guarantee}] {outcome.reason}", pytrace=False)
