"""The rig for any device that torch knows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
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
BUSY_SIZE = 1024
"""Rows and columns of the matrix product that keeps it busy."""


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
        self._held: torch.Event | None = None
        self._products: int | None = None  # that fill HOLD_SECONDS

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
        matrix = torch.ones(BUSY_SIZE, BUSY_SIZE, device=self.device)
        if self._products is None:
            torch.mm(matrix, matrix)
            torch.accelerator.synchronize(self.device)
            began = time.perf_counter()
            for _ in range(100):
                torch.mm(matrix, matrix)
            torch.accelerator.synchronize(self.device)
            self._products = int(100 * HOLD_SECONDS / (time.perf_counter() - began)) + 1
        for _ in range(self._products):
            self._kept.append(torch.mm(matrix, matrix))
            del self._kept[-1]
        self._held = torch.Event(self.device)
        self._held.record(torch.accelerator.current_stream(self.device))

    def release(self) -> None:
        """It goes on by itself."""

    @property
    def holding(self) -> bool:
        return self._held is not None and not self._held.query()

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
