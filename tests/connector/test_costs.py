"""What a step costs the engine's thread: counted, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvoffload.backends.cpu.backend import CpuBackend
from kvoffload.connector import events, jobs
from kvoffload.core.backend import Backend
from kvoffload.core.lanes import Lane
from kvoffload.core.specs import DeviceLoadStoreSpec, HostLoadStoreSpec, TransferSpec
from kvoffload.testing.conformance.lab import Cache
from kvoffload.testing.simulator import SimBackend
from tests.connector.connected import Connected

BLOCKS = 2200


def calls(work: Callable[[], None]) -> int:
    """Python functions that ``work`` calls, and those of C."""
    count = 0

    def profile(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def metadata(protocol: str, index: int, store: range, load: range) -> Any:
    """A step that stores blocks to chunks of the same numbers, and loads others."""
    stored = DeviceLoadStoreSpec(store), HostLoadStoreSpec(store)
    loaded = HostLoadStoreSpec(load), DeviceLoadStoreSpec(load)
    if protocol == "jobs":
        return jobs.Metadata(
            loads=(jobs.Job(2 * index + 1, "r", *loaded),),
            stores=(jobs.Job(2 * index, "r", *stored),),
        )
    pairs = TransferSpec(*loaded), TransferSpec(*stored)
    return events.Metadata(index, index, pairs[:1], pairs[1:], {index: ("r",)})


@pytest.mark.parametrize("make_backend", [CpuBackend, SimBackend])
def test_submitting_makes_as_many_calls_for_1000_blocks_as_for_10(
    make_backend: Callable[[], Backend], protocol: str
) -> None:
    cache = Cache(blocks=BLOCKS, chunks=BLOCKS)
    with Connected(make_backend(), protocol, cache, stepped=True) as lab:
        lab.fill_all()

        def step(index: int, count: int) -> int:
            told = metadata(protocol, index, range(count), range(1100, 1100 + count))
            nothing = lab.protocol.Metadata()

            def submit() -> None:
                lab.side.start_step(told)
                lab.side.finish_step()
                lab.launcher.drain()
                lab.side.start_step(nothing)
                lab.side.finish_step()

            lab.rig.hold()  # whether a mark is reached already must make no difference
            made = calls(submit)
            lab.rig.release()
            lab.wait()
            lab.poll_worker()
            return made

        step(0, 10)  # fills pools
        step(1, 1000)
        assert step(2, 1000) == step(3, 10)


@pytest.mark.parametrize("pending", [1, 60])
def test_polling_costs_what_has_finished_and_not_what_is_pending(
    protocol: str, pending: int
) -> None:
    cache = Cache(blocks=200, chunks=200)
    with Connected(SimBackend(), protocol, cache) as lab:
        assert isinstance(lab.backend, SimBackend)
        counters = lab.backend.world.counters
        with lab.holding(Lane.STORE), lab.holding(Lane.LOAD):
            for index in range(pending):
                told = metadata(
                    protocol, index, range(index, index + 1), range(100 + index, 101 + index)
                )
                lab.side.start_step(told)
                lab.side.finish_step()
                lab.launcher.drain()
            lab.side.start_step(lab.protocol.Metadata())
            assert len(lab.engine.in_flight) == 2 * pending
            lab.side.get_finished()
            asked = counters.queries
            made = calls(lab.side.get_finished)
            assert counters.queries - asked == 2, "one query for each lane"
            assert made < 100
        lab.wait()
        asked = counters.queries
        lab.side.get_finished()
        # Of each job its end and its start.
        assert counters.queries - asked <= 4 * pending
