"""The whole backend: torch's streams, and a copy out of torch's operations."""

from __future__ import annotations

from typing import Any

import torch

from kvoffload.backends.index_copy import IndexCopy
from kvoffload.backends.torch_base import TorchBackend
from kvoffload.core.backend import Keep, Probe, Stream
from kvoffload.core.errors import ClosedError
from kvoffload.core.host_memory import HostMemory
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.plan import CopyPlan, Geometry


class XpuBackend(TorchBackend):
    """Moves the KV cache of an Intel GPU.

    Args:
        device: such as ``"xpu:1"``. Any other device of torch's works as well, which is how the kit
            runs this on its fake device.
    """

    def __init__(self, device: str | None = None) -> None:
        super().__init__(device or "xpu")
        # Of a device that was not written for, leave the choice to whoever knows it.
        self.fallback = self.device.type != "xpu"
        self._copy: IndexCopy | None = None

    def probe(self) -> Probe:
        kind, version = self.device.type, torch.__version__
        try:
            built_for = torch.accelerator.current_accelerator()
            count = torch.accelerator.device_count()
        except Exception as error:  # noqa: BLE001 - a probe never raises
            return Probe(False, f"torch {version} fails to look for {kind} devices: {error}")
        if built_for is None or built_for.type != kind:
            return Probe(False, f"torch {version} was not built for {kind}; install one that was")
        if self.device.index >= count:
            return Probe(False, f"torch {version} sees {count} of type {kind}, no {self.device}")
        return Probe(True, f"{self.device}, with torch's own operations")

    def bind(self, geometry: Geometry, caches: CanonicalKVCaches, host: HostMemory) -> None:
        self._copy = IndexCopy(geometry, caches, host)

    def unbind(self) -> None:
        self._copy = None

    def swap_blocks(self, plan: CopyPlan, stream: Stream, keep: Keep[Any]) -> None:
        if self._copy is None:
            raise ClosedError("no caches are bound")
        if not isinstance(stream, torch.Stream):
            raise TypeError(f"not a stream of this backend: {stream!r}")
        self._copy(plan, stream, keep)
