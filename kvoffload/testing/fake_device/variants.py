"""Which versions of its driver each backend is verified on, on the fake device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from kvoffload.core.backend import Backend
from kvoffload.testing.fake_device.library import DEVICE_TYPE, FakeDevice

MakeOnFake: TypeAlias = Callable[[FakeDevice], Backend]

DEFAULT_VARIANT = "default"
"""Of a backend that has no driver of its own."""
DEVICE = f"{DEVICE_TYPE}:0"


def _hpu(*, lazy: bool) -> MakeOnFake:
    def make(fake: FakeDevice) -> Backend:
        from kvoffload.backends.hpu.backend import HpuBackend
        from kvoffload.testing.fake_device.hpu import FakeHabana

        return HpuBackend(DEVICE, FakeHabana(fake, lazy=lazy))

    return make


VARIANTS: dict[str, dict[str, MakeOnFake]] = {
    "hpu": {"eager": _hpu(lazy=False), "lazy": _hpu(lazy=True)},
}
"""By backend and variant. Factories import the backend, so that reading the names costs nothing."""


def variants_of(backend: str) -> list[str]:
    """Names of the variants of a backend, one at least; nothing is built or loaded."""
    return list(VARIANTS.get(backend, {DEFAULT_VARIANT: None}))
