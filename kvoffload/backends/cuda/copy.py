"""The copy of the cuda backend: the driver's calls, through ctypes and numpy."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvoffload.backends._driver import Driver, DriverError, address_of
from kvoffload.backends.cuda.blocks import prefers_overlap
from kvoffload.core.plan import Descriptors

LIBRARIES = ("libcuda.so.1", "libcuda.so")
BATCH_SINCE = 12080
"""Driver version of the first ``cuMemcpyBatchAsync``, which reports the index of a failure."""
BATCH_WITHOUT_INDEX_SINCE = 13000
"""Driver version from which it has another form, which does not."""
BUS_ID_BYTES = 32
NAME_BYTES = 128

# Of CUmemcpySrcAccessOrder and CUmemcpyFlags in cuda.h.
ORDER_STREAM, ORDER_ANY = 1, 3
PREFER_OVERLAP = 1

_P, _I, _Z = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t


def _attributes(order: int, flags: int) -> npt.NDArray[np.uint32]:
    """One ``CUmemcpyAttributes``: the order, two locations that say nothing, the flags."""
    return np.array([order, 0, 0, 0, 0, flags], dtype=np.uint32)


_ATTRIBUTES = {
    (any_order, overlap): _attributes(
        ORDER_ANY if any_order else ORDER_STREAM, PREFER_OVERLAP if overlap else 0
    )
    for any_order in (False, True)
    for overlap in (False, True)
}
_FIRST = np.zeros(1, dtype=np.uint64)
"""The attributes hold from copy 0 on."""


class CudaDriver(Driver):
    """NVIDIA's driver."""

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
        self.version = self._int("cuDriverGetVersion")
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._batch = self._find_batch()

    @property
    def has_batch(self) -> bool:  # type: ignore[override]
        """From 12.8 on."""
        return self._batch is not None

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

    def _int(self, function: str, *arguments: Any) -> int:
        value = ctypes.c_int()
        self.call(function, ctypes.byref(value), *arguments)
        return value.value

    def device_count(self) -> int:
        return self._int("cuDeviceGetCount")

    def device_name(self, index: int) -> str:
        return self._text("cuDeviceGetName", NAME_BYTES, index)

    def pci_bus_id(self, index: int) -> str:
        return self._text("cuDeviceGetPCIBusId", BUS_ID_BYTES, index)

    def _text(self, function: str, size: int, index: int) -> str:
        text = ctypes.create_string_buffer(size)
        self.call(function, text, size, self._int("cuDeviceGet", index))
        return text.value.decode(errors="replace")

    @contextlib.contextmanager
    def current(self, index: int) -> Iterator[None]:
        """The device's primary context, which is also torch's, is the calling thread's."""
        context = self._contexts.get(index)
        if context is None:
            # Held as long as the process lives, as torch does.
            context = ctypes.c_void_p()
            device = self._int("cuDeviceGet", index)
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[index] = context
        self.call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", None)

    def register(self, address: int, nbytes: int) -> None:
        try:
            self.call("cuMemHostRegister_v2", address, nbytes, 0)
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
            code = function(*_leading(copies, attributes), ctypes.byref(failed), stream)
            if code:
                raise DriverError(
                    "cuMemcpyBatchAsync", code, f"{self.describe(code)} ({_which(copies, failed)})"
                )

        return batch

    def _without_index(
        self, function: Callable[..., int]
    ) -> Callable[[Descriptors, npt.NDArray[np.uint32], int], None]:
        def batch(copies: Descriptors, attributes: npt.NDArray[np.uint32], stream: int) -> None:
            code = function(*_leading(copies, attributes), stream)
            if code:
                raise DriverError("cuMemcpyBatchAsync", code, self.describe(code))

        return batch


def _leading(copies: Descriptors, attributes: npt.NDArray[np.uint32]) -> tuple[int, ...]:
    """The arguments that both forms begin with."""
    return (
        address_of(copies.dst),
        address_of(copies.src),
        address_of(copies.size),
        len(copies.size),
        address_of(attributes),
        address_of(_FIRST),
        1,
    )


def _which(copies: Descriptors, failed: ctypes.c_size_t) -> str:
    """Which copy it was, where the driver says so."""
    at = failed.value
    if at >= len(copies.size):
        return f"{len(copies.size)} copies"
    return (
        f"copy {at} of {len(copies.size)}: {int(copies.size[at])} bytes "
        f"from {int(copies.src[at]):#x} to {int(copies.dst[at]):#x}"
    )
