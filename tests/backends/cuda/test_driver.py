"""What the cuda backend asks of its driver, and what it makes of the answers."""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvoffload.backends import _driver
from kvoffload.backends._driver import DriverError
from kvoffload.backends.cuda.backend import CudaBackend
from kvoffload.backends.cuda.copy import CudaDriver
from kvoffload.core import host_memory
from kvoffload.core.backend import Capabilities
from kvoffload.core.errors import ConfigurationError, GraphCaptureError, SubmitError
from kvoffload.core.lanes import Lane
from kvoffload.core.specs import DeviceLoadStoreSpec, HostLoadStoreSpec
from kvoffload.testing.conformance import Cache, Lab
from kvoffload.testing.fake_device import FakeDevice, load
from tests.backends.cuda.test_conformance import cuda

pytestmark = pytest.mark.fake

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
USED_WHEN_OPENED = {"cuInit", "cuDriverGetVersion"}
NEVER_FAIL = {"cuGetErrorName", "cuGetErrorString"}


@pytest.fixture
def fake() -> Iterator[FakeDevice]:
    device = load()
    yield device
    device.calm()
    device.limit_registrations()


@pytest.fixture
def lab(fake: FakeDevice) -> Iterator[Lab]:
    with Lab(cuda()) as made:
        made.fill_all()
        yield made


@pytest.mark.parametrize("version", [13000, 12080, 12040])
@pytest.mark.parametrize("call", sorted(set(CudaDriver.functions) - NEVER_FAIL))
def test_a_failure_of_any_call_is_a_typed_error_and_the_next_time_works(
    fake: FakeDevice, version: int, call: str
) -> None:
    fake.fail_call(call, code=OUT_OF_MEMORY)
    backend = cuda(version)
    if call in USED_WHEN_OPENED:
        assert re.search(f"does not work: {call} returned 2", backend.probe().reason)
        assert backend.probe().available
        return
    failed: list[BaseException] = []
    for _ in range(2):
        try:
            with Lab(cuda(version)) as lab:
                lab.fill_all()
                jobs = [lab.store([1], [0]), lab.load([0], [2])]
                lab.worker.wait(jobs)
                failed += [r.error for r in lab.worker.get_finished() if r.error is not None]
                if not failed:
                    lab.check()
        except DriverError as error:
            failed.append(error)
        else:
            break
    # Somebody was told, by name; or the failure harmed nobody, and every byte was right.
    assert all(call in str(error) for error in failed)
    fake.calm()
    with Lab(cuda(version)) as lab:
        lab.fill_all()
        lab.succeed(lab.store([1], [0]), lab.load([0], [2]))
        lab.check()


@pytest.mark.parametrize("version", [13000, 12080])
def test_a_failed_batch_is_a_failed_job_that_names_the_call(lab: Lab, version: int) -> None:
    backend = cuda(version)
    function = "cuMemcpyBatchAsync_v2" if version == 13000 else "cuMemcpyBatchAsync"
    with Lab(backend) as other:
        load().fail_call(function, code=OUT_OF_MEMORY)
        (result,) = other.finish(other.store([1], [0]))
        assert isinstance(result.error, SubmitError)
        assert "cuMemcpyBatchAsync returned 2: CUDA_ERROR_OUT_OF_MEMORY" in str(result.error)


def test_the_older_batch_tells_which_copy_was_wrong(fake: FakeDevice) -> None:
    backend = cuda(12080)
    with Lab(backend) as lab:
        lower = backend.lower

        def broken(plan: Any) -> Any:
            copies = lower(plan)
            src = copies.src.copy()
            src[-1] = 64
            return copies._replace(src=src)

        backend.lower = broken  # type: ignore[method-assign]
        (result,) = lab.finish(lab.store([1, 3, 5], [0, 2, 4]))
        assert re.search(r"copy 8 of 9: 104 bytes from 0x40 to 0x", str(result.error))


def test_a_failed_registration_leaves_no_error_for_others_D05(
    fake: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    fake.limit_registrations(4096)
    backend = cuda()
    with caplog.at_level(logging.WARNING):
        memory = backend.allocate_host(1 << 20)
    # Whatever is called next, by whomever, is told the truth.
    assert backend.driver.device_count() == 2
    assert not memory.pinned
    assert not backend.capabilities.pinned_memory
    assert caplog.text.count("host memory is not pinned, so that copies are slow") == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        backend.allocate_host(1 << 20)
    assert caplog.text == ""
    memory.release()


@pytest.mark.parametrize("failing", range(4))
def test_a_registration_that_fails_half_way_is_rolled_back_whole(
    fake: FakeDevice, failing: int
) -> None:
    before = fake.counts().registrations
    backend = cuda(piece_bytes=4096)
    fake.fail_call("cuMemHostRegister_v2", code=OUT_OF_MEMORY, after=failing)
    memory = backend.allocate_host(4 * 4096)
    assert fake.counts().registrations == before
    assert not memory.pinned
    # The next backend gets all of its pieces.
    again = cuda(piece_bytes=4096).allocate_host(4 * 4096)
    assert fake.counts().registrations == before + 4
    again.release()
    assert fake.counts().registrations == before


def test_nothing_stays_registered_after_any_number_of_lives_D07(fake: FakeDevice) -> None:
    before = fake.counts().registrations
    for _ in range(100):
        with Lab(cuda(piece_bytes=4096), Cache(blocks=8)) as lab:
            assert fake.counts().registrations > before
            lab.fill_all()
            lab.succeed(lab.store([1], [0]))
        assert fake.counts().registrations == before


@pytest.mark.parametrize("step", ["bind", "new_stream"])
def test_a_start_that_fails_later_leaves_nothing_registered_D07(
    fake: FakeDevice, step: str
) -> None:
    before = fake.counts().registrations
    backend = cuda()

    def fail(*_: Any) -> None:
        raise RuntimeError("no more")

    setattr(backend, step, fail)
    with pytest.raises(RuntimeError, match="no more"):
        Lab(backend)
    assert fake.counts().registrations == before


def test_memory_that_stays_registered_is_not_unmapped(
    fake: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    memory = cuda().allocate_host(4096)
    address = memory.address
    fake.fail_call("cuMemHostUnregister", code=OUT_OF_MEMORY)
    with caplog.at_level(logging.ERROR):
        memory.release()
    assert "stays registered: cuMemHostUnregister returned 2" in caplog.text
    assert fake.peek(address, 1)[0] == 0  # still mapped
    with cuda().driver.current(0):
        cuda().driver.unregister(address)


def test_more_copies_than_a_call_takes_are_split_L07(fake: FakeDevice) -> None:
    # 10,001 pages, none of which is adjacent to the next.
    cache = Cache(pages=(8,), groups=((0,),), blocks=10_001, chunks=10_001)
    with Lab(cuda(max_batch=4096), cache) as lab:
        lab.fill_all()
        lab.rig.synchronize()
        fake.forget_largest_call()
        before = fake.counts()
        blocks = np.arange(10_001) * 2 % 10_001
        lab.succeed(lab.store(blocks.tolist(), range(10_001)))
        after = fake.counts()
        assert after.copy_calls - before.copy_calls == 3
        assert after.largest_call == 4096
        assert after.copies - before.copies == 10_001
        lab.check()


def test_adjacent_pages_are_one_copy(fake: FakeDevice, lab: Lab) -> None:
    before = fake.counts()
    lab.succeed(lab.store(range(8), range(8)))
    after = fake.counts()
    assert (after.copy_calls - before.copy_calls, after.copies - before.copies) == (1, 3)


def test_without_a_batch_there_is_a_call_for_every_run(fake: FakeDevice) -> None:
    with Lab(cuda(12040)) as lab:
        lab.fill_all()
        before = fake.counts()
        lab.succeed(lab.store([0, 1, 2, 5, 6], [0, 1, 2, 3, 4]))
        after = fake.counts()
        assert after.copy_calls - before.copy_calls == 2 * 3
        lab.check()


def test_streams_are_of_the_lowest_priority_one_a_lane_and_kept(fake: FakeDevice) -> None:
    backend = cuda()
    streams = [backend.new_stream(lane) for lane in Lane]
    assert len({stream.stream_id for stream in streams}) == len(Lane)
    assert 0 not in {stream.stream_id for stream in streams}, "a copy on the default stream"
    assert {fake.priority(stream) for stream in streams} == {0}
    assert [backend.new_stream(lane) for lane in Lane] == streams


def orders_of(backend: CudaBackend) -> list[bool]:
    seen: list[bool] = []
    copy_batch = backend.driver.copy_batch

    def watch(copies: Any, stream: int, *, any_order: bool) -> None:
        seen.append(any_order)
        copy_batch(copies, stream, any_order=any_order)

    backend.driver.copy_batch = watch  # type: ignore[method-assign]
    return seen


def test_a_source_is_read_in_any_order_only_where_nobody_writes_it(lab: Lab) -> None:
    assert isinstance(lab.backend, CudaBackend)
    seen = orders_of(lab.backend)
    lab.succeed(lab.store([1], [0]))
    lab.succeed(lab.load([0], [2]))
    lab.succeed(lab.copy([2], [3]))
    assert seen == [False, True, False]
    seen.clear()
    lab.rig.hold()
    jobs = [lab.store([1], [0]), lab.load([0], [4])]  # the store still writes what the load reads
    lab.rig.release()
    lab.succeed(*jobs)
    assert seen == [False, False]
    lab.check()


def test_the_callers_context_is_as_it_was(lab: Lab) -> None:
    def context() -> int | None:
        found = ctypes.c_void_p()
        assert load().library.cuCtxGetCurrent(ctypes.byref(found)) == 0
        return found.value

    before = context()
    lab.succeed(lab.store([1], [0]))
    assert context() == before


def test_a_stream_that_is_being_captured_is_refused(fake: FakeDevice, lab: Lab) -> None:
    stream = torch.accelerator.current_stream()
    fake.set_capturing(stream, True)
    with pytest.raises(GraphCaptureError):
        lab.worker.transfer_async(77, (DeviceLoadStoreSpec([1]), HostLoadStoreSpec([0])))
    fake.set_capturing(stream, False)
    lab.succeed(lab.store([1], [0]))


def test_host_memory_belongs_next_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def node_of(pci_bus_id: str) -> int:
        asked.append(pci_bus_id)
        return 0

    monkeypatch.setattr(_driver, "numa_node_of", node_of)
    monkeypatch.setattr(host_memory, "cpus_of_node", lambda node: os.sched_getaffinity(0))
    memory = cuda(device="fake:1").allocate_host(8192)
    assert asked == ["0000:fb:00.0"]
    assert memory.numa_node == 0
    assert memory.pinned
    memory.release()
    chosen = cuda().allocate_host(8192, numa_node=0)
    assert len(asked) == 1, "who names a node gets that one"
    chosen.release()


@pytest.mark.parametrize("cpus", [set(), {100_000}], ids=["no such node", "none of its processors"])
def test_a_node_that_nobody_asked_for_and_that_cannot_be_used_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, cpus: set[int]
) -> None:
    def cpus_of(node: int) -> set[int]:
        if not cpus:
            raise ConfigurationError("this machine has no such node")
        return cpus

    monkeypatch.setattr(_driver, "numa_node_of", lambda pci_bus_id: 1)
    monkeypatch.setattr(host_memory, "cpus_of_node", cpus_of)
    memory = cuda().allocate_host(8192)
    assert (memory.pinned, memory.numa_node) == (True, None)
    memory.release()
    with pytest.raises(ConfigurationError):  # but who names it is told
        cuda().allocate_host(8192, numa_node=1)


def test_memory_is_pinned_again_after_it_was_refused_once(fake: FakeDevice) -> None:
    backend = cuda()
    fake.limit_registrations(0)
    assert not backend.allocate_host(8192).pinned
    assert backend.capabilities == replace(backend.capabilities, asynchronous=False)
    fake.limit_registrations()
    memory = backend.allocate_host(8192)
    claims: Capabilities = backend.capabilities
    assert (memory.pinned, claims.asynchronous) == (True, True)
    memory.release()


def test_a_batch_that_turns_out_to_be_unsupported_is_copied_one_by_one(
    fake: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    with Lab(cuda()) as lab, caplog.at_level(logging.WARNING):
        lab.fill_all()
        fake.fail_call("cuMemcpyBatchAsync_v2", code=801)
        lab.succeed(lab.store([1, 3], [0, 2]), lab.load([0, 2], [5, 7]))
        assert not lab.backend.capabilities.batch_copy
        assert caplog.text.count("one by one from here on") == 1
        lab.check()


def test_a_forked_process_does_not_get_the_memory(fake: FakeDevice) -> None:
    memory = cuda().allocate_host(1 << 20)
    found = re.search(
        rf"^{memory.address:x}-.*?VmFlags: ([a-z ]+)$",
        Path("/proc/self/smaps").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert found is not None
    assert "dc" in found[1].split()
    memory.release()


def test_calls_are_made_beside_captures_and_the_mode_is_put_back(lab: Lab) -> None:
    def mode() -> int:
        found = ctypes.c_int(0)
        exchange = load().library.cuThreadExchangeStreamCaptureMode
        assert exchange(ctypes.byref(found)) == 0
        assert exchange(ctypes.byref(ctypes.c_int(found.value))) == 0
        return found.value

    assert isinstance(lab.backend, CudaBackend)
    inside: list[int] = []
    copy_batch = lab.backend.driver.copy_batch

    def watch(*arguments: Any, **options: Any) -> None:
        inside.append(mode())
        copy_batch(*arguments, **options)

    lab.backend.driver.copy_batch = watch  # type: ignore[method-assign]
    lab.succeed(lab.store([1], [0]))
    assert inside == [2]
    assert mode() == 0


def test_polling_beside_a_capture_is_answered(fake: FakeDevice, lab: Lab) -> None:
    job = lab.store([1], [0], after=None)
    lab.rig.synchronize()
    fake.set_global_capture(True)
    results = lab.worker.get_finished()
    fake.set_global_capture(False)
    assert [(result.job_id, result.error) for result in results] == [(job, None)]


def test_an_interrupt_between_two_pieces_leaves_nothing_registered(fake: FakeDevice) -> None:
    before = fake.counts().registrations
    backend = cuda(piece_bytes=4096)
    register, pieces = backend.driver.register, 0

    def interrupted(address: int, nbytes: int) -> None:
        nonlocal pieces
        pieces += 1
        if pieces == 3:
            raise KeyboardInterrupt
        register(address, nbytes)

    backend.driver.register = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        backend.allocate_host(4 * 4096)
    assert fake.counts().registrations == before


def test_a_driver_that_does_not_tell_where_a_device_is_is_no_obstacle(fake: FakeDevice) -> None:
    fake.fail_call("cuDeviceGetPCIBusId", code=OUT_OF_MEMORY)
    memory = cuda().allocate_host(8192)
    assert (memory.pinned, memory.numa_node) == (True, None)
    memory.release()
