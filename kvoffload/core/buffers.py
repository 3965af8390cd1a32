"""Arrays that are used again and again, so that submitting allocates nothing large."""

from __future__ import annotations

import threading

import numpy as np

from kvoffload.core.specs import IntArray

SMALLEST = 1 << 10
"""Elements of the smallest buffer."""
LARGEST = 1 << 22
"""Elements of the largest that is kept: 32 MiB, the descriptors of 1.4 million copies."""


class BufferPool:
    """int64 buffers, lent until they are given back; safe to call from several threads.

    Args:
        keep: at most so many idle buffers are kept; the smallest go first. One of more than
            ``LARGEST`` elements is not kept.
    """

    def __init__(self, keep: int = 4) -> None:
        self._keep = keep
        self._idle: list[IntArray] = []
        self._lock = threading.Lock()
        self.lent = 0
        """Buffers that are in use now."""

    def borrow(self, length: int) -> IntArray:
        """A buffer of at least ``length`` elements, with any content."""
        with self._lock:
            self.lent += 1
            # Ascending by size: the first that fits is the smallest that does.
            for position, buffer in enumerate(self._idle):
                if len(buffer) >= length:
                    return self._idle.pop(position)
        capacity = max(SMALLEST, 1 << max(length - 1, 0).bit_length())
        return np.empty(capacity, dtype=np.int64)

    def give_back(self, buffer: IntArray) -> None:
        """Nobody uses the buffer any more."""
        with self._lock:
            self.lent -= 1
            if len(buffer) <= LARGEST:
                self._idle.append(buffer)
                self._idle.sort(key=len)
            del self._idle[: max(len(self._idle) - self._keep, 0)]

    @property
    def idle_bytes(self) -> int:
        """Bytes kept for later."""
        return sum(buffer.nbytes for buffer in self._idle)
