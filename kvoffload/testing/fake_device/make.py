"""Making a backend on the fake device."""

from __future__ import annotations

from collections.abc import Callable

from kvoffload.core.backend import Backend
from kvoffload.plugins.registry import BackendRegistry
from kvoffload.testing.fake_device import load
from kvoffload.testing.fake_device.variants import DEVICE, VARIANTS


def maker(name: str, variant: str, device: str | None = None) -> Callable[[], Backend]:
    """A function that makes a fresh backend; the device is loaded into this process, for good.

    Args:
        name: of an installed backend.
        variant: one of ``variants_of(name)``.
        device: ``"fake:0"`` or ``"fake:1"``; the first by default.

    Raises:
        CannotBuildError: no compiler.
    """
    fake, chosen = load(), device or DEVICE
    if name in VARIANTS:
        make = VARIANTS[name][variant]
        return lambda: make(fake, chosen)
    registry = BackendRegistry()
    return lambda: registry.create(name, chosen)
