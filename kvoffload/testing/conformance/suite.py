"""The kit in a test suite: one class to subclass. The only module here that imports pytest."""

from __future__ import annotations

import contextlib

import pytest

from kvoffload.core.backend import Backend
from kvoffload.testing.conformance import CHECKS, run_check
from kvoffload.testing.conformance.run import FAILED, SKIPPED, why_unavailable


class BackendConformance:
    """Every check as a test. Subclass it as ``TestMyBackend``, and say how to make a backend::

        class TestMine(BackendConformance):
            def make_backend(self):
                return MyBackend("xpu:0")

    A check that the capabilities rule out is skipped, with the reason. Where the backend's probe
    says that it cannot run, all are, unless :attr:`must_run` is set.
    """

    must_run: bool = False
    """Where the backend cannot run, fail instead of skipping: for a lane that has its device."""

    deadline: float = 30.0
    """Seconds for each check."""
    seed: int = 0
    """Of everything random."""

    def make_backend(self) -> Backend:
        """A fresh backend for the device under test; called many times."""
        raise NotImplementedError("say how to make the backend under test")

    def _missing(self) -> str | None:
        """Why the backend cannot run here; what is wrong otherwise is for the checks to find."""
        with contextlib.suppress(Exception), contextlib.closing(self.make_backend()) as backend:
            return why_unavailable(backend)
        return None

    @pytest.mark.parametrize("name", list(CHECKS))
    def test(self, name: str) -> None:
        """The backend keeps this sentence."""
        missing = self._missing()
        if missing is not None:
            why = f"the backend cannot run here: {missing}"
            if self.must_run:
                pytest.fail(why, pytrace=False)
            pytest.skip(why)
        outcome = run_check(CHECKS[name], self.make_backend, seed=self.seed, deadline=self.deadline)
        if outcome.outcome == SKIPPED:
            pytest.skip(outcome.reason)
        if outcome.outcome == FAILED:
            pytest.fail(f"[{outcome.guarantee}] {outcome.reason}", pytrace=False)
