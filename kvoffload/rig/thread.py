"""The rig for backends on worker threads: the device is the host."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch

from kvoffload.backends.thread_base import ThreadBackend, ThreadStream, Work, void
from kvoffload.core.errors import CopyError
from kvoffload.core.host_memory import HostMemory
from kvoffload.core.lanes import Lane
from kvoffload.core.specs import IntArray
from kvoffload.rig.base import Bytes, DeviceRig, Fault


class ThreadRig(DeviceRig):
    """A host that computes on a thread stream.

    Args:
        backend: any on ``thread_base``.
    """

    faults = frozenset(Fault)

    def __init__(self, backend: ThreadBackend) -> None:
        self._backend = backend
        self._compute = ThreadStream("kvoffload-compute")
        self._other: ThreadStream | None = None
        self._here = threading.local()
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
        self._caller().submit(work)

    def _caller(self) -> ThreadStream:
        stream: ThreadStream = getattr(self._here, "stream", self._compute)
        return stream

    def scatter(self, tensor: torch.Tensor, rows: IntArray, data: Bytes) -> None:
        tensor.numpy()[rows] = data

    def gather(self, tensor: torch.Tensor, rows: IntArray) -> Bytes:
        taken: Bytes = tensor.numpy()[rows]
        return taken

    def synchronize(self) -> None:
        own = (self._compute,) if self._other is None else (self._compute, self._other)
        for stream in (*own, *self._backend.streams.values()):
            stream.synchronize()

    def hold(self) -> None:
        self._gate.clear()
        self._caller().submit(lambda: void(self._gate.wait()))

    def release(self) -> None:
        self._gate.set()

    @property
    def holding(self) -> bool:
        return not self._gate.is_set()

    @contextlib.contextmanager
    def other_stream(self) -> Iterator[None]:
        if self._other is None:
            self._other = ThreadStream("kvoffload-compute-other")
        with self._backend.use_stream(self._other):
            self._here.stream = self._other
            try:
                yield
            finally:
                del self._here.stream

    def one_copy(
        self,
        nbytes: int,
        lane: Lane,  # noqa: ARG002 - memory is memory
    ) -> Callable[[], None] | None:
        """With as many threads as the backend copies with in one direction."""
        source, target = (HostMemory(nbytes, populate=True) for _ in range(2))
        step = -(-nbytes // self._backend.copy_threads)
        parts = [(at, min(step, nbytes - at)) for at in range(0, nbytes, step)]

        def move(part: tuple[int, int]) -> None:
            at, length = part
            ctypes.memmove(target.address + at, source.address + at, length)

        def copy() -> None:
            others = [threading.Thread(target=move, args=(part,)) for part in parts[1:]]
            for other in others:
                other.start()
            move(parts[0])
            for other in others:
                other.join()

        return copy

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
        if self._other is not None:
            self._other.close()
