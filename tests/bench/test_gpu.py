"""The parts of the benchmark of accelerators that need none."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload.backends.cpu.backend import CpuBackend
from kvoffload.bench import gpu, submit
from kvoffload.bench.burst import JOBS, burst
from kvoffload.bench.memory import Room
from kvoffload.bench.pool import Pool
from kvoffload.core.errors import ConfigurationError
from kvoffload.core.lanes import Lane
from kvoffload.core.specs import IntArray
from kvoffload.rig import rig_for
from tests.bench.two_ways import TwoWays


def test_a_backend_in_host_memory_is_refused(backend: CpuBackend) -> None:
    with rig_for(backend) as rig, pytest.raises(ConfigurationError, match="no accelerator"):
        gpu.run(backend, rig)
    backend.close()


def test_the_ways_are_the_backends_own() -> None:
    assert gpu.ways_of(CpuBackend()) == [None]
    assert gpu.ways_of(TwoWays()) == ["dma", "kernel"]


def test_without_copies_a_job_is_lowered_and_nothing_else() -> None:
    backend = TwoWays()
    with submit.without_copies(backend) as counts, rig_for(backend) as rig:
        with Pool(backend, rig, 64, 8) as pool:
            pool.transfer(Lane.LOAD, np.array([1, 3, 5]), np.array([2, 2, 2]))
        assert counts == [1, 1, 3]
    assert backend.used == []
    assert "swap_blocks" not in vars(backend)
    backend.close()


def test_the_cost_of_a_submit_is_told_for_1000_descriptors() -> None:
    backend = CpuBackend()
    with rig_for(backend) as rig:
        rows = submit.run(backend, rig, room=Room(1 << 30, None), blocks=8, rounds=2)
    backend.close()
    assert [row.tensors for row in rows] == list(submit.TENSORS)
    for row in rows:
        assert row.blocks == 8
        assert 0 < row.descriptors <= 8 * row.tensors
        assert row.us_per_1000 == pytest.approx(row.submit_us * 1000 / row.descriptors)


@pytest.mark.parametrize("random", [True, False])
def test_the_jobs_of_a_burst_share_no_block(
    random: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = CpuBackend()
    seen: list[tuple[Lane, IntArray, IntArray]] = []
    with rig_for(backend) as rig, Pool(backend, rig, 64, 32) as pool:
        real = pool.submit

        def note(lane: Lane, blocks: IntArray, chunks: IntArray) -> int:
            seen.append((lane, blocks, chunks))
            return real(lane, blocks, chunks)

        monkeypatch.setattr(pool, "submit", note)
        run = burst(pool, [Lane.STORE, Lane.LOAD], 8, rounds=2, rng=rng if random else None)
        run()
        run()
    backend.close()
    assert [lane for lane, _, _ in seen] == [Lane.STORE, Lane.LOAD] * (JOBS // 2) * 2
    for round_ in (seen[:JOBS], seen[JOBS:]):
        for side in (1, 2):
            ids = np.concatenate([job[side] for job in round_])
            assert len(set(ids.tolist())) == 8 * JOBS
        if not random:
            assert (np.diff(round_[0][1]) == 1).all()
