"""Every byte of every layout, through ``canonicalize``: the matrix, and a cache as on Gaudi."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import kvoffload as kv
from kvoffload.backends.hpu.backend import HpuBackend
from kvoffload.core.backend import Backend, HostOrder
from kvoffload.core.specs import DeviceLoadStoreSpec, HostLoadStoreSpec, IntArray
from kvoffload.core.worker import OffloadingWorker
from kvoffload.testing.fake_device import load
from kvoffload.testing.fake_device.hpu import DEVICE
from kvoffload.testing.fake_device.variants import VARIANTS
from tests.core.test_layout_matrix import pairwise, round_trip

pytestmark = pytest.mark.fake

BLOCKS = 24


@pytest.mark.parametrize("variant", ["eager", "lazy"])
def test_every_pair_of_the_matrix_round_trips(variant: str) -> None:
    def make() -> Backend:
        return VARIANTS["hpu"][variant](load())

    for case, order in zip(pairwise(), itertools.cycle(HostOrder), strict=False):
        round_trip(make, case, order, DEVICE)


@dataclass
class Gaudi:
    """A cache as a hybrid model has it there, and what each of its bytes was at first.

    Attributes:
        whole: the memory of each tensor, one spare block behind its end.
        caches: of keys and values that differ in size, twice, and of a Mamba-like state.
        truth: a host copy of ``whole``.
    """

    whole: list[torch.Tensor]
    caches: kv.CanonicalKVCaches
    truth: list[torch.Tensor]


def gaudi(rng: np.random.Generator) -> Gaudi:
    shapes = [(8, 16), (8, 24), (8, 16), (8, 24), (3, 20), (5, 7)]
    dtypes = [torch.bfloat16] * 4 + [torch.float32] * 2
    whole, truth = [], []
    for shape, dtype in zip(shapes, dtypes, strict=True):
        count = (BLOCKS + 1) * shape[0] * shape[1] * dtype.itemsize
        truth.append(torch.from_numpy(rng.integers(0, 256, count, dtype=np.uint8)))
        whole.append(truth[-1].to(DEVICE))
    views = [
        memory.view(dtype).view(BLOCKS + 1, *shape)[:BLOCKS]
        for memory, shape, dtype in zip(whole, shapes, dtypes, strict=True)
    ]
    caches = kv.canonicalize(
        kv.CacheRegistration(
            num_blocks=BLOCKS,
            layers={
                "attn.0": kv.LayerCache((views[0], views[1])),
                "attn.1": kv.LayerCache((views[2], views[3])),
                "mamba.0": kv.LayerCache([views[4], views[5]], "state"),
            },
            groups=[["attn.0", "attn.1"], ["mamba.0"]],
        )
    )
    return Gaudi(whole, caches, truth)


def blocks_of(memory: torch.Tensor) -> torch.Tensor:
    """``(blocks + 1, page)``"""
    return memory.cpu().view(BLOCKS + 1, -1)


@pytest.mark.parametrize("order", HostOrder, ids=lambda order: order.name)
@pytest.mark.parametrize("factor", [1, 3, 4])
def test_keys_values_state_and_spare_blocks_hold_what_they_must(
    factor: int, order: HostOrder, rng: np.random.Generator
) -> None:
    cache = gaudi(rng)
    row = sum(tensor.page_size_bytes for tensor in cache.caches.tensors)
    worker = OffloadingWorker.for_caches(
        VARIANTS["hpu"]["lazy"](load()),
        cache.caches,
        host_bytes=row * factor * 4,
        block_size_factor=factor,
        host_order=order,
    )
    assert isinstance(worker.engine and worker.engine.backend, HpuBackend)
    skip = factor - 1
    out = [rng.permutation(BLOCKS)[: 2 * factor] for _ in range(2)]
    back = [rng.permutation(BLOCKS)[: 2 * factor - skip], rng.permutation(BLOCKS)[: 2 * factor]]
    chunks = HostLoadStoreSpec([3, 0, 1, 2])
    try:
        store = DeviceLoadStoreSpec(np.concatenate(out), [2 * factor] * 2)
        worker.transfer_async(1, (store, chunks))
        worker.wait([1])
        wanted = [~memory for memory in cache.truth]
        for memory, other in zip(cache.whole, wanted, strict=True):
            memory.copy_(other)
        load_ = DeviceLoadStoreSpec(np.concatenate(back), [len(b) for b in back], [skip, 0])
        worker.transfer_async(2, (chunks, load_))
        worker.wait([2])
        assert all(result.success for result in worker.get_finished())
    finally:
        worker.shutdown()
    _move(wanted[:4], cache.truth[:4], out[0][skip:], back[0])
    _move(wanted[4:], cache.truth[4:], out[1], back[1])
    for number, (memory, expected) in enumerate(zip(cache.whole, wanted, strict=True)):
        assert torch.equal(blocks_of(memory), blocks_of(expected)), f"tensor {number}"


def _move(
    wanted: Sequence[torch.Tensor],
    truth: Sequence[torch.Tensor],
    sources: IntArray,
    targets: IntArray,
) -> None:
    """What the store and the load make of it: ``wanted[targets] = truth[sources]``."""
    for new, old in zip(wanted, truth, strict=True):
        rows = old.view(BLOCKS + 1, -1)[torch.from_numpy(sources)]
        new.view(BLOCKS + 1, -1)[torch.from_numpy(targets)] = rows
