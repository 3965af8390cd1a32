"""What staging, wide copies and asynchrony are worth on a device that gathers and scatters.

The naive path is what one would write first: for every layer, upload the ids, gather or scatter on
one side, move the result with ``.to``, scatter or gather on the other in int8, and at the end wait
for the whole device. Both sides gather and scatter the same pages on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvoffload.bench.timing import in_turn
from kvoffload.core.backend import Backend
from kvoffload.core.errors import CopyError
from kvoffload.core.host_memory import check_available
from kvoffload.core.kv_caches import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from kvoffload.core.plan import power_of_two
from kvoffload.core.specs import DeviceLoadStoreSpec, HostLoadStoreSpec
from kvoffload.core.worker import OffloadingWorker
from kvoffload.rig import Bytes, DeviceRig, rig_for

ROUNDS = 5
"""Of which the median counts."""
SAMPLE = 7
"""Every so many blocks are compared byte by byte."""


@dataclass(frozen=True)
class Row:
    """One direction at one page size.

    Attributes:
        page_bytes: of one block in one layer.
        direction: ``"store"`` or ``"load"``.
        nbytes: of the transfer.
        ours, naive: bytes per second, from submit to the end.
        ratio: ours to naive.
    """

    page_bytes: int
    direction: str
    nbytes: int
    ours: float
    naive: float
    ratio: float


class NaivePath:
    """Moves blocks layer by layer, and waits for the device.

    Args:
        layers: int8 ``(blocks, page)`` on the device.
    """

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self._layers = [layer.view(torch.int8) for layer in layers]
        self._device = layers[0].device
        self._host = [_host(layer) for layer in self._layers]

    def store(self, blocks: torch.Tensor, chunks: torch.Tensor) -> None:
        """``host[chunks] = device[blocks]``, int64 ids on the host."""
        for layer, host in zip(self._layers, self._host, strict=True):
            pages = layer.index_select(0, blocks.to(self._device))
            host.index_put_((chunks,), pages.to("cpu"))
        torch.accelerator.synchronize(self._device)

    def load(self, chunks: torch.Tensor, blocks: torch.Tensor) -> None:
        """``device[blocks] = host[chunks]``, int64 ids on the host."""
        for layer, host in zip(self._layers, self._host, strict=True):
            pages = host.index_select(0, chunks).to(self._device)
            layer.index_put_((blocks.to(self._device),), pages)
        torch.accelerator.synchronize(self._device)


def _host(layer: torch.Tensor) -> torch.Tensor:
    try:
        return torch.zeros(layer.shape, dtype=layer.dtype, pin_memory=True)
    except RuntimeError:
        return torch.zeros(layer.shape, dtype=layer.dtype)


def run(
    make_backend: Callable[[], Backend],
    *,
    pages: Sequence[int],
    layers: int,
    blocks: int,
    seed: int = 0,
    rounds: int = ROUNDS,
) -> list[Row]:
    """Measure both paths in turn, and check the bytes of both.

    Args:
        make_backend: makes a fresh backend, of a device that torch knows.
        pages: bytes of one block in one layer, for each row.
        layers: each with a tensor of its own.
        blocks: of the transfer, in random order on both sides.
        seed: of the order and the bytes.
        rounds: of which the median counts.

    Raises:
        CapacityError: this machine has not that much memory.
        TransferError: a transfer failed, or a byte was wrong.
    """
    rows: list[Row] = []
    for page in pages:
        # Where the device is emulated it is this machine's memory, too.
        check_available(3 * layers * blocks * page, "the caches and both paths' host memory")
    for page in pages:
        rows += _measure(make_backend(), page, layers, blocks, seed, rounds)
    return rows


def _measure(
    backend: Backend, page: int, layers: int, blocks: int, seed: int, rounds: int
) -> list[Row]:
    rng = np.random.default_rng(seed)
    rig = rig_for(backend)
    tensors = [rig.allocate(blocks * page).view(blocks, page) for _ in range(layers)]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, page) for tensor in tensors],
        [[CanonicalKVCacheRef(number, page) for number in range(layers)]],
    )
    nbytes = layers * blocks * page
    worker = OffloadingWorker.for_caches(backend, caches, host_bytes=power_of_two(nbytes))
    try:
        with rig:
            ids, chunks = (rng.permutation(blocks) for _ in range(2))
            naive = NaivePath(tensors)
            device, host = DeviceLoadStoreSpec(ids), HostLoadStoreSpec(chunks)
            there, here = torch.from_numpy(ids), torch.from_numpy(chunks)
            truth = _fill(rig, tensors, rng)
            stores: list[Callable[[], object]] = [
                lambda: _move(worker, device, host),
                lambda: naive.store(there, here),
            ]
            in_turn(stores, 1)  # the first one touches memory for the first time
            ours_store, naive_store = in_turn(stores, rounds)
            loads: list[Callable[[], object]] = [
                lambda: _move(worker, host, device),
                lambda: naive.load(here, there),
            ]
            for load in loads:
                for tensor in tensors:
                    tensor.zero_()
                load()
                _compare(rig, tensors, truth)
            ours_load, naive_load = in_turn(loads, rounds)
    finally:
        worker.shutdown()
    return [
        Row(page, direction, nbytes, nbytes / ours, nbytes / other, other / ours)
        for direction, ours, other in (
            ("store", ours_store, naive_store),
            ("load", ours_load, naive_load),
        )
    ]


def _move(
    worker: OffloadingWorker,
    src: DeviceLoadStoreSpec | HostLoadStoreSpec,
    dst: DeviceLoadStoreSpec | HostLoadStoreSpec,
) -> None:
    worker.transfer_async(1, (src, dst))
    worker.wait([1])
    for result in worker.get_finished():
        if result.error is not None:
            raise result.error


def _fill(rig: DeviceRig, tensors: Sequence[torch.Tensor], rng: np.random.Generator) -> list[Bytes]:
    """Random bytes in the blocks that are compared: uint8 ``(sample, page)`` of each layer."""
    sample = np.arange(0, tensors[0].shape[0], SAMPLE)
    truth = []
    for tensor in tensors:
        truth.append(rng.integers(0, 256, (len(sample), tensor.shape[1]), dtype=np.uint8))
        rig.write(tensor, sample, truth[-1])
    return truth


def _compare(
    rig: DeviceRig,
    tensors: Sequence[torch.Tensor],
    truth: Sequence[Bytes],
) -> None:
    sample = np.arange(0, tensors[0].shape[0], SAMPLE)
    for number, (tensor, wanted) in enumerate(zip(tensors, truth, strict=True)):
        if not np.array_equal(rig.read(tensor, sample), wanted):
            raise CopyError(f"the bytes of layer {number} did not come back as they were")
