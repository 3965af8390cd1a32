"""The cuda backend, tied together."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import torch

from kvoffload.backends import calibration
from kvoffload.backends._driver import Driver, DriverBackend, open_library
from kvoffload.backends.calibration import AUTO, DMA, KERNEL
from kvoffload.backends.cuda import kernel
from kvoffload.backends.cuda.blocks import choose_ways
from kvoffload.backends.cuda.copy import LIBRARIES, CudaDriver
from kvoffload.core.backend import Keep
from kvoffload.core.errors import ConfigurationError
from kvoffload.core.plan import CopyPlan, Descriptors

ENVIRONMENT = "KVOFFLOAD_CUDA_COPY"
"""The variable that chooses a way where no argument does."""
WAYS = (DMA, KERNEL, AUTO)


class CudaBackend(DriverBackend):
    """NVIDIA GPUs through the CUDA driver.

    Args:
        device: such as ``"cuda:1"``; the first by default.
        library: the driver, opened with ctypes; the installed one by default.
        way: ``"dma"``; ``"kernel"``, for whatever a kernel can load; or ``"auto"``, a kernel for
            copies up to the size that ``kvoffload bench calibrate`` has measured on this device,
            and DMA where that has never run. By default ``KVOFFLOAD_CUDA_COPY``, or ``"auto"``.
        kernel_up_to: bytes of the largest copy for the kernel, instead of a measured one.

    Raises:
        ConfigurationError: there is no such way, or it needs triton and there is none.
    """

    def __init__(
        self,
        device: str | None = None,
        library: ctypes.CDLL | None = None,
        *,
        way: str | None = None,
        kernel_up_to: int | None = None,
    ) -> None:
        super().__init__(device or "cuda", library)
        named = way or os.environ.get(ENVIRONMENT) or AUTO
        if named not in WAYS:
            source = "way" if way else ENVIRONMENT
            raise ConfigurationError(f"{source}: {named!r} is none of {', '.join(WAYS)}")
        if named == KERNEL:
            kernel.require()
        self.way = named
        """May be changed while no job is in flight."""
        self._kernel_up_to = kernel_up_to
        self._measured: int | None = None
        self._kernel: kernel.CopyKernel | None = None

    def copy_ways(self) -> tuple[str, ...]:
        """Those that can be compared on this machine."""
        return (DMA, KERNEL) if kernel.is_available() else (DMA,)

    def calibrated_for(self) -> tuple[str, str]:
        """Name of the device, and version of its driver."""
        return self.driver.device_name(self.index), self.driver.version_text

    def open_driver(self, library: ctypes.CDLL | None) -> Driver:
        return CudaDriver(library or open_library(LIBRARIES))

    def missing_from_torch(self) -> str | None:
        if self.device.type == "cuda" and torch.version.cuda is None:
            return f"torch {torch.__version__} was built without CUDA; install a build with it"
        return None

    @property
    def kernel_up_to(self) -> int:
        """Bytes of the largest copy that the kernel does; 0: none."""
        if self.way == DMA or not kernel.is_available():
            return 0
        if self._kernel_up_to is not None:
            return self._kernel_up_to
        if self.way == KERNEL:
            return sys.maxsize
        if self._measured is None:
            self._measured = calibration.load(*self.calibrated_for()) or 0
        return self._measured

    def enqueue(
        self, copies: Descriptors, plan: CopyPlan, stream: torch.Stream, keep: Keep[Any]
    ) -> None:
        # A kernel reads host memory in place, in the order of the stream; it must be pinned.
        if plan.src_on_host and self.capabilities.pinned_memory and self.kernel_up_to:
            ways = choose_ways(copies, self.kernel_up_to)
            if len(ways.kernel.size):
                self._kernel = self._kernel or kernel.CopyKernel()
                self._kernel.enqueue(keep(ways.kernel), stream, keep)
            copies = keep(ways.dma)
        super().enqueue(copies, plan, stream, keep)
