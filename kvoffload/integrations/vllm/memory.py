"""Host memory: how many chunks the scheduler counts on, and the worker that holds as many."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from kvoffload.core.backend import Backend
from kvoffload.core.errors import CapacityError, LayoutError
from kvoffload.core.kv_caches import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from kvoffload.core.plan import pools_of
from kvoffload.core.sizes import format_bytes
from kvoffload.core.worker import OffloadingWorker
from kvoffload.integrations.vllm.options import Options
from kvoffload.integrations.vllm.transfers import Transfers
from kvoffload.plugins.registry import BackendRegistry

logger = logging.getLogger(__name__)

NULL_BLOCK = 0
"""The block that stands for "nothing here" in vLLM."""


class TheirTensor(Protocol):
    """A tensor of vLLM's canonical caches."""

    @property
    def tensor(self) -> torch.Tensor:
        """int8 (num_blocks, page_size_bytes), rows perhaps apart."""

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block, padding included."""


class TheirRef(Protocol):
    """A layer's place in those tensors."""

    @property
    def tensor_idx(self) -> int:
        """Which tensor."""

    @property
    def page_size_bytes(self) -> int:
        """Bytes that are real."""


class TheirCaches(Protocol):
    """vLLM's canonical caches."""

    @property
    def tensors(self) -> Sequence[TheirTensor]:
        """All tensors."""

    @property
    def group_data_refs(self) -> Sequence[Sequence[TheirRef]]:
        """The places of each group."""


def canonical(theirs: TheirCaches) -> CanonicalKVCaches:
    """vLLM's canonical caches as the core's: the same views, nothing copied.

    Raises:
        LayoutError: a tensor is not pages in rows.
    """
    tensors = []
    for index, entry in enumerate(theirs.tensors):
        tensor = entry.tensor
        if tensor.element_size() != 1:
            raise LayoutError(f"vLLM's canonical tensor {index} is of {tensor.dtype}, not of bytes")
        if tensor.ndim > 2:
            tensor = tensor.flatten(1) if tensor[0].is_contiguous() else tensor
        tensors.append(CanonicalKVCacheTensor(tensor, entry.page_size_bytes))
    refs = [
        [CanonicalKVCacheRef(ref.tensor_idx, ref.page_size_bytes) for ref in group]
        for group in theirs.group_data_refs
    ]
    return CanonicalKVCaches(tensors, refs)


def chunks_within(
    options: Options, workers: int, bytes_per_block: int, blocks_per_chunk: int
) -> int:
    """How many chunks every worker can hold; scheduler and workers come to the same number.

    Args:
        options: the budget is that of all workers together.
        workers: how many there are.
        bytes_per_block: of one block in all tensors of one worker.
        blocks_per_chunk: what makes a chunk.

    Raises:
        CapacityError: not even one, or vLLM did not say how large a block is.
    """
    if bytes_per_block < 1:
        raise CapacityError("vLLM did not say how many bytes a block has: nothing to offload")
    chunk = bytes_per_block * blocks_per_chunk
    chunks = options.cpu_bytes_to_use // (chunk * workers)
    if chunks < 1:
        raise CapacityError(
            f"cpu_bytes_to_use of {options.cpu_bytes_to_use} bytes "
            f"({format_bytes(options.cpu_bytes_to_use)}) is too small: a chunk of "
            f"{blocks_per_chunk} blocks takes {chunk} bytes on each of {workers} workers"
        )
    return chunks


def build_transfers(
    theirs: TheirCaches,
    options: Options,
    chunks: int,
    blocks_per_chunk: int,
    tokens_per_block: Sequence[int],
) -> Transfers:
    """The worker side for these caches, with room for so many chunks of every group.

    Raises:
        BackendError: no backend serves these caches.
        CapacityError: there is less memory than the scheduler counts on.
    """
    caches = canonical(theirs)
    groups = [np.array(sorted({r.tensor_idx for r in refs})) for refs in caches.group_data_refs]
    pools = pools_of(groups).tolist()
    per_block = list(tokens_per_block)
    if len(set(pools)) > 1:
        # All pools hold equally many chunks, since the scheduler gives all groups the same ids.
        per_block = [pools.count(pool) for pool in pools]
    page_bytes = sum(entry.page_size_bytes for entry in caches.tensors)
    worker = OffloadingWorker.for_caches(
        select(options, caches.device),
        caches,
        host_bytes=chunks * blocks_per_chunk * page_bytes,
        block_size_factor=blocks_per_chunk,
        host_order=options.host_order,
        null_block=NULL_BLOCK,
        tokens_per_block=per_block,
        numa_node=options.numa_node,
        job_deadline=options.job_deadline,
    )
    if min(worker.num_chunks) < chunks:
        found = worker.num_chunks
        worker.shutdown()
        raise CapacityError(
            f"the scheduler counts on {chunks} chunks of every group, but this worker holds {found}"
        )
    logger.info("offloading to host memory: %s", worker.capacity)
    return Transfers(worker, blocks_per_chunk)


def select(options: Options, device: torch.device) -> Backend:
    """The backend that was named, or else one that serves the device."""
    named = str(device)
    registry = BackendRegistry()
    if options.backend is None and device.type == "cpu":
        # Whatever accelerators the machine has, the caches are in host memory.
        return registry.select("cpu", named)
    return registry.select(options.backend, named)
