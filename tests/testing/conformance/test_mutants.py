"""The kit can fail: a backend wrong in one way fails a check of the guarantee that it breaks."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvoffload.testing.conformance import CHECKS, Guarantee, Outcome, run_check
from kvoffload.testing.conformance.run import FAILED, PASSED
from tests.testing.conformance.mutants import (
    MUTANTS,
    BlocksInCopiesOnTheDevice,
    BlocksInSwapBlocks,
    Hangs,
    KeptMemory,
    LeavesItsThreads,
    RecycledMemory,
    Reference,
    SharesItsStreamsWithOthers,
)


@pytest.fixture(autouse=True)
def _clean_up_after_mutants(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("kvoffload.testing.conformance.run.GRACE_SECONDS", 0.2)
    monkeypatch.setattr("kvoffload.testing.conformance.lab.SHUTDOWN_SECONDS", 0.2)
    logging.getLogger("kvoffload").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("kvoffload").setLevel(logging.NOTSET)
    Hangs.let_go.set()
    while LeavesItsThreads.left:
        LeavesItsThreads.left.pop().close()
    KeptMemory.kept.clear()
    RecycledMemory.pool.clear()
    SharesItsStreamsWithOthers().close()


@pytest.mark.parametrize("name", CHECKS)
def test_the_reference_passes(name: str) -> None:
    outcome = run_check(CHECKS[name], Reference)
    assert outcome.outcome != FAILED, outcome.reason


NEVER_END = (Hangs, BlocksInSwapBlocks, BlocksInCopiesOnTheDevice)
"""Those that are found by the deadline."""


def first_failure(backend: type[Reference], guarantee: Guarantee) -> Outcome | None:
    deadline = 2 if backend in NEVER_END else 30
    # Where a mutant is a race, it loses within a few rounds.
    for seed in range(20):
        for check in CHECKS.values():
            if check.guarantee is guarantee:
                outcome = run_check(check, backend, seed=seed, deadline=deadline)
                if outcome.outcome == FAILED:
                    return outcome
    return None


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails_a_check_of_what_it_breaks(name: str) -> None:
    backend, guarantee = MUTANTS[name]
    outcome = first_failure(backend, guarantee)
    assert outcome is not None, f"{name} keeps {guarantee.value}"
    assert outcome.guarantee == guarantee.value
    assert outcome.reason
    print(f"{outcome.name}: {outcome.reason}")


def test_every_guarantee_that_a_backend_can_break_has_a_mutant() -> None:
    assert {guarantee for _, guarantee in MUTANTS.values()} == set(Guarantee)
    assert len(MUTANTS) >= 15


def test_checks_have_one_name_and_run_in_a_fixed_order() -> None:
    assert len(CHECKS) >= 25
    assert [check.name for check in CHECKS.values()] == list(CHECKS)
    guarantees = list(dict.fromkeys(check.guarantee for check in CHECKS.values()))
    assert guarantees == list(Guarantee)
    assert PASSED == "passed"


def test_the_callers_stream_is_found_out_while_it_is_held() -> None:
    check = CHECKS["without an event a transfer does not wait for compute"]
    outcome = run_check(check, MUTANTS["CopiesOnTheCallersStream"][0])
    assert outcome.outcome == FAILED
    assert "pages are wrong" in outcome.reason
