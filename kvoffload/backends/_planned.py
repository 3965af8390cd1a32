"""Backends that are registered and say truthfully what is missing, before their copy exists."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from kvoffload.core.backend import Backend, Event, Probe, Stream
from kvoffload.core.errors import BackendUnavailableError


class PlannedBackend(Backend):
    """Probes for its hardware, and is never available.

    Args:
        device: such as ``"cuda:1"``; the first device by default.
    """

    name: str
    """Of the backend and of the torch device it will serve."""

    def __init__(self, device: str | None = None) -> None:
        self._device = device

    @abstractmethod
    def missing(self) -> str | None:
        """What the hardware needs and this machine lacks; None if it is all there."""

    def probe(self) -> Probe:
        try:
            missing = self.missing()
        except Exception as error:  # noqa: BLE001 - a probe never raises
            missing = f"looking for it failed: {type(error).__name__}: {error}"
        version = "this version of kvoffload does not implement the copy for it yet"
        return Probe(False, f"{missing}; {version}" if missing else version)

    def _refuse(self) -> BackendUnavailableError:
        return BackendUnavailableError(f"{self.name}: {self.probe().reason}")

    def swap_blocks(self, *_: Any) -> None:
        raise self._refuse()

    def current_stream(self) -> Stream:
        raise self._refuse()

    def new_stream(self, *_: Any) -> Stream:
        raise self._refuse()

    def new_event(self) -> Event:
        raise self._refuse()


def torch_build() -> str:
    """The installed torch, for a reason."""
    return f"torch {torch.__version__}"
