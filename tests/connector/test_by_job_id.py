"""The protocol by job id, point by point (S2)."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from kvoffload.connector import aggregate, jobs
from kvoffload.core import canonicalize as canonicalizing
from kvoffload.core.backend import Backend
from kvoffload.core.canonicalize import CacheRegistration, LayerCache, register_state_kind
from kvoffload.core.engine import TransferResult
from kvoffload.core.errors import (
    AlreadyBoundError,
    ClosedError,
    LayoutError,
    StateError,
    UnsupportedStateError,
)
from kvoffload.core.handler import OffloadingHandler
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.lanes import Lane
from kvoffload.core.specs import (
    BlockIDsLoadStoreSpec,
    DeviceLoadStoreSpec,
    HostLoadStoreSpec,
    LoadStoreSpec,
)
from kvoffload.core.worker import OffloadingWorker
from kvoffload.rig import DeviceRig, Fault
from kvoffload.testing.conformance.lab import Cache
from tests.connector.connected import Connected, key, keys, on_device, on_host

Connect = Callable[..., Connected]
MakeBackend = Callable[[], Backend]
NOTHING = jobs.Metadata()


class Shelf(BlockIDsLoadStoreSpec):
    """A medium of the test's own."""

    @staticmethod
    def medium() -> str:
        return "shelf"


class ShelfHandler(OffloadingHandler):
    """Ends every job at once, and notes it."""

    def __init__(self) -> None:
        self.jobs: list[int] = []
        self._results: list[TransferResult] = []

    def transfer_async(
        self, job_id: int, spec: tuple[LoadStoreSpec, LoadStoreSpec], **_: Any
    ) -> bool:
        self.jobs.append(job_id)
        kind = spec[0].medium(), spec[1].medium()
        self._results.append(TransferResult(job_id, True, 8, None, kind, None))
        return True

    def get_finished(self) -> list[TransferResult]:
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: Iterable[int]) -> None:
        pass

    def fence(self, job_ids: Iterable[int]) -> None:
        pass

    def cancel(self, job_ids: Iterable[int]) -> None:
        pass

    def shutdown(self, timeout: float | None = None) -> None:
        pass


def side_for(backend: Backend, budget: int = 1 << 12) -> jobs.WorkerSide:
    return jobs.WorkerSide(
        lambda caches: OffloadingWorker.for_caches(backend, caches, host_bytes=budget)
    )


def job(number: int, src: LoadStoreSpec, dst: LoadStoreSpec, request: str = "r") -> jobs.Job:
    return jobs.Job(number, request, src, dst)


def store(number: int, blocks: list[int], chunks: list[int]) -> jobs.Job:
    return job(number, DeviceLoadStoreSpec(blocks), HostLoadStoreSpec(chunks))


def load(number: int, chunks: list[int], blocks: list[int], request: str = "r") -> jobs.Job:
    return job(number, HostLoadStoreSpec(chunks), DeviceLoadStoreSpec(blocks), request)


def registered(side: jobs.WorkerSide) -> CanonicalKVCaches:
    assert side.worker is not None
    assert side.worker.engine is not None
    return side.worker.engine.caches


RigAndBackend = tuple[DeviceRig, Backend]


# ------------------------------------------------------------------------------------ registration
def test_a_job_goes_to_the_handler_of_its_two_spec_types_S2_1(make_backend: MakeBackend) -> None:
    handler = ShelfHandler()

    def make_worker(_: CanonicalKVCaches) -> OffloadingWorker:
        worker = OffloadingWorker()
        worker.register_handler(DeviceLoadStoreSpec, Shelf, handler)
        return worker

    side = jobs.WorkerSide(make_worker)
    side.register_kv_caches(CanonicalKVCaches.from_tensors([torch.zeros(4, 8)]))
    device, shelf = DeviceLoadStoreSpec([1]), Shelf([0])
    side.start_step(jobs.Metadata(stores=(job(7, device, shelf), job(8, shelf, device))))
    side.finish_step()
    side.start_step(NOTHING)
    assert handler.jobs == [7]
    side.get_finished()
    report = side.take_worker_metadata()
    # The other has no handler: it is a failed job, and no exception in the engine's step.
    assert report == jobs.WorkerMetadata({8: 1, 7: 1}, {8: 1})
    side.shutdown()


def hybrid(rig: DeviceRig) -> tuple[CacheRegistration, dict[str, list[torch.Tensor]]]:
    """Attention in one group; in another a list of states over one buffer, at an offset."""
    attention = on_device(rig, 6 * 2 * 8).view(6, 2, 8)
    buffer = on_device(rig, 12 + 6 * 14)
    conv = torch.as_strided(buffer, (6, 4), (14, 1), 12)
    ssm = torch.as_strided(buffer, (6, 6), (14, 1), 16)
    layers = {
        "attn": LayerCache(attention),
        "mamba": LayerCache([conv, ssm], "state", page_bytes=20, padded_page_bytes=28),
    }
    return (
        CacheRegistration(6, layers, [["attn"], ["mamba"]]),
        {"attn": [attention], "mamba": [conv, ssm]},
    )


def test_layers_are_views_of_their_own_storage_at_their_own_offset_S2_2(
    rig_and_backend: RigAndBackend,
) -> None:
    rig, backend = rig_and_backend
    registration, tensors = hybrid(rig)
    before = {name: [on_host(rig, t) for t in ts] for name, ts in tensors.items()}
    side = side_for(backend)
    side.register_kv_caches(registration)
    attention, mamba = registered(side).tensors
    assert (attention.tensor.dtype, tuple(attention.tensor.shape)) == (torch.int8, (6, 32))
    assert (mamba.tensor.dtype, tuple(mamba.tensor.shape)) == (torch.int8, (6, 28))
    assert mamba.tensor.data_ptr() == tensors["mamba"][0].data_ptr()
    assert mamba.tensor.storage_offset() == 24
    both = [1, 1]
    side.start_step(
        jobs.Metadata(
            stores=(job(1, DeviceLoadStoreSpec([1, 2], both), HostLoadStoreSpec([0, 1])),)
        )
    )
    side.finish_step()
    side.start_step(
        jobs.Metadata(loads=(job(2, HostLoadStoreSpec([0, 1]), DeviceLoadStoreSpec([3, 4], both)),))
    )
    assert side.worker is not None
    side.worker.wait([1, 2])
    assert side.get_finished() == (set(), {"r"})
    for name, new, old in (("attn", 3, 1), ("mamba", 4, 2)):
        for tensor, was in zip(tensors[name], before[name], strict=True):
            after = on_host(rig, tensor)
            assert torch.equal(after[new], was[old])
            assert torch.equal(after[0], was[0])
    side.shutdown()


def test_a_layer_has_a_padded_and_an_unpadded_page_S2_3(rig_and_backend: RigAndBackend) -> None:
    rig, backend = rig_and_backend
    side = side_for(backend)
    side.register_kv_caches(hybrid(rig)[0])
    caches = registered(side)
    assert [entry.page_size_bytes for entry in caches.tensors] == [32, 28]
    assert [refs[0].page_size_bytes for refs in caches.group_data_refs] == [32, 20]
    side.shutdown()


def test_another_kind_of_state_is_a_clear_error_and_can_be_added_S2_3(
    rig_and_backend: RigAndBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, backend = rig_and_backend
    tensor = on_device(rig, 6 * 8).view(6, 8)
    registration = CacheRegistration(6, {"l": LayerCache(tensor, "ring")}, [["l"]])
    side = side_for(backend)
    with pytest.raises(UnsupportedStateError, match="register_state_kind"):
        side.register_kv_caches(registration)
    monkeypatch.setattr(canonicalizing, "_KINDS", dict(canonicalizing._KINDS))
    register_state_kind("ring", lambda layer, blocks: canonicalizing.parts_of(tensor, blocks))
    side.register_kv_caches(registration)
    assert len(registered(side).tensors) == 1
    side.shutdown()


def slots(rig: DeviceRig, other: int = 0) -> CacheRegistration:
    """A slot of two layers of different groups, one of them of smaller pages."""
    memory = on_device(rig, 6 * 16 + 16)
    layers = {
        "a": LayerCache(torch.as_strided(memory, (6, 16), (16, 1), 0)),
        "b": LayerCache(torch.as_strided(memory, (6, 10), (16, 1), other)),
    }
    return CacheRegistration(6, layers, [["a"], ["b"]], slots=[["a", "reserved", "b"]])


def test_layers_of_a_slot_share_a_tensor_and_names_that_are_not_here_are_skipped_S2_4(
    rig_and_backend: RigAndBackend,
) -> None:
    rig, backend = rig_and_backend
    side = side_for(backend)
    side.register_kv_caches(slots(rig))
    caches = registered(side)
    assert [entry.page_size_bytes for entry in caches.tensors] == [32]
    assert [[ref.page_size_bytes for ref in refs] for refs in caches.group_data_refs] == [
        [32],
        [20],
    ]
    side.shutdown()
    with pytest.raises(LayoutError, match="'a' and 'b' share a slot"):
        side_for(backend).register_kv_caches(slots(rig, other=8))


def test_each_group_has_its_references_in_its_own_order_S2_5(
    rig_and_backend: RigAndBackend,
) -> None:
    rig, backend = rig_and_backend
    layers = {name: LayerCache(on_device(rig, 6 * 8).view(6, 8)) for name in "abcd"}
    side = side_for(backend)
    side.register_kv_caches(CacheRegistration(6, layers, [["c", "a"], ["d", "b"]]))
    caches = registered(side)
    named = [[ref.layer for ref in refs] for refs in caches.group_data_refs]
    assert named == [["c", "a"], ["d", "b"]]
    addresses = [
        [caches.tensors[ref.tensor_idx].tensor.data_ptr() for ref in refs]
        for refs in caches.group_data_refs
    ]
    assert addresses[0][1] == layers["a"].tensors.data_ptr()  # type: ignore[union-attr]
    assert len({address for group in addresses for address in group}) == 4
    side.shutdown()


def test_caches_are_registered_once_or_again_after_a_sleep(connect: Connect) -> None:
    lab = connect("jobs")
    with pytest.raises(AlreadyBoundError, match="unregister"):
        lab.side.register_kv_caches(lab.caches())
    lab.fill_all()
    lab.scheduler.store("r", keys(5), [1])
    lab.step()
    lab.side.unregister_kv_caches()  # the deferred store has been made, and ended
    assert lab.poll().outcome.stored == keys(5)
    with pytest.raises(StateError, match="register"):
        lab.side.start_step(NOTHING)
    lab.side.register_kv_caches(lab.caches())
    lab.worker = lab.side.worker
    lab.scheduler.reset()
    assert lab.scheduler.lookup("s", keys(5)).hits == 0
    lab.keep([2], [6])


# ----------------------------------------------------------------------------------------- a step
def test_stores_are_submitted_at_the_start_of_the_next_step_S2_6(connect: Connect) -> None:
    lab = connect("jobs")
    lab.scheduler.store("r", keys(5), [1])
    metadata = pickle.loads(pickle.dumps(lab.begin()))
    assert len(metadata.stores) == 1
    lab.fill([1], [4])
    lab.end(metadata)
    assert not lab.engine.in_flight
    assert lab.side.has_pending_work()
    lab.hold()
    lab.fill([1], [5])  # what the step still has to do: the store comes after it, too
    lab.begin(NOTHING)
    lab.fill([2], [9])
    assert lab.engine.in_flight == [metadata.stores[0].job_id]
    lab.rig.release()
    lab.wait()
    assert lab.end(NOTHING).outcome.stored == keys(5)
    lab.load_into("s", [5], [3])
    lab.step()
    lab.settle()
    lab.expect([3], [5])


def test_a_step_begins_with_the_deferred_stores_and_then_its_loads_S2_7(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = connect("jobs")
    lab.keep([1], [5])
    order: list[int] = []
    transfer = OffloadingWorker.transfer_async

    def noted(self: Any, job_id: int, *args: Any, **options: Any) -> bool:
        order.append(job_id)
        return transfer(self, job_id, *args, **options)

    monkeypatch.setattr(OffloadingWorker, "transfer_async", noted)
    stores = [lab.scheduler.store("r", keys(6), [2]), lab.scheduler.store("r", keys(7), [3])]
    lab.step(lambda: lab.fill([2, 3], [6, 7]))
    loads = [lab.load_into("s", [5], [4]), lab.load_into("t", [5], [8])]
    metadata = lab.begin()
    assert order == stores + loads
    lab.wait()
    ended = lab.end(metadata)
    assert ended.finished == (set(), {"s", "t"})
    assert ended.outcome.loaded == ["s", "t"]
    lab.expect([4, 8], [5, 5])


def test_a_preemption_submits_deferred_stores_and_waits_for_the_named_jobs_S2_8(
    connect: Connect,
) -> None:
    lab = connect("jobs")
    lab.keep([9], [1])
    lab.scheduler.store("r", keys(5), [4])
    lab.step(lambda: lab.fill([4], [5]))
    assert not lab.engine.in_flight, "deferred"
    lab.scheduler.preempted("r")
    lab.scheduler.allocated([4])
    metadata = lab.scheduler.build_metadata()
    lab.side.handle_preemptions(metadata)
    assert not lab.engine.in_flight, "ended"
    lab.fill([4], [6])  # whoever has the block now
    assert lab.step(metadata=metadata).outcome.stored == keys(5)
    lab.load_into("s", [5], [2])
    lab.step()
    lab.settle()
    lab.expect([2], [5])


def test_a_preemption_waits_for_no_other_job_S2_8(connect: Connect) -> None:
    lab = connect("jobs")
    lab.keep([1], [5])
    with lab.holding(Lane.STORE):
        stored = lab.scheduler.store("other", keys(6), [2])
        lab.step(lambda: lab.fill([2], [6]))
        loaded = lab.load_into("r", [5], [3])
        lab.step()
        lab.scheduler.preempted("r")
        metadata = lab.scheduler.build_metadata()
        if metadata.flush:  # the load may have ended before
            assert metadata.flush == {loaded}
        lab.side.handle_preemptions(jobs.Metadata(flush=frozenset({loaded, 999})))
        assert lab.engine.in_flight == [stored]
    lab.settle()


def test_a_poll_names_the_requests_whose_loads_ended_and_needs_no_ids_S2_9(
    connect: Connect,
) -> None:
    lab = connect("jobs")
    lab.keep([1], [5])
    lab.load_into("r", [5], [2])
    with lab.holding(Lane.LOAD):
        lab.step()
        assert lab.side.get_finished({"r", "unknown"}) == (set(), set())
    lab.wait()
    ended = lab.poll()
    assert ended.finished == (set(), {"r"})
    assert ended.outcome.loaded == ["r"]
    assert lab.side.get_finished() == (set(), set())
    lab.expect([2], [5])


@pytest.mark.parametrize("fault", [Fault.SUBMIT, Fault.EXECUTE])
def test_a_failed_job_is_reported_and_names_its_blocks_S2_9(connect: Connect, fault: Fault) -> None:
    lab = connect("jobs", Cache(groups=((0,), (1, 2))))
    stored = [*keys(5, 6), key(7, group=1)]
    lab.scheduler.store("r", stored, [1, 2, 3])
    lab.step(lambda: lab.fill([1, 2, 3], [5, 6, 7]))
    assert sorted(lab.settle().stored) == sorted(stored)
    lab.rig.inject(fault, Lane.LOAD)
    assert lab.scheduler.lookup("s", stored).hits == 3
    number = lab.scheduler.load("s", stored, DeviceLoadStoreSpec([4, 8, 9], [2, 1]))
    metadata = lab.begin()
    lab.side.finish_step()
    lab.wait()
    ended = lab.poll(metadata)
    assert ended.finished == (set(), {"s"})
    assert ended.report == jobs.WorkerMetadata({number: 1}, {number: 1})
    assert lab.side.take_invalid_blocks() == {0: [4, 8], 1: [9]}
    assert lab.side.take_invalid_blocks() == {}
    assert ended.outcome.invalid_blocks == {"s": {0: [4, 8], 1: [9]}}
    assert ended.outcome.loaded == ["s"], "it can go on, once it has computed them"
    assert lab.scheduler.lookup("t", stored).hits == 0, "what failed once is not trusted"
    lab.rig.inject(fault, Lane.STORE)
    lab.scheduler.store("u", keys(8), [10])
    lab.step()
    assert lab.settle().not_stored == keys(8)
    assert lab.scheduler.lookup("v", keys(8)).hits == 0


def test_a_job_that_the_worker_refuses_is_reported_S2_9(connect: Connect) -> None:
    lab = connect("jobs")
    lab.side.start_step(jobs.Metadata(loads=(load(1, [0], [99]), load(2, [99], [1], "s"))))
    assert lab.side.get_finished() == (set(), {"r", "s"})
    assert lab.side.take_worker_metadata() == jobs.WorkerMetadata({1: 1, 2: 1}, {1: 1, 2: 1})
    assert lab.side.take_invalid_blocks() == {0: [1, 99]}


def test_a_step_that_was_never_finished_has_failed(connect: Connect) -> None:
    lab = connect("jobs")
    lab.side.start_step(jobs.Metadata(stores=(store(1, [1], [0]),)))
    lab.side.start_step(NOTHING)
    assert lab.side.take_worker_metadata() == jobs.WorkerMetadata({1: 1}, {1: 1})


def test_completed_jobs_and_statistics_go_up_once_a_step_S2_10(connect: Connect) -> None:
    lab = connect("jobs")
    assert lab.side.take_worker_metadata() is None
    assert lab.side.take_statistics() is None
    lab.fill_all()
    lab.side.start_step(jobs.Metadata(stores=(store(3, [1, 2], [0, 1]), store(4, [3], [2]))))
    lab.side.finish_step()
    lab.side.start_step(NOTHING)
    lab.worker.wait([3, 4])
    lab.side.get_finished()
    report = lab.side.take_worker_metadata()
    assert report == jobs.WorkerMetadata({3: 1, 4: 1}, {})
    assert aggregate([report, jobs.WorkerMetadata({4: 1}, {4: 1}), None]) == jobs.WorkerMetadata(
        {3: 1, 4: 2}, {4: 1}
    )
    assert lab.side.take_worker_metadata() is None
    statistics = lab.side.take_statistics()
    assert lab.side.take_statistics() is None
    if statistics is not None:  # seconds of such small copies may be 0
        found = statistics.transfers["device", "host"]
        assert {record.nbytes for record in found} <= {192, 384}
        assert all(record.seconds > 0 for record in found)
        twice = aggregate([statistics, None, statistics])
        assert twice is not None
        assert twice.nbytes(("device", "host")) == 2 * statistics.nbytes(("device", "host"))
        assert twice.seconds(("device", "host")) == pytest.approx(
            2 * statistics.seconds(("device", "host"))
        )
        assert statistics.nbytes(("host", "device")) == 0


def test_a_rank_that_does_not_write_acknowledges_at_once_S2_10(connect: Connect) -> None:
    lab = connect("jobs", writes=False)
    number = lab.scheduler.store("r", keys(5), [1])
    ended = lab.step()
    assert ended.report == jobs.WorkerMetadata({number: 1}, {})
    assert ended.outcome.stored == keys(5)
    assert not lab.side.has_pending_work()


def test_shutdown_drops_what_is_deferred_and_works_twice_S2_11(connect: Connect) -> None:
    lab = connect("jobs")
    lab.keep([1], [5])
    lab.load_into("r", [5], [2])
    lab.scheduler.store("r", keys(6), [3])
    lab.step()
    assert lab.side.has_pending_work()
    lab.side.start_step(jobs.Metadata(stores=(store(99, [1], [0]),)))
    lab.side.shutdown()
    assert not lab.side.has_pending_work()
    assert lab.side.get_finished() == (set(), set())
    assert lab.side.take_worker_metadata() is None
    assert lab.engine.usage()[:3] == (0, 0, 0)
    assert not lab.backend.bound
    lab.side.shutdown()
    with pytest.raises(ClosedError):
        lab.side.register_kv_caches(lab.caches())
