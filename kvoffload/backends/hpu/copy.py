"""The copy of the hpu backend: :class:`IndexCopy`, with its shapes known beforehand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvoffload.backends.hpu.blocks import BUCKET, WIDEST, buckets
from kvoffload.backends.index_copy import IndexCopy, Part
from kvoffload.core.backend import Keep
from kvoffload.core.host_memory import HostMemory
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.lanes import Lane
from kvoffload.core.plan import Geometry


class HpuCopy(IndexCopy):
    """Moves plans in padded lengths; see :class:`IndexCopy`.

    Args:
        geometry, caches, host: what ``bind`` is given.
        step: of the backend's streams; entered once for each transfer.
    """

    def __init__(
        self, geometry: Geometry, caches: CanonicalKVCaches, host: HostMemory, step: Any
    ) -> None:
        super().__init__(geometry, caches, host, bucket=BUCKET, widest=WIDEST, on=step)

    def warm_up(self, lane: Lane, largest: int, stream: Any, keep: Keep[Any]) -> int:
        """Run every operation of a lane in every length that it will have; nothing changes.

        Gathers read block 0, and scatters write its own bytes back. What is copied to and from
        host memory is not the host's blocks but a buffer beside them.

        Args:
            lane: whose operations.
            largest: rows of a group in the largest transfer.
            stream: of the lane.
            keep: holds what the work needs until it has run.

        Returns:
            How many lengths there were, over all groups.
        """
        pinned = self._host.is_pinned()
        scratch = keep(torch.zeros(self._elements, dtype=self._dtype, pin_memory=pinned))
        lengths = [
            (group, rows)
            for group, most in enumerate(self._most_rows)
            for rows in buckets(min(largest, most))
        ]
        for group, rows in lengths:
            with self._on(stream):
                index = keep(self._upload(np.zeros(rows, dtype=np.int64), keep))
                self._rehearse(lane, group, rows, index, scratch)
        return len(lengths)

    def _rehearse(
        self, lane: Lane, group: int, rows: int, index: torch.Tensor, scratch: torch.Tensor
    ) -> None:
        everything = slice(0, rows)
        part = Part(group, np.zeros(0, dtype=np.int64), rows, everything, everything)
        if lane is Lane.COPY:
            self._copy(part, index)
            return
        for segment in self._segments[group]:
            staged = self._stage(lane, rows, segment.width)
            host = scratch[: rows * segment.width].view(rows, segment.width)
            if lane is Lane.STORE:
                host.copy_(staged, non_blocking=True)
                continue
            staged.copy_(host, non_blocking=True)
            filled = self._stage(lane, rows, segment.width, "filled")
            torch.index_select(staged, 0, index, out=filled)
            for tensor, column in segment.columns:
                page = filled[:, column]
                torch.index_select(self._tensors[tensor], 0, index, out=page)
                self._tensors[tensor].index_copy_(0, index, page)
        if lane is Lane.STORE:
            self._store(part, index)
