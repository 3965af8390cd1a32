"""What the rocm backend asks of the runtime, and what it makes of the answers."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvoffload.backends._driver import NOT_SUPPORTED, DriverError
from kvoffload.backends.rocm.blocks import ENVIRONMENT, MAX_BATCH
from kvoffload.backends.rocm.copy import HipRuntime
from kvoffload.core.errors import CopyError
from kvoffload.core.lanes import Lane
from kvoffload.testing.conformance import Cache, Lab
from kvoffload.testing.fake_device import FakeDevice, load
from tests.backends.rocm.test_conformance import (
    FIRST_BATCHES,
    NEWEST,
    NO_ATTRIBUTES,
    NO_BATCHES,
    VERSIONS,
    rocm,
)

pytestmark = pytest.mark.fake

OUT_OF_MEMORY = 2
MANY = Cache(pages=(8,), groups=((0,),), blocks=20_001, chunks=20_001)


@pytest.fixture
def fake() -> Iterator[FakeDevice]:
    device = load()
    yield device
    device.calm()
    device.limit_registrations()


def store_scattered(lab: Lab) -> int:
    """None of 20,001 pages is adjacent to the next."""
    lab.fill_all()
    lab.rig.synchronize()
    return lab.store([block * 2 % 20_001 for block in range(20_001)], range(20_001))


@pytest.mark.parametrize("version", [NEWEST, NO_ATTRIBUTES, FIRST_BATCHES])
def test_no_call_holds_more_copies_than_the_runtime_bears_L07(
    fake: FakeDevice, version: int
) -> None:
    with Lab(rocm(version), MANY) as lab:
        fake.forget_largest_call()
        before = fake.counts()
        lab.succeed(store_scattered(lab))
        after = fake.counts()
        assert after.largest_call == MAX_BATCH == 8192
        assert after.copy_calls - before.copy_calls == 3
        lab.check()


def test_a_call_that_holds_too_many_would_fault(fake: FakeDevice) -> None:
    with Lab(rocm(max_batch=10_000), MANY) as lab:
        (result,) = lab.finish(store_scattered(lab))
        assert isinstance(result.error, CopyError)
        assert "memory access fault" in str(result.error)


def test_the_limit_can_be_set(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "1000")
    with Lab(rocm(), MANY) as lab:
        fake.forget_largest_call()
        lab.succeed(store_scattered(lab))
        assert fake.counts().largest_call == 1000
        assert lab.backend.capabilities.max_batch == 1000


@pytest.mark.parametrize(("version", "attributed"), [(NEWEST, 3), (NO_ATTRIBUTES, 0)])
def test_attributes_are_given_only_where_they_are_taken_F09(
    fake: FakeDevice, version: int, attributed: int
) -> None:
    with Lab(rocm(version)) as lab:
        lab.fill_all()
        before = fake.counts().attributed_calls
        lab.succeed(*(lab.submit(lane) for lane in Lane))
        assert fake.counts().attributed_calls - before == attributed
        lab.check()


def test_a_runtime_that_refuses_attributes_though_it_should_take_them_F09(
    fake: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    with Lab(rocm(NEWEST)) as lab:
        lab.fill_all()
        before = fake.counts().attributed_calls
        fake.fail_call("hipMemcpyBatchAsync", code=NOT_SUPPORTED)
        with caplog.at_level(logging.WARNING):
            lab.succeed(lab.store([1], [0]), lab.load([0], [2]))
        assert caplog.text.count("refuses attributes: copying without them") == 1
        assert fake.counts().attributed_calls == before
        lab.check()


def test_a_runtime_without_batches_copies_one_by_one_and_says_so_once_F09(
    fake: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), Lab(rocm(NO_BATCHES)) as lab:
        lab.fill_all()
        before = fake.counts()
        lab.succeed(lab.store([0, 1, 2, 5, 6], [0, 1, 2, 3, 4]))
        lab.succeed(lab.load([0, 4], [7, 9]))
        after = fake.counts()
        assert after.copy_calls - before.copy_calls == 2 * 3 + 2 * 3
        lab.check()
    assert caplog.text.count("HIP 5.2.21153 has no call for many copies") == 1


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("call", [*sorted(HipRuntime.functions), "hipMemcpyBatchAsync"])
def test_a_failure_of_any_call_is_a_typed_error_and_the_next_time_works(
    fake: FakeDevice, version: int, call: str
) -> None:
    fake.fail_call(call, code=OUT_OF_MEMORY)
    failed: list[BaseException] = []
    try:
        with Lab(rocm(version)) as lab:
            lab.fill_all()
            jobs = [lab.store([1], [0]), lab.load([0], [2])]
            lab.worker.wait(jobs)
            failed += [r.error for r in lab.worker.get_finished() if r.error is not None]
            if not failed:
                lab.check()
    except DriverError as error:
        failed.append(error)
    assert all(call in str(error) for error in failed)
    # Nobody who asks for the last error is told of ours.
    assert fake.library.fake_hip_pending_error() == 0
    fake.calm()
    with Lab(rocm(version)) as lab:
        lab.fill_all()
        lab.succeed(lab.store([1], [0]), lab.load([0], [2]))
        lab.check()


@pytest.mark.parametrize("failing", range(4))
def test_a_registration_that_fails_half_way_is_rolled_back_whole_D05(
    fake: FakeDevice, failing: int, caplog: pytest.LogCaptureFixture
) -> None:
    before = fake.counts().registrations
    backend = rocm(piece_bytes=4096)
    fake.fail_call("hipHostRegister", code=OUT_OF_MEMORY, after=failing)
    with caplog.at_level(logging.WARNING):
        memory = backend.allocate_host(4 * 4096)
    assert fake.counts().registrations == before
    assert not memory.pinned
    assert caplog.text.count("host memory is not pinned") == 1
    assert fake.library.fake_hip_pending_error() == 0


def test_the_callers_device_is_as_it_was(fake: FakeDevice) -> None:
    runtime = rocm(device="fake:1").driver
    assert isinstance(runtime, HipRuntime)
    with runtime.current(1):
        assert runtime.read_int("hipGetDevice") == 1
    assert runtime.read_int("hipGetDevice") == 0
