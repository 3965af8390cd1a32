"""What a rig can do: :class:`DeviceRig`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

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

    faults: frozenset[Fault] = frozenset()
    """What :meth:`inject` can do."""

    @abstractmethod
    def allocate(self, nbytes: int) -> torch.Tensor:
        """Zeroed device memory: uint8 ``(nbytes,)``.

        Raises:
            CapacityError: the device has not that much.
        """

    def allocated_bytes(self) -> int | None:
        """Device and pinned memory that is in use; None if the device does not tell."""
        return None

    def free_bytes(self) -> int | None:
        """Device memory that can still be allocated; None if the device does not tell, or if its
        memory is the host's."""
        return None

    def one_copy(
        self,
        nbytes: int,  # noqa: ARG002 - for rigs whose device takes time
        lane: Lane,  # noqa: ARG002
    ) -> Callable[[], None] | None:
        """One copy of so many bytes, the way that a user would write it, to be made repeatedly.

        Args:
            nbytes: contiguous on both sides.
            lane: STORE or LOAD.

        Returns:
            Makes the copy, and returns when it is done; its memory is allocated and touched. None
            where time means nothing.

        Raises:
            CapacityError: there is not that much memory.
        """
        return None

    def seconds_of_one_copy(self, nbytes: int, lane: Lane) -> float | None:
        """Seconds that :meth:`one_copy` takes once; None where time means nothing."""
        copy = self.one_copy(nbytes, lane)
        if copy is None:
            return None
        self.synchronize()
        began = time.perf_counter()
        copy()
        return time.perf_counter() - began

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
            work: calls :meth:`scatter` and :meth:`gather`, now or when the device comes to it;
                what it uses must stay unchanged until then.
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
        """Device work: a host copy of ``tensor[rows]``. For use within :meth:`compute`.

        Returns:
            uint8 ``(k, page)``, filled once the device has come to it: synchronise, then look.
        """

    def write(self, tensor: torch.Tensor, rows: IntArray, data: Bytes) -> None:
        """``tensor[rows] = data``, done when it returns; synchronises the device."""
        self.compute(lambda: self.scatter(tensor, rows, data), writes=rows.tolist())
        self.synchronize()

    def read(self, tensor: torch.Tensor, rows: IntArray) -> Bytes:
        """``tensor[rows]`` after all device work so far: uint8 ``(k, page)``; synchronises."""
        taken: list[Bytes] = []
        self.compute(lambda: taken.append(self.gather(tensor, rows)), reads=rows.tolist())
        self.synchronize()
        return taken[0]

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all device work so far is done."""

    @abstractmethod
    def hold(self) -> None:
        """Stop the caller's stream: device work enqueued there from here on waits for a release.

        A device without a gate is kept busy for a while instead: see :attr:`holding`.
        """

    @abstractmethod
    def release(self) -> None:
        """Let every held stream go on. Harmless when there is none; from any thread."""

    @property
    @abstractmethod
    def holding(self) -> bool:
        """A stream is held, and nobody has released it."""

    @abstractmethod
    def other_stream(self) -> AbstractContextManager[None]:
        """Within, another stream than the rig's is the calling thread's current stream.

        In any thread, and always the same one: :meth:`compute` and :meth:`hold` go there.
        """

    def capturing(self) -> AbstractContextManager[None] | None:
        """Within, the caller's stream is being captured into a graph; None if the rig cannot."""
        return None

    def is_lowest_priority(self, stream: Any) -> bool | None:  # noqa: ARG002 - for rigs that can tell
        """No stream of the device has a lower priority than this; None if nobody can tell."""
        return None

    def step(self) -> None:  # noqa: B027 - most devices have nothing to do here
        """Let a device go on that runs only while somebody waits for it."""

    def inject(self, fault: Fault, lane: Lane) -> None:
        """Let the next copy of ``lane`` fail. Only what :attr:`faults` names."""
        raise NotImplementedError(f"{type(self).__name__} cannot inject {fault} into {lane}")

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(self, *exc_info: object) -> None: ...
