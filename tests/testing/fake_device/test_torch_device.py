"""The emulated device is one of torch's: it keeps torch's promises, and breaks on demand."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvoffload.testing.fake_device import FakeDevice, load
from tests.testing.fake_device.held import until_waited_for

pytestmark = pytest.mark.fake

DEVICES = ("fake:0", "fake:1")


@pytest.fixture
def fake() -> Iterator[FakeDevice]:
    """The device; afterwards nothing is held, and no error is left for somebody else."""
    device = load()
    yield device
    device.calm()
    for name in DEVICES:
        torch.accelerator.synchronize(torch.device(name))
        outcome_of_an_event_on(torch.Stream(device=name))


@pytest.fixture
def stream(fake: FakeDevice) -> Iterator[torch.Stream]:
    """A stream of the first device, current in the test."""
    with torch.Stream(device="fake:0") as made:
        yield made
        fake.calm()
        made.synchronize()
        outcome_of_an_event_on(made)


def outcome_of_an_event_on(stream: torch.Stream) -> str:
    """What an event says that is recorded now: nothing, or its error."""
    event = stream.record_event()
    event.synchronize()
    try:
        assert event.query()
    except RuntimeError as error:
        return str(error)
    return ""


def a_pool(rows: int = 8, columns: int = 6, device: str = "fake:0") -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.int32).reshape(rows, columns).to(device)


# ------------------------------------------------------------------------------------------ memory


def test_torch_sees_two_devices(fake: FakeDevice) -> None:
    current = torch.accelerator.current_accelerator()
    assert current is not None
    assert current.type == "fake"
    assert torch.accelerator.device_count() == 2
    assert torch.empty(1, device="fake:1").device == torch.device("fake:1")
    with pytest.raises(RuntimeError, match="no device"):
        torch.empty(1, device="fake:2")


@pytest.mark.parametrize("touch", ["ctypes.string_at(p, 1)", "ctypes.memset(p, 1, 1)"])
def test_the_host_dies_when_it_touches_device_memory(fake: FakeDevice, touch: str) -> None:
    script = (
        "import ctypes, faulthandler, resource, torch\n"
        "from kvoffload.testing.fake_device import load\n"
        "load()\n"
        "p = torch.zeros(1, device='fake').data_ptr()\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "faulthandler.disable()\n"
        "print('about to touch it', flush=True)\n"
        f"{touch}\n"
        "print('survived')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=50
    )
    assert done.stdout == "about to touch it\n", done.stderr
    assert done.returncode < 0  # a signal


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
        torch.float8_e4m3fn,
    ],
)
def test_bytes_of_every_dtype_come_back(
    fake: FakeDevice, rng: np.random.Generator, device: str, dtype: torch.dtype
) -> None:
    raw = torch.from_numpy(rng.integers(0, 2, size=(3, 64), dtype=np.uint8))
    sent = raw.view(dtype)
    there = sent.to(device)
    assert there.dtype == dtype
    assert torch.equal(there.cpu().view(torch.uint8), raw)
    assert torch.equal(there.view(torch.uint8).cpu(), raw)
    assert torch.equal(there.clone().cpu().view(torch.uint8), raw)


def test_a_copy_may_change_the_dtype(fake: FakeDevice) -> None:
    there = torch.arange(5, dtype=torch.int64).to("fake", torch.float32)
    assert there.cpu().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_nothing_at_all_may_be_copied(fake: FakeDevice) -> None:
    empty = torch.empty(0, 4, device="fake")
    assert empty.cpu().shape == (0, 4)
    assert empty.clone().fill_(1).numel() == 0


@pytest.mark.parametrize(
    "part",
    [
        np.s_[:, 2:5],
        np.s_[1::2],
        np.s_[3:4, ::2],
        np.s_[4],
        np.s_[:, 1],
    ],
)
def test_parts_are_copied_both_ways(fake: FakeDevice, part: tuple[slice, ...]) -> None:
    host = np.arange(48, dtype=np.int32).reshape(8, 6)
    there = torch.from_numpy(host.copy()).to("fake")
    assert np.array_equal(there[part].cpu().numpy(), host[part])
    there[part].copy_(torch.from_numpy(-host)[part])  # from a part of the host's memory
    host[part] *= -1
    assert np.array_equal(there.cpu().numpy(), host)
    back = torch.zeros(8, 6, dtype=torch.int32)
    back[part].copy_(there[part])  # and into one
    assert np.array_equal(back.numpy()[part], host[part])
    assert int(back.count_nonzero()) == np.count_nonzero(host[part])


def test_a_transposed_tensor_is_copied_as_it_reads(fake: FakeDevice) -> None:
    there = a_pool()
    assert torch.equal(there.t().cpu(), there.cpu().t())
    turned = torch.empty(6, 8, dtype=torch.int32, device="fake")
    assert torch.equal(turned.copy_(there.t()).cpu(), there.cpu().t())


def test_what_is_copied_is_spread_over_the_destination(fake: FakeDevice) -> None:
    there = a_pool(4, 3)
    there.copy_(torch.tensor([7, 8, 9], dtype=torch.int32))
    assert there.cpu().tolist() == [[7, 8, 9]] * 4


def test_filling(fake: FakeDevice) -> None:
    there = a_pool(4, 4)
    there[:, 1:3].fill_(-5)
    there[3].zero_()
    assert there.cpu().tolist() == [[0, -5, -5, 3], [4, -5, -5, 7], [8, -5, -5, 11], [0] * 4]


def test_fresh_memory_is_zero(fake: FakeDevice) -> None:
    assert not torch.empty(10_000, dtype=torch.uint8, device="fake").cpu().any()


# ----------------------------------------------------------------------------- gather and scatter


@pytest.mark.parametrize("columns", [np.s_[:], np.s_[1:5], np.s_[::2]])
def test_rows_are_gathered(fake: FakeDevice, rng: np.random.Generator, columns: slice) -> None:
    host = rng.integers(0, 1000, size=(50, 8), dtype=np.int32)
    rows = rng.integers(0, 50, size=200)
    there, index = torch.from_numpy(host).to("fake")[:, columns], torch.from_numpy(rows).to("fake")
    assert np.array_equal(there.index_select(0, index).cpu().numpy(), host[rows][:, columns])


def test_rows_are_gathered_into_columns_of_another_tensor(
    fake: FakeDevice, rng: np.random.Generator
) -> None:
    host = rng.integers(1, 1000, size=(50, 4), dtype=np.int32)
    rows = rng.permutation(50)[:20]
    out = torch.zeros(20, 12, dtype=torch.int32, device="fake")
    torch.index_select(
        torch.from_numpy(host).to("fake"), 0, torch.from_numpy(rows).to("fake"), out=out[:, 4:8]
    )
    expected = np.zeros((20, 12), dtype=np.int32)
    expected[:, 4:8] = host[rows]
    assert np.array_equal(out.cpu().numpy(), expected)


@pytest.mark.parametrize("dim", [1, -1])
def test_columns_are_gathered_and_scattered(
    fake: FakeDevice, rng: np.random.Generator, dim: int
) -> None:
    host = rng.integers(0, 1000, size=(5, 30), dtype=np.int32)
    columns = rng.permutation(30)[:7]
    there, index = torch.from_numpy(host).to("fake"), torch.from_numpy(columns).to("fake")
    taken = there.index_select(dim, index)
    assert np.array_equal(taken.cpu().numpy(), host[:, columns])
    there.index_copy_(dim, index, taken + 1)
    host[:, columns] += 1
    assert np.array_equal(there.cpu().numpy(), host)


@pytest.mark.parametrize("how", ["index_copy_", "index_put_"])
@pytest.mark.parametrize("columns", [np.s_[:], np.s_[1:5], np.s_[::2]])
def test_rows_are_scattered(
    fake: FakeDevice, rng: np.random.Generator, how: str, columns: slice
) -> None:
    host = rng.integers(0, 1000, size=(50, 8), dtype=np.int32)
    rows = rng.permutation(50)[:20]
    whole = torch.from_numpy(host.copy()).to("fake")
    data = rng.integers(0, 1000, size=host[rows][:, columns].shape, dtype=np.int32)
    index, source = torch.from_numpy(rows).to("fake"), torch.from_numpy(data).to("fake")
    if how == "index_copy_":
        whole[:, columns].index_copy_(0, index, source)
    else:
        whole[:, columns].index_put_((index,), source)
    host[rows[:, None], np.arange(8)[columns]] = data
    assert np.array_equal(whole.cpu().numpy(), host)


def test_one_value_is_put_into_many_rows_that_the_host_names(fake: FakeDevice) -> None:
    there = a_pool(4, 2)
    there[torch.tensor([1, 3])] = torch.tensor(-1, dtype=torch.int32, device="fake")
    assert there.cpu().tolist() == [[0, 1], [-1, -1], [4, 5], [-1, -1]]


@pytest.mark.parametrize("bad", [-1, 8])
@pytest.mark.parametrize("how", ["index_select", "index_copy_"])
def test_an_index_out_of_range_is_an_error_of_the_next_event(
    stream: torch.Stream, bad: int, how: str
) -> None:
    there = a_pool(8, 2)
    index = torch.tensor([0, bad]).to("fake")
    if how == "index_select":
        there.index_select(0, index)
    else:
        there.index_copy_(0, index, a_pool(2, 2))
    assert f"index {bad} is out of range" in outcome_of_an_event_on(stream)
    assert outcome_of_an_event_on(stream) == ""


def test_tensors_that_do_not_fit_are_refused_at_once(stream: torch.Stream) -> None:
    there, index = a_pool(8, 2), torch.tensor([0, 1]).to("fake")
    with pytest.raises(RuntimeError, match="devices"):
        there.index_select(0, index.cpu())
    with pytest.raises(RuntimeError, match="devices"):
        there.index_copy_(0, index, torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="devices"):
        there.index_select(0, index.to("fake:1"))
    with pytest.raises(RuntimeError, match="dtype"):
        there.index_copy_(0, index, a_pool(2, 2).view(torch.float32))
    with pytest.raises(RuntimeError, match="dtype"):
        torch.index_select(there, 0, index, out=torch.empty(2, 2, device="fake"))
    with pytest.raises(RuntimeError, match="slices"):
        there.index_copy_(0, index, a_pool(3, 2))
    with pytest.raises(RuntimeError, match="slices"):
        there.index_copy_(0, index, a_pool(2, 1))
    with pytest.raises(RuntimeError, match="int64"):
        there.index_copy_(0, index.to(torch.int32), a_pool(2, 2))
    assert outcome_of_an_event_on(stream) == ""


# ---------------------------------------------------------------------------------- pinned memory


def test_pinned_memory_is_known(fake: FakeDevice) -> None:
    pageable = torch.arange(10)
    pinned = pageable.pin_memory()
    assert pinned.is_pinned()
    assert pinned[5:].is_pinned()
    assert torch.equal(pinned, pageable)
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert not pageable.is_pinned()
    assert not pageable.to("fake").is_pinned()


def test_a_copy_of_pinned_memory_returns_while_the_stream_is_held(
    fake: FakeDevice, stream: torch.Stream
) -> None:
    there, pinned, back = a_pool(), a_pool().cpu().neg().pin_memory(), a_pool().cpu().pin_memory()
    fake.hold(stream)
    there.copy_(pinned, non_blocking=True)
    back.copy_(there, non_blocking=True)
    event = stream.record_event()
    assert not event.query()
    assert not stream.query()
    assert not torch.equal(back, pinned)
    fake.release(stream)
    event.synchronize()
    assert torch.equal(back, pinned)


@pytest.mark.parametrize("to_device", [True, False])
@pytest.mark.parametrize("kind", ["pageable", "blocking"])
def test_a_copy_of_other_memory_waits_for_the_stream(
    fake: FakeDevice, stream: torch.Stream, kind: str, to_device: bool
) -> None:
    there, host = a_pool(), a_pool().cpu().neg()
    if kind == "blocking":
        host = host.pin_memory()
    target, source = (there, host) if to_device else (host, there)
    with until_waited_for(fake, stream):
        target.copy_(source, non_blocking=kind == "pageable")
    assert torch.equal(there.cpu(), host)


def test_pinned_memory_that_goes_before_its_copy_is_an_error(
    fake: FakeDevice, stream: torch.Stream
) -> None:
    there, pinned = a_pool(), a_pool().cpu().pin_memory()
    fake.hold(stream)
    there.copy_(pinned, non_blocking=True)
    del pinned
    fake.release(stream)
    assert "host memory was given back before" in outcome_of_an_event_on(stream)


def test_pinning_may_be_refused_once(fake: FakeDevice) -> None:
    fake.fail_call("pin_memory", code=1)
    with pytest.raises(RuntimeError, match="refused"):
        torch.empty(8, pin_memory=True)
    assert torch.empty(8, pin_memory=True).is_pinned()


# ------------------------------------------------------------------------------ streams and events


def test_an_event_that_was_never_recorded_is_done(fake: FakeDevice) -> None:
    event = torch.Event(device="fake")
    assert event.query()
    event.synchronize()


def test_an_event_without_timing_tells_no_time(stream: torch.Stream) -> None:
    start, end = torch.Event(device="fake"), torch.Event(device="fake")
    start.record(stream)
    end.record(stream)
    stream.synchronize()
    with pytest.raises((RuntimeError, ValueError), match="timing"):
        start.elapsed_time(end)


def test_an_event_with_timing_tells_how_long_work_took(
    fake: FakeDevice, stream: torch.Stream
) -> None:
    there = a_pool()
    start, end = (torch.Event(device="fake", enable_timing=True) for _ in range(2))
    fake.delay(0.01)
    start.record(stream)
    there.fill_(1)
    there.fill_(2)
    end.record(stream)
    end.synchronize()
    assert 20 <= start.elapsed_time(end) < 10_000


def test_time_needs_both_events_to_be_reached(fake: FakeDevice, stream: torch.Stream) -> None:
    start, end = (torch.Event(device="fake", enable_timing=True) for _ in range(2))
    start.record(stream)
    fake.hold(stream)
    end.record(stream)
    with pytest.raises(RuntimeError, match=r"reached|completed"):
        start.elapsed_time(end)


def test_a_wait_is_for_the_recording_it_saw(fake: FakeDevice, stream: torch.Stream) -> None:
    other, event = torch.Stream(device="fake:0"), torch.Event(device="fake")
    other.record_event(event)
    stream.wait_event(event)  # this recording, which comes at once
    fake.hold(other)
    other.record_event(event)  # and not the later one
    assert outcome_of_an_event_on(stream) == ""
    assert not event.query()
    fake.release(other)


def test_a_later_recording_lets_nobody_past_an_earlier_one(
    fake: FakeDevice, stream: torch.Stream
) -> None:
    held, idle = torch.Stream(device="fake:0"), torch.Stream(device="fake:0")
    event = torch.Event(device="fake")
    fake.hold(held)
    held.record_event(event)
    stream.wait_event(event)
    after = stream.record_event()
    idle.record_event(event)  # comes at once
    event.synchronize()
    assert event.query()
    for _ in range(100):
        idle.record_event().synchronize()
        assert not after.query()
    fake.release(held)
    after.synchronize()


def test_an_earlier_recording_does_not_overwrite_what_a_later_one_says(
    fake: FakeDevice, stream: torch.Stream
) -> None:
    idle, event = torch.Stream(device="fake:0"), torch.Event(device="fake")
    there = a_pool()
    fake.hold(stream)
    fake.fail_next(stream, at_submit=False)
    there.fill_(1)
    stream.record_event(event)
    idle.record_event(event)
    event.synchronize()
    fake.release(stream)
    stream.synchronize()
    assert event.query()  # the failure is of the recording that was replaced


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["event", "stream"])
def test_one_stream_waits_for_another(
    fake: FakeDevice, stream: torch.Stream, device: str, how: str
) -> None:
    other = torch.Stream(device=device)
    fake.hold(stream)
    if how == "event":
        other.wait_event(stream.record_event())
    else:
        other.wait_stream(stream)
    after = other.record_event()
    assert not after.query()
    fake.release(stream)
    after.synchronize()
    assert after.query()


def test_a_stream_waits_for_none_but_those_it_was_told(
    fake: FakeDevice, stream: torch.Stream
) -> None:
    fake.hold(stream)
    for device in DEVICES:
        other = torch.Stream(device=device)
        other.record_event().synchronize()
        assert other.query()
    assert not stream.query()


def test_each_device_has_a_current_stream_of_its_own(fake: FakeDevice) -> None:
    with torch.Stream(device="fake:1") as made:
        assert torch.accelerator.current_stream(torch.device("fake:1")) == made
        assert torch.accelerator.current_stream(torch.device("fake:0")).stream_id == 0
    assert torch.accelerator.current_stream(torch.device("fake:1")).stream_id == 0


def test_devices_do_not_wait_for_each_other(fake: FakeDevice, stream: torch.Stream) -> None:
    here, there = a_pool(device="fake:0"), a_pool(device="fake:1")
    fake.hold(stream)
    here.fill_(1)
    there.fill_(2)
    assert there.cpu().eq(2).all()
    assert not stream.query()
    fake.release(stream)
    assert here.cpu().eq(1).all()


def test_a_copy_to_the_other_device_is_ordered_on_both(
    fake: FakeDevice, stream: torch.Stream
) -> None:
    here, there = a_pool(device="fake:0"), torch.zeros(8, 6, dtype=torch.int32, device="fake:1")
    fake.hold(stream)
    here.fill_(3)
    there.copy_(here)
    result = torch.empty(8, 6, dtype=torch.int32, pin_memory=True)
    result.copy_(there, non_blocking=True)  # on the other device's current stream
    done = torch.accelerator.current_stream(torch.device("fake:1")).record_event()
    assert not done.query()
    fake.release(stream)
    done.synchronize()
    assert result.tolist() == [[3] * 6] * 8


def test_a_copy_to_the_other_device_comes_after_what_reads_it_there(
    fake: FakeDevice, stream: torch.Stream
) -> None:
    here, there = a_pool(device="fake:0"), a_pool(device="fake:1").fill_(3)
    before = torch.empty(8, 6, dtype=torch.int32, pin_memory=True)
    idle = torch.Stream(device="fake:0")
    with torch.Stream(device="fake:1") as other:
        torch.accelerator.synchronize(torch.device("fake:1"))
        fake.hold(other)
        before.copy_(there, non_blocking=True)
        there.copy_(here)
        after = stream.record_event()
        for _ in range(100):
            idle.record_event().synchronize()
            assert not after.query()
        fake.release(other)
        other.synchronize()
    assert before.tolist() == [[3] * 6] * 8
    assert torch.equal(there.cpu(), here.cpu())


def test_an_event_belongs_to_one_device(fake: FakeDevice) -> None:
    event = torch.Event(device="fake:0")
    torch.Stream(device="fake:0").record_event(event)
    with pytest.raises(RuntimeError, match="device"):
        torch.Stream(device="fake:1").record_event(event)


@pytest.mark.parametrize(("asked", "given"), [(0, 0), (-1, -1), (-5, -5), (-9, -5), (3, 0)])
def test_priorities_are_those_asked_for_within_bounds(
    fake: FakeDevice, asked: int, given: int
) -> None:
    assert fake.priority(torch.Stream(device="fake:0", priority=asked)) == given


def test_a_stream_that_is_captured_says_so(fake: FakeDevice, stream: torch.Stream) -> None:
    assert not stream.is_capturing()
    fake.set_capturing(stream, True)
    assert stream.is_capturing()
    fake.set_capturing(stream, False)
    assert not stream.is_capturing()


def test_a_global_capture_lets_nobody_ask_how_far_the_device_is(
    fake: FakeDevice, stream: torch.Stream
) -> None:
    event = stream.record_event()
    answers: list[str] = []

    def ask() -> None:
        for query in (event.query, stream.query):
            try:
                answers.append(str(query()))
            except RuntimeError as error:
                answers.append(str(error).splitlines()[0])

    def ask_in_another_thread() -> list[str]:
        answers.clear()
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return list(answers)

    event.synchronize()
    refused = "operation not permitted when stream is capturing"
    fake.set_global_capture(True)
    assert ask_in_another_thread() == [refused, refused]
    with pytest.raises(RuntimeError, match=refused):
        event.query()
    event.synchronize()  # nothing has stopped
    fake.set_global_capture(False)
    assert ask_in_another_thread() == ["True", "True"]
    fake.set_global_capture(True)
    fake.calm()
    assert event.query()


def test_a_held_stream_goes_on_after_one_release_however_often_it_was_held(
    fake: FakeDevice, stream: torch.Stream
) -> None:
    fake.release(stream)  # harmless
    fake.hold(stream)
    fake.hold(stream)
    assert not stream.query()
    fake.release(stream)
    stream.synchronize()
    fake.hold(stream)
    assert not stream.record_event().query()
    fake.calm()
    stream.synchronize()


def test_synchronizing_waits_for_every_stream_of_the_device(fake: FakeDevice) -> None:
    streams = [torch.Stream(device="fake:1") for _ in range(3)]
    fake.delay(0.001)
    there = a_pool(device="fake:1")
    for each in streams:
        with each:
            there.fill_(1)
    torch.accelerator.synchronize(torch.device("fake:1"))
    assert all(each.query() for each in streams)


# ----------------------------------------------------------------------------------------- faults


def test_work_that_fails_is_told_by_the_next_event_and_by_no_other(
    fake: FakeDevice, stream: torch.Stream
) -> None:
    there = a_pool()
    before = stream.record_event()
    fake.fail_next(stream, at_submit=False)
    there[0].fill_(-1)
    there[1].fill_(-1)  # skipped: it may need what failed
    assert "fill_ failed on the device: injected" in outcome_of_an_event_on(stream)
    assert before.query()
    there[2].fill_(-1)
    assert outcome_of_an_event_on(stream) == ""
    assert there.cpu()[:3, 0].tolist() == [0, 6, -1]


def test_an_error_stays_with_its_event(fake: FakeDevice, stream: torch.Stream) -> None:
    there = a_pool()
    fake.fail_next(stream, at_submit=False)
    there.fill_(-1)
    event = stream.record_event()
    stream.synchronize()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="injected"):
            event.query()
    stream.record_event(event)
    stream.synchronize()
    assert event.query()


def test_a_blocking_copy_raises_the_error_of_what_it_waited_for(
    fake: FakeDevice, stream: torch.Stream
) -> None:
    there = a_pool()
    fake.fail_next(stream, at_submit=False)
    there.fill_(-1)
    with pytest.raises(RuntimeError, match="injected"):
        there.cpu()
    assert torch.equal(there.cpu(), a_pool().cpu())


def test_work_that_is_refused_never_runs(fake: FakeDevice, stream: torch.Stream) -> None:
    there = a_pool()
    fake.fail_next(stream, at_submit=True)
    with pytest.raises(RuntimeError, match="fill_ was refused"):
        there.fill_(-1)
    assert outcome_of_an_event_on(stream) == ""
    assert torch.equal(there.cpu(), a_pool().cpu())


def test_a_failure_is_of_one_stream(fake: FakeDevice, stream: torch.Stream) -> None:
    fake.fail_next(torch.Stream(device="fake:0"), at_submit=True)
    a_pool().fill_(1)
    assert outcome_of_an_event_on(stream) == ""


@pytest.mark.parametrize("at_submit", [True, False])
def test_calm_forgets_failures_to_come(
    fake: FakeDevice, stream: torch.Stream, at_submit: bool
) -> None:
    fake.fail_next(stream, at_submit=at_submit)
    fake.calm()
    a_pool().fill_(1)
    assert outcome_of_an_event_on(stream) == ""


# ------------------------------------------------------------------------------ lifetime of memory


def test_memory_freed_while_another_stream_needs_it_is_an_error(
    fake: FakeDevice, stream: torch.Stream
) -> None:
    other, there = torch.Stream(device="fake:0"), a_pool()
    fake.hold(other)
    with other:
        there.fill_(1)
    del there
    stream.synchronize()  # it is gone now
    fake.release(other)
    assert "device memory was given back before" in outcome_of_an_event_on(other)


def test_memory_that_another_stream_is_recorded_for_stays(
    fake: FakeDevice, stream: torch.Stream
) -> None:
    baseline = fake.counts().device_bytes
    other, there = torch.Stream(device="fake:0"), a_pool()
    fake.hold(other)
    with other:
        there.fill_(1)
    there.record_stream(other)
    del there
    stream.synchronize()
    assert fake.counts().device_bytes > baseline
    fake.release(other)
    assert outcome_of_an_event_on(other) == ""
    assert fake.counts().device_bytes == baseline


def test_memory_freed_in_the_order_of_its_stream_is_fine(
    fake: FakeDevice, stream: torch.Stream
) -> None:
    pinned = torch.empty(8, 6, dtype=torch.int32, pin_memory=True)
    there = a_pool()
    fake.hold(stream)
    there.fill_(4)
    pinned.copy_(there, non_blocking=True)
    del there
    fake.release(stream)
    assert outcome_of_an_event_on(stream) == ""
    assert pinned.tolist() == [[4] * 6] * 8


def test_nothing_is_left_after_many_allocations(fake: FakeDevice, stream: torch.Stream) -> None:
    def leftovers() -> tuple[int, ...]:
        counts = fake.counts()
        return (*counts[:5], counts.live_events)

    stream.synchronize()
    baseline = leftovers()
    for size in range(1, 300):
        there = torch.empty(size, dtype=torch.uint8, device="fake")
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        there.copy_(pinned, non_blocking=True)
        stream.record_event().synchronize()
    assert leftovers() > baseline
    del there, pinned
    stream.synchronize()
    assert leftovers() == baseline


def test_more_memory_than_there_can_be_is_refused(fake: FakeDevice) -> None:
    baseline = fake.counts().device_ranges
    with pytest.raises(RuntimeError, match="out of device memory"):
        torch.empty(1 << 62, dtype=torch.uint8, device="fake")
    assert fake.counts().device_ranges == baseline


def test_copies_and_kernels_are_counted(fake: FakeDevice, stream: torch.Stream) -> None:
    there, other = a_pool(), a_pool()
    before = fake.counts()
    there.copy_(other)
    there.fill_(1)
    after = fake.counts()
    assert after.copies - before.copies == 1
    assert after.copy_calls - before.copy_calls == 1
    assert after.copied_bytes - before.copied_bytes == there.nbytes
    assert after.kernels - before.kernels == 1


# ------------------------------------------------------------------------- what it does not have


@pytest.mark.parametrize("device", DEVICES)
def test_what_has_no_implementation_is_done_on_the_host(fake: FakeDevice, device: str) -> None:
    there = a_pool(device=device)
    doubled = there * 2 + there
    assert doubled.device == torch.device(device)
    assert torch.equal(doubled.cpu(), a_pool().cpu() * 3)
    assert int(there.sum()) == sum(range(48))
    assert there[2, 3].item() == 15
    assert there.sort(descending=True).values.cpu()[0, 0] == 5
    there.add_(1)
    assert there.cpu()[0, 0] == 1


def test_a_result_of_the_host_goes_where_it_is_wanted(fake: FakeDevice) -> None:
    there = a_pool()
    out = torch.empty(8, 6, dtype=torch.int32, device="fake")
    torch.add(there, there, out=out)
    assert torch.equal(out.cpu(), there.cpu() * 2)


@pytest.mark.parametrize("device", DEVICES)
def test_the_host_waits_for_all_streams_before_it_does_anything(
    fake: FakeDevice, device: str
) -> None:
    there, stream = a_pool(device=device), torch.Stream(device=device)
    with until_waited_for(fake, stream):
        with stream:
            there.fill_(1)
        assert there[2, 3].item() == 1


def test_a_result_makes_room_for_itself(fake: FakeDevice, stream: torch.Stream) -> None:
    assert torch.arange(3, device="fake").tolist() == [0, 1, 2]
    out = torch.empty(0, dtype=torch.int32, device="fake")
    torch.add(a_pool(), 1, out=out)
    assert torch.equal(out.cpu(), a_pool().cpu() + 1)


def test_memory_keeps_its_bytes_when_it_grows(fake: FakeDevice, stream: torch.Stream) -> None:
    ranges = fake.counts().device_ranges
    there = a_pool(2, 3)
    there.resize_(3, 3)
    assert there.cpu().tolist() == [[0, 1, 2], [3, 4, 5], [0, 0, 0]]
    there.untyped_storage().resize_(100)
    assert there.cpu()[1].tolist() == [3, 4, 5]
    stream.synchronize()
    assert fake.counts().device_ranges == ranges + 1


def test_memory_stays_until_its_bytes_are_in_the_larger_one(
    fake: FakeDevice, stream: torch.Stream
) -> None:
    default = torch.Stream(0, stream.device_index, stream.device_type)
    with default:
        there = a_pool(2, 3)
    fake.hold(stream)
    there.resize_(3, 3)
    default.synchronize()
    fake.release(stream)
    assert outcome_of_an_event_on(stream) == ""
    assert there.cpu()[:2].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_tensor_may_be_laid_over_a_storage(fake: FakeDevice) -> None:
    there = a_pool()
    over = torch.empty(0, dtype=torch.int32, device="fake")
    over.set_(there.untyped_storage(), 6, (2, 3), (6, 1))
    assert over.data_ptr() == there.data_ptr() + 24
    assert over.cpu().tolist() == [[6, 7, 8], [12, 13, 14]]
    assert over.set_(there.untyped_storage()).tolist() == list(range(48))
    assert copy.deepcopy(over).tolist() == list(range(48))


def test_views_are_of_the_same_memory(fake: FakeDevice) -> None:
    there = a_pool()
    views = (there.unfold(0, 2, 1), there.view(torch.uint8), there.reshape(-1), there.detach())
    assert {view.data_ptr() for view in views} == {there.data_ptr()}
    pairs = torch.zeros(2, 2, device="fake")
    assert torch.view_as_real(torch.view_as_complex(pairs)).data_ptr() == pairs.data_ptr()


def test_any_other_way_to_put_is_as_on_the_host(fake: FakeDevice, stream: torch.Stream) -> None:
    there, host = a_pool(), a_pool().cpu()
    one = torch.tensor([1, 1])
    for tensor in (there, host):
        tensor[tensor > 40] = 7
        tensor[:, torch.tensor([0, 2], device=tensor.device)] = -1
        tensor.index_put_((one.to(tensor.device),), tensor[3].clone(), accumulate=True)
        tensor[2, 3] = 9
    assert torch.equal(there.cpu(), host)
    there.index_put_((one.to("fake"), one.to("fake") * 99), there[0, :2].clone())
    assert "out of bounds" in outcome_of_an_event_on(stream)


# -------------------------------------------------------------------------------- peek and poke


def test_peek_and_poke_pass_by_every_stream(fake: FakeDevice, stream: torch.Stream) -> None:
    there = torch.zeros(64, dtype=torch.uint8, device="fake")
    stream.synchronize()
    fake.hold(stream)
    fake.poke(there.data_ptr() + 3, np.array([7, 8], dtype=np.uint8))
    assert fake.peek(there.data_ptr(), 6).tolist() == [0, 0, 0, 7, 8, 0]


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 65), (60, 5), (64, 1), (-1, 2), (0, 1 << 40), (8, 2**64 - 8)]
)
def test_peek_and_poke_stay_in_one_allocation(fake: FakeDevice, offset: int, nbytes: int) -> None:
    there = torch.zeros(64, dtype=torch.uint8, device="fake")
    scratch = np.zeros(1, dtype=np.uint8)
    library, address = fake.library, there.data_ptr() + offset
    assert library.fake_peek(address, scratch.ctypes.data, nbytes) == 0
    assert library.fake_poke(address, scratch.ctypes.data, nbytes) == 0
    if nbytes < 100:
        with pytest.raises(ValueError, match="known"):
            fake.peek(address, nbytes)
        with pytest.raises(ValueError, match="known"):
            fake.poke(address, np.zeros(nbytes, dtype=np.uint8))


def test_rows_are_moved_past_torch_in_the_order_of_the_stream(
    fake: FakeDevice, stream: torch.Stream
) -> None:
    there = torch.zeros(8, 16, dtype=torch.uint8, device="fake")
    rows, data = np.array([5, 2]), np.arange(32, dtype=np.uint8).reshape(2, 16)
    fake.hold(stream)
    fake.scatter(stream, there, rows, data)
    data_before, data = data.copy(), np.zeros_like(data)  # taken when it was called
    gathered = fake.gather(stream, there, rows)
    assert not gathered.any()
    fake.release(stream)
    stream.synchronize()
    assert np.array_equal(gathered, data_before)
    assert np.array_equal(there.cpu().numpy()[rows], data_before)
