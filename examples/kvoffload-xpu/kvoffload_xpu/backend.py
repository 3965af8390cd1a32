"""The whole backend: torch's streams, and a copy out of torch's operations."""

from __future__ import annotations

import torch

from kvoffload.backends.index_copy import IndexCopyBackend
from kvoffload.core.backend import Probe


class XpuBackend(IndexCopyBackend):
    """Moves the KV cache of an Intel GPU.

    Args:
        device: such as ``"xpu:1"``. Any other device of torch's works as well, which is how the kit
            runs this on its fake device.
    """

    def __init__(self, device: str | None = None) -> None:
        super().__init__(device or "xpu")
        # Of a device that was not written for, leave the choice to whoever knows it.
        self.fallback = self.device.type != "xpu"

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
