"""Block expansion for a device that compiles for every shape: buckets of powers of two."""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload.core.plan import power_of_two

BUCKET = power_of_two
"""Index arrays are padded to this length, so that a transfer of n rows is one of log2(n) + 1."""
WIDEST = 4
"""Bytes of the widest element that the device has kernels for: int32."""


def buckets(largest: int) -> Iterator[int]:
    """All lengths that transfers of up to so many rows are padded to, the smallest first."""
    rows = 1
    while rows < largest:
        yield rows
        rows *= 2
    yield rows
