"""Device memory and device work, held without the code under test.

Replay, benchmarks and the conformance kit drive a device through a :class:`DeviceRig`. It never
calls ``swap_blocks``, so that what it reads is what really is in device memory. Rigs come with
kvoffload, one for each kind of stream; a vendor writes none.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvoffload.backends.thread_base import ThreadBackend, ThreadStream, Work, void
from kvoffload.core.backend import Backend
from kvoffload.core.errors import ConfigurationError, CopyError
from kvoffload.core.host_memory import HostMemory
from kvoffload.core.lanes import Lane
from kvoffload.core.specs import IntArray

Bytes = npt.NDArray[np.uint8]


class Fault(Enum):
    """Where the next copy of a lane fails."""

    SUBMIT = "submit"
    """Enqueuing it raises."""
    EXECUTE = "execute"
    """It fails when it runs."""


class DeviceRig(ABC):
    """One device, as its engine sees it. Use it as a context manager: within, the rig's stream is
    the calling thread's current stream."""

    @abstractmethod
    def allocate(self, nbytes: int) -> torch.Tensor:
        """Zeroed device memory: uint8 ``(nbytes,)``.

        Raises:
            CapacityError: the device has not that much.
        """

    @abstractmethod
    def compute(
        self,
        work: Callable[[], None],
        *,
        reads: Iterable[int] = (),
        writes: Iterable[int] = (),
    ) -> None:
        """Enqueue device work on the caller's stream.

        Args:
            work: done on the device; what it uses must stay unchanged until then.
            reads, writes: blocks it touches, for rigs that check.
        """

    @abstractmethod
    def scatter(self, tensor: torch.Tensor, rows: IntArray, data: Bytes) -> None:
        """Device work: ``tensor[rows] = data``. For use within :meth:`compute`.

        Args:
            tensor: uint8 ``(n, page)`` on the device.
            rows: int64[k].
            data: uint8 ``(k, page)`` on the host.
        """

    @abstractmethod
    def gather(self, tensor: torch.Tensor, rows: IntArray) -> Bytes:
        """A host copy of ``tensor[rows]``, now: uint8 ``(k, page)``."""

    def write(self, tensor: torch.Tensor, rows: IntArray, data: Bytes) -> None:
        """``tensor[rows] = data``, done when it returns; synchronises the device."""
        self.compute(lambda: self.scatter(tensor, rows, data), writes=rows.tolist())
        self.synchronize()

    def read(self, tensor: torch.Tensor, rows: IntArray) -> Bytes:
        """``tensor[rows]`` after all device work so far: uint8 ``(k, page)``; synchronises."""
        self.synchronize()
        return self.gather(tensor, rows)

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all device work so far is done."""

    @abstractmethod
    def hold(self) -> None:
        """Stop the caller's stream: device work enqueued from here on waits for a release."""

    @abstractmethod
    def release(self) -> None:
        """Let the caller's stream go on. Harmless when it is not held."""

    @abstractmethod
    def inject(self, fault: Fault, lane: Lane) -> None:
        """Let the next copy of ``lane`` fail."""

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(self, *exc_info: object) -> None: ...


class ThreadRig(DeviceRig):
    """A host that computes on a thread stream.

    Args:
        backend: any on ``thread_base``.
    """

    def __init__(self, backend: ThreadBackend) -> None:
        self._backend = backend
        self._compute = ThreadStream("kvoffload-compute")
        self._gate = threading.Event()
        self._gate.set()
        self._current = backend.use_stream(self._compute)

    def allocate(self, nbytes: int) -> torch.Tensor:
        return HostMemory(nbytes).tensor

    def compute(
        self,
        work: Callable[[], None],
        *,
        reads: Iterable[int] = (),  # noqa: ARG002 - thread streams need no declaration
        writes: Iterable[int] = (),  # noqa: ARG002
    ) -> None:
        self._compute.submit(work)

    def scatter(self, tensor: torch.Tensor, rows: IntArray, data: Bytes) -> None:
        tensor.numpy()[rows] = data

    def gather(self, tensor: torch.Tensor, rows: IntArray) -> Bytes:
        taken: Bytes = tensor.numpy()[rows]
        return taken

    def synchronize(self) -> None:
        self._compute.synchronize()
        for stream in self._backend.streams.values():
            stream.synchronize()

    def hold(self) -> None:
        self._gate.clear()
        self._compute.submit(lambda: void(self._gate.wait()))

    def release(self) -> None:
        self._gate.set()

    def inject(self, fault: Fault, lane: Lane) -> None:
        stream: Any = self._backend.new_stream(lane)

        def fail() -> None:
            raise CopyError(f"injected: {fault.value}")

        def failing_submit(_: Work) -> None:
            del stream.submit  # once: the method of the class is back
            if fault is Fault.SUBMIT:
                fail()
            stream.submit(fail)

        stream.submit = failing_submit

    def __enter__(self) -> Self:
        self._current.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._current.__exit__(None, None, None)
        self.release()
        self._compute.close()


RigFactory: TypeAlias = Callable[[Any], DeviceRig]

_RIGS: list[tuple[type[Backend], RigFactory]] = []


def register_rig(backend: type[Backend], rig: RigFactory) -> None:
    """``rig`` holds the devices of this kind of backend; the latest registration wins."""
    _RIGS.insert(0, (backend, rig))


register_rig(ThreadBackend, ThreadRig)  # type: ignore[type-abstract]


def rig_for(backend: Backend) -> DeviceRig:
    """The rig for this backend's device.

    Raises:
        ConfigurationError: there is none for its kind of device yet.
    """
    for kind, rig in _RIGS:
        if isinstance(backend, kind):
            return rig(backend)
    raise ConfigurationError(f"no rig for {type(backend).__name__} in this version of kvoffload")
