"""Adding up what several workers report of one step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, Self, TypeAlias, TypeVar

Counts: TypeAlias = Mapping[int, int]
"""How many workers have said something, by job id or event index."""


class Addable(Protocol):
    """What two workers say is the sum of what each says."""

    def __add__(self, other: Self, /) -> Self: ...


A = TypeVar("A", bound=Addable)


def aggregate(reports: Iterable[A | None]) -> A | None:
    """The sum of all that is not None; None if nothing is."""
    total: A | None = None
    for report in reports:
        if report is not None:
            total = report if total is None else total + report
    return total


def add_counts(first: Counts, second: Counts) -> dict[int, int]:
    """Entry by entry; what one of them lacks counts 0."""
    total = dict(first)
    for name, count in second.items():
        total[name] = total.get(name, 0) + count
    return total
