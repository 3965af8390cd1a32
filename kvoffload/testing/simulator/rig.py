"""The simulated device, held without the code under test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Self

import torch

from kvoffload.core.host_memory import HostMemory
from kvoffload.core.lanes import Lane
from kvoffload.core.specs import IntArray
from kvoffload.rig import Bytes, DeviceRig, Fault, register_rig
from kvoffload.testing.simulator.backend import SimBackend
from kvoffload.testing.simulator.world import SimFault, SimStream


class SimRig(DeviceRig):
    """Holds the world of a simulated backend.

    Args:
        backend: the simulator.
    """

    faults = frozenset(Fault)

    def __init__(self, backend: SimBackend) -> None:
        self.world = backend.world
        self._other: SimStream | None = None
        self._held: list[SimStream] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        return HostMemory(nbytes).tensor

    def compute(
        self,
        work: Callable[[], None],
        *,
        reads: Iterable[int] = (),
        writes: Iterable[int] = (),
    ) -> None:
        blocks = {"reads": list(reads), "writes": list(writes)}
        what = " and ".join(f"{verb} {ids}" for verb, ids in blocks.items() if ids)
        self.world.compute.submit(work, f"compute {what}", **blocks)

    def scatter(self, tensor: torch.Tensor, rows: IntArray, data: Bytes) -> None:
        tensor.numpy()[rows] = data

    def gather(self, tensor: torch.Tensor, rows: IntArray) -> Bytes:
        taken: Bytes = tensor.numpy()[rows]
        return taken

    def synchronize(self) -> None:
        self.world.drain()

    def advance(self, steps: int) -> int:
        """Let the scheduler take at most so many steps; how many there were."""
        return self.world.run(steps)

    def hold(self) -> None:
        self.world.compute.held = True
        self._held.append(self.world.compute)

    def release(self) -> None:
        while self._held:
            self._held.pop().held = False

    @property
    def holding(self) -> bool:
        return bool(self._held)

    @contextlib.contextmanager
    def other_stream(self) -> Iterator[None]:
        """For all threads: nobody else may submit meanwhile."""
        if self._other is None:
            self._other = SimStream(self.world, "compute")
        before, self.world.compute = self.world.compute, self._other
        try:
            yield
        finally:
            self.world.compute = before

    def step(self) -> None:
        self.advance(1)

    def inject(self, fault: Fault, lane: Lane) -> None:
        self.world.inject(SimFault(fault.value), lane)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


register_rig(lambda backend: isinstance(backend, SimBackend), SimRig)
