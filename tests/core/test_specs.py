"""Specs take their inputs, and refuse what they cannot mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvoffload.core.errors import (
    BlockCountError,
    ConfigurationError,
    LayoutError,
    SpecError,
    UnroutableError,
)
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.specs import DeviceLoadStoreSpec, HostLoadStoreSpec, TransferSpec
from kvoffload.core.worker import OffloadingWorker


def test_a_spec_owns_its_ids() -> None:
    ids = np.array([1, 2], dtype=np.int32)
    spec = HostLoadStoreSpec(ids)
    ids[0] = 9
    assert spec.block_ids.tolist() == [1, 2]
    assert spec.block_ids.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        spec.block_ids[0] = 5


def test_the_groups_of_a_device_spec_add_up() -> None:
    spec = DeviceLoadStoreSpec([1, 2, 3], [1, 2], [0, 5])
    assert spec.group_sizes.tolist() == [1, 2]
    assert spec.block_indices.tolist() == [0, 5]
    assert DeviceLoadStoreSpec([1, 2]).group_sizes.tolist() == [2]
    with pytest.raises(BlockCountError):
        DeviceLoadStoreSpec([], [2**62] * 4)  # which wraps around to nothing
    for sizes, indices in (([1, 1], None), ([4, -1], None), ([1, 2], [0]), ([1, 2], [0, -1])):
        with pytest.raises(BlockCountError):
            DeviceLoadStoreSpec([1, 2, 3], sizes, indices)


@pytest.mark.parametrize("ids", [[0.5], [[1]], ["a"], [None], 3, [True], [[1], [2, 3]]])
def test_ids_are_integers_in_one_dimension(ids: object) -> None:
    with pytest.raises(SpecError):
        HostLoadStoreSpec(ids)  # type: ignore[arg-type]


def test_a_worker_routes_by_the_types_of_the_specs() -> None:
    worker = OffloadingWorker()
    spec = TransferSpec(HostLoadStoreSpec([0]), HostLoadStoreSpec([1]))
    with pytest.raises(UnroutableError, match="HostLoadStoreSpec → HostLoadStoreSpec"):
        worker.transfer_async(1, spec)


def test_a_pair_of_types_has_one_handler(lab: object) -> None:
    worker = lab.worker  # type: ignore[attr-defined]
    handler = worker._handlers[HostLoadStoreSpec, DeviceLoadStoreSpec]
    with pytest.raises(ConfigurationError, match="has a handler already"):
        worker.register_handler(HostLoadStoreSpec, DeviceLoadStoreSpec, handler)


def test_tensors_of_layers_are_contiguous_and_apart() -> None:
    store = torch.zeros(8, 4, dtype=torch.uint8)
    caches = CanonicalKVCaches.from_tensors([store[:4], store[4:]])
    assert [t.page_size_bytes for t in caches.tensors] == [4, 4]
    for wrong in ([store, store], [store, store[2:4]], [store.T], [torch.zeros(0, 4)], store):
        with pytest.raises(LayoutError):
            CanonicalKVCaches.from_tensors(wrong)
