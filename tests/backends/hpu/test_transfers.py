"""Transfers on a device that is late, refuses to pin, fails, or has run a thousand of them."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest
import torch

from kvoffload.backends.hpu.backend import HpuBackend
from kvoffload.core.errors import ClosedError, ConfigurationError
from kvoffload.core.lanes import Lane
from kvoffload.rig import Fault
from kvoffload.testing.conformance.lab import Cache, Lab
from kvoffload.testing.fake_device import Counts, load
from kvoffload.testing.fake_device.hpu import FakeHabana
from tests.backends.hpu.laws import lab_on, random_transfers, real

pytestmark = pytest.mark.fake


@pytest.fixture(autouse=True)
def _calm() -> Iterator[None]:
    yield
    load().calm()


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("lane", Lane)
def test_submit_returns_while_the_device_still_works(lane: Lane, lazy: bool) -> None:
    with lab_on(real, lazy=lazy, cache=Cache(pages=(64,), groups=((0,),))) as (lab, habana):
        recorded = []
        new_event = lab.backend.new_event

        def noted() -> object:
            recorded.append(new_event())
            return recorded[-1]

        lab.backend.new_event = noted  # type: ignore[method-assign,assignment]
        habana.fake.delay(0.2)
        job = lab.submit(lane)
        end = recorded[-1]
        assert not end.query()
        assert lab.worker.get_finished() == []
        habana.fake.delay(0)
        lab.succeed(job)
        lab.check()


def held(lab: Lab) -> Counts:
    lab.rig.synchronize()
    gc.collect()
    return load().counts()


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_a_thousand_transfers_leave_nothing_behind(lazy: bool) -> None:
    with lab_on(real, lazy=lazy) as (lab, _):
        lab.succeed(*random_transfers(lab, 6))  # staging is made on first use
        # A load that needs filling takes a buffer more.
        lab.succeed(lab.load(range(3), range(3)))
        before = held(lab)
        jobs: list[int] = []
        for job in random_transfers(lab, 1000):
            jobs.append(job)
            if len(jobs) == 8:
                lab.succeed(*jobs)
                jobs.clear()
        lab.succeed(*jobs)
        after = held(lab)
        for what in ("device_bytes", "device_ranges", "pinned_bytes", "pinned_ranges"):
            assert getattr(after, what) == getattr(before, what), what
        usage = lab.engine.usage()
        assert (usage.in_flight, usage.running, usage.buffers) == (0, 0, 0)
        lab.check()
        lab.worker.unregister()
        assert held(lab).device_ranges == len(lab.tensors), "staging outlives the caches"


def test_memory_is_pageable_where_pinning_is_refused_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    habana = FakeHabana(load(), lazy=False)
    with habana.refusing_to_pin(), caplog.at_level(logging.WARNING, "kvoffload"):
        backend = real(habana)
        claimed = backend.capabilities
        pinned = [backend.allocate_host(4096).pinned for _ in range(2)]
    left = backend.capabilities
    assert (claimed.pinned_memory, claimed.asynchronous) == (True, True)
    assert pinned == [False, False]
    assert (left.pinned_memory, left.asynchronous) == (False, False)
    assert sum("not pinned" in record.message for record in caplog.records) == 1


def test_a_copy_that_fails_leaves_no_operation_for_somebody_elses_step() -> None:
    with lab_on(real, lazy=True) as (lab, habana), habana.watch():
        lab.succeed(lab.store([1], [0]))
        lab.rig.inject(Fault.SUBMIT, Lane.STORE)
        (failed,) = lab.finish(lab.store([2, 3, 4], [1, 2, 3]))
        assert not failed.success
        assert habana.counts.stray == 0
        assert habana.counts.steps == 2


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_after_a_warm_up_nothing_is_compiled(lazy: bool) -> None:
    with lab_on(real, lazy=lazy) as (lab, habana):
        assert isinstance(lab.backend, HpuBackend)
        with habana.watch() as warming:
            lengths = lab.backend.warm_up(32)
        assert lengths == 3 * 6, "1, 2, … 32 of each direction"
        lab.check()  # nothing has changed, on the device or in host memory
        assert habana.counts.stray == 0
        with habana.watch() as seen:
            lab.succeed(*random_transfers(lab, 60))
        # Ids are uploaded: no operation of the device's.
        new = {
            (name, shapes) for name, shapes in seen.shapes - warming.shapes if len(shapes[0][1]) > 1
        }
        assert not new
        lab.check()


def test_it_warms_up_without_pinned_memory() -> None:
    with FakeHabana(load(), lazy=False).refusing_to_pin(), lab_on(real, lazy=False) as (lab, _):
        assert isinstance(lab.backend, HpuBackend)
        assert lab.backend.warm_up(3) == 3 * 3
        lab.check()


def test_no_warm_up_happens_by_itself() -> None:
    with lab_on(real, lazy=False) as (lab, habana), habana.watch() as seen:
        lab.succeed(lab.store([5], [0]))
    names = [name for name, _ in seen.operations]
    assert names == ["_to_copy", *["index_select"] * 3, "copy_"]


def test_a_warm_up_needs_caches_and_a_length() -> None:
    with pytest.raises(ClosedError):
        real(FakeHabana(load(), lazy=False)).warm_up(1)
    with pytest.raises(ConfigurationError, match="at least one block"):
        real(FakeHabana(load(), lazy=False)).warm_up(0)


def test_the_device_is_the_fake_one() -> None:
    backend = real(FakeHabana(load(), lazy=False))
    assert backend.device == torch.device("fake:0")
    assert backend.current_stream().device == backend.device
