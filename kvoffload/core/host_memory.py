"""Host memory as the operating system gives it: one mapping, touched only where it is used."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
import numpy.typing as npt
import torch

from kvoffload.core.errors import CapacityError
from kvoffload.core.sizes import format_bytes


def total_memory() -> int:
    """Bytes of memory this machine has, as the operating system reports them."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class HostMemory:
    """One anonymous, zeroed mapping.

    Untouched pages cost nothing. The mapping lives until :meth:`release` and until the last tensor
    or array over it is gone, so a copy in flight never reads memory that was given back.

    Args:
        nbytes: its size, at least 1.

    Raises:
        CapacityError: the machine has not that much memory.
    """

    def __init__(self, nbytes: int) -> None:
        total = total_memory()
        if nbytes > total:
            raise CapacityError(
                f"{nbytes} bytes ({format_bytes(nbytes)}) of host memory are more than this "
                f"machine has: {total} bytes ({format_bytes(total)})"
            )
        try:
            mapping = mmap.mmap(-1, nbytes)
        except OSError as error:
            raise CapacityError(
                f"the operating system refused {nbytes} bytes ({format_bytes(nbytes)}) of host "
                f"memory: {error}"
            ) from error
        self._array: npt.NDArray[np.uint8] | None = np.frombuffer(mapping, dtype=np.uint8)
        self.nbytes = nbytes
        self.address = int(self._array.ctypes.data)
        """Of the first byte; aligned to a page of the operating system."""
        self.pinned = False
        """Page-locked, so that a device copies to and from it without a bounce."""

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 ``(nbytes,)`` over the memory, on the CPU."""
        if self._array is None:
            raise ValueError("this host memory was released")
        return torch.from_numpy(self._array)

    def resident_bytes(self) -> int:
        """Bytes of the mapping that occupy memory now, from ``mincore(2)``."""
        if self._array is None:
            return 0
        page = mmap.PAGESIZE
        pages = np.zeros(-(-self.nbytes // page), dtype=np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(
            ctypes.c_void_p(self.address),
            ctypes.c_size_t(self.nbytes),
            ctypes.c_void_p(pages.ctypes.data),
        ):
            number = ctypes.get_errno()
            raise OSError(number, f"mincore: {os.strerror(number)}")
        return int((pages & 1).sum()) * page

    def release(self) -> None:
        """Give the memory back, as soon as nothing uses it any more. Works twice."""
        self._array = None
