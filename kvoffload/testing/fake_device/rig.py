"""The fake device, held without the code under test: past torch and past every driver."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from kvoffload.core.backend import Backend
from kvoffload.core.lanes import Lane
from kvoffload.core.specs import IntArray
from kvoffload.rig import Bytes, Fault, TorchRig, register_rig
from kvoffload.testing.fake_device.library import DEVICE_TYPE, load


class FakeRig(TorchRig):
    """A rig with a real gate, and faults on demand.

    Args:
        backend: its device is the fake one.
    """

    faults = frozenset(Fault)

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.fake = load()
        self._backend = backend
        self._gathered: list[Bytes] = []  # until the stream has come to them
        self._closed: set[torch.Stream] = set()

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)  # zero, and sparse

    def allocated_bytes(self) -> int | None:
        counts = self.fake.counts()
        return counts.device_bytes + counts.pinned_bytes

    def scatter(self, tensor: torch.Tensor, rows: IntArray, data: Bytes) -> None:
        self.fake.scatter(torch.accelerator.current_stream(self.device), tensor, rows, data)

    def gather(self, tensor: torch.Tensor, rows: IntArray) -> Bytes:
        taken = self.fake.gather(torch.accelerator.current_stream(self.device), tensor, rows)
        self._gathered.append(taken)
        return taken

    def synchronize(self) -> None:
        super().synchronize()
        self._gathered.clear()

    def hold(self) -> None:
        stream = self._caller()
        self._closed.add(stream)
        self.fake.hold(stream)

    def release(self) -> None:
        while self._closed:
            self.fake.release(self._closed.pop())

    @property
    def holding(self) -> bool:
        return bool(self._closed)

    def capturing(self) -> AbstractContextManager[None] | None:
        # Before torch 2.13, its generic streams do not tell.
        return self._capturing() if hasattr(self.stream, "is_capturing") else None

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[None]:
        stream = self._caller()
        self.fake.set_capturing(stream, True)
        try:
            yield
        finally:
            self.fake.set_capturing(stream, False)

    def is_lowest_priority(self, stream: Any) -> bool | None:
        return self.fake.priority(stream) == 0 if isinstance(stream, torch.Stream) else None

    def inject(self, fault: Fault, lane: Lane) -> None:
        stream = self._backend.new_stream(lane)
        if not isinstance(stream, torch.Stream):
            raise TypeError(f"not a stream of torch's: {stream!r}")
        self.fake.fail_next(stream, at_submit=fault is Fault.SUBMIT)


register_rig(
    lambda backend: backend.device is not None and backend.device.type == DEVICE_TYPE, FakeRig
)
