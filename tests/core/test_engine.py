"""Order and the life of a job, on the simulator, case by case. A01, A02, … are field failures it
must not repeat."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvoffload.backends.cpu.backend import CpuBackend
from kvoffload.core import engine as engine_module
from kvoffload.core.backend import Keep, Stream
from kvoffload.core.engine import TransferEngine, TransferResult
from kvoffload.core.errors import (
    BlockWithheldError,
    CancelledError,
    ClosedError,
    ConfigurationError,
    CopyError,
    DependencyError,
    ForkedError,
    GraphCaptureError,
    SpecError,
    StalledError,
    SubmitError,
    UnroutableError,
)
from kvoffload.core.handler import (
    EngineOffloadingHandler,
    OffloadingHandler,
    SingleDirectionOffloadingHandler,
)
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.lanes import Lane
from kvoffload.core.plan import CopyPlan
from kvoffload.core.specs import DeviceLoadStoreSpec, HostLoadStoreSpec
from kvoffload.core.worker import OffloadingWorker
from kvoffload.testing.simulator import SimBackend, Switches, World
from kvoffload.testing.simulator.world import DeadlockError, SimFault

BLOCKS, CHUNKS, PAGE = 8, 6, 16


class Sim:
    """One tensor on a simulated device. A block's content is one number."""

    def __init__(
        self,
        world: World | None = None,
        backend: Callable[[World], SimBackend] = SimBackend,
        **options: Any,
    ) -> None:
        self.world = world or World()
        self.backend = backend(self.world)
        self.tensor = torch.zeros(options.pop("blocks", BLOCKS), PAGE, dtype=torch.uint8)
        chunks = options.pop("chunks", CHUNKS)
        self.worker = OffloadingWorker.for_caches(
            self.backend,
            CanonicalKVCaches.from_tensors([self.tensor]),
            host_bytes=chunks * PAGE,
            **options,
        )
        assert self.worker.engine is not None
        self.engine: TransferEngine = self.worker.engine
        self._host = self.engine.host.memory.tensor.numpy()[: chunks * PAGE].reshape(-1, PAGE)
        self._ids = itertools.count(1)

    def write(self, block: int, value: int) -> None:
        """Compute on the caller's stream."""
        memory = self.tensor.numpy()

        def work() -> None:
            memory[block] = value

        self.world.compute.submit(work)

    def read(self, block: int) -> list[int]:
        """Compute on the caller's stream; what it saw is there once it ran."""
        memory = self.tensor.numpy()
        seen: list[int] = []
        self.world.compute.submit(lambda: seen.append(int(memory[block, -1])))
        return seen

    def store(self, block: int, chunk: int, **options: Any) -> int:
        job = next(self._ids)
        spec = DeviceLoadStoreSpec([block]), HostLoadStoreSpec([chunk])
        self.worker.transfer_async(job, spec, **options)
        return job

    def load(self, chunk: int, block: int, **options: Any) -> int:
        job = next(self._ids)
        spec = HostLoadStoreSpec([chunk]), DeviceLoadStoreSpec([block])
        self.worker.transfer_async(job, spec, **options)
        return job

    def copy(self, src: int, dst: int, **options: Any) -> int:
        job = next(self._ids)
        self.worker.copy_blocks(
            job, DeviceLoadStoreSpec([src]), DeviceLoadStoreSpec([dst]), **options
        )
        return job

    def submit(self, lane: Lane) -> int:
        """Block 1 to chunk 0, chunk 0 to block 2, or block 1 to block 3."""
        if lane is Lane.STORE:
            return self.store(1, 0)
        return self.load(0, 2) if lane is Lane.LOAD else self.copy(1, 3)

    def stream(self, lane: Lane) -> Any:
        return self.engine._lanes[lane].stream

    def run_lanes(self) -> None:
        """Step everything but compute as far as it goes."""
        self.world.compute.held = True
        self.world.run(10_000)
        self.world.compute.held = False

    def finish(self) -> dict[int, TransferResult]:
        self.world.drain()
        return self.poll()

    def poll(self) -> dict[int, TransferResult]:
        results = self.worker.get_finished()
        assert len({r.job_id for r in results}) == len(results)
        return {result.job_id: result for result in results}

    def blocks(self) -> list[int]:
        return [int(value) for value in self.tensor.numpy()[:, 0]]

    def chunks(self) -> list[int]:
        return [int(value) for value in self._host[:, 0]]


@pytest.fixture
def sim() -> Iterator[Sim]:
    made = Sim()
    yield made
    made.worker.shutdown()
    assert made.world.violations == []


def test_a_store_does_not_overtake_the_compute_that_writes_its_block_A01(sim: Sim) -> None:
    sim.write(3, 7)
    job = sim.store(3, 0)
    sim.run_lanes()
    assert sim.chunks()[0] == 0, "the copy ran before compute"
    assert sim.poll() == {}
    assert sim.finish()[job].success
    assert sim.chunks()[0] == 7


@pytest.mark.parametrize("ordered", [True, False])
def test_a_host_that_runs_ahead_is_no_order_A02(ordered: bool) -> None:
    """Stores of steps 1 and 2, submitted when the host is three steps ahead of the device."""
    corrupt = 0
    for seed in range(1000):
        sim = Sim(World(seed, Switches(relaxed_source=True)))
        for step in range(3):
            sim.write(step, 10 + step)
        jobs = [sim.store(0, 0, **({} if ordered else {"after": None})), sim.store(1, 1)]
        sim.write(5, 1)
        results = sim.finish()
        assert all(results[job].success for job in jobs)
        corrupt += sim.chunks()[:2] != [10, 11]
        sim.worker.shutdown()
    assert (corrupt == 0) if ordered else (corrupt > 0), f"{corrupt} of 1000 are corrupt"


def test_a_load_does_not_overtake_compute_that_reads_its_block_A03(sim: Sim) -> None:
    sim.write(5, 1)
    sim.write(6, 9)
    sim.store(6, 2)
    sim.finish()
    seen = sim.read(5)
    sim.load(2, 5)
    sim.run_lanes()
    assert sim.blocks()[5] == 1
    sim.finish()
    assert seen == [1]
    assert sim.blocks()[5] == 9


MOVES: dict[str, Callable[[Sim], int]] = {
    "store 1→0": lambda sim: sim.store(1, 0),
    "store 2→0": lambda sim: sim.store(2, 0),
    "store 1→1": lambda sim: sim.store(1, 1),
    "load 0→1": lambda sim: sim.load(0, 1),
    "load 0→2": lambda sim: sim.load(0, 2),
    "load 1→1": lambda sim: sim.load(1, 1),
    "copy 1→2": lambda sim: sim.copy(1, 2),
    "copy 2→1": lambda sim: sim.copy(2, 1),
}


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(MOVES, 2)))
def test_transfers_that_share_a_block_keep_their_order_A12(
    sim: Sim, first: str, second: str
) -> None:
    def prepare(one: Sim) -> None:
        for block in range(3):
            one.write(block, 20 + block)
        one.store(0, 0)
        one.finish()
        one.store(2, 1)
        one.finish()

    in_turn = Sim()
    prepare(in_turn)
    for move in (first, second):
        MOVES[move](in_turn)
        in_turn.finish()
    prepare(sim)
    MOVES[first](sim)
    MOVES[second](sim)
    # The second as far as it goes, and only then the rest.
    lanes = {"s": Lane.STORE, "l": Lane.LOAD, "c": Lane.COPY}
    hurried = sim.stream(lanes[second[0]])
    sim.world.settle()
    while hurried.ready():
        hurried.step()
        sim.world.settle()
    assert all(result.success for result in sim.finish().values())
    assert (sim.blocks(), sim.chunks()) == (in_turn.blocks(), in_turn.chunks())
    in_turn.worker.shutdown()


@pytest.mark.parametrize("lane", list(Lane))
def test_an_event_given_by_the_caller_is_waited_for_in_every_direction_A15(
    sim: Sim, lane: Lane
) -> None:
    def submit(**options: Any) -> int:
        if lane is Lane.STORE:
            return sim.store(1, 0, **options)
        return sim.load(0, 2, **options) if lane is Lane.LOAD else sim.copy(1, 3, **options)

    sim.write(0, 1)
    event = sim.backend.new_event()
    sim.world.compute.record_event(event)
    job = submit(after=event)
    sim.run_lanes()
    assert sim.poll() == {}
    assert sim.finish()[job].success
    sim.write(0, 2)
    free = submit(after=None)
    sim.run_lanes()
    assert sim.poll()[free].success, "None is the caller's opt-out"
    sim.world.drain()


class StagingBackend(SimBackend):
    """Copies in two phases, by way of staging memory."""

    def swap_blocks(self, plan: CopyPlan, stream: Stream, keep: Keep[Any]) -> None:
        copies = plan.descriptors()
        staging: npt.NDArray[np.uint8] = keep(np.zeros(int(copies.size.sum()), dtype=np.uint8))
        staged = weakref.ref(staging)
        rows = list(zip(*(column.tolist() for column in copies), strict=True))

        def phase(move: Callable[[npt.NDArray[np.uint8], int, int, int, int], None]) -> None:
            at = 0
            for src, dst, size in rows:
                buffer = staged()
                assert buffer is not None, "staging memory was given back too early"
                move(buffer, at, src, dst, size)
                at += size

        import ctypes

        def fill(buffer: Any, at: int, src: int, dst: int, size: int) -> None:
            buffer[at : at + size] = np.frombuffer(ctypes.string_at(src, size), np.uint8)

        def empty(buffer: Any, at: int, src: int, dst: int, size: int) -> None:
            ctypes.memmove(dst, buffer[at : at + size].tobytes(), size)

        assert hasattr(stream, "submit")
        stream.submit(lambda: phase(fill))
        stream.submit(lambda: phase(empty))


def test_staging_memory_belongs_to_one_job_until_it_has_ended_A17() -> None:
    for seed in range(200):
        sim = Sim(World(seed), StagingBackend)
        sim.write(1, 7)
        sim.write(2, 8)
        sim.store(2, 1)
        sim.finish()
        sim.store(1, 0)
        sim.load(1, 3)
        assert all(result.success for result in sim.finish().values())
        assert (sim.chunks()[0], sim.blocks()[3]) == (7, 8)
        sim.worker.shutdown()


def test_a_job_that_failed_half_way_ends_when_what_runs_of_it_has_stopped_A18(sim: Sim) -> None:
    sim.world.inject(SimFault.PARTIAL, Lane.STORE)
    job = 77
    sim.write(1, 1)
    spec = DeviceLoadStoreSpec([1, 3, 5, 7]), HostLoadStoreSpec([0, 2, 4, 5])
    sim.worker.transfer_async(job, spec)
    gc.collect()
    assert sim.poll() == {}, "part of it is still to run"
    assert sim.engine.usage().running == 1
    sim.worker.cancel([job])
    follower = sim.store(2, 0)  # its chunk is not free: whoever wants it comes after
    assert sim.poll() == {}
    results = sim.finish()
    assert isinstance(results[job].error, SubmitError)
    assert results[follower].success
    assert sim.chunks()[0] == 0, "the follower came after the part that ran"


@pytest.mark.parametrize("seed", range(0, 1000, 100))
def test_cancelling_a_running_job_is_deferred_and_late_completions_are_harmless_A19(
    seed: int,
) -> None:
    for number in range(seed, seed + 100):
        rng = random.Random(number)
        sim = Sim(World(number))
        ended: list[TransferResult] = []
        sim.write(1, 1)
        jobs = [sim.submit(lane) for lane in Lane]
        for _ in range(6):
            sim.world.run(rng.randrange(4))
            sim.worker.cancel([rng.choice(jobs), 999])
            ended += sim.worker.get_finished()
        sim.world.drain()
        sim.worker.shutdown()
        ended += sim.worker.get_finished()
        assert sorted(result.job_id for result in ended) == jobs
        assert sim.world.violations == []


def test_a_cancelled_job_fails_once_it_has_stopped_A19(sim: Sim) -> None:
    sim.write(1, 1)
    job = sim.store(1, 0)
    sim.worker.cancel([job])
    sim.run_lanes()
    assert sim.poll() == {}, "its blocks are not free yet"
    result = sim.finish()[job]
    assert isinstance(result.error, CancelledError)
    assert sim.engine.usage().running == 0


def test_registered_memory_outlives_the_callers_references_A21() -> None:
    memory = np.full((BLOCKS, PAGE), 5, dtype=np.uint8)
    world, alive = World(), weakref.ref(memory)
    caches = CanonicalKVCaches.from_tensors([torch.from_numpy(memory)])
    worker = OffloadingWorker.for_caches(SimBackend(world), caches, host_bytes=CHUNKS * PAGE)
    worker.transfer_async(1, (DeviceLoadStoreSpec([1]), HostLoadStoreSpec([0])))
    del memory, caches
    gc.collect()
    assert alive() is not None
    world.drain()
    assert worker.get_finished()[0].success
    assert worker.engine is not None
    assert worker.engine.host.memory.tensor[:PAGE].tolist() == [5] * PAGE
    worker.shutdown()
    del worker
    gc.collect()
    assert alive() is None


def test_an_engine_that_nobody_holds_stays_alive_while_a_job_runs_A21() -> None:
    world = World()
    sim: Sim | None = Sim(world)
    assert sim is not None
    sim.write(1, 5)
    sim.store(1, 0)
    alive = weakref.ref(sim.engine)
    sim = None
    gc.collect()
    world.drain()
    assert world.violations == []
    engine = alive()
    assert engine is not None
    engine.shutdown()
    del engine
    gc.collect()
    assert alive() is None


def test_a_job_that_is_not_launched_is_not_complete_and_one_of_nothing_is_A23(
    sim: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "LAUNCHED_PER_LANE", 1)
    first, second = sim.store(1, 0), sim.store(2, 1)
    assert sim.poll() == {}
    assert sim.world.counters.launches == 1, "the second waits for room"
    nothing = 99
    sim.worker.transfer_async(nothing, (DeviceLoadStoreSpec([]), HostLoadStoreSpec([])))
    result = sim.poll()[nothing]
    assert (result.success, result.transfer_size) == (True, 0)
    sim.world.drain()
    assert list(sim.poll()) == [first]
    assert list(sim.finish()) == [second]


def test_a_reset_leaves_no_old_work_and_no_new_threads_A26() -> None:
    backend = CpuBackend()
    tensor = torch.zeros(BLOCKS, PAGE, dtype=torch.uint8)
    worker = OffloadingWorker.for_caches(
        backend, CanonicalKVCaches.from_tensors([tensor]), host_bytes=CHUNKS * PAGE
    )
    engine = worker.engine
    assert engine is not None
    host = engine.host.memory.tensor.numpy()
    threads = len(threading.enumerate())
    number = 0
    for generation in range(20):
        tensor.fill_(generation)
        for _ in range(30):
            number += 1
            spec = DeviceLoadStoreSpec([number % BLOCKS]), HostLoadStoreSpec([number % CHUNKS])
            worker.transfer_async(number, spec)
        worker.reset()
        # Nothing of this generation is written any more, whatever the device block holds now.
        tensor.fill_(200)
        host[:] = 250
        engine.wait(engine.in_flight)
        assert (host[: CHUNKS * PAGE] == 250).all()
        assert len(threading.enumerate()) == threads
    results = worker.get_finished()
    assert sorted(r.job_id for r in results) == list(range(1, number + 1))
    worker.shutdown()


def test_a_malformed_job_fails_alone_C11(sim: Sim) -> None:
    with pytest.raises(SpecError):
        sim.worker.transfer_async(1, (DeviceLoadStoreSpec([1]), HostLoadStoreSpec([0, 1, 2])))
    jobs = [sim.store(n % BLOCKS, n % CHUNKS) for n in range(10)]
    results = sim.finish()
    assert list(results) == jobs
    assert all(result.success for result in results.values())


def test_everything_returns_to_its_baseline_after_any_mix_of_ends_D14() -> None:
    """References (D13), handles and descriptors (D14), over 10,000 random jobs."""
    sim, rng = Sim(), random.Random(5)
    for _ in range(10_000):
        lane = rng.choice(list(Lane))
        if rng.random() < 0.05:
            sim.world.inject(rng.choice(list(SimFault)), lane)
        job = sim.submit(lane)
        if rng.random() < 0.05:
            sim.worker.cancel([job])
        sim.world.run(rng.randrange(12))
        sim.worker.get_finished()
        assert len(sim.world.counters.live_events) <= 3 * len(sim.engine.in_flight) + 50
    sim.finish()
    usage = sim.engine.usage()
    assert (usage.in_flight, usage.running, usage.buffers) == (0, 0, 0)
    assert len(sim.world.counters.live_events) == usage.idle_events
    sim.worker.shutdown()
    assert (len(sim.world.counters.live_events), sim.world.counters.streams) == (0, 1)


def test_pools_stay_bounded_after_bursts_D15(sim: Sim) -> None:
    for burst in (1, 500, 1, 500, 1):
        for number in range(burst):
            sim.store(number % BLOCKS, number % CHUNKS)
        sim.worker.wait(sim.engine.in_flight)
        sim.worker.get_finished()
        usage = sim.engine.usage()
        assert usage.idle_events <= engine_module.KEPT_EVENTS
        assert usage.buffers == 0
        assert sim.engine._buffers.idle_bytes < 1 << 20


def test_a_device_without_a_batch_call_gets_one_call_per_copy_and_one_warning_F09(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sim = Sim(World(0, Switches(batch=False)))
    for block in range(BLOCKS):
        sim.write(block, 30 + block)
    with caplog.at_level(logging.WARNING):
        for job in (1, 2):
            spec = DeviceLoadStoreSpec([1, 3, 5]), HostLoadStoreSpec([4, 0, 2])
            sim.worker.transfer_async(job, spec)
            assert sim.finish()[job].success
    assert sim.chunks()[:5] == [33, 0, 35, 0, 31]
    assert sim.world.counters.launches == 6
    assert caplog.text.count("one by one") == 1
    sim.worker.shutdown()


@pytest.mark.parametrize("lane", list(Lane))
@pytest.mark.parametrize("fault", list(SimFault))
def test_an_error_anywhere_is_a_failed_result_and_the_next_job_works_H15(
    sim: Sim, lane: Lane, fault: SimFault
) -> None:
    sim.write(1, 9)
    sim.store(1, 0)
    sim.finish()
    sim.world.inject(fault, lane)
    job = sim.submit(lane)
    result = sim.finish()[job]
    assert not result.success
    early = fault in (SimFault.SUBMIT, SimFault.PARTIAL)
    assert isinstance(result.error, SubmitError if early else CopyError)
    assert (result.transfer_size, result.transfer_time) == (0, None)
    again = sim.submit(lane)
    assert sim.finish()[again].success


@pytest.mark.parametrize("fault", list(SimFault))
def test_what_read_from_a_failed_job_fails_too_and_the_rest_does_not_H15(
    sim: Sim, fault: SimFault
) -> None:
    sim.write(1, 9)
    sim.world.inject(fault, Lane.STORE)
    failed = sim.store(1, 0)
    reader, other = sim.load(0, 2), sim.load(3, 5)
    reader_of_reader = sim.copy(2, 4)
    again = sim.store(1, 0)
    fresh = sim.load(0, 6)
    results = sim.finish()
    assert [results[j].success for j in (failed, reader, other, reader_of_reader)] == [
        False,
        False,
        True,
        False,
    ]
    assert isinstance(results[reader].error, DependencyError)
    assert isinstance(results[reader_of_reader].error, DependencyError)
    assert results[again].success
    assert results[fresh].success
    assert sim.blocks()[6] == 9


def test_the_events_of_a_failed_job_are_not_used_again_H15(sim: Sim) -> None:
    first = sim.store(1, 0)
    assert sim.finish()[first].success
    assert sim.engine.usage().idle_events == 2
    sim.world.inject(SimFault.QUERY, Lane.STORE)
    failed = sim.store(1, 0)
    assert not sim.finish()[failed].success
    assert sim.engine.usage().idle_events == 0


def test_a_failure_that_was_reported_spoils_nothing_later(sim: Sim) -> None:
    sim.world.inject(SimFault.EXECUTE, Lane.LOAD)
    failed = sim.load(0, 2)
    assert not sim.finish()[failed].success
    sim.write(2, 8)  # the engine computes what it could not load
    stored = sim.store(2, 1)
    assert sim.finish()[stored].success
    assert sim.chunks()[1] == 8


def test_a_failure_that_ended_but_was_not_reported_spoils_its_readers(sim: Sim) -> None:
    sim.world.inject(SimFault.EXECUTE, Lane.LOAD)
    failed = sim.load(0, 2)
    sim.world.drain()
    assert sim.engine.finished(Lane.STORE) == []  # ends the job, and tells nobody
    reader = sim.store(2, 1)
    results = sim.finish()
    assert not results[failed].success
    assert isinstance(results[reader].error, DependencyError)


def test_a_job_that_never_got_onto_its_stream_does_not_hide_the_ones_before_it(sim: Sim) -> None:
    """A job that failed to launch has no end to wait for; what it would have followed has."""
    sim.write(1, 5)
    first = sim.store(1, 0)
    sim.world.inject(SimFault.SUBMIT, Lane.STORE)
    record = sim.world.compute.record_event
    sim.world.compute.record_event = fail  # type: ignore[method-assign, assignment]
    unmarked = sim.store(2, 0)
    sim.world.compute.record_event = record  # type: ignore[method-assign]
    last = sim.load(0, 3, after=None)
    sim.run_lanes()
    assert sim.poll() == {}
    results = sim.finish()
    assert [results[job].success for job in (first, unmarked, last)] == [True, False, False]
    assert isinstance(results[last].error, DependencyError)
    assert sim.blocks()[3] == 5, "it ran after the first, in order"


def fail(*_: object) -> None:
    raise CopyError("made to fail")


def test_a_job_of_nothing_does_not_hide_the_ones_before_it(sim: Sim) -> None:
    sim.write(1, 5)
    sim.store(1, 0)
    sim.worker.transfer_async(50, (DeviceLoadStoreSpec([]), HostLoadStoreSpec([])))
    sim.load(0, 3, after=None)
    sim.run_lanes()
    assert sim.blocks()[3] == 0
    sim.finish()
    assert sim.blocks()[3] == 5


def test_an_end_that_cannot_be_recorded_at_first_is_recorded_again(sim: Sim) -> None:
    stream = sim.stream(Lane.STORE)
    record, calls = stream.record_event, itertools.count(1)

    def flaky(event: object) -> object:
        if next(calls) == 2:
            fail()
        return record(event)

    stream.record_event = flaky
    sim.write(1, 5)
    job = sim.store(1, 0)
    assert sim.poll() == {}, "the copy has not run"
    assert sim.finish()[job].success


def test_a_lost_device_ends_every_job_once_with_an_error(sim: Sim) -> None:
    sim.write(1, 1)
    jobs = [sim.submit(lane) for lane in Lane]
    sim.world.die()
    late = [sim.submit(lane) for lane in Lane]
    sim.worker.wait([*jobs, *late])
    results = sim.poll()
    assert sorted(results) == [*jobs, *late]
    for result in results.values():
        assert isinstance(result.error, SubmitError | CopyError)
    assert sim.engine.usage().running == 0
    with pytest.raises(CopyError):
        sim.world.check_alive()
    sim.worker.fence(jobs)
    # What is in the dead device's streams is nobody's any more.
    for stream in sim.world.streams:
        stream.ops.clear()


def test_importing_touches_no_device_and_a_forked_child_gets_a_clear_error_J05() -> None:
    code = """
import os, sys, threading, torch
import kvoffload as kv
from kvoffload.core.lanes import Lane
assert threading.active_count() == 1
tensor = torch.zeros(4, 8, dtype=torch.uint8)
worker = kv.OffloadingWorker.for_caches(
    kv.select_backend("cpu"), kv.CanonicalKVCaches.from_tensors([tensor]), host_bytes=64)
spec = kv.DeviceLoadStoreSpec([1]), kv.HostLoadStoreSpec([0])
import threading
gate = threading.Event()
stream = worker.engine.backend.new_stream(Lane.STORE)
stream.submit(lambda: gate.wait() and None)
worker.transfer_async(1, spec)  # in flight when the process forks
child = os.fork()
if child == 0:
    calls = (
        lambda: worker.transfer_async(2, spec), worker.get_finished, worker.reset,
        lambda: worker.wait([1]), lambda: worker.fence([1]), lambda: worker.cancel([1]),
    )
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            print(type(error).__name__, error, flush=True)
        else:
            os._exit(1)
    worker.shutdown()
    os._exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
gate.set()
worker.shutdown()
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ForkedError") == 6
    assert "belongs to process" in done.stdout


def test_a_worker_of_another_process_is_refused_J05(
    sim: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    with pytest.raises(ForkedError, match=str(pid)):
        sim.store(1, 0)
    monkeypatch.undo()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), CopyError("made to fail")])
def test_whoever_waits_for_a_helper_that_dies_gets_an_error_J07(error: BaseException) -> None:
    backend = CpuBackend()
    tensor = torch.zeros(4, 8, dtype=torch.uint8)
    worker = OffloadingWorker.for_caches(
        backend, CanonicalKVCaches.from_tensors([tensor]), host_bytes=64
    )

    def dies() -> None:
        raise error

    stream: Any = backend.new_stream(Lane.STORE)
    backend.swap_blocks = lambda plan, stream, keep: stream.submit(dies)  # type: ignore[method-assign, attr-defined]
    worker.transfer_async(1, (DeviceLoadStoreSpec([1]), HostLoadStoreSpec([0])))
    worker.wait([1])
    (result,) = worker.get_finished()
    assert isinstance(result.error, CopyError)
    assert type(error).__name__ in str(result.error)
    del backend.swap_blocks
    worker.transfer_async(2, (DeviceLoadStoreSpec([1]), HostLoadStoreSpec([0])))
    worker.wait([2])
    assert worker.get_finished()[0].success, "the thread is still there"
    assert stream is backend.new_stream(Lane.STORE)
    worker.shutdown()


def test_an_event_of_the_caller_that_fails_fails_the_transfer() -> None:
    class Lost:
        def synchronize(self) -> None:
            raise RuntimeError("device lost")

    tensor = torch.ones(4, 8, dtype=torch.uint8)
    worker = OffloadingWorker.for_caches(
        CpuBackend(), CanonicalKVCaches.from_tensors([tensor]), host_bytes=64
    )
    spec = DeviceLoadStoreSpec([1]), HostLoadStoreSpec([0])
    worker.transfer_async(1, spec, after=Lost())  # type: ignore[arg-type]
    worker.wait([1])
    (result,) = worker.get_finished()
    assert "device lost" in str(result.error)
    assert worker.engine is not None
    assert int(worker.engine.host.memory.tensor.sum()) == 0, "the copy did not run"
    with pytest.raises(SpecError, match="after must be"):
        worker.transfer_async(2, spec, after="later")  # type: ignore[arg-type]
    worker.shutdown()


@pytest.mark.parametrize("max_batch", [None, 256])
def test_submit_never_blocks_on_a_full_stream_L01(max_batch: int | None) -> None:
    """200 transfers each way of 64 scattered blocks in 32 layers: 2,048 copies a transfer."""
    world = World(0, Switches(queue_depth=1000, max_batch=max_batch))
    layers = [torch.zeros(256, 1, dtype=torch.uint8) for _ in range(32)]
    worker = OffloadingWorker.for_caches(
        SimBackend(world), CanonicalKVCaches.from_tensors(layers), host_bytes=256 * 32
    )
    world.compute.held = True
    world.compute.submit(lambda: None)  # nothing can run until it does
    scattered = np.arange(64) * 2
    for number in range(200):
        store = DeviceLoadStoreSpec(scattered), HostLoadStoreSpec(scattered)
        load = HostLoadStoreSpec(scattered), DeviceLoadStoreSpec(scattered + 1)
        worker.transfer_async(2 * number, store)
        worker.transfer_async(2 * number + 1, load)
    assert worker.engine is not None
    assert len(worker.engine.in_flight) == 400
    world.compute.held = False
    results: list[TransferResult] = []
    worker.cancel(range(20, 400))  # the rest would be more of the same
    while len(results) < 400:
        world.run(20_000)
        results += worker.get_finished()
    assert sum(result.success for result in results) == 20
    assert (world.counters.blocked_enqueues, world.counters.host_waits) == (0, 0)
    worker.shutdown()


def test_a_stream_without_room_would_be_noticed_L01(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransferEngine, "_has_room", lambda self, lane, job: True)
    sim = Sim(World(0, Switches(queue_depth=100)))
    for _ in range(50):
        sim.store(1, 0)
    assert sim.world.counters.blocked_enqueues > 0
    sim.worker.shutdown()


def test_a_fence_reaches_a_job_that_waits_for_room_L01(
    sim: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "LAUNCHED_PER_LANE", 2)
    sim.write(1, 5)
    for _ in range(5):
        sim.store(1, 0)
    last = sim.load(0, 3)
    for _ in range(5):
        sim.load(1, 4)
    sim.worker.fence([last])
    seen = sim.read(3)
    sim.finish()
    assert seen == [5]
    sim.worker.wait(sim.engine.in_flight)
    assert sim.engine.in_flight == []


def test_polling_asks_once_per_lane_however_much_is_pending_L03(sim: Sim) -> None:
    sim.world.compute.held = True
    sim.write(0, 1)
    for number in range(10_000):
        sim.submit(list(Lane)[number % len(Lane)])
    before = sim.world.counters.queries
    for _ in range(100):
        assert sim.worker.get_finished() == []
    sim.world.compute.held = False
    assert sim.world.counters.queries - before <= 100 * len(Lane)
    sim.worker.wait(sim.engine.in_flight)


def test_a_batch_is_split_at_its_limit_L07() -> None:
    count = 10_001
    world = World(0, Switches(max_batch=4096))
    sim = Sim(world, blocks=2 * count, chunks=count)
    sim.tensor.copy_(
        torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2 * count, PAGE), np.uint8))
    )
    blocks = np.arange(count) * 2  # none adjacent
    sim.worker.transfer_async(1, (DeviceLoadStoreSpec(blocks), HostLoadStoreSpec(np.arange(count))))
    assert sim.finish()[1].success
    assert (world.counters.launches, world.counters.descriptors) == (3, count)
    assert world.violations == []
    assert (sim._host == sim.tensor.numpy()[blocks]).all()
    sim.worker.shutdown()


def test_the_hot_path_makes_no_events_L09(sim: Sim) -> None:
    for _ in range(1000):
        sim.store(1, 0)
        sim.finish()
    assert sim.world.counters.events_created <= 2
    assert sim.world.counters.streams == 4


def calls(work: Callable[[], object]) -> int:
    """Python and C functions that are called."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # what it calls is not the work's
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_the_cost_of_a_poll_does_not_depend_on_what_has_finished_L10(sim: Sim) -> None:
    def poll_one() -> int:
        sim.store(1, 0)
        sim.world.drain()
        return calls(sim.worker.get_finished)

    poll_one()
    costs = []
    for finished in (1000, 9000):
        for _ in range(finished):
            sim.store(1, 0, after=None)
            sim.world.drain()
            sim.worker.get_finished()
        costs.append(poll_one())
    assert costs[0] == costs[1]


def test_the_cost_of_a_submit_does_not_depend_on_blocks_or_on_what_has_finished_L10() -> None:
    sim = Sim(blocks=4000, chunks=4000)

    def submit(count: int) -> int:
        ids = np.random.default_rng(1).permutation(2000)[:count] * 2  # none adjacent
        spec = DeviceLoadStoreSpec(ids), HostLoadStoreSpec(ids)
        cost = calls(lambda: sim.engine.submit(next(sim._ids), *spec, after=None))
        sim.finish()
        return cost

    submit(2000)  # what is allocated once
    assert submit(10) == submit(1000) == submit(2000)
    sim.worker.shutdown()


def test_a_job_past_its_deadline_is_reported_and_its_blocks_are_withheld() -> None:
    now = 0.0
    world = World()
    backend = SimBackend(world)
    tensor = torch.zeros(BLOCKS, PAGE, dtype=torch.uint8)
    engine = TransferEngine(
        backend,
        CanonicalKVCaches.from_tensors([tensor]),
        host_bytes=CHUNKS * PAGE,
        job_deadline=10,
        clock=lambda: now,
    )
    world.compute.held = True  # the device hangs
    world.compute.submit(lambda: None)

    def store(job: int, block: int, chunk: int) -> None:
        engine.submit(job, DeviceLoadStoreSpec([block]), HostLoadStoreSpec([chunk]))

    store(1, 1, 0)
    waiting = len(world.compute.ops) + 2  # the marks of the next two
    now = 5.0
    store(2, 2, 1)
    assert engine.finished(Lane.STORE) == []
    now = 10.0
    (result,) = engine.finished(Lane.STORE)
    assert (result.job_id, type(result.error)) == (1, StalledError)
    for block, chunk in ((1, 3), (3, 0)):
        with pytest.raises(BlockWithheldError, match="job 1"):
            store(3, block, chunk)
    store(3, 3, 3)  # others are free
    engine.fence([1])
    assert len(world.compute.ops) > waiting, "compute behind a fence comes after a stalled job, too"
    assert engine.usage().running == 3
    world.compute.held = False
    world.drain()
    assert [r.job_id for r in engine.finished(Lane.STORE)] == [2, 3], "job 1 ended once"
    assert engine.usage().running == 0
    store(4, 1, 0)  # and are free again
    world.drain()
    assert engine.finished(Lane.STORE)[0].success
    engine.shutdown()
    with pytest.raises(ConfigurationError, match="job_deadline"):
        TransferEngine(
            SimBackend(),
            CanonicalKVCaches.from_tensors([tensor]),
            host_bytes=CHUNKS * PAGE,
            job_deadline=0,
        )


def test_shutdown_of_a_hung_device_returns_and_keeps_what_it_may_still_write_J06() -> None:
    sim = Sim()
    sim.world.compute.held = True
    sim.write(1, 5)
    jobs = [sim.store(1, 0), sim.load(2, 3)]
    sim.worker.shutdown(timeout=0)
    results = sim.poll()
    assert sorted(results) == jobs
    assert all(isinstance(r.error, StalledError) for r in results.values())
    sim.world.compute.held = False
    sim.world.drain()
    assert sim.world.violations == [], "the late copies found their memory"
    sim.worker.shutdown()  # now there is nothing to wait for
    assert sim.world.counters.streams == 1
    assert sim.poll() == {}


def test_an_interrupted_shutdown_can_be_called_again(
    sim: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: object, timeout: object) -> None:
        raise KeyboardInterrupt

    sim.write(1, 5)
    job = sim.store(1, 0)
    with monkeypatch.context() as patch:
        patch.setattr(TransferEngine, "_drain", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sim.worker.shutdown()
    with pytest.raises(ClosedError):
        sim.store(2, 1)
    sim.worker.shutdown()
    assert sim.poll()[job].success
    assert sim.world.counters.streams == 1


@pytest.mark.parametrize("where", ["elapsed_time", "query"])
def test_an_interrupt_while_polling_loses_no_result(
    sim: Sim, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    job = sim.store(1, 0)
    sim.world.drain()
    with monkeypatch.context() as patch:
        patch.setattr(f"kvoffload.testing.simulator.world.SimEvent.{where}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sim.poll()
    assert sim.poll()[job].success
    assert sim.engine.in_flight == []


def test_an_interrupt_while_submitting_leaves_a_failed_job_and_no_hole(
    sim: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for where in ("swap_blocks", "current_stream"):
        with monkeypatch.context() as patch:
            patch.setattr(sim.backend, where, interrupt)
            with pytest.raises(KeyboardInterrupt):
                sim.store(1, 0)
        (result,) = sim.finish().values()
        assert isinstance(result.error, SubmitError)
        assert "interrupted" in str(result.error)
    job = sim.store(1, 0)
    assert sim.finish()[job].success


def test_a_failed_registration_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls_made: list[str] = []
    for name in ("unbind", "close"):
        original = getattr(SimBackend, name)

        def note(self: SimBackend, name: str = name, original: Any = original) -> None:
            calls_made.append(name)
            original(self)

        monkeypatch.setattr(SimBackend, name, note)
    original_stream = SimBackend.new_stream

    def fails(self: SimBackend, lane: Lane) -> Any:
        if lane is Lane.LOAD:
            fail()
        return original_stream(self, lane)

    monkeypatch.setattr(SimBackend, "new_stream", fails)
    world = World()
    with pytest.raises(CopyError):
        Sim(world)
    assert calls_made == ["unbind", "close"]
    assert world.counters.streams == 1


def test_a_stream_being_captured_is_refused_and_nothing_is_created(sim: Sim) -> None:
    sim.backend.is_capturing = lambda: True  # type: ignore[method-assign]
    with pytest.raises(GraphCaptureError, match="graph"):
        sim.store(1, 0)
    assert sim.engine.in_flight == []
    event = sim.backend.new_event()
    job = sim.store(1, 0, after=event)  # an event of another time is no part of the capture
    assert sim.finish()[job].success


@pytest.mark.parametrize(
    ("mine", "theirs", "served"),
    [
        ("cuda:1", "cuda:1", True),
        ("cuda:1", "cuda:0", False),
        ("cuda", "cuda:0", True),
        ("cuda", "cuda:1", False),
        ("cpu", "cpu", True),
        ("cuda:0", "cpu", False),
        (None, "cuda:3", True),
    ],
)
def test_a_backend_serves_its_own_device_and_no_other(
    mine: str | None, theirs: str, served: bool
) -> None:
    device = None if mine is None else torch.device(mine)
    assert engine_module._serves(device, torch.device(theirs)) == served


def test_waiting_for_unknown_jobs_returns_at_once(sim: Sim) -> None:
    sim.worker.wait([5, 6])
    sim.worker.fence([5, 6])
    sim.worker.cancel([5, 6])
    assert sim.poll() == {}


def test_seconds_are_those_of_the_copy_and_not_of_the_wait_K10(sim: Sim) -> None:
    for _ in range(100):
        sim.read(0)
    job = sim.store(1, 0)
    result = sim.finish()[job]
    assert result.transfer_time is not None
    assert result.transfer_time * 1e3 < 10, "ticks of waiting were counted"


def test_polling_and_submitting_go_on_while_another_thread_fences_or_shuts_down() -> None:
    """The caller's own thread is its stream: a fence blocks it, and nobody else."""
    backend = CpuBackend()
    tensor = torch.zeros(4, 8, dtype=torch.uint8)
    worker = OffloadingWorker.for_caches(
        backend, CanonicalKVCaches.from_tensors([tensor]), host_bytes=64
    )
    gate = threading.Event()
    stream: Any = backend.new_stream(Lane.STORE)
    stream.submit(gate.wait)
    spec = DeviceLoadStoreSpec([1]), HostLoadStoreSpec([0])
    worker.transfer_async(1, spec)
    fencing = threading.Thread(target=worker.fence, args=([1],))
    fencing.start()
    assert worker.get_finished() == []
    worker.transfer_async(2, (HostLoadStoreSpec([3]), DeviceLoadStoreSpec([2])))
    worker.wait([2])
    assert worker.get_finished()[0].success
    closing = threading.Thread(target=worker.shutdown)
    closing.start()
    with contextlib.suppress(ClosedError):
        while True:  # until the other thread has begun
            worker.transfer_async(9, (DeviceLoadStoreSpec([]), HostLoadStoreSpec([])))
            worker.get_finished()
    gate.set()
    fencing.join()
    closing.join()
    assert [r.job_id for r in worker.get_finished() if r.job_id != 9] == [1]


def test_results_survive_a_handler_that_raises(sim: Sim) -> None:
    class Broken(OffloadingHandler):
        def transfer_async(self, job_id: int, spec: Any, *, after: Any = None) -> bool:
            return True

        def get_finished(self) -> list[TransferResult]:
            fail()
            return []

        def wait(self, job_ids: Any) -> None:
            pass

        fence = cancel = wait

        def shutdown(self, timeout: float | None = None) -> None:
            fail()

    job = sim.store(1, 0)
    sim.world.drain()
    broken = Broken()
    sim.worker.register_handler(HostLoadStoreSpec, HostLoadStoreSpec, broken)
    for _ in range(2):
        with pytest.raises(CopyError):
            sim.worker.get_finished()
    sim.worker._distinct.remove(broken)
    assert sim.poll()[job].success
    sim.worker._distinct.insert(0, broken)
    with pytest.raises(CopyError):
        sim.worker.shutdown()
    assert sim.world.counters.streams == 1, "the other handlers were shut down"
    sim.worker._distinct.remove(broken)


def test_handlers_of_one_direction_share_an_engine_and_keep_to_it(sim: Sim) -> None:
    handlers = {lane: SingleDirectionOffloadingHandler(sim.engine, lane) for lane in Lane}
    specs = {
        Lane.STORE: (DeviceLoadStoreSpec([1]), HostLoadStoreSpec([0])),
        Lane.LOAD: (HostLoadStoreSpec([0]), DeviceLoadStoreSpec([2])),
        Lane.COPY: (DeviceLoadStoreSpec([1]), DeviceLoadStoreSpec([3])),
    }
    for number, lane in enumerate(Lane):
        assert handlers[lane].transfer_async(number, specs[lane])
        for other in set(Lane) - {lane}:
            with pytest.raises(UnroutableError, match=" → "):
                handlers[other].transfer_async(9, specs[lane])
    sim.world.drain()
    for number, lane in enumerate(Lane):
        (result,) = handlers[lane].get_finished()
        assert (result.job_id, result.transfer_type) == (number, lane.media)


def test_subclasses_of_specs_are_routed_as_their_base(sim: Sim) -> None:
    class Mine(DeviceLoadStoreSpec):
        pass

    assert sim.worker.transfer_async(1, (Mine([1]), HostLoadStoreSpec([0])))
    assert sim.finish()[1].success


@pytest.mark.parametrize("spec", [None, (), (1, 2), (HostLoadStoreSpec([0]),), "ab"])
def test_what_is_no_pair_of_specs_is_refused(sim: Sim, spec: Any) -> None:
    engine = sim.engine
    takers: list[Callable[..., bool]] = [
        sim.worker.transfer_async,
        EngineOffloadingHandler(engine).transfer_async,
        SingleDirectionOffloadingHandler(engine, Lane.STORE).transfer_async,
    ]
    for transfer_async in takers:
        with pytest.raises(SpecError, match="pair of specs"):
            transfer_async(1, spec)
    assert sim.engine.in_flight == []


def test_a_stored_error_holds_no_frame(sim: Sim) -> None:
    """A traceback would keep the copy's frame, and with it staging memory, alive."""

    class Staging:
        pass

    alive: list[weakref.ref[Staging]] = []

    def swap_blocks(plan: object, stream: object, keep: object) -> None:
        staging = Staging()
        alive.append(weakref.ref(staging))
        try:
            fail()
        except CopyError as error:
            raise RuntimeError("vendor") from error

    sim.backend.swap_blocks = swap_blocks  # type: ignore[method-assign]
    job = sim.store(1, 0)
    result = sim.finish()[job]
    gc.collect()
    assert isinstance(result.error, SubmitError)
    assert "vendor" in str(result.error)
    assert alive[0]() is None


def test_a_wait_that_cannot_end_says_so() -> None:
    world = World()
    event = SimBackend(world).new_event()
    world.compute.held = True
    world.compute.record_event(event)
    with pytest.raises(DeadlockError):
        event.synchronize()


def hung(**options: Any) -> tuple[OffloadingWorker, threading.Event]:
    """A worker whose stores hang until the event is set."""
    backend = CpuBackend()
    tensor = torch.full((4, 8), 7, dtype=torch.uint8)
    worker = OffloadingWorker.for_caches(
        backend, CanonicalKVCaches.from_tensors([tensor]), host_bytes=64, **options
    )
    gate = threading.Event()
    stream: Any = backend.new_stream(Lane.STORE)
    stream.submit(gate.wait)
    worker.transfer_async(1, (DeviceLoadStoreSpec([1]), HostLoadStoreSpec([0])))
    return worker, gate


def test_waiting_for_a_hung_device_ends_with_the_deadline() -> None:
    worker, gate = hung(job_deadline=0.05)
    worker.wait([1])
    (result,) = worker.get_finished()
    assert isinstance(result.error, StalledError)
    assert worker.engine is not None
    assert worker.engine.usage().running == 1
    with pytest.raises(StalledError, match="1 transfer"):
        worker.reset()
    gate.set()
    worker.shutdown(timeout=30)
    assert worker.engine.usage().running == 0
    assert worker.get_finished() == []


def test_a_shutdown_with_a_timeout_does_not_wait_for_one_without() -> None:
    worker, gate = hung()
    patient = threading.Thread(target=worker.shutdown)
    patient.start()
    while True:  # until the other has begun
        with contextlib.suppress(SpecError):
            try:
                worker.transfer_async(2, (DeviceLoadStoreSpec([]), HostLoadStoreSpec([])))
            except ClosedError:
                break
            worker.get_finished()
    worker.shutdown(timeout=0.05)
    assert [type(r.error) for r in worker.get_finished() if r.job_id == 1] == [StalledError]
    gate.set()
    patient.join()
    worker.shutdown(timeout=30)


@pytest.mark.parametrize("timeout", [float("nan"), -1, "soon", True])
def test_a_timeout_that_means_nothing_is_refused(sim: Sim, timeout: Any) -> None:
    with pytest.raises(ConfigurationError, match="timeout"):
        sim.worker.shutdown(timeout)
    assert sim.store(1, 0), "nothing was shut down"
    sim.finish()


def test_waiting_for_cancelled_jobs_beyond_the_room_of_a_lane_waits_for_them(sim: Sim) -> None:
    sim.write(0, 1)
    jobs = [sim.store(1, 0) for _ in range(500)]
    sim.worker.cancel(jobs)
    sim.worker.wait([jobs[-1]])
    assert jobs[-1] not in sim.engine.in_flight
    assert len(sim.finish()) == 500


def test_an_event_that_somebody_waits_for_is_not_used_again(sim: Sim) -> None:
    job = sim.store(1, 0)
    end = sim.engine._in_flight[job].end
    synchronize = end.synchronize  # type: ignore[union-attr]

    def poll_meanwhile() -> None:
        synchronize()
        assert sim.poll()[job].success  # as another thread might
        assert end not in sim.engine._free_events

    end.synchronize = poll_meanwhile  # type: ignore[union-attr, method-assign]
    sim.worker.wait([job])


def test_no_end_event_no_launch(sim: Sim, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a copy needs to be known to have ended is there before the copy is enqueued."""
    made = itertools.count(1)
    new_event = sim.backend.new_event

    def fails_at_the_second() -> Any:
        if next(made) == 2:
            fail()
        return new_event()

    monkeypatch.setattr(sim.backend, "new_event", fails_at_the_second)
    job = sim.store(1, 0)
    assert isinstance(sim.finish()[job].error, SubmitError)
    assert sim.world.counters.launches == 0


@pytest.mark.parametrize(
    "where",
    [
        "kvoffload.core.ordering.OrderingTable.dependencies",
        "kvoffload.core.ordering.OrderingTable.add",
        "kvoffload.core.ordering.OrderingTable.writers",
        "kvoffload.core.engine.TransferEngine._launch_waiting",
        "kvoffload.core.engine.TransferEngine._event",
        "kvoffload.core.engine.TransferEngine._order_after",
    ],
)
def test_an_interrupt_anywhere_in_a_submit_leaves_no_job_or_a_failed_one(
    sim: Sim, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    sim.store(3, 3)  # so that there is something to look at
    with monkeypatch.context() as patch:
        patch.setattr(where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            sim.worker.transfer_async(70, (DeviceLoadStoreSpec([1]), HostLoadStoreSpec([0])))
    results = sim.finish()
    if 70 in results:
        assert isinstance(results[70].error, SubmitError)
    assert sim.engine.usage()[:3] == (0, 0, 0)
    again = sim.store(1, 0)
    assert sim.finish()[again].success


def test_threads_end_with_the_engine_that_nobody_holds() -> None:
    worker, gate = hung()
    gate.set()
    worker.wait([1])
    worker.get_finished()
    threads = [t for t in threading.enumerate() if t.name.startswith("kvoffload-")]
    assert len(threads) == 3
    del worker
    gc.collect()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "options",
    [
        {"null_block": -1},
        {"null_block": BLOCKS},
        {"null_block": 1.5},
        {"null_block": True},
        {"job_deadline": True},
        {"job_deadline": "x"},
        {"job_deadline": float("nan")},
        {"tokens_per_block": True},
        {"tokens_per_block": [16.5]},
        {"tokens_per_block": 0},
        {"longest_request": "x"},
        {"numa_node": "0"},
        {"numa_node": 10_000},
        {"host_order": "planes"},
        {"block_size_factor": "2"},
    ],
)
def test_settings_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Sim(**options)


def test_an_event_that_must_not_be_asked_ends_no_job() -> None:
    sim = Sim()
    refusing = True

    def is_reached(event: Any) -> bool:
        return False if refusing else bool(event.query())

    sim.engine.backend.is_reached = is_reached  # type: ignore[method-assign]
    job = sim.store(1, 0)
    sim.world.drain()
    assert sim.worker.get_finished() == []
    assert sim.engine.in_flight == [job]
    refusing = False
    assert [result.success for result in sim.worker.get_finished()] == [True]
    sim.worker.shutdown()
