"""Streams, events and steps of the vendor's torch bridge.

They are ``torch.hpu``'s own and not torch's generic ones: its streams take no other events, and in
some releases neither is derived from torch's classes.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any, Protocol, cast

import torch

from kvoffload.backends.torch_base import TorchBackend
from kvoffload.core.errors import ConfigurationError
from kvoffload.core.lanes import Lane

DEVICE_TYPE = "hpu"
"""What torch calls a Gaudi."""
PACKAGE = "habana_frameworks.torch"
"""The bridge, as it is imported."""


class Bridge(Protocol):
    """What is used of the bridge.

    Attributes:
        hpu: ``Stream()``, ``Event(enable_timing)``, ``current_stream()``, ``stream(s)``,
            ``is_available()``.
        core: ``mark_step()``, which launches what lazy mode has gathered.
        utils: ``internal.is_lazy()``.
    """

    hpu: Any
    core: Any
    utils: Any


def is_installed() -> bool:
    """The bridge is there; nothing of it is imported."""
    return importlib.util.find_spec(PACKAGE.partition(".")[0]) is not None


def load_bridge() -> Bridge:
    """Import the bridge; the first time this takes seconds.

    Raises:
        Exception: whatever it raises, as for a torch that it was not built for.
    """
    for part in ("hpu", "core", "utils.internal"):
        importlib.import_module(f"{PACKAGE}.{part}")
    return cast(Bridge, importlib.import_module(PACKAGE))


class HpuStreams(TorchBackend):
    """A backend's streams and events on the one Gaudi of this process.

    Args:
        device: ``"hpu"`` or ``"hpu:0"``, the default; with a bridge whatever it serves.
        bridge: ``habana_frameworks.torch``, imported when it is first used.

    Raises:
        ConfigurationError: another device.
    """

    def __init__(
        self, device: str | torch.device | None = None, bridge: Bridge | None = None
    ) -> None:
        super().__init__(DEVICE_TYPE if device is None else device)
        if bridge is None and self.device.type != DEVICE_TYPE:
            raise ConfigurationError(f"the hpu backend serves 'hpu', not {str(device)!r}")
        if self.device.index:
            raise ConfigurationError(
                f"a process has one Gaudi, which is {self.device.type}:0, not {self.device}: "
                "HABANA_VISIBLE_MODULES chooses which"
            )
        self._bridge = bridge

    @property
    def bridge(self) -> Bridge:
        """Imported by now."""
        if self._bridge is None:
            self._bridge = load_bridge()
        return self._bridge

    @property
    def lazy(self) -> bool:
        """Work is gathered, and launched by a step marker (``PT_HPU_LAZY_MODE=1``)."""
        return bool(self.bridge.utils.internal.is_lazy())

    def current_stream(self) -> Any:
        return self.bridge.hpu.current_stream()

    def new_stream(self, lane: Lane) -> Any:
        if lane not in self.streams:
            self.streams[lane] = self.bridge.hpu.Stream()  # there is one priority
        return self.streams[lane]

    def new_event(self) -> Any:
        return self.bridge.hpu.Event(enable_timing=self.capabilities.timing_events)

    @contextlib.contextmanager
    def step(self, stream: Any) -> Iterator[None]:
        """What is enqueued within goes onto the stream; in lazy mode it is one step.

        The marker comes also after a failure: what was gathered before would else be launched by
        whoever marks the next step, on another stream.
        """
        with self.bridge.hpu.stream(stream):
            try:
                yield
            finally:
                if self.lazy:
                    self.bridge.core.mark_step()
