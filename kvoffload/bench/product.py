"""What a large bf16 matrix product loses while blocks are copied beside it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvoffload.bench.copy import Step
from kvoffload.bench.memory import Room, fit
from kvoffload.bench.pool import Pool
from kvoffload.core.backend import Backend
from kvoffload.core.errors import ConfigurationError
from kvoffload.core.lanes import Lane
from kvoffload.rig import DeviceRig

SIZE = 8192
"""Rows and columns: large enough to occupy the whole of a large accelerator."""
SECONDS = 0.1
"""Of products in one measurement, about."""
PAGE_BYTES = 64 << 10
IN_FLIGHT = 2
"""Jobs of each direction, so that the next one is there when one ends."""


@dataclass(frozen=True)
class ProductRow:
    """Medians of times that the device's own events tell.

    Attributes:
        way: of copying; None where the backend has one only.
        direction: of the copies: ``"store"``, ``"load"`` or ``"both"``.
        alone_ms: milliseconds of the products with nothing beside them.
        beside_ms: milliseconds with copies beside them all the time.
        ratio: alone to beside: 0.98 is a loss of 2 %.
    """

    way: str | None
    direction: str
    alone_ms: float
    beside_ms: float
    ratio: float


class Products:
    """Products on the rig's stream.

    Args:
        device: of torch's.
        size: rows and columns.

    Raises:
        ConfigurationError: the device does not multiply, or does not time it.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        self._device = device
        try:
            self._left, self._right, self._out = (
                torch.randn(size, size).to(torch.bfloat16).to(device) for _ in range(3)
            )
            self._count = 1
            self.milliseconds()
            self._count = max(int(SECONDS * 1e3 / max(self.milliseconds(), 1e-3)), 1)
        except Exception as error:
            raise ConfigurationError(
                f"{device} does not multiply bf16 matrices of {size} × {size}: {error}"
            ) from error

    def milliseconds(self, beside: Callable[[], None] | None = None) -> float:
        """Of all products, by the device's events.

        Args:
            beside: called again and again until they are done.
        """
        stream = torch.accelerator.current_stream(self._device)
        start, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        start.record(stream)
        for _ in range(self._count):
            torch.mm(self._left, self._right, out=self._out)
        end.record(stream)
        while beside is not None and not end.query():
            beside()
        end.synchronize()
        return float(start.elapsed_time(end))


class Traffic:
    """Copies that do not stop: a job that has ended is followed by another one.

    Args:
        pool: that they move blocks of.
        lanes: directions.
        blocks: of a job.
    """

    def __init__(self, pool: Pool, lanes: Sequence[Lane], blocks: int) -> None:
        self._pool, self._lanes, self._blocks = pool, lanes, blocks
        self._submitted = 0
        self._flying: dict[int, Lane] = {}

    def fill(self) -> None:
        """Submit until as many jobs as there may be are in flight; none waits for the products."""
        for lane in self._lanes:
            while sum(flying is lane for flying in self._flying.values()) < IN_FLIGHT:
                first = self._submitted % (self._pool.blocks // self._blocks) * self._blocks
                ids = np.arange(first, first + self._blocks)
                apart = ids[::-1].copy()  # so that nothing coalesces
                self._flying[self._pool.submit(lane, ids, apart, after=None)] = lane
                self._submitted += 1

    def go_on(self) -> None:
        """Submit another job for each that has ended."""
        for job_id in self._pool.poll():
            self._flying.pop(job_id, None)
        self.fill()

    def stop(self) -> None:
        """Wait for what is in flight."""
        self._pool.finish(self._flying)
        self._flying.clear()


def run(
    backend: Backend,
    rig: DeviceRig,
    *,
    room: Room,
    ways: Sequence[str | None],
    set_way: Callable[[str | None], None],
    blocks: int = 2000,
    size: int = SIZE,
    rounds: int = 5,
    step: Step = lambda _, __: None,
) -> list[ProductRow]:
    """Time products alone and beside copies in every way and direction, in turn.

    Raises:
        ConfigurationError: the device cannot multiply such matrices.
        TransferError: a transfer failed.
    """
    if backend.device is None:
        raise ConfigurationError("torch does not know the device")
    directions = {"store": [Lane.STORE], "load": [Lane.LOAD], "both": [Lane.STORE, Lane.LOAD]}
    kinds = [(way, direction) for way in ways for direction in directions]
    products = Products(backend.device, size)
    fitting = fit(PAGE_BYTES, blocks, room, jobs=2 * IN_FLIGHT)
    alone: list[float] = []
    beside: dict[tuple[str | None, str], list[float]] = {kind: [] for kind in kinds}
    with Pool(backend, rig, PAGE_BYTES, fitting.pool) as pool:
        for round_ in range(rounds):
            rig.synchronize()
            alone.append(products.milliseconds())
            for number, (way, direction) in enumerate(kinds):
                step(round_ * len(kinds) + number, rounds * len(kinds))
                rig.synchronize()
                set_way(way)
                traffic = Traffic(pool, directions[direction], fitting.blocks)
                traffic.fill()
                try:
                    beside[way, direction].append(products.milliseconds(traffic.go_on))
                finally:
                    traffic.stop()
    step(rounds * len(kinds), rounds * len(kinds))
    before = statistics.median(alone)
    rows = []
    for (way, direction), seen in beside.items():
        after = statistics.median(seen)
        rows.append(ProductRow(way, direction, before, after, before / after))
    return rows
