"""The rocm backend, tied together."""

from __future__ import annotations

import ctypes

import torch

from kvoffload.backends._driver import Driver, DriverBackend, loaded_library, open_library
from kvoffload.backends.rocm.blocks import max_batch
from kvoffload.backends.rocm.copy import LIBRARIES, HipRuntime


class RocmBackend(DriverBackend):
    """AMD GPUs through the HIP runtime. torch calls their devices ``cuda``.

    Args:
        device: such as ``"cuda:1"``; the first by default.
        library: the runtime, opened with ctypes; the installed one by default.

    Raises:
        ConfigurationError: ``KVOFFLOAD_ROCM_MAX_BATCH`` is no positive number.
    """

    def __init__(self, device: str | None = None, library: ctypes.CDLL | None = None) -> None:
        super().__init__(device or "cuda", library)
        self.max_batch = max_batch()

    def open_driver(self, library: ctypes.CDLL | None) -> Driver:
        if library is None:
            # torch's own, if it has loaded one: its streams mean nothing to another.
            loaded = loaded_library("libamdhip64.so")
            library = open_library(LIBRARIES if loaded is None else (loaded,))
        return HipRuntime(library)

    def missing_from_torch(self) -> str | None:
        if self.device.type == "cuda" and torch.version.hip is None:
            return f"torch {torch.__version__} was built without ROCm; install a build with it"
        return None
