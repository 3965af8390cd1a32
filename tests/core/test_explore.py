"""Small programs in every interleaving."""

from __future__ import annotations

import pytest

from kvoffload.core.engine import TransferEngine
from kvoffload.core.lanes import Lane
from kvoffload.core.ordering import OrderingTable
from kvoffload.testing.simulator.explore import MOVES, Move, explore, programs, run_program

STORE, LOAD, COPY = Lane.STORE, Lane.LOAD, Lane.COPY
FIRST_MOVES = sorted({program[0] for program in programs(1)}, key=str)

FOUR_JOBS = (
    # A block goes round through both chunks.
    (Move(STORE, 0, 0), Move(LOAD, 0, 1), Move(STORE, 1, 1), Move(LOAD, 1, 0)),
    # Both blocks to one chunk, and both back from it.
    (Move(STORE, 0, 0), Move(STORE, 1, 0), Move(LOAD, 0, 0), Move(LOAD, 0, 1)),
    # The chunk is stored again between two loads.
    (Move(STORE, 0, 0), Move(LOAD, 0, 1), Move(STORE, 1, 0), Move(LOAD, 0, 0)),
    # All three lanes wait for each other in turn.
    (Move(COPY, 0, 1), Move(STORE, 1, 0), Move(LOAD, 0, 0), Move(COPY, 0, 1)),
    (Move(LOAD, 0, 0), Move(COPY, 0, 1), Move(STORE, 1, 0), Move(LOAD, 0, 1)),
    # Two pairs that share nothing.
    (Move(STORE, 0, 0), Move(STORE, 1, 1), Move(LOAD, 0, 0), Move(LOAD, 1, 1)),
    # Write after read, on either side.
    (Move(STORE, 0, 0), Move(LOAD, 1, 0), Move(STORE, 0, 1), Move(COPY, 1, 0)),
    (Move(LOAD, 0, 0), Move(STORE, 1, 0), Move(LOAD, 0, 1), Move(STORE, 0, 0)),
)


def test_all_programs_are_those_up_to_names() -> None:
    assert len(MOVES) == 10
    assert len(list(programs(3))) == 252


@pytest.mark.parametrize("first", FIRST_MOVES, ids=str)
def test_every_program_of_three_jobs_in_every_interleaving(first: Move) -> None:
    schedules = 0
    for program in programs(3):
        if program[0] == first:
            found = explore(lambda choose, program=program: run_program(program, choose))  # type: ignore[misc]
            assert not found.faults, f"{[str(m) for m in program]}: {found.faults[0]}"
            assert found.complete
            schedules += found.schedules
    print(f"{schedules} interleavings")
    assert schedules > 1000


@pytest.mark.parametrize("program", FOUR_JOBS, ids=lambda p: ", ".join(map(str, p)))
def test_programs_of_four_jobs_in_every_interleaving(program: tuple[Move, ...]) -> None:
    found = explore(lambda choose: run_program(program, choose))
    assert found.complete
    assert not found.faults, found.faults[0]


def test_compute_that_does_not_wait_for_a_transfer_is_found() -> None:
    """A negative control: without the fence some interleavings read too early, and some do not."""
    program = (Move(STORE, 0, 0), Move(LOAD, 0, 1))
    found = explore(lambda choose: run_program(program, choose, fenced=False))
    assert 0 < len(found.faults) < found.schedules


def test_an_engine_that_does_not_order_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (Move(STORE, 0, 0), Move(LOAD, 0, 1), Move(STORE, 1, 1))
    monkeypatch.setattr(OrderingTable, "dependencies", lambda self, lane, reads, writes: [])
    found = explore(lambda choose: run_program(program, choose))
    assert found.complete
    assert found.faults


def test_an_engine_that_does_not_wait_for_compute_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TransferEngine, "_order_after", lambda self, job, stream: None)
    found = explore(lambda choose: run_program((Move(STORE, 0, 0),), choose))
    assert found.faults
