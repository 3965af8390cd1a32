"""Which versions of its driver each backend is verified on, on the fake device."""

from __future__ import annotations

from typing import Protocol

from kvoffload.core.backend import Backend
from kvoffload.testing.fake_device.library import DEVICE_TYPE, FakeDevice

DEFAULT_VARIANT = "default"
"""Of a backend that has no driver of its own."""
DEVICE = f"{DEVICE_TYPE}:0"


class MakeOnFake(Protocol):
    """Makes a backend on one of the fake devices."""

    def __call__(self, fake: FakeDevice, device: str = DEVICE) -> Backend: ...


def _cuda(driver_version: int) -> MakeOnFake:
    def make(fake: FakeDevice, device: str = DEVICE) -> Backend:
        from kvoffload.backends.cuda.backend import CudaBackend

        return CudaBackend(device, library=fake.cuda_driver(driver_version))

    return make


def _rocm(runtime_version: int) -> MakeOnFake:
    def make(fake: FakeDevice, device: str = DEVICE) -> Backend:
        from kvoffload.backends.rocm.backend import RocmBackend

        return RocmBackend(device, library=fake.hip_runtime(runtime_version))

    return make


def _hpu(*, lazy: bool) -> MakeOnFake:
    def make(fake: FakeDevice, device: str = DEVICE) -> Backend:
        from kvoffload.backends.hpu.backend import HpuBackend
        from kvoffload.testing.fake_device.hpu import FakeHabana

        return HpuBackend(device, FakeHabana(fake, lazy=lazy))

    return make


VARIANTS: dict[str, dict[str, MakeOnFake]] = {
    "rocm": {
        "7.13": _rocm(71300000),
        "7.2.2": _rocm(70200002),
        "7.1": _rocm(70100000),
        "5.2": _rocm(50221153),
    },
    "cuda": {"13.0": _cuda(13000), "12.8": _cuda(12080), "12.4": _cuda(12040)},
    "hpu": {"eager": _hpu(lazy=False), "lazy": _hpu(lazy=True)},
}
"""By backend and variant, which is the driver's version where there is one.

CUDA 13 and 12.8 have different calls for many copies, 12.4 has none. ROCm 7.13 and 7.2.2 differ in
whether theirs takes attributes; 5.2 has none.
"""


def variants_of(backend: str) -> list[str]:
    """Names of the variants of a backend, one at least; nothing is built or loaded."""
    return list(VARIANTS.get(backend, {DEFAULT_VARIANT: None}))
