"""The worker side in vLLM's terms, on the cpu backend."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvoffload.core.errors import (
    BackendError,
    BlockRangeError,
    CapacityError,
    ConfigurationError,
    LayoutError,
    StalledError,
    TransferError,
)
from kvoffload.integrations.vllm.memory import build_transfers, canonical, select
from kvoffload.integrations.vllm.options import Options
from kvoffload.integrations.vllm.transfers import Finished, Transfers

BLOCKS, PAGE, CHUNKS, FACTOR = 16, 8, 4, 4


def caches(groups: list[list[int]], pages: list[int] | None = None) -> SimpleNamespace:
    """vLLM's canonical caches: for each group the tensors that its layers are in."""
    pages = pages or [PAGE] * (1 + max(t for group in groups for t in group))
    tensors = [
        SimpleNamespace(
            tensor=torch.arange(BLOCKS * page, dtype=torch.int16).to(torch.int8).view(BLOCKS, page),
            page_size_bytes=page,
        )
        for page in pages
    ]
    refs = [
        [SimpleNamespace(tensor_idx=t, page_size_bytes=pages[t]) for t in group] for group in groups
    ]
    return SimpleNamespace(tensors=tensors, group_data_refs=refs)


OPTIONS = Options.read({"cpu_bytes_to_use": 1 << 20})


def build(theirs: SimpleNamespace, factor: int = FACTOR) -> Transfers:
    return build_transfers(theirs, OPTIONS, CHUNKS, factor, [16] * len(theirs.group_data_refs))


@pytest.fixture
def theirs() -> SimpleNamespace:
    """Two groups that share a tensor."""
    return caches([[0], [0]])


@pytest.fixture
def transfers(theirs: SimpleNamespace) -> Iterator[Transfers]:
    made = build(theirs)
    yield made
    made.shutdown()
    made.shutdown()


def finished(transfers: Transfers, *jobs: int) -> list[Finished]:
    transfers.wait(jobs)
    return sorted(transfers.get_finished(), key=lambda job: job.job_id)


def test_a_load_may_enter_and_leave_inside_a_chunk_in_every_group(
    transfers: Transfers, theirs: SimpleNamespace
) -> None:
    cache = theirs.tensors[0].tensor
    before = cache.clone()
    transfers.submit_store(1, np.arange(1, 9), [4, 4], [0, 4], [2, 0])
    assert [(job.error, job.is_store, job.nbytes) for job in finished(transfers, 1)] == [
        (None, True, 8 * PAGE)
    ]
    transfers.submit_load(2, [10, 11, 12, 13], [3, 1], [1, 6], [2, 0])
    (job,) = finished(transfers, 2)
    assert (job.error, job.is_store, job.nbytes, job.failures) == (None, False, 4 * PAGE, ())
    assert job.seconds is not None
    assert torch.equal(cache[10:14], before[[2, 3, 4, 7]])
    assert torch.equal(cache[:10], before[:10])
    assert torch.equal(cache[14:], before[14:])


def test_a_store_may_lack_the_head_of_its_first_chunk(
    transfers: Transfers, theirs: SimpleNamespace
) -> None:
    cache = theirs.tensors[0].tensor
    before = cache.clone()
    # Blocks 2 to 7 of the request are 1 to 6; what came before has left the window.
    transfers.submit_store(1, [1, 2, 3, 4, 5, 6], [0, 6], [0, 2], [3, 1])
    assert finished(transfers, 1)[0].error is None
    transfers.submit_load(2, [9, 10, 11, 12], [0, 4], [0, 3], [3, 1])
    assert finished(transfers, 2)[0].error is None
    assert torch.equal(cache[9:13], before[[2, 3, 4, 5]])


def test_a_failure_in_one_group_is_told_by_group_and_position(
    transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = transfers.worker.engine.backend  # type: ignore[union-attr]
    right = backend.swap_blocks

    def only_group_0(plan, stream, keep) -> None:  # type: ignore[no-untyped-def]
        if plan.bounds[2] > plan.bounds[1]:
            raise OSError("broken")
        right(plan, stream, keep)

    monkeypatch.setattr(backend, "swap_blocks", only_group_0)
    transfers.submit_load(5, [11, 9, 10], [1, 2], [0, 3], [0, 1, 2])
    (job,) = finished(transfers, 5)
    assert isinstance(job.error, TransferError)
    assert job.nbytes == 0
    (failure,) = job.failures
    assert (failure.job_id, failure.group, list(failure.positions)) == (5, 1, [3, 4])
    assert failure.block_ids == (9, 10)
    assert "broken" in failure.reason


def test_what_is_refused_is_a_failed_job_and_raises_nothing(transfers: Transfers) -> None:
    transfers.submit_load(1, [0], [1, 0], [0, 0], [0])
    transfers.submit_load(2, [99, 98], [1, 1], [0, 0], [0, 1])
    transfers.submit_store(3, [1, 2, 3], [3, 0], [0, 0], [0])
    transfers.submit_load(4, [1, 2], [1, 1], [0, 0], [0, 1, 2])
    jobs = finished(transfers, 1, 2, 3, 4)
    assert [type(job.error) for job in jobs[:2]] == [BlockRangeError] * 2
    assert all(job.error is not None for job in jobs)
    assert [len(job.failures) for job in jobs] == [1, 2, 0, 1]
    assert transfers.get_finished() == []


def test_a_job_without_blocks_ends_at_once(transfers: Transfers) -> None:
    transfers.submit_load(1, [], [0, 0], [0, 0], [])
    assert [job.error for job in transfers.get_finished()] == [None]


def test_unknown_jobs_can_be_waited_for(transfers: Transfers) -> None:
    transfers.wait({12, 13})


def test_a_load_that_stalls_ends_everything(
    transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers.submit_load(1, [1], [1, 0], [0, 0], [0])
    transfers.wait([1])
    (result,) = transfers.worker.get_finished()
    stalled = type(result)(0, False, 0, None, ("host", "device"), StalledError("late"))
    monkeypatch.setattr(transfers.worker, "get_finished", lambda: [stalled])
    with pytest.raises(StalledError, match="late"):
        transfers.get_finished()


@pytest.mark.parametrize("groups", [[[0, 1]], [[0], [1]], [[0, 1], [1]], [[0], [1], [1]]])
def test_every_group_has_the_chunks_that_the_scheduler_counts_on(groups: list[list[int]]) -> None:
    transfers = build(caches(groups, pages=[8, 24]))
    try:
        assert transfers.worker.num_chunks == [CHUNKS] * len(groups)
        assert transfers.worker.capacity.nbytes == CHUNKS * FACTOR * (8 + 24)
    finally:
        transfers.shutdown()


def test_a_worker_with_too_little_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvoffload.core.worker import OffloadingWorker

    monkeypatch.setattr(OffloadingWorker, "num_chunks", [3])
    with pytest.raises(CapacityError, match=r"counts on 4 chunks.*holds \[3\]"):
        build(caches([[0]]))


def test_canonical_tensors_are_views_of_the_same_bytes() -> None:
    theirs = caches([[0]])
    ours = canonical(theirs)
    assert ours.tensors[0].tensor.data_ptr() == theirs.tensors[0].tensor.data_ptr()
    theirs.tensors[0].tensor = theirs.tensors[0].tensor.view(BLOCKS, 2, PAGE // 2)
    assert canonical(theirs).tensors[0].tensor.shape == (BLOCKS, PAGE)
    theirs.tensors[0].tensor = torch.zeros(BLOCKS, PAGE, dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match="bfloat16, not of bytes"):
        canonical(theirs)


def test_caches_in_host_memory_are_served_by_the_cpu_backend() -> None:
    assert type(select(OPTIONS, torch.device("cpu"))).__name__ == "CpuBackend"
    named = Options.read({"cpu_bytes_to_use": 1, "backend": "cuda"})
    with pytest.raises((BackendError, ConfigurationError)):
        select(named, torch.device("cpu"))
