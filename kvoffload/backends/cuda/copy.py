"""The copy of the cuda backend: the driver's calls, through ctypes and numpy."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvoffload.backends._driver import (
    Driver,
    DriverError,
    attributes_of,
    leading_arguments,
    logged,
    which_failed,
)
from kvoffload.backends.cuda.blocks import prefers_overlap
from kvoffload.core.plan import Descriptors

LIBRARIES = ("libcuda.so.1", "libcuda.so")
BATCH_SINCE = 12080
"""Driver version of the first ``cuMemcpyBatchAsync``, which reports the index of a failure."""
BATCH_WITHOUT_INDEX_SINCE = 13000
"""Driver version from which it has another form, which does not."""
REGISTER_FLAGS = 0x1 | 0x2
"""Portable and mapped: for every device, and for kernels that read it in place."""
PREFER_OVERLAP = 1
"""Of ``CUmemcpyFlags``."""

_P, _I, _Z = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_ATTRIBUTES = {
    (any_order, overlap): attributes_of(any_order=any_order, flags=PREFER_OVERLAP * overlap)
    for any_order in (False, True)
    for overlap in (False, True)
}


class CudaDriver(Driver):
    """NVIDIA's driver."""

    relaxed_capture = "cuThreadExchangeStreamCaptureMode"
    functions: ClassVar[dict[str, list[Any]]] = {
        "cuInit": [ctypes.c_uint],
        "cuDriverGetVersion": [_P],
        "cuDeviceGetCount": [_P],
        "cuDeviceGet": [_P, _I],
        "cuDeviceGetName": [ctypes.c_char_p, _I, _I],
        "cuDeviceGetPCIBusId": [ctypes.c_char_p, _I, _I],
        "cuDevicePrimaryCtxRetain": [_P, _I],
        "cuCtxPushCurrent_v2": [_P],
        "cuCtxPopCurrent_v2": [_P],
        "cuCtxGetCurrent": [_P],
        "cuMemHostRegister_v2": [_P, _Z, ctypes.c_uint],
        "cuMemHostUnregister": [_P],
        "cuMemcpyAsync": [_P, _P, _Z, _P],
        "cuGetErrorName": [_I, _P],
        "cuGetErrorString": [_I, _P],
    }

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self.call("cuInit", 0)
        self.version = self.read_int("cuDriverGetVersion")
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._batch = self._find_batch()
        self.has_batch = self._batch is not None

    @property
    def version_text(self) -> str:
        return f"CUDA driver {self.version // 1000}.{self.version % 1000 // 10}"

    def describe(self, code: int) -> str:
        said = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            if getattr(self.library, function)(code, ctypes.byref(text)) == 0 and text.value:
                said.append(text.value.decode(errors="replace"))
        return ": ".join(said) or "an unknown error"

    def device_count(self) -> int:
        return self.read_int("cuDeviceGetCount")

    def device_name(self, index: int) -> str:
        return self.read_text("cuDeviceGetName", self._device(index))

    def pci_bus_id(self, index: int) -> str:
        return self.read_text("cuDeviceGetPCIBusId", self._device(index))

    def _device(self, index: int) -> int:
        return self.read_int("cuDeviceGet", index)

    @contextlib.contextmanager
    def current(self, index: int) -> Iterator[None]:
        """The device's primary context, which is also torch's, is the calling thread's."""
        context = self._contexts.get(index)
        if context is None:
            # Held as long as the process lives, as torch does.
            context = ctypes.c_void_p()
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(index))
            self._contexts[index] = context
        self.call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            # Not to be told instead of what went wrong within.
            with logged(DriverError):
                self.call("cuCtxPopCurrent_v2", None)

    def register(self, address: int, nbytes: int) -> None:
        try:
            self.call("cuMemHostRegister_v2", address, nbytes, REGISTER_FLAGS)
        except DriverError:
            # The next call, whosesoever it is, may be told of the failure instead of its own.
            self.library.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p()))
            raise

    def unregister(self, address: int) -> None:
        self.call("cuMemHostUnregister", address)

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self.call("cuMemcpyAsync", dst, src, nbytes, stream)

    def copy_batch(self, copies: Descriptors, stream: int, *, any_order: bool) -> None:
        if self._batch is None:
            raise DriverError("cuMemcpyBatchAsync", 0, "this driver does not have it")
        if len(copies.size):
            self._batch(copies, _ATTRIBUTES[any_order, prefers_overlap(copies)], stream)

    def _find_batch(self) -> Callable[[Descriptors, npt.NDArray[np.uint32], int], None] | None:
        """The call for many copies in the form that this driver has; None if it has none."""
        wanted = min(self.version, BATCH_WITHOUT_INDEX_SINCE)
        if wanted < BATCH_SINCE or not hasattr(self.library, "cuGetProcAddress_v2"):
            return None
        wanted = BATCH_WITHOUT_INDEX_SINCE if wanted == BATCH_WITHOUT_INDEX_SINCE else BATCH_SINCE
        address, status = ctypes.c_void_p(), ctypes.c_int()
        # Asked for by version: the plain name stands for the older form on every driver.
        find = self.library.cuGetProcAddress_v2
        find.argtypes = [ctypes.c_char_p, _P, _I, ctypes.c_uint64, _P]
        find.restype = ctypes.c_int
        code = find(b"cuMemcpyBatchAsync", ctypes.byref(address), wanted, 0, ctypes.byref(status))
        if code or not address.value:
            return None
        leading = [_P, _P, _P, _Z, _P, _P, _Z]
        if wanted == BATCH_SINCE:
            return self._with_index(ctypes.CFUNCTYPE(_I, *leading, _P, _P)(address.value))
        return self._without_index(ctypes.CFUNCTYPE(_I, *leading, _P)(address.value))

    def _with_index(
        self, function: Callable[..., int]
    ) -> Callable[[Descriptors, npt.NDArray[np.uint32], int], None]:
        def batch(copies: Descriptors, attributes: npt.NDArray[np.uint32], stream: int) -> None:
            failed = ctypes.c_size_t()
            code = function(*leading_arguments(copies, attributes), ctypes.byref(failed), stream)
            if code:
                raise DriverError(
                    "cuMemcpyBatchAsync",
                    code,
                    f"{self.describe(code)} ({which_failed(copies, failed.value)})",
                )

        return batch

    def _without_index(
        self, function: Callable[..., int]
    ) -> Callable[[Descriptors, npt.NDArray[np.uint32], int], None]:
        def batch(copies: Descriptors, attributes: npt.NDArray[np.uint32], stream: int) -> None:
            code = function(*leading_arguments(copies, attributes), stream)
            if code:
                raise DriverError("cuMemcpyBatchAsync", code, self.describe(code))

        return batch
