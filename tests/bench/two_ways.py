"""A backend that copies in two ways, on threads."""

from __future__ import annotations

from typing import Any

from kvoffload.backends.cpu.backend import CpuBackend
from kvoffload.core.backend import Keep, Stream
from kvoffload.core.plan import CopyPlan

DEVICE, DRIVER = "Two/Ways 9000", "1.2 beta"


class TwoWays(CpuBackend):
    """Both ways are the same; it notes which was asked for."""

    def __init__(self, ways: tuple[str, ...] = ("dma", "kernel")) -> None:
        super().__init__()
        self.way = "auto"
        self.ways = ways
        self.used: list[str] = []

    def copy_ways(self) -> tuple[str, ...]:
        return self.ways

    def calibrated_for(self) -> tuple[str, str]:
        return DEVICE, DRIVER

    def swap_blocks(self, plan: CopyPlan, stream: Stream, keep: Keep[Any]) -> None:
        self.used.append(self.way)
        super().swap_blocks(plan, stream, keep)
