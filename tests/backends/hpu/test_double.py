"""The bridge's double does and counts what the real one does."""

from __future__ import annotations

import threading

import pytest
import torch

from kvoffload.testing.fake_device import load
from kvoffload.testing.fake_device.hpu import DEVICE, FakeHabana

pytestmark = pytest.mark.fake


@pytest.fixture(params=[False, True], ids=["eager", "lazy"])
def habana(request: pytest.FixtureRequest) -> FakeHabana:
    return FakeHabana(load(), lazy=request.param)


def is_lazy(habana: FakeHabana) -> bool:
    return bool(habana.utils.internal.is_lazy())


def test_it_has_one_device_with_memory(habana: FakeHabana) -> None:
    hpu = habana.hpu
    assert (hpu.is_available(), hpu.device_count(), hpu.current_device()) == (True, 1, 0)
    free, total = hpu.mem_get_info()
    block = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
    assert hpu.mem_get_info() == (free - block.nbytes, total)


def test_a_stream_is_current_within_its_context_and_on_its_thread(habana: FakeHabana) -> None:
    hpu, seen = habana.hpu, []
    stream = hpu.Stream(priority=-1)
    with hpu.stream(stream):
        assert hpu.current_stream() == stream
        assert isinstance(hpu.current_stream(), hpu.Stream)
        other = threading.Thread(target=lambda: seen.append(hpu.current_stream()))
        other.start()
        other.join()
        with hpu.stream(None):
            assert hpu.current_stream() == stream
    assert hpu.current_stream() == hpu.default_stream() == seen[0]
    assert load().priority(stream) == 0


def test_events_order_and_time_streams(habana: FakeHabana) -> None:
    hpu = habana.hpu
    first, second = hpu.Stream(), hpu.Stream()
    start, end = hpu.Event(enable_timing=True), hpu.Event(enable_timing=True)
    load().hold(first)
    first.record_event(start)
    second.wait_event(start)
    end.record(second)
    assert not end.query()
    load().release(first)
    end.synchronize()
    assert start.query()
    assert start.elapsed_time(end) >= 0
    made = second.record_event()
    made.wait(first)
    made.wait()
    made.synchronize()


def test_it_takes_no_events_but_its_own(habana: FakeHabana) -> None:
    stream, event = habana.hpu.Stream(), torch.Event(DEVICE)
    with pytest.raises(TypeError, match=r"torch\.hpu\.Event"):
        stream.wait_event(event)
    with pytest.raises(TypeError, match=r"torch\.hpu\.Event"):
        stream.record_event(event)


def test_recording_an_event_marks_a_step_in_lazy_mode(habana: FakeHabana) -> None:
    habana.hpu.Event().record()
    assert habana.counts.implied_steps == is_lazy(habana)
    assert habana.counts.steps == 0


def test_asking_a_stream_marks_a_step_in_lazy_mode_unless_it_is_current(
    habana: FakeHabana,
) -> None:
    hpu = habana.hpu
    hpu.current_stream().query()
    hpu.current_stream().synchronize()
    assert habana.counts.foreign == 0
    other = hpu.Stream()
    other.query()
    other.synchronize()
    assert habana.counts.foreign == 2
    assert habana.counts.implied_steps == 2 * is_lazy(habana)


def test_waiting_for_the_device_is_counted(habana: FakeHabana) -> None:
    habana.hpu.synchronize()
    assert habana.counts.device_synchronizations == 1


def test_a_marker_is_counted_with_its_stream(habana: FakeHabana) -> None:
    stream = habana.hpu.Stream()
    with habana.hpu.stream(stream):
        habana.core.mark_step()
    assert habana.counts.steps_on == [stream.stream_id]


def test_work_that_is_left_without_a_step_is_counted_in_lazy_mode(habana: FakeHabana) -> None:
    tensor = torch.zeros(8, 4, device=DEVICE)
    ids = torch.tensor([1, 2]).to(DEVICE)
    with habana.watch(), habana.hpu.stream(habana.hpu.Stream()):
        tensor.index_select(0, ids)
    assert habana.counts.stray == is_lazy(habana)
    habana.hpu.synchronize()


def test_every_new_shape_is_a_recompile(habana: FakeHabana) -> None:
    tensor = torch.zeros(8, 4, device=DEVICE)
    with habana.watch() as seen:
        for rows in (2, 3, 2):
            ids = torch.zeros(rows, dtype=torch.int64).to(DEVICE)
            tensor.index_copy_(0, ids, tensor.index_select(0, ids))
    assert len(seen.operations) == 9
    assert len(seen.shapes) == 6
    habana.hpu.synchronize()


def test_pinning_is_granted_or_refused(habana: FakeHabana) -> None:
    with habana.refusing_to_pin(), pytest.raises(RuntimeError, match="pinning was refused"):
        torch.zeros(8, pin_memory=True)
    assert torch.zeros(8, pin_memory=True).is_pinned()
