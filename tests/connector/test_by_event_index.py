"""The protocol by event index, point by point (S1)."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvoffload.backends.torch_base import LOWEST_PRIORITY
from kvoffload.connector import aggregate, events
from kvoffload.core.backend import Backend
from kvoffload.core.canonicalize import CacheRegistration, LayerCache
from kvoffload.core.errors import AmbiguousLayoutError, CapacityError, StateError
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.lanes import Lane
from kvoffload.core.specs import DeviceLoadStoreSpec, HostLoadStoreSpec, TransferSpec
from kvoffload.core.worker import OffloadingWorker
from kvoffload.rig import DeviceRig, rig_for
from kvoffload.testing.conformance.lab import Cache
from kvoffload.testing.simulator.launcher import SteppedLauncher
from tests.connector.connected import Connected, keys, on_device, on_host

Connect = Callable[..., Connected]
MakeBackend = Callable[[], Backend]
NOTHING = events.Metadata()


def side_for(backend: Backend, budget: int) -> events.WorkerSide:
    return events.WorkerSide(
        lambda caches: OffloadingWorker.for_caches(backend, caches, host_bytes=budget),
        launcher=SteppedLauncher(),
    )


def store(index: int, blocks: list[int], chunks: list[int]) -> events.Metadata:
    pair = TransferSpec(DeviceLoadStoreSpec(blocks), HostLoadStoreSpec(chunks))
    return events.Metadata(store_event=index, stores=(pair,) if blocks else ())


def load(index: int, chunks: list[int], blocks: list[int], request: str) -> events.Metadata:
    pair = TransferSpec(HostLoadStoreSpec(chunks), DeviceLoadStoreSpec(blocks))
    return events.Metadata(
        load_event=index, loads=(pair,) if blocks else (), load_requests={index: (request,)}
    )


def run(side: events.WorkerSide, metadata: events.Metadata) -> None:
    side.start_step(metadata)
    side.finish_step()
    side.flush()


def round_trip(
    backend: Backend,
    rig: DeviceRig,
    registration: CacheRegistration,
    block: Callable[[str, torch.Tensor, int], torch.Tensor],
    budget: int = 1 << 16,
) -> None:
    """Blocks 1 and 2 go to chunks 0 and 1, and come back as blocks 4 and 3."""
    side = side_for(backend, budget)
    tensors = {
        (name, at): tensor
        for name, layer in registration.layers.items()
        for at, tensor in enumerate(
            [layer.tensors] if isinstance(layer.tensors, torch.Tensor) else layer.tensors
        )
    }
    before = {name: on_host(rig, tensor) for name, tensor in tensors.items()}
    side.register_kv_caches(registration)
    try:
        run(side, store(0, [1, 2], [0, 1]))
        run(side, load(0, [0, 1], [4, 3], "r"))
        report = side.take_worker_metadata()
        assert report is not None
        assert not report.failed_loads
        assert not report.failed_stores
        for (name, at), tensor in tensors.items():
            after, old = on_host(rig, tensor), before[name, at]
            for new, was in ((4, 1), (3, 2), (1, 1), (2, 2), (0, 0)):
                assert torch.equal(block(name, after, new), block(name, old, was)), (name, at)
    finally:
        side.shutdown()


# ------------------------------------------------------------------------------------ registration
def test_layers_are_registered_by_name_as_a_tensor_or_a_list_over_one_storage_S1_1(
    make_backend: MakeBackend,
) -> None:
    backend = make_backend()
    with rig_for(backend) as rig:
        attention = on_device(rig, 6 * 12).view(6, 12)
        flat = on_device(rig, 6 * 10)
        conv = torch.as_strided(flat, (6, 4), (10, 1), 0)
        ssm = torch.as_strided(flat, (6, 6), (10, 1), 4)
        registration = CacheRegistration(
            6,
            {"attn": LayerCache(attention), "mamba": LayerCache([conv, ssm], "state")},
            [["attn", "mamba"]],
        )
        round_trip(backend, rig, registration, lambda _, tensor, at: tensor[at])


def test_an_empty_registration_is_a_warning_and_everything_is_acknowledged_at_once_S1_1(
    make_backend: MakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    side = side_for(make_backend(), 1 << 10)
    side.register_kv_caches(CacheRegistration(6, {}, []))
    assert "nothing will be moved" in caplog.text
    side.start_step(load(0, [0], [1], "r"))
    side.finish_step()
    assert side.get_finished() == (None, {"r"})
    side.start_step(store(0, [1], [0]))
    side.finish_step()
    assert side.take_worker_metadata() == events.WorkerMetadata({0: 1}, {0: 1})
    side.shutdown()


def test_layers_that_share_a_storage_move_once_S1_2(make_backend: MakeBackend) -> None:
    backend = make_backend()
    with rig_for(backend) as rig:
        shared = on_device(rig, 6 * 8).view(6, 8)
        layers = {"a": LayerCache(shared), "b": LayerCache(shared.view(6, 2, 4))}
        registration = CacheRegistration(6, layers, [["a", "b"]])
        side = side_for(backend, 1 << 10)
        side.register_kv_caches(registration)
        run(side, store(0, [1, 2], [0, 1]))
        assert side.worker is not None
        assert side.worker.engine is not None
        assert len(side.worker.engine.caches.tensors) == 1
        statistics = side.take_statistics()
        assert statistics is None or statistics.nbytes(("device", "host")) == 2 * 16
        side.shutdown()


@pytest.mark.parametrize("layout", ["blocks outermost", "keys and values outermost", "heads"])
def test_outer_segments_are_views_of_their_own_S1_3(make_backend: MakeBackend, layout: str) -> None:
    backend = make_backend()
    with rig_for(backend) as rig:
        shape, dim = {
            "blocks outermost": ((6, 2, 8), 0),
            "keys and values outermost": ((2, 6, 8), 1),
            "heads": ((2, 3, 6, 4), 2),  # more than one dimension lies further out
        }[layout]
        tensor = on_device(rig, int(np.prod(shape))).view(shape)
        registration = CacheRegistration(6, {"l": LayerCache(tensor, block_dim=dim)}, [["l"]])
        round_trip(backend, rig, registration, lambda _, t, at: t.select(dim, at))


@pytest.mark.parametrize("layout", ["padded", "offset", "interleaved"])
def test_padded_offset_and_interleaved_storages_keep_their_bytes_S1_3(
    make_backend: MakeBackend, layout: str
) -> None:
    backend = make_backend()
    with rig_for(backend) as rig:
        flat = on_device(rig, 6 * 40 + 24)
        first = torch.as_strided(flat, (6, 16), (40, 1), 24 if layout == "offset" else 0)
        layers = {"a": LayerCache(first)}
        if layout == "interleaved":
            layers["b"] = LayerCache(torch.as_strided(flat, (6, 24), (40, 1), 16))
        registration = CacheRegistration(6, layers, [list(layers)])
        round_trip(backend, rig, registration, lambda _, tensor, at: tensor[at])


def test_two_blocks_behind_keys_and_values_must_be_declared_S1_3(
    make_backend: MakeBackend,
) -> None:
    backend = make_backend()
    with rig_for(backend) as rig:
        tensor = on_device(rig, 2 * 2 * 8).view(2, 2, 8)
        side = side_for(backend, 1 << 10)
        with pytest.raises(AmbiguousLayoutError, match="block_dim=1"):
            side.register_kv_caches(CacheRegistration(2, {"l": LayerCache(tensor)}, [["l"]]))
        declared = CacheRegistration(2, {"l": LayerCache(tensor, block_dim=1)}, [["l"]])
        side.register_kv_caches(declared)
        assert side.worker is not None
        assert side.worker.engine is not None
        assert len(side.worker.engine.caches.tensors) == 2  # keys and values
        side.shutdown()


def test_a_budget_is_as_many_blocks_as_it_holds_and_they_are_zero_S1_4(connect: Connect) -> None:
    lab = connect("events", Cache(pages=(64, 24, 104), chunks=5))
    assert lab.side.num_chunks == [5]
    assert not lab.engine.host.memory.numpy()[: 5 * 192].any()
    assert lab.worker.capacity.blocks == (5,)


def test_a_budget_below_one_block_is_an_error_S1_4(make_backend: MakeBackend) -> None:
    backend = make_backend()
    with rig_for(backend) as rig:
        tensor = on_device(rig, 6 * 8).view(6, 8)
        registration = CacheRegistration(6, {"l": LayerCache(tensor)}, [["l"]])
        side = side_for(backend, 15)
        with pytest.raises(CapacityError, match="15"):
            side.register_kv_caches(registration)
        assert side.worker is None
        side.shutdown()
        backend.close()


def test_host_memory_is_pinned_in_place_where_it_can_be_and_within_the_budget_S1_5(
    connect: Connect,
) -> None:
    lab = connect("events", Cache(pages=(4096,), groups=((0,),), blocks=6, chunks=5))
    memory = lab.engine.host.memory
    assert memory.pinned == lab.backend.capabilities.pinned_memory
    assert memory.nbytes == 5 * 4096
    assert lab.worker.host_bytes_resident() <= 1.02 * memory.nbytes
    lab.keep([1, 2], [5, 6])
    assert lab.worker.host_bytes_resident() <= 1.02 * memory.nbytes


def test_loads_and_stores_have_a_long_lived_stream_each_of_lowest_priority_S1_6(
    connect: Connect,
) -> None:
    lab = connect("events")
    streams = [lab.backend.new_stream(lane) for lane in (Lane.STORE, Lane.LOAD)]
    lab.keep([1], [5])
    lab.load_into("r", [5], [2])
    lab.step()
    lab.settle()
    assert [lab.backend.new_stream(lane) for lane in (Lane.STORE, Lane.LOAD)] == streams
    assert streams[0] is not streams[1]
    current: Any = lab.backend.current_stream()
    assert current not in streams
    for stream in streams:
        assert getattr(stream, "priority", LOWEST_PRIORITY) == LOWEST_PRIORITY


# ----------------------------------------------------------------------------------------- a step
class Noting(SteppedLauncher):
    """Runs launches on a thread that is over when they are."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    def step(self) -> bool:
        done: list[bool] = []

        def launch() -> None:
            self.threads.append(threading.get_ident())
            done.append(SteppedLauncher.step(self))

        if not self.waiting:
            return False
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
        return done[0]


def test_launches_are_off_the_engines_thread_after_a_mark_recorded_on_it_S1_7(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = connect("events", stepped=True)
    lab.launcher = noting = Noting()
    lab.side._launcher = noting
    marks, given, threads = [], [], []
    new_event, transfer = lab.backend.new_event, OffloadingWorker.transfer_async

    def noted_event() -> Any:
        marks.append(new_event())
        return marks[-1]

    def noted_transfer(self: Any, job_id: int, spec: Any, *, after: Any) -> bool:
        given.append(after)
        threads.append(threading.get_ident())
        return transfer(self, job_id, spec, after=after)

    monkeypatch.setattr(lab.backend, "new_event", noted_event)
    monkeypatch.setattr(OffloadingWorker, "transfer_async", noted_transfer)
    lab.scheduler.store("r", keys(5), [1])
    lab.begin()
    lab.fill([1], [5])
    lab.side.finish_step()
    assert len(marks) == 1, "the mark is there before anything is launched"
    assert not given
    noting.drain()
    assert given == marks[:1]
    assert threads == noting.threads
    assert threads[0] != threading.get_ident()
    lab.wait()
    assert lab.poll().outcome.stored == keys(5)


def test_a_flush_covers_what_is_queued_and_not_launched_S1_7(connect: Connect) -> None:
    lab = connect("events", stepped=True)
    lab.scheduler.store("r", keys(5), [1])
    lab.begin()
    lab.fill([1], [5])
    lab.side.finish_step()
    assert not lab.engine.in_flight
    lab.side.flush()
    assert lab.side.store_mark == 0
    assert lab.poll().outcome.stored == keys(5)


def test_both_directions_are_launched_after_the_model_and_run_after_it_S1_8(
    connect: Connect,
) -> None:
    lab = connect("events", stepped=True)
    lab.keep([1, 2], [5, 6])
    lab.scheduler.store("a", keys(7), [3])
    lab.load_into("b", [5], [4])
    lab.hold()
    metadata = lab.begin()
    assert not lab.engine.in_flight
    assert not lab.launcher.waiting  # type: ignore[union-attr]
    lab.fill([3], [7])
    old = lab.peek([4])  # what block 4 holds when the model runs
    lab.side.finish_step()
    lab.launcher.drain()
    assert len(lab.engine.in_flight) == 2
    assert lab.poll(metadata).report is None, "compute has not run: neither has a copy"
    lab.rig.release()
    outcome = lab.settle()
    assert (outcome.stored, outcome.loaded) == (keys(7), ["b"])
    lab.expect([4], [5])
    assert not any(page.any() for page in old), "the load overtook the model"
    lab.load_into("c", [7], [8])
    lab.step()
    lab.settle()
    lab.expect([8], [7])


def test_an_index_bound_with_an_empty_list_is_complete_at_once_S1_8(connect: Connect) -> None:
    lab = connect("events", stepped=True)
    side = lab.side
    with lab.holding(Lane.LOAD), lab.holding(Lane.STORE):
        side.start_step(store(0, [1], [0]))
        side.finish_step()
        side.start_step(store(1, [], []))
        side.finish_step()
        side.start_step(load(0, [], [], "r"))
        side.finish_step()
        assert side.get_finished() == (None, {"r"})
        assert side.take_worker_metadata() == events.WorkerMetadata({0: 1}, {1: 1})
        assert side.load_mark == 0
        assert side.store_mark == -1, "the one before has not ended"
        assert len(lab.launcher.waiting) == 1, "empty lists launch nothing"  # type: ignore[union-attr]
    side.flush()
    assert side.take_worker_metadata() == events.WorkerMetadata({}, {0: 1})
    assert side.store_mark == 1


def test_marks_move_in_order_each_direction_by_itself_S1_9(connect: Connect) -> None:
    lab = connect("events")
    side = lab.side
    lab.fill_all()
    assert (side.load_mark, side.store_mark) == (-1, -1)
    for index in range(3):
        run(side, store(index, [index], [index]))
    with lab.holding(Lane.LOAD):
        side.start_step(load(0, [0], [5], "r"))
        side.finish_step()
        lab.launcher.drain()
        assert side.get_finished() == (None, None)
        assert (side.load_mark, side.store_mark) == (-1, 2)
    side.flush()
    assert (side.load_mark, side.store_mark) == (0, 2)


def test_a_metadata_names_events_blocks_and_whom_loads_serve_S1_10(connect: Connect) -> None:
    lab = connect("events")
    lab.keep([1, 2], [5, 6])
    assert lab.scheduler.build_metadata().load_event == events.NO_EVENT
    lab.load_into("a", [5], [3])
    lab.load_into("b", [6], [4])
    lab.scheduler.store("c", keys(7), [8])
    metadata = pickle.loads(pickle.dumps(lab.scheduler.build_metadata()))
    assert (metadata.load_event, metadata.store_event) == (0, 1)
    assert [pair.src.block_ids.tolist() for pair in metadata.loads] == [[0], [1]]
    assert [pair.dst.block_ids.tolist() for pair in metadata.loads] == [[3], [4]]
    assert [pair.src.block_ids.tolist() for pair in metadata.stores] == [[8]]
    assert metadata.load_requests == {0: ("a", "b")}
    lab.side.start_step(metadata)
    assert lab.side._loads.pending == [0], "known as pending before it is launched"
    lab.fill([8], [7])
    loaded = lab.end(metadata).outcome.loaded
    assert sorted(loaded + lab.settle().loaded) == ["a", "b"]
    lab.expect([3, 4], [5, 6])


def test_stores_go_up_once_as_counts_that_add_up_S1_11(connect: Connect) -> None:
    lab = connect("events", workers=2)
    lab.scheduler.store("r", keys(5), [1])
    lab.begin()
    lab.side.finish_step()
    lab.side.flush()
    assert lab.side.get_finished({"somebody", "r"}) == (None, None)
    report = lab.side.take_worker_metadata()
    assert report == events.WorkerMetadata(stores={0: 1})
    assert lab.side.take_worker_metadata() is None
    assert aggregate([report, None, report]) == events.WorkerMetadata(stores={0: 2})
    assert aggregate([None, None]) is None
    assert lab.scheduler.update(report).stored == []
    assert lab.scheduler.update(report).stored == keys(5)


def test_a_load_that_ends_in_a_later_step_finds_its_request_S1_11(connect: Connect) -> None:
    lab = connect("events")
    lab.keep([1], [5])
    lab.load_into("late", [5], [2])
    with lab.holding(Lane.LOAD):
        assert lab.step().finished == (None, None)
        for _ in range(3):
            assert lab.step(metadata=NOTHING).finished == (None, None)
    lab.wait()
    ended = lab.step(metadata=NOTHING)
    assert ended.finished == (None, {"late"})
    assert ended.outcome.loaded == ["late"]
    assert lab.side.get_finished() == (None, None)


def test_a_flush_synchronises_both_directions_and_the_next_poll_reports_it_S1_12(
    connect: Connect,
) -> None:
    lab = connect("events", stepped=True)
    lab.keep([1], [5])
    lab.load_into("r", [5], [2])
    lab.scheduler.store("s", keys(6), [3])
    metadata = lab.begin()
    lab.fill([3], [6])
    lab.side.finish_step()
    assert (metadata.load_event, metadata.store_event) == (0, 1)
    lab.scheduler.preempted("s")
    flushing = lab.scheduler.build_metadata()
    assert flushing.flush
    lab.side.handle_preemptions(flushing)
    assert not lab.engine.in_flight
    assert (lab.side.load_mark, lab.side.store_mark) == (0, 1)
    lab.fill([3], [99])  # whoever has the block now
    ended = lab.step(metadata=flushing)
    assert ended.finished == (None, {"r"})
    assert ended.report == events.WorkerMetadata({0: 1}, {1: 1})
    lab.load_into("again", [6], [4])
    lab.step()
    lab.settle()
    lab.expect([4], [6])


def test_a_metadata_without_a_flush_waits_for_nothing_S1_12(connect: Connect) -> None:
    lab = connect("events")
    with lab.holding(Lane.STORE):
        lab.step(metadata=store(0, [1], [0]))
        lab.side.handle_preemptions(NOTHING)
        assert lab.engine.in_flight == [1]


def test_a_worker_without_an_engine_cannot_record_a_mark(make_backend: MakeBackend) -> None:
    tensor = torch.zeros(2, 8)
    side = events.WorkerSide(lambda _: OffloadingWorker())
    with pytest.raises(StateError, match="mark"):
        side.register_kv_caches(CanonicalKVCaches.from_tensors([tensor]))
    side.shutdown()


def test_the_launchers_thread_ends_with_it_and_outlives_a_broken_launch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    launcher, done = events.ThreadLauncher(), threading.Event()

    def broken() -> None:
        raise RuntimeError("broken off")

    launcher.submit(broken)
    launcher.submit(done.set)
    launcher.drain()
    assert done.is_set()
    assert "broken off" in caplog.text
    launcher.close()
    launcher.close()
    assert not [t for t in threading.enumerate() if t.name == "kvoffload-launcher"]
