"""What transfers moved, and how long they took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvoffload.core.engine import TransferResult


class TransferRecord(NamedTuple):
    """One transfer.

    Attributes:
        nbytes: moved, padding included.
        seconds: that the copy took on the device.
    """

    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Statistics:
    """Transfers by direction: the media of source and destination, ``("device", "host")``."""

    transfers: Mapping[tuple[str, str], Sequence[TransferRecord]] = field(default_factory=dict)

    def __add__(self, other: Statistics) -> Statistics:
        total = {kind: list(records) for kind, records in self.transfers.items()}
        for kind, records in other.transfers.items():
            total.setdefault(kind, []).extend(records)
        return Statistics(total)

    def nbytes(self, kind: tuple[str, str]) -> int:
        """Bytes moved in a direction."""
        return sum(record.nbytes for record in self.transfers.get(kind, ()))

    def seconds(self, kind: tuple[str, str]) -> float:
        """Seconds that its copies took, added up."""
        return sum(record.seconds for record in self.transfers.get(kind, ()))


class StatisticsCollector:
    """Statistics since they were last taken."""

    def __init__(self) -> None:
        self._transfers: dict[tuple[str, str], list[TransferRecord]] = {}

    def add(self, result: TransferResult) -> None:
        """Record a transfer of which bytes and seconds are known; others say nothing."""
        if result.success and result.transfer_size and result.transfer_time:
            record = TransferRecord(result.transfer_size, result.transfer_time)
            self._transfers.setdefault(result.transfer_type, []).append(record)

    def take(self) -> Statistics | None:
        """What there is, once; None if there is nothing."""
        taken, self._transfers = self._transfers, {}
        return Statistics(taken) if taken else None
