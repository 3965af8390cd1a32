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


def _cuda(driver_version: int) -> MakeOnFake:
    def make(fake: FakeDevice) -> Backend:
        from kvoffload.backends.cuda.backend import CudaBackend

        return CudaBackend(DEVICE, library=fake.cuda_driver(driver_version))

    return make


VARIANTS: dict[str, dict[str, MakeOnFake]] = {
    "cuda": {"13.0": _cuda(13000), "12.8": _cuda(12080), "12.4": _cuda(12040)},
}
"""By backend and variant, which is the driver's version where there is one.

CUDA 13 and 12.8 have different calls for many copies, 12.4 has none.
"""


def variants_of(backend: str) -> list[str]:
    """Names of the variants of a backend, one at least; nothing is built or loaded."""
    return list(VARIANTS.get(backend, {DEFAULT_VARIANT: None}))
