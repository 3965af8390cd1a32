"""Host memory as the operating system gives it: one mapping, touched only where it is used."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvoffload.core.errors import CapacityError, ConfigurationError
from kvoffload.core.sizes import format_bytes

logger = logging.getLogger(__name__)

MADV_POPULATE_WRITE = 23
"""Of Linux 5.14 and later, from ``asm-generic/mman-common.h``; Python does not name it."""


MOST_THREADS = 16
"""That touch memory for the first time; more of them only wait for the kernel."""
THREAD_BYTES = 256 * 1024 * 1024
"""From which another thread pays."""


@dataclass(frozen=True)
class MemoryLimit:
    """How much memory this process may use.

    Attributes:
        nbytes: at most.
        source: who says so, for messages.
    """

    nbytes: int
    source: str


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """The smallest of the machine's memory and the limits of this process's control groups.

    Args:
        root: where ``proc`` and ``sys`` are found.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [MemoryLimit(machine, "this machine's memory")]
    limits += [
        MemoryLimit(nbytes, f"the control group limit {path}") for path, nbytes in _cgroups(root)
    ]
    return min(limits, key=lambda limit: limit.nbytes)


def _cgroups(root: Path) -> Iterator[tuple[Path, int]]:
    """Every memory limit of the process's control groups and of those above them."""
    try:
        lines = (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, colon, group = rest.partition(":")
        if not colon:
            continue
        if controllers == "":
            top, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        here = top / group.lstrip("/")
        for folder in (here, *here.parents):
            try:
                text = (folder / file).read_text().strip()
            except (OSError, UnicodeDecodeError):
                text = "max"
            if text.isascii() and text.isdigit():
                yield folder / file, int(text)
            if folder == top:
                break


def check_available(nbytes: int, what: str) -> None:
    """There may be ``nbytes`` of memory.

    Raises:
        CapacityError: there may not, with both numbers.
    """
    limit = memory_limit()
    if nbytes > limit.nbytes:
        raise CapacityError(
            f"{what} of {nbytes} bytes ({format_bytes(nbytes)}) is more than {limit.source} has: "
            f"{limit.nbytes} bytes ({format_bytes(limit.nbytes)})"
        )


def cpus_of_node(node: int, root: Path = Path("/")) -> set[int]:
    """The processors of a NUMA node.

    Raises:
        ConfigurationError: there is no such node.
    """
    path = root / f"sys/devices/system/node/node{node}/cpulist"
    try:
        text = path.read_text().strip()
    except OSError as error:
        raise ConfigurationError(f"numa_node {node}: this machine has no such node") from error
    cpus: set[int] = set()
    for span in text.split(","):
        low, _, high = span.partition("-")
        cpus.update(range(int(low), int(high or low) + 1) if span else ())
    return cpus


def usable_cpus(node: int) -> set[int]:
    """The processors of a NUMA node that this process may run on.

    Raises:
        ConfigurationError: there is no such node, or it has none.
    """
    usable = cpus_of_node(node) & os.sched_getaffinity(0)
    if not usable:
        raise ConfigurationError(
            f"numa_node {node}: this process may run on none of its processors"
        )
    return usable


class HostMemory:
    """One anonymous, zeroed mapping.

    Untouched pages cost nothing. The mapping lives until :meth:`release` and until the last tensor
    or array over it is gone, so a copy in flight never reads memory that was given back.

    Args:
        nbytes: its size, at least 1.
        numa_node: touch all of it now, from a thread on this node's processors, so that the
            operating system places it there. By default pages come when they are first used.
        populate: touch all of it now, wherever it lands.

    Raises:
        CapacityError: there is not that much memory.
        ConfigurationError: there is no such node.
    """

    def __init__(
        self, nbytes: int, *, numa_node: int | None = None, populate: bool = False
    ) -> None:
        check_available(nbytes, "host memory")
        cpus = None if numa_node is None else usable_cpus(numa_node)
        self._mapping: mmap.mmap | None = None
        self._array: npt.NDArray[np.uint8] | None = None
        self.nbytes = nbytes
        self.pinned = False
        """Page-locked, so that a device copies to and from it without a bounce."""
        self.numa_node = numa_node
        """Where its pages were placed; None if nobody chose."""

        def acquire() -> None:
            self._array = self._allocate()
            if populate or cpus is not None:
                self._populate()

        run_on(cpus, acquire)
        self.address = int(self.numpy().ctypes.data)
        """Of the first byte; aligned to a page of the operating system."""

    def _allocate(self) -> npt.NDArray[np.uint8]:
        """Zeroed memory, uint8 ``(nbytes,)``; called once, where its pages belong."""
        try:
            self._mapping = _map(self.nbytes)
        except OSError as error:
            raise CapacityError(
                f"the operating system refused {self.nbytes} bytes ({format_bytes(self.nbytes)}) "
                f"of host memory: {error}"
            ) from error
        return np.frombuffer(self._mapping, dtype=np.uint8)

    def _populate(self) -> None:
        """Give every page memory, on as many threads as pay; those run where this one may run."""
        if self._mapping is None:
            return
        array = self.numpy()
        address = int(array.ctypes.data)
        threads = min(len(os.sched_getaffinity(0)), MOST_THREADS, -(-self.nbytes // THREAD_BYTES))
        step = -(-self.nbytes // threads // mmap.PAGESIZE) * mmap.PAGESIZE or mmap.PAGESIZE
        starts = range(0, self.nbytes, step)
        began = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(threads, "kvoffload-first-touch") as pool:
            refusals = list(
                pool.map(
                    lambda start: _populate_range(address + start, array[start : start + step]),
                    starts,
                )
            )
        refused = next((text for text in refusals if text), None)
        if refused is not None:
            logger.info("populated page by page, since madvise refused: %s", refused)
        logger.info(
            "populated %s of host memory in %.2f s on %d threads",
            format_bytes(self.nbytes),
            time.perf_counter() - began,
            threads,
        )

    def numpy(self) -> npt.NDArray[np.uint8]:
        """The memory as uint8 ``(nbytes,)``."""
        if self._array is None:
            raise ValueError("this host memory was released")
        return self._array

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 ``(nbytes,)`` over the memory, on the CPU."""
        return torch.from_numpy(self.numpy())

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
        if self._mapping is not None:
            # Unmapped with the last view of it; closing it now would fail while there is one.
            with contextlib.suppress(BufferError):
                self._mapping.close()


def _populate_range(address: int, array: npt.NDArray[np.uint8]) -> str | None:
    """Give these pages memory, in one call where the kernel has that; why not, if it has not."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = ctypes.c_void_p(address), ctypes.c_size_t(array.nbytes)
    if libc.madvise(*arguments, ctypes.c_int(MADV_POPULATE_WRITE)) == 0:
        return None
    refused = os.strerror(ctypes.get_errno())
    array[:: mmap.PAGESIZE] = 0
    return refused


def _map(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def run_on(cpus: set[int] | None, work: Callable[[], None]) -> None:
    """Do ``work`` on these processors only, or anywhere if None; and wait for it."""
    if cpus is None:
        work()
        return
    failed: list[Exception] = []

    def run() -> None:
        try:
            os.sched_setaffinity(0, cpus)  # of this thread alone
            work()
        except Exception as error:  # noqa: BLE001 - it belongs to the caller
            failed.append(error)

    thread = threading.Thread(target=run, name="kvoffload-first-touch")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
