"""The fake device in this process: loaded once, and driven from here."""

from __future__ import annotations

import ctypes
import functools
import types
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.backend_registration import rename_privateuse1_backend

from kvoffload.core.specs import IntArray
from kvoffload.rig import Bytes
from kvoffload.testing.fake_device.build import CannotBuildError, build

DEVICE_TYPE = "fake"
"""What torch calls the device: ``torch.device("fake:0")``."""
NUM_DEVICES = 2


class Counts(NamedTuple):
    """What there is, and what happened; in the order of ``fake_counts`` in runtime.cpp.

    Attributes:
        device_bytes, device_ranges: device memory that is allocated.
        pinned_bytes, pinned_ranges: pinned memory that is allocated.
        registrations: ranges of host memory that are registered.
        copies: pieces of memory moved, each with addresses of its own.
        copy_calls: calls that moved them.
        copied_bytes: bytes moved.
        kernels: gathers, scatters, fills and the like.
        largest_call: most pieces of one call since :meth:`FakeDevice.forget_largest_call`.
        live_events: events that were recorded and not given back.
        synchronizations: how often the host waited for a stream.
        attributed_calls: batch calls that came with attributes.
    """

    device_bytes: int
    device_ranges: int
    pinned_bytes: int
    pinned_ranges: int
    registrations: int
    copies: int
    copy_calls: int
    copied_bytes: int
    kernels: int
    largest_call: int
    live_events: int
    synchronizations: int
    attributed_calls: int


class FakeDevice:
    """Holds, delays and breaks the fake device, and looks into its memory past everything.

    Args:
        library: as built.
    """

    def __init__(self, library: Path) -> None:
        self.path = library
        self.library = ctypes.CDLL(str(library))
        integer, address = ctypes.c_int64, ctypes.c_void_p
        for name, arguments in {
            "fake_hold": [ctypes.c_int, integer],
            "fake_release": [ctypes.c_int, integer],
            "fake_fail_next": [ctypes.c_int, integer, ctypes.c_int],
            "fake_set_capturing": [ctypes.c_int, integer, ctypes.c_int],
            "fake_set_global_capture": [ctypes.c_int],
            "fake_priority": [ctypes.c_int, integer],
            "fake_delay": [integer],
            "fake_fail_call": [ctypes.c_char_p, integer, integer, ctypes.c_int],
            "fake_calm": [],
            "fake_peek": [ctypes.c_uint64, address, ctypes.c_size_t],
            "fake_poke": [ctypes.c_uint64, address, ctypes.c_size_t],
            "fake_scatter": [ctypes.c_int, *(integer,) * 3, address, *(integer,) * 2, address],
            "fake_gather": [ctypes.c_int, *(integer,) * 3, address, *(integer,) * 2, address],
            "fake_counts": [address],
            "fake_forget_largest_call": [],
        }.items():
            function = getattr(self.library, name)
            function.argtypes = arguments
            function.restype = (
                ctypes.c_int if name in ("fake_priority", "fake_peek", "fake_poke") else None
            )

        self.library.fake_hip_version.argtypes = [ctypes.c_int]
        self.library.fake_hip_registration_ceiling.argtypes = [integer]
        if self.has_cuda:
            self.library.fake_cuda_version.argtypes = [ctypes.c_int]
            self.library.fake_cuda_registration_ceiling.argtypes = [integer]

    @property
    def has_cuda(self) -> bool:
        """CUDA's stand-ins are in: its header was there."""
        return hasattr(self.library, "cuInit")

    def cuda_driver(self, version: int) -> ctypes.CDLL:
        """CUDA's driver in this version, such as 12080: of the whole process, until the next call.

        Raises:
            CannotBuildError: its header was not there when the device was built.
        """
        if not self.has_cuda:
            raise CannotBuildError(
                "the fake device was built without CUDA's stand-ins, since there is no cuda.h; "
                "pip install nvidia-cuda-runtime, or set CUDA_HOME"
            )
        self.library.fake_cuda_version(version)
        return ctypes.CDLL(str(self.path))

    def hip_runtime(self, version: int) -> ctypes.CDLL:
        """HIP's runtime in this version, such as 70200002: as :meth:`cuda_driver`."""
        self.library.fake_hip_version(version)
        return ctypes.CDLL(str(self.path))

    def limit_registrations(self, nbytes: int | None = None) -> None:
        """No driver registers more than so many bytes at once; None: any number."""
        most = (1 << 63) - 1 if nbytes is None else nbytes
        self.library.fake_hip_registration_ceiling(most)
        if self.has_cuda:
            self.library.fake_cuda_registration_ceiling(most)

    def hold(self, stream: torch.Stream) -> None:
        """Stop the stream: what is enqueued from here on waits for :meth:`release`."""
        self.library.fake_hold(stream.device_index, stream.stream_id)

    def release(self, stream: torch.Stream) -> None:
        """Let the stream go on. Harmless when it is not held."""
        self.library.fake_release(stream.device_index, stream.stream_id)

    def fail_next(self, stream: torch.Stream, *, at_submit: bool) -> None:
        """Refuse the stream's next piece of work, or let it fail when it runs."""
        self.library.fake_fail_next(stream.device_index, stream.stream_id, at_submit)

    def fail_call(self, name: str, *, code: int, after: int = 0, times: int = 1) -> None:
        """Let calls of that name return ``code``, after so many that work."""
        self.library.fake_fail_call(name.encode(), after, times, code)

    def set_capturing(self, stream: torch.Stream, capturing: bool) -> None:
        """The stream is being captured into a graph."""
        self.library.fake_set_capturing(stream.device_index, stream.stream_id, capturing)

    def set_global_capture(self, capturing: bool) -> None:
        """A graph is being captured in CUDA's global mode: asking an event or a stream how far
        it is raises in every thread, although nothing has stopped."""
        self.library.fake_set_global_capture(capturing)

    def priority(self, stream: torch.Stream) -> int:
        """Of the stream: 0 is the lowest, -5 the highest."""
        priority: int = self.library.fake_priority(stream.device_index, stream.stream_id)
        return priority

    def delay(self, seconds: float) -> None:
        """Every piece of work takes at least so long from here on."""
        self.library.fake_delay(int(seconds * 1e6))

    def calm(self) -> None:
        """Nothing is held, delayed or captured, and no failure of a call is planned."""
        self.library.fake_calm()

    def peek(self, address: int, nbytes: int) -> Bytes:
        """Device memory as it is now, in no order with any stream: uint8 ``(nbytes,)``.

        Raises:
            ValueError: it is not device or pinned memory.
        """
        out = np.empty(nbytes, dtype=np.uint8)
        if not self.library.fake_peek(address, out.ctypes.data, nbytes):
            raise ValueError(f"not all of {nbytes} bytes at {address:#x} are known to the device")
        return out

    def poke(self, address: int, data: Bytes) -> None:
        """Overwrite device memory now, in no order with any stream; as :meth:`peek`."""
        if not self.library.fake_poke(address, np.ascontiguousarray(data).ctypes.data, data.nbytes):
            raise ValueError(f"not all of {data.nbytes} bytes at {address:#x} are known")

    def scatter(
        self, stream: torch.Stream, tensor: torch.Tensor, rows: IntArray, data: Bytes
    ) -> None:
        """Work on the stream: ``tensor[rows] = data``, past torch; the arguments are taken now.

        Args:
            tensor: uint8 ``(n, page)`` on the device.
            rows: int64[k].
            data: uint8 ``(k, page)``.
        """
        self._move(self.library.fake_scatter, stream, tensor, rows, np.ascontiguousarray(data))

    def gather(self, stream: torch.Stream, tensor: torch.Tensor, rows: IntArray) -> Bytes:
        """Work on the stream: ``tensor[rows]``, past torch; filled when the stream comes to it.

        The caller keeps the result until then.
        """
        out = np.zeros((len(rows), tensor.shape[1]), dtype=np.uint8)
        self._move(self.library.fake_gather, stream, tensor, rows, out)
        return out

    def _move(
        self, call: Any, stream: torch.Stream, tensor: torch.Tensor, rows: IntArray, data: Bytes
    ) -> None:
        ids = np.ascontiguousarray(rows, dtype=np.int64)
        call(
            *(stream.device_index, stream.stream_id, tensor.data_ptr(), tensor.stride(0)),
            *(ids.ctypes.data, len(ids), tensor.shape[1], data.ctypes.data),
        )

    def counts(self) -> Counts:
        """What there is, and what happened since the library was loaded."""
        out = np.zeros(len(Counts._fields), dtype=np.int64)
        self.library.fake_counts(out.ctypes.data)
        return Counts(*out.tolist())

    def forget_largest_call(self) -> None:
        """Count the largest call anew."""
        self.library.fake_forget_largest_call()


@functools.cache
def load() -> FakeDevice:
    """Build the device if need be, and make it the accelerator of this process, for good.

    torch has room for one such device, and prefers it to any other: a process that loads it tests
    nothing else.

    Raises:
        CannotBuildError: no compiler.
    """
    device = FakeDevice(build())
    device.library.fake_register_with_torch()
    rename_privateuse1_backend(DEVICE_TYPE)
    module = types.ModuleType(f"torch.{DEVICE_TYPE}")
    vars(module).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: NUM_DEVICES,
        current_device=torch.accelerator.current_device_index,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,  # noqa: ARG005 - it makes no random numbers
    )
    torch._register_device_module(DEVICE_TYPE, module)  # type: ignore[no-untyped-call]
    return device
