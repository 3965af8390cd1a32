"""Streams, events and pinned memory of torch: a base for any device that torch knows.

A backend on this base implements ``probe`` and ``swap_blocks``; one on
:class:`kvoffload.backends.index_copy.IndexCopyBackend` only the first.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from kvoffload.core.backend import Backend, Capabilities, Event, HostOrder
from kvoffload.core.errors import ConfigurationError
from kvoffload.core.host_memory import HostMemory
from kvoffload.core.lanes import Lane
from kvoffload.core.sizes import format_bytes

logger = logging.getLogger(__name__)

LOWEST_PRIORITY = 0
"""Of torch's streams: copies yield to compute. Negative numbers are more urgent."""
CAPTURING = "stream is capturing"
"""What CUDA and HIP say when they refuse a call because of a graph being captured."""
PINNED_WASTE = 0.02
"""How much of a budget rounding may add: torch's pinned allocators take powers of two."""
NEGLIGIBLE_WASTE = 64 * 1024
"""Bytes of it that nobody will miss."""


class TorchPinnedMemory(HostMemory):
    """Zeroed, page-locked memory from torch's allocator; see :class:`HostMemory`.

    What is released goes back to that allocator, which may keep it for the process.
    """

    def _allocate(self) -> npt.NDArray[np.uint8]:
        made = torch.zeros(self.nbytes, dtype=torch.uint8, pin_memory=True)
        if self.nbytes and not made.is_pinned():
            raise RuntimeError("the allocator for pinned memory gave pageable memory")
        array: npt.NDArray[np.uint8] = made.numpy()
        self.pinned = True
        return array

    def resident_bytes(self) -> int:
        """All of it: locked memory is always there."""
        return 0 if self._array is None else self.nbytes


class TorchBackend(Backend):
    """Base of a backend whose streams and events are torch's.

    Args:
        device: such as ``"xpu:1"``; a type without an index is that type's first device.
    """

    capabilities = Capabilities(
        asynchronous=True,
        timing_events=True,
        pinned_memory=True,
        host_order=HostOrder.BLOCK_MAJOR,
    )

    device: torch.device

    def __init__(self, device: str | torch.device) -> None:
        try:
            named = torch.device(device)
        except RuntimeError as error:
            raise ConfigurationError(f"torch knows no device {device!r}") from error
        self.device = torch.device(named.type, named.index or 0)
        self.streams: dict[Lane, torch.Stream] = {}
        """Those that were asked for."""
        self._told_of_pageable_memory = False

    def current_stream(self) -> torch.Stream:
        stream: torch.Stream = torch.accelerator.current_stream(self.device)
        return stream

    def is_capturing(self) -> bool:
        # torch's generic streams tell since 2.13; before, a device that captures must say it here.
        capturing = getattr(self.current_stream(), "is_capturing", None)
        return bool(capturing()) if capturing is not None else False

    def new_stream(self, lane: Lane) -> torch.Stream:
        if lane not in self.streams:
            self.streams[lane] = torch.Stream(self.device, priority=LOWEST_PRIORITY)
        return self.streams[lane]

    def new_event(self) -> torch.Event:
        return torch.Event(self.device, enable_timing=self.capabilities.timing_events)

    def is_reached(self, event: Event) -> bool:
        try:
            return event.query()
        except RuntimeError as error:
            # While some thread captures a graph, a device may refuse to say how far an event is.
            # That is no failure of the work before it, which goes on.
            if CAPTURING in str(error):
                return False
            raise

    def allocate_host(self, nbytes: int, numa_node: int | None = None) -> HostMemory:
        """Pinned memory where that is to be had within the budget, pageable memory otherwise.

        Pageable memory is copied while the host waits, so that the capabilities change with it.
        """
        waste = (1 << max(nbytes - 1, 0).bit_length()) - nbytes
        if waste > max(PINNED_WASTE * nbytes, NEGLIGIBLE_WASTE):
            why = (
                f"torch would round {format_bytes(nbytes)} up to {format_bytes(nbytes + waste)}; "
                "a budget of a power of two is pinned"
            )
        else:
            try:
                memory = TorchPinnedMemory(nbytes, numa_node=numa_node)
            except RuntimeError as error:
                why = f"pinning was refused ({str(error).splitlines()[0]})"
            else:
                self.claim_pinned_memory()
                return memory
        self.do_without_pinned_memory(why)
        return HostMemory(nbytes, numa_node=numa_node)

    def claim_pinned_memory(self) -> None:
        """Claim what the class does, whatever earlier memory was like."""
        claimed = type(self).capabilities
        self.capabilities = replace(
            self.capabilities,
            pinned_memory=claimed.pinned_memory,
            asynchronous=claimed.asynchronous,
        )

    def do_without_pinned_memory(self, why: str) -> None:
        """Say once that copies go through pageable memory from here on, and claim no more."""
        if not self._told_of_pageable_memory:
            logger.warning("host memory is not pinned, so that copies are slow and block: %s", why)
            self._told_of_pageable_memory = True
        self.capabilities = replace(self.capabilities, pinned_memory=False, asynchronous=False)

    def close(self) -> None:
        self.streams = {}
