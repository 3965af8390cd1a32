"""Making the caches of the CPU forget what was copied last.

A real KV cache is much larger than any cache of the CPU, so blocks come from memory. A benchmark's
pool of small pages is not, and would be copied from the CPU's caches, several times faster.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvoffload.core.sizes import parse_bytes

UNKNOWN = 64 << 20
"""Bytes, where the machine does not tell."""
MOST = 256 << 20
"""Bytes: more would take longer than what is measured."""


def cache_bytes(root: Path = Path("/")) -> int:
    """Bytes of the largest cache of the first processor.

    Args:
        root: where ``sys`` is found.
    """
    sizes = []
    for path in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size")):
        try:
            sizes.append(parse_bytes(path.read_text().strip().replace("K", "KiB")))
        except (OSError, ValueError):
            continue
    return max(sizes, default=UNKNOWN)


class Flush:
    """Called, it writes twice as much memory as the largest cache holds."""

    def __init__(self) -> None:
        self._scratch = np.zeros(min(2 * cache_bytes(), MOST), dtype=np.uint8)

    def __call__(self) -> None:
        self._scratch += 1
