"""The rig for any device that torch knows."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import numpy as np
import torch

from kvoffload.core.backend import Backend
from kvoffload.core.errors import CapacityError, ConfigurationError
from kvoffload.core.lanes import Lane
from kvoffload.core.specs import IntArray
from kvoffload.rig.base import Bytes, DeviceRig

HOLD_SECONDS = 0.5
"""How long a stream that has no gate is kept busy: much longer than a check needs to submit."""
MOST_PRODUCTS = 200
"""That keep it busy: streams hold some 1,024 pieces of work, and then enqueuing blocks."""
SMALLEST, LARGEST, SIZE_STEP = 1024, 16 * 1024, 256
"""Rows and columns of the matrices."""
SAMPLE = 20
"""Products that are timed."""


def busy_work(seconds_of: Callable[[int, int], float]) -> tuple[int, int]:
    """How large the matrices are, and how many products of them fill :data:`HOLD_SECONDS`.

    Args:
        seconds_of: what so many products of matrices of this size take.
    """
    size = SMALLEST
    while True:
        products = int(SAMPLE * HOLD_SECONDS / seconds_of(size, SAMPLE)) + 1
        if products <= MOST_PRODUCTS or size >= LARGEST:
            return size, products
        grown = size * (products / MOST_PRODUCTS) ** (1 / 3)
        steps = max(math.ceil(grown / SIZE_STEP), size // SIZE_STEP + 1)
        size = min(steps * SIZE_STEP, LARGEST)


class TorchRig(DeviceRig):
    """A device of torch's, driven with torch's own operations on a stream of its own.

    It keeps the stream busy with matrix products where it is to hold it, and injects no faults.

    Args:
        backend: its ``device`` is the one that is held.
    """

    def __init__(self, backend: Backend) -> None:
        if backend.device is None:
            raise ConfigurationError(f"{type(backend).__name__} names no device")
        self.device = backend.device
        self.stream = torch.Stream(self.device)
        self._before: torch.Stream | None = None
        self._kept: list[torch.Tensor] = []  # until the device has been synchronised
        self._other: torch.Stream | None = None
        self._here = threading.local()
        self._held: list[torch.Event] = []
        self._busy: tuple[int, int] | None = None  # size and number of products, once measured

    def allocate(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            raise CapacityError(f"{nbytes} bytes of device memory: {error}") from error

    def allocated_bytes(self) -> int | None:
        try:
            return int(torch.accelerator.memory_allocated(self.device))
        except Exception:  # noqa: BLE001 - devices without torch's allocator fail in ways of their own
            return None

    def compute(
        self,
        work: Callable[[], None],
        *,
        reads: Iterable[int] = (),  # noqa: ARG002 - streams need no declaration
        writes: Iterable[int] = (),  # noqa: ARG002
    ) -> None:
        work()

    def _upload(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        host = _pinned(torch.from_numpy(np.array(array)))
        there = host.to(self.device, non_blocking=True)
        self._kept += [host, there]
        return there

    def scatter(self, tensor: torch.Tensor, rows: IntArray, data: Bytes) -> None:
        tensor.index_copy_(0, self._upload(rows), self._upload(data))

    def gather(self, tensor: torch.Tensor, rows: IntArray) -> Bytes:
        taken = tensor.index_select(0, self._upload(rows))
        host = _pinned(torch.empty(taken.shape, dtype=taken.dtype))
        host.copy_(taken, non_blocking=True)
        self._kept += [taken, host]
        array: Bytes = host.numpy()
        return array

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)
        self._kept.clear()

    def hold(self) -> None:
        if self._busy is None:
            self._busy = busy_work(self._seconds_of)
        self._multiply(*self._busy)
        self._held = [event for event in self._held if not event.query()]
        self._held.append(self._caller().record_event(torch.Event(self.device)))

    def _multiply(self, size: int, products: int) -> None:
        matrix = torch.ones(size, size, device=self.device)
        result = torch.empty_like(matrix)
        for _ in range(products):
            torch.mm(matrix, matrix, out=result)
        self._kept += [matrix, result]

    def _seconds_of(self, size: int, products: int) -> float:
        self._multiply(size, 1)
        self.synchronize()
        began = time.perf_counter()
        self._multiply(size, products)
        self.synchronize()
        return time.perf_counter() - began

    def _caller(self) -> torch.Stream:
        stream: torch.Stream = getattr(self._here, "stream", self.stream)
        return stream

    def release(self) -> None:
        """It goes on by itself."""

    @property
    def holding(self) -> bool:
        return not all(event.query() for event in self._held)

    @contextlib.contextmanager
    def other_stream(self) -> Iterator[None]:
        if self._other is None:
            self._other = torch.Stream(self.device)
        before = torch.accelerator.current_stream(self.device)
        torch.accelerator.set_stream(self._other)
        self._here.stream = self._other
        try:
            yield
        finally:
            del self._here.stream
            torch.accelerator.set_stream(before)

    def one_copy(self, nbytes: int, lane: Lane) -> Callable[[], None] | None:
        host = _pinned(torch.zeros(nbytes, dtype=torch.uint8))
        there = self.allocate(nbytes)
        source, target = (there, host) if lane is Lane.STORE else (host, there)

        def copy() -> None:
            target.copy_(source, non_blocking=True)
            torch.accelerator.synchronize(self.device)

        return copy

    def free_bytes(self) -> int | None:
        try:
            return int(torch.accelerator.get_memory_info(self.device)[0])
        except Exception:  # noqa: BLE001 - as above
            return None

    def __enter__(self) -> Self:
        self._before = torch.accelerator.current_stream(self.device)
        torch.accelerator.set_stream(self.stream)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()
        if self._before is not None:
            torch.accelerator.set_stream(self._before)
        self.synchronize()


def _pinned(host: torch.Tensor) -> torch.Tensor:
    """The tensor in pinned memory, or as it is where there is none to be had."""
    try:
        return host.pin_memory()
    except RuntimeError:
        return host
