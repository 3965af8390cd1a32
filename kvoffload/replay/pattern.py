"""The content of every page: a function of key, layer and offset, so that a stale, crossed or torn
byte names itself."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from kvoffload.core.specs import IntArray

Words = npt.NDArray[np.uint64]


def pages(keys: IntArray, layer: int, page_bytes: int) -> npt.NDArray[np.uint8]:
    """The pages of ``keys`` in ``layer``: uint8 ``(len(keys), page_bytes)``.

    Word ``i`` of a page is ``hash(key, layer) + i * odd``, modulo 2**64: words of a page differ,
    and so do equal offsets of different pages.
    """
    seeds = _mix(keys.astype(np.uint64) ^ _mix(np.array([layer], dtype=np.uint64)))
    words = seeds[:, None] + _ramp(-(-page_bytes // 8))
    return words.view(np.uint8)[:, :page_bytes]


@functools.lru_cache(maxsize=8)
def _ramp(words: int) -> Words:
    return np.arange(words, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def _mix(x: Words) -> Words:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = x ^ (x >> np.uint64(31))
    return mixed
