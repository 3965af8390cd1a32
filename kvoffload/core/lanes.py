"""The directions of transfers."""

from __future__ import annotations

from enum import Enum


class Lane(Enum):
    """A direction of transfers. Each lane has one stream, and its jobs run in order."""

    STORE = "store"
    LOAD = "load"
    COPY = "copy"
    """From device blocks to device blocks."""

    @property
    def media(self) -> tuple[str, str]:
        """Where its jobs come from and where they go."""
        return {
            Lane.STORE: ("device", "host"),
            Lane.LOAD: ("host", "device"),
            Lane.COPY: ("device", "device"),
        }[self]
