"""The cuda backend, tied together."""

from __future__ import annotations

import ctypes

import torch

from kvoffload.backends._driver import Driver, DriverBackend, open_library
from kvoffload.backends.cuda.copy import LIBRARIES, CudaDriver


class CudaBackend(DriverBackend):
    """NVIDIA GPUs through the CUDA driver.

    Args:
        device: such as ``"cuda:1"``; the first by default.
        library: the driver, opened with ctypes; the installed one by default.
    """

    def __init__(self, device: str | None = None, library: ctypes.CDLL | None = None) -> None:
        super().__init__(device or "cuda", library)

    def open_driver(self, library: ctypes.CDLL | None) -> Driver:
        return CudaDriver(library or open_library(LIBRARIES))

    def missing_from_torch(self) -> str | None:
        if self.device.type == "cuda" and torch.version.cuda is None:
            return f"torch {torch.__version__} was built without CUDA; install a build with it"
        return None
