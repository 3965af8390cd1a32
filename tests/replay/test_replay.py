"""The main job: counts that depend on nothing but the trace, and bytes that are all checked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.backends.cpu.backend import CpuBackend
from kvoffload.backends.cpu.blocks import lower
from kvoffload.backends.cpu.copy import run_copies
from kvoffload.core.backend import Backend
from kvoffload.core.errors import CapacityError, ConfigurationError
from kvoffload.core.host_memory import memory_limit
from kvoffload.core.lanes import Lane
from kvoffload.replay import pattern
from kvoffload.replay.device_pool import DevicePool
from kvoffload.replay.replay import Replay, Report, Settings
from kvoffload.replay.trace import Request, read_trace
from kvoffload.replay.workload import chat
from kvoffload.rig import Fault, rig_for
from kvoffload.scheduler.keys import OffloadKey

SMALL = Settings(
    device_blocks=60, host_bytes=200 * 3 * 100, layers=3, page_bytes=100, concurrency=4
)
TRACES = Path(__file__).parents[3] / "shared" / "traces"


def replay(
    requests: Sequence[Request],
    settings: Settings = SMALL,
    backend: Backend | None = None,
    prepare: Callable[[Replay, Any], None] = lambda *_: None,
    **options: Any,
) -> Report:
    chosen = backend or CpuBackend()
    with rig_for(chosen) as rig:
        run = Replay(chosen, "cpu", rig, settings)
        try:
            prepare(run, rig)
            return run.run(requests, **options)
        finally:
            run.close()


def lru_counts(requests: Sequence[Request], device: int, host: int) -> tuple[int, int]:
    """Blocks found on the device, and after those in host memory; counted with two dictionaries."""
    on_device: OrderedDict[int, None] = OrderedDict()
    on_host: OrderedDict[int, None] = OrderedDict()
    device_hits = host_hits = 0
    for request in requests:
        ids = list(request.hash_ids)
        d = next((i for i, key in enumerate(ids) if key not in on_device), len(ids))
        h = next((i for i in range(d, len(ids)) if ids[i] not in on_host), len(ids))
        device_hits, host_hits = device_hits + d, host_hits + h - d
        for cache, capacity, new in ((on_device, device, ids), (on_host, host, ids[h:])):
            for key in new:
                cache.setdefault(key)
            for key in reversed(ids):  # the head is the most recent
                if key in cache:
                    cache.move_to_end(key)
            while len(cache) > capacity:
                cache.popitem(last=False)
    return device_hits, host_hits


def test_counts_agree_with_two_dictionaries() -> None:
    requests = chat(1, 300)
    settings = Settings(
        device_blocks=60, host_bytes=200 * 300, layers=3, page_bytes=100, concurrency=1
    )
    report = replay(requests, settings)
    assert report.host_chunks == 200
    assert (report.device_hit_blocks, report.host_hit_blocks) == lru_counts(requests, 60, 200)
    assert report.blocks == sum(len(r.hash_ids) for r in requests)
    assert report.device_hit_blocks + report.host_hit_blocks + report.computed_blocks == (
        report.blocks
    )
    assert report.host_hit_blocks > 100
    assert report.evicted_chunks > 100
    assert report.bytes_stored == report.stored_chunks * 300
    assert report.bytes_loaded == report.host_hit_blocks * 300
    assert report.ok


@pytest.mark.parametrize("factor", [2, 3, 5])
def test_only_whole_chunks_are_stored_and_a_load_may_enter_inside_one(factor: int) -> None:
    chunk = 300 * factor
    settings = Settings(
        device_blocks=40,
        host_bytes=chunk * 60,
        layers=3,
        page_bytes=100,
        concurrency=3,
        block_size_factor=factor,
    )
    entered_inside = 0

    def watch(run: Replay, rig: Any) -> None:
        load = run._load

        def watched(running: Any) -> None:
            nonlocal entered_inside
            entered_inside += running.loaded.start % factor > 0
            load(running)

        run._load = watched  # type: ignore[method-assign]

    requests = [r for r in chat(1, 400) if len(r.hash_ids) <= 40]
    report = replay(requests, settings, prepare=watch)
    assert report.ok
    assert entered_inside > 0
    assert report.host_hit_blocks > 0
    assert report.evicted_chunks > 0
    assert report.bytes_stored == report.stored_chunks * chunk
    assert report.bytes_loaded == report.host_hit_blocks * 300


def test_counts_do_not_depend_on_timing() -> None:
    reports = [replay(chat(2, 150)) for _ in range(3)]
    for report in reports:
        report.seconds = 0.0
        report.host_bytes_resident = 0
    assert reports[0] == reports[1] == reports[2]


def test_a_request_waits_until_its_device_blocks_are_free() -> None:
    requests = [Request(i, range(i * 5, i * 5 + 5), str(i)) for i in range(20)]
    settings = Settings(device_blocks=7, host_bytes=100_000, layers=1, page_bytes=8, concurrency=8)
    report = replay(requests, settings)
    assert report.requests == 20
    assert report.ok


def test_a_request_larger_than_the_device_pool_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--device-blocks 60: .*line 9 needs 61"):
        replay([Request(0, range(61), "line 9")])


class Watched:
    """A stop that counts what the rig reads, and asks to stop after so many reads."""

    def __init__(self, after: int) -> None:
        self.after, self.reads = after, 0

    def watch(self, run: Replay, rig: Any) -> None:
        read = rig.read

        def counted(*arguments: Any) -> Any:
            self.reads += 1
            return read(*arguments)

        rig.read = counted

    def __call__(self) -> bool:
        return self.reads >= self.after


def stopped(requests: Sequence[Request], settings: Settings, after: int) -> tuple[Report, int]:
    """The report of a run that was stopped after so many reads, and how many there were."""
    stop = Watched(after)
    report = replay(requests, settings, prepare=stop.watch, stop=stop)
    assert report.interrupted
    assert report.ok
    assert report.device_hit_blocks + report.host_hit_blocks + report.computed_blocks == (
        report.blocks
    )
    return report, stop.reads


def test_a_stop_while_many_layers_are_compared_is_seen_at_the_next_layer() -> None:
    settings = replace(SMALL, layers=500, page_bytes=8)
    report, reads = stopped(chat(1, 50), settings, after=7)
    assert (report.requests, report.blocks, reads) == (0, 0, 7)


def test_a_stop_while_large_pages_are_compared_is_seen_within_the_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvoffload.replay.replay.PART_BYTES", 200)
    settings = replace(SMALL, layers=1, page_bytes=200)
    assert stopped([Request(0, range(9), "line 1")], settings, after=4)[1] == 4


def test_a_stop_while_the_last_requests_are_retired_counts_those_that_were_compared() -> None:
    requests = chat(1, 20)
    settings = replace(SMALL, concurrency=1000, device_blocks=1000)
    report, reads = stopped(requests, settings, after=15 * SMALL.layers)
    assert reads == 15 * SMALL.layers
    # The fifteenth was compared to its end, but then it was too late to count it.
    assert report.requests == 14
    assert report.blocks == sum(len(r.hash_ids) for r in requests[:14])


def test_after_a_stop_nothing_is_compared_however_many_requests_are_in_flight() -> None:
    served = 0

    def watch(run: Replay, rig: Any) -> None:
        admit = run._admit

        def counted(request: Request, number: int) -> None:
            nonlocal served
            admit(request, number)
            served += 1

        run._admit = counted  # type: ignore[method-assign]
        rig.read = None  # nobody may call it

    settings = replace(SMALL, concurrency=1000, device_blocks=10_000)
    report = replay(chat(1, 500), settings, prepare=watch, stop=lambda: served >= 300)
    assert (served, report.requests, report.interrupted) == (300, 0, True)


def test_progress_tells_how_many_requests_were_compared() -> None:
    told: list[int] = []
    report = replay(chat(1, 30), progress=told.append)
    assert told == list(range(1, 31))
    assert not report.interrupted


def test_small_parts_give_the_same_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = replay(chat(1, 100))
    monkeypatch.setattr("kvoffload.replay.replay.PART_BYTES", 300)
    parts = replay(chat(1, 100))
    for report in (whole, parts):
        report.seconds = 0.0
        report.host_bytes_resident = 0
    assert whole == parts


def test_both_pools_must_fit_this_machine_together() -> None:
    most = memory_limit().nbytes
    settings = Settings(
        device_blocks=60, host_bytes=most // 2, layers=1, page_bytes=most // 100, concurrency=1
    )
    with pytest.raises(CapacityError, match=f"together more than .*{most} bytes"):
        replay(chat(1, 1), settings)


def test_device_blocks_that_were_never_used_take_no_memory() -> None:
    pool = DevicePool(1 << 60)
    keys = [OffloadKey(bytes([n])) for n in range(4)]
    assert pool.acquire("a", keys[:3]) == [0, 1, 2]
    pool.release("a", keys[:3])
    assert pool.acquire("b", keys[2:]) == [2, 3]


def mutate_copies(backend: CpuBackend, mutation: Callable[[int, int], bool]) -> None:
    """Drop the copies for which ``mutation(job number, copy number)`` is true."""
    jobs = 0

    def broken(plan: Any, stream: Any, keep: Any) -> None:
        nonlocal jobs
        jobs += 1
        job = jobs
        copies = lower(plan)
        wanted = np.array([not mutation(job, i) for i in range(len(copies.size))])
        kept = type(copies)(*(column[wanted] for column in copies))
        stream.submit(lambda: run_copies(keep(kept)))

    backend.swap_blocks = broken  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "mutation",
    [lambda job, copy: True, lambda job, copy: copy == 1, lambda job, copy: 20 < job < 40],
    ids=["nothing is copied", "one layer's run is missing", "some jobs are missing"],
)
def test_a_broken_copy_is_found(mutation: Callable[[int, int], bool]) -> None:
    backend = CpuBackend()
    mutate_copies(backend, mutation)
    report = replay(chat(1, 200), backend=backend)
    assert report.corrupt_blocks > 0
    assert not report.ok


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("lane", [Lane.STORE, Lane.LOAD])
def test_a_failed_transfer_is_counted_and_no_wrong_byte_is_served(fault: Fault, lane: Lane) -> None:
    report = replay(chat(1, 100), prepare=lambda run, rig: rig.inject(fault, lane))
    assert report.failed_jobs == 1
    assert report.corrupt_blocks == 0
    assert not report.ok


def test_pages_differ_by_key_layer_and_offset() -> None:
    ids = np.array([0, 1, 2**62])
    seen = {pattern.pages(ids, layer, 100)[row].tobytes() for layer in range(3) for row in range(3)}
    assert len(seen) == 9
    page = pattern.pages(ids, 0, 4096)[0].view(np.uint64)
    assert len(set(page.tolist())) == len(page)


@pytest.mark.parametrize(("name", "requests"), [("conversation", 1500), ("synthetic", 600)])
def test_real_traces_agree_with_two_dictionaries(name: str, requests: int) -> None:
    path = TRACES / f"{name}_trace.jsonl"
    if not path.exists():
        pytest.skip(f"no {path}: the traces are not part of this repository")
    trace = read_trace(path, requests)
    settings = Settings(
        device_blocks=500, host_bytes=3000 * 16, layers=2, page_bytes=8, concurrency=1
    )
    report = replay(trace, settings)
    assert (report.device_hit_blocks, report.host_hit_blocks) == lru_counts(trace, 500, 3000)
    assert report.ok
