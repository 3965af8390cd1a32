"""Block expansion as the driver wants it: coalesced copies, and which of them a kernel does."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvoffload.core.plan import Descriptors

WORD = 8
"""Bytes that the kernel moves at a time: what it copies is aligned to that on both sides."""
OVERLAP_BYTES = 128 * 1024
"""Up to here, in every copy of a batch, asking the driver to overlap with compute pays (as others
report; not measured here)."""


class Ways(NamedTuple):
    """The copies of one plan, by who moves them. Either may be empty."""

    dma: Descriptors
    kernel: Descriptors


def choose_ways(copies: Descriptors, kernel_up_to: int) -> Ways:
    """Give the kernel what is small enough and aligned: the sizes that are really moved decide.

    Args:
        copies: coalesced.
        kernel_up_to: bytes of the largest copy for the kernel; 0 for none.
    """
    small = copies.size <= kernel_up_to
    aligned = (copies.src | copies.dst | copies.size) % np.uint64(WORD) == 0
    mine = small & aligned
    return Ways(
        Descriptors(*(column[~mine] for column in copies)),
        Descriptors(*(column[mine] for column in copies)),
    )


def prefers_overlap(copies: Descriptors) -> bool:
    """All copies are short enough for the driver to fit them in beside compute."""
    return bool(copies.size.max(initial=0) <= OVERLAP_BYTES)
