"""The torch backend, tied together."""

from __future__ import annotations

import torch

from kvoffload.backends.torch.copy import IndexCopyBackend
from kvoffload.core.backend import Probe
from kvoffload.core.errors import ConfigurationError


class GenericBackend(IndexCopyBackend):
    """Gathers and scatters with torch's own operations: correct on whatever torch knows.

    Args:
        device: such as ``"xpu:1"``; by default torch's current accelerator.
    """

    fallback = True  # a backend that knows its hardware goes first

    def __init__(self, device: str | None = None) -> None:
        found = torch.accelerator.current_accelerator() if device is None else device
        super().__init__(found or "meta")
        if self.device.type == "cpu":
            raise ConfigurationError(
                "the torch backend serves accelerators; for the host there is cpu"
            )

    def probe(self) -> Probe:
        try:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            count = torch.accelerator.device_count() if accelerator is not None else 0
        except Exception as error:  # noqa: BLE001 - a probe never raises
            return Probe(False, f"torch {torch.__version__} fails to look: {error}")
        if accelerator is None:
            return Probe(False, f"torch {torch.__version__} sees no accelerator on this machine")
        if accelerator.type != self.device.type or (self.device.index or 0) >= count:
            return Probe(
                False, f"torch sees {count} devices of type {accelerator.type}, not {self.device}"
            )
        return Probe(True, f"{self.device}, with torch's own operations")
