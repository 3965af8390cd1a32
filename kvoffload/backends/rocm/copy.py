"""The copy of the rocm backend: the runtime's calls, through ctypes and numpy."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Iterator
from typing import Any, ClassVar

from kvoffload.backends._driver import (
    NOT_SUPPORTED,
    Driver,
    DriverError,
    attributes_of,
    leading_arguments,
    logged,
    which_failed,
)
from kvoffload.core.plan import Descriptors

logger = logging.getLogger(__name__)

LIBRARIES = tuple(f"libamdhip64.so{suffix}" for suffix in ("", ".7", ".6", ".5"))
"""The plain name comes with development packages only; torch brings a numbered one."""
BATCH_SINCE = 70_100_000
"""Runtime version of the first ``hipMemcpyBatchAsync``: major·10⁷ + minor·10⁵ + patch."""
ATTRIBUTES_SINCE = 71_300_000
"""Runtime version from which that takes attributes; before, it refuses them."""
COPY_KIND = 4
"""``hipMemcpyDefault``: the addresses tell the direction."""

_P, _I, _Z = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_ATTRIBUTES = {any_order: attributes_of(any_order=any_order) for any_order in (False, True)}


class HipRuntime(Driver):
    """AMD's runtime."""

    relaxed_capture = "hipThreadExchangeStreamCaptureMode"
    functions: ClassVar[dict[str, list[Any]]] = {
        "hipInit": [ctypes.c_uint],
        "hipRuntimeGetVersion": [_P],
        "hipGetDeviceCount": [_P],
        "hipDeviceGetName": [ctypes.c_char_p, _I, _I],
        "hipDeviceGetPCIBusId": [ctypes.c_char_p, _I, _I],
        "hipGetDevice": [_P],
        "hipSetDevice": [_I],
        "hipHostRegister": [_P, _Z, ctypes.c_uint],
        "hipHostUnregister": [_P],
        "hipMemcpyAsync": [_P, _P, _Z, _I, _P],
        "hipGetLastError": [],
    }

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        for name in ("hipGetErrorName", "hipGetErrorString"):
            function = getattr(library, name)
            function.argtypes, function.restype = [_I], ctypes.c_char_p
        self.call("hipInit", 0)
        self.version = self.read_int("hipRuntimeGetVersion")
        self.has_batch = self.version >= BATCH_SINCE and hasattr(library, "hipMemcpyBatchAsync")
        self._takes_attributes = self.version >= ATTRIBUTES_SINCE
        if self.has_batch:
            library.hipMemcpyBatchAsync.argtypes = [_P, _P, _P, _Z, _P, _P, _Z, _P, _P]
            library.hipMemcpyBatchAsync.restype = _I

    @property
    def version_text(self) -> str:
        major, rest = divmod(self.version, 10_000_000)
        minor, patch = divmod(rest, 100_000)
        return f"HIP {major}.{minor}.{patch}"

    def describe(self, code: int) -> str:
        said = [self.library.hipGetErrorName(code), self.library.hipGetErrorString(code)]
        texts = [text.decode(errors="replace") for text in said if text]
        return ": ".join(dict.fromkeys(texts))

    def call(self, name: str, *arguments: Any) -> None:
        try:
            super().call(name, *arguments)
        except DriverError:
            # Whoever asks for the last error next, torch among them, must not be told of this one.
            self.library.hipGetLastError()
            raise

    def device_count(self) -> int:
        return self.read_int("hipGetDeviceCount")

    def device_name(self, index: int) -> str:
        return self.read_text("hipDeviceGetName", index)

    def pci_bus_id(self, index: int) -> str:
        return self.read_text("hipDeviceGetPCIBusId", index)

    @contextlib.contextmanager
    def current(self, index: int) -> Iterator[None]:
        before = self.read_int("hipGetDevice")
        if before != index:
            self.call("hipSetDevice", index)
        try:
            yield
        finally:
            if before != index:
                # Not to be told instead of what went wrong within.
                with logged(DriverError):
                    self.call("hipSetDevice", before)

    def register(self, address: int, nbytes: int) -> None:
        self.call("hipHostRegister", address, nbytes, 0)

    def unregister(self, address: int) -> None:
        self.call("hipHostUnregister", address)

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self.call("hipMemcpyAsync", dst, src, nbytes, COPY_KIND, stream)

    def copy_batch(self, copies: Descriptors, stream: int, *, any_order: bool) -> None:
        if not len(copies.size):
            return
        try:
            self._batch(copies, stream, any_order)
        except DriverError as error:
            if error.code != NOT_SUPPORTED or not self._takes_attributes:
                raise
            # Nothing of it was enqueued.
            logger.warning("%s refuses attributes: copying without them", self.version_text)
            self._takes_attributes = False
            self._batch(copies, stream, any_order)

    def _batch(self, copies: Descriptors, stream: int, any_order: bool) -> None:
        failed = ctypes.c_size_t()
        attributes = _ATTRIBUTES[any_order] if self._takes_attributes else None
        try:
            self.call(
                "hipMemcpyBatchAsync",
                *leading_arguments(copies, attributes),
                ctypes.byref(failed),
                stream,
            )
        except DriverError as error:
            error.args = (f"{error} ({which_failed(copies, failed.value)})",)
            raise
