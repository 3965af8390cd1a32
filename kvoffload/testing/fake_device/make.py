"""Making a backend on the fake device."""

from __future__ import annotations

from collections.abc import Callable

from kvoffload.core.backend import Backend
from kvoffload.plugins.registry import BackendRegistry
from kvoffload.testing.fake_device import load
from kvoffload.testing.fake_device.variants import DEVICE, VARIANTS


def maker(name: str, variant: str) -> Callable[[], Backend]:
    """A function that makes a fresh backend; the device is loaded into this process, for good.

    Args:
        name: of an installed backend.
        variant: one of ``variants_of(name)``.

    Raises:
        CannotBuildError: no compiler.
    """
    fake = load()
    if name in VARIANTS:
        make = VARIANTS[name][variant]
        return lambda: make(fake)
    registry = BackendRegistry()
    return lambda: registry.create(name, DEVICE)
