"""What backends share that copy through a driver of their own, on torch's streams."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from kvoffload.backends.torch_base import LOWEST_PRIORITY, TorchBackend
from kvoffload.core.backend import Event, HostOrder, Keep, Probe, Stream
from kvoffload.core.errors import ConfigurationError, KVOffloadError
from kvoffload.core.host_memory import HostMemory, usable_cpus
from kvoffload.core.lanes import Lane
from kvoffload.core.plan import CopyPlan, Descriptors
from kvoffload.core.sizes import format_bytes

logger = logging.getLogger(__name__)

PIECE_BYTES = 64 << 30
"""Most bytes of one registration: single ones of 512 GiB and more fail on recent drivers."""
QUEUE_DEPTH = 1000
"""Copies that a stream holds before enqueuing another one blocks; drivers have room for 1,024."""

TEXT_BYTES = 256
"""Room for a device's name or place."""

CAPTURE_RELAXED = 2
"""The mode in which a thread's calls have nothing to do with captures, in CUDA and HIP."""
NOT_SUPPORTED = 801
"""What CUDA and HIP return for a call that this device or driver cannot do."""
NO_DEVICE = (100, 101)
"""What CUDA and HIP return where there is no device, or none that they can use."""
ORDER_STREAM, ORDER_ANY = 1, 3
"""When a source is read, as CUDA and HIP number it."""

_FIRST = np.zeros(1, dtype=np.uint64)
"""Attributes hold from copy 0 on."""
_KEPT: list[object] = []
"""Memory whose registration could not be undone: it must not be unmapped."""


class DriverError(KVOffloadError):
    """A call of the driver failed.

    Attributes:
        call: the function.
        code: what it returned.
    """

    def __init__(self, call: str, code: int, what: str) -> None:
        super().__init__(f"{call} returned {code}: {what}")
        self.call, self.code = call, code


class Driver(ABC):
    """The calls of a vendor's library that offloading needs, every one checked.

    Args:
        library: opened; its functions are typed here.

    Raises:
        OSError: a function is missing.
    """

    functions: ClassVar[dict[str, list[Any]]]
    """Argument types of the functions that must be there. All return an int, 0 for success."""
    version: int
    """As the vendor counts."""
    has_batch: bool
    """Many copies in one call; until that turns out to be unsupported."""
    relaxed_capture: ClassVar[str]
    """The function that exchanges the calling thread's mode of stream capture."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        for name, arguments in self.functions.items():
            try:
                function = getattr(library, name)
            except AttributeError as error:
                raise OSError(f"{library._name} has no function {name}") from error
            function.argtypes, function.restype = arguments, ctypes.c_int

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library.

        Raises:
            DriverError: it failed.
        """
        code = getattr(self.library, name)(*arguments)
        if code:
            raise DriverError(name, code, self.describe(code))

    def read_int(self, name: str, *arguments: Any) -> int:
        """What a function puts where its first argument points."""
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def read_text(self, name: str, device: int) -> str:
        """What a function of ``(buffer, size, device)`` writes."""
        text = ctypes.create_string_buffer(TEXT_BYTES)
        self.call(name, text, TEXT_BYTES, device)
        return text.value.decode(errors="replace")

    @abstractmethod
    def describe(self, code: int) -> str:
        """What the vendor says of an error."""

    @property
    @abstractmethod
    def version_text(self) -> str:
        """The version as people write it."""

    @abstractmethod
    def device_count(self) -> int:
        """Devices that the driver sees."""

    @abstractmethod
    def device_name(self, index: int) -> str:
        """What the vendor calls the device."""

    @abstractmethod
    def pci_bus_id(self, index: int) -> str:
        """Where the device is, such as ``"0000:3b:00.0"``."""

    @abstractmethod
    def current(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Within, the device is the one that the calling thread's calls are for."""

    @contextlib.contextmanager
    def beside_captures(self) -> Iterator[None]:
        """Within, calls neither fail nor spoil a graph because another thread captures it."""
        exchange = getattr(self.library, self.relaxed_capture, None)
        mode = ctypes.c_int(CAPTURE_RELAXED)
        relaxed = exchange is not None and exchange(ctypes.byref(mode)) == 0
        try:
            yield
        finally:
            if exchange is not None and relaxed:
                exchange(ctypes.byref(mode))

    @abstractmethod
    def register(self, address: int, nbytes: int) -> None:
        """Page-lock host memory. A failure leaves nothing behind for later calls."""

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Undo the registration that begins there."""

    @abstractmethod
    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Enqueue one copy."""

    @abstractmethod
    def copy_batch(self, copies: Descriptors, stream: int, *, any_order: bool) -> None:
        """Enqueue many copies in one call.

        Args:
            copies: uint64 arrays, read before it returns.
            stream: the driver's handle; not the default stream.
            any_order: the sources are host memory that nobody writes: they may be read at once.
        """


class RegisteredMemory(HostMemory):
    """Host memory, touched first where it belongs and then page-locked in place, in pieces.

    Args:
        nbytes, numa_node: see :class:`HostMemory`.
        driver, index: who locks it, for which device.
        piece_bytes: most bytes of one registration; a multiple of the operating system's pages.

    Raises:
        DriverError: a piece was refused. Those before it are registered no more.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        numa_node: int | None,
        driver: Driver,
        index: int,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        super().__init__(nbytes, numa_node=numa_node, populate=True)
        if self._mapping is not None:
            # A forked process must neither copy all of it nor move pages from under the device.
            self._mapping.madvise(mmap.MADV_DONTFORK)
        self._driver, self._index = driver, index
        self._registered: list[int] = []
        self.boundaries: npt.NDArray[np.uint64] = np.array([], dtype=np.uint64)
        """Addresses where one registration ends and the next one begins: no copy may cross."""
        try:
            with driver.current(index):
                for start in range(self.address, self.address + nbytes, piece_bytes):
                    driver.register(start, min(piece_bytes, self.address + nbytes - start))
                    self._registered.append(start)
        except BaseException:  # an interrupt must not leave memory registered that is unmapped
            self.release()
            raise
        self.pinned = True
        self.boundaries = np.array(self._registered[1:], dtype=np.uint64)

    def resident_bytes(self) -> int:
        """All of it: locked memory is always there."""
        return 0 if self._array is None else self.nbytes

    def release(self) -> None:
        """Undo the registrations, then give the memory back. Works twice."""
        while self._registered:
            start = self._registered.pop()
            try:
                with self._driver.current(self._index):
                    self._driver.unregister(start)
            except DriverError as error:
                logger.error(  # noqa: TRY400 - the error says it all
                    "host memory stays allocated, since it stays registered: %s", error
                )
                _KEPT.append(self._mapping)
                self._mapping = None
        self.pinned = False
        super().release()


def split_at(
    copies: Descriptors, boundaries: npt.NDArray[np.uint64], *, host_is_source: bool
) -> Descriptors:
    """``copies`` again, but none whose host side crosses a boundary.

    Args:
        copies: as a plan's ``descriptors()``.
        boundaries: uint64[k], rising.
        host_is_source: which side is host memory.
    """
    host = copies.src if host_is_source else copies.dst
    first = np.searchsorted(boundaries, host, side="right")
    crossed = np.searchsorted(boundaries, host + copies.size, side="left") - first
    if not crossed.any():
        return copies
    # Each copy in as many pieces as it crosses boundaries, and one more.
    pieces = crossed + 1
    copy = np.repeat(np.arange(len(host)), pieces)
    piece = np.arange(len(copy)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    edge = np.concatenate((boundaries, [np.uint64(0)]))
    start = np.where(piece == 0, host[copy], edge[first[copy] + piece - 1])
    end = np.where(piece == crossed[copy], (host + copies.size)[copy], edge[first[copy] + piece])
    offset = start - host[copy]
    return Descriptors(copies.src[copy] + offset, copies.dst[copy] + offset, end - start)


def numa_node_of(pci_bus_id: str, root: Path = Path("/")) -> int | None:
    """The NUMA node next to a device; None if the machine has one node, or does not tell."""
    path = root / "sys/bus/pci/devices" / pci_bus_id.lower() / "numa_node"
    try:
        node = int(path.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


class DriverBackend(TorchBackend):
    """Base of a backend that enqueues its copies with the vendor's driver.

    Args:
        device: such as ``"cuda:1"``.
        library: the driver; opened when it is needed by default.
    """

    max_batch: int | None = None
    """Most copies of one call."""
    piece_bytes: int = PIECE_BYTES
    """Most bytes of one registration."""

    def __init__(self, device: str, library: ctypes.CDLL | None = None) -> None:
        super().__init__(device)
        self._library = library
        self._driver: Driver | None = None
        self._boundaries: npt.NDArray[np.uint64] = np.array([], dtype=np.uint64)
        self.capabilities = replace(
            self.capabilities,
            register_memory=True,
            register_limit=self.piece_bytes,
            queue_depth=QUEUE_DEPTH,
            host_order=HostOrder.PLANES,
        )

    @abstractmethod
    def open_driver(self, library: ctypes.CDLL | None) -> Driver:
        """The driver, in the given library or in the one that is installed.

        Raises:
            OSError: there is none.
            DriverError: it cannot be used.
        """

    @abstractmethod
    def missing_from_torch(self) -> str | None:
        """What this build of torch lacks for the device; None if nothing."""

    @property
    def driver(self) -> Driver:
        """Opened on first use; what it can do is claimed from then on."""
        if self._driver is None:
            driver = self.open_driver(self._library)
            if not driver.has_batch:
                logger.warning(
                    "%s has no call for many copies: they are enqueued one by one, which is slow",
                    driver.version_text,
                )
            self.capabilities = replace(
                self.capabilities,
                batch_copy=driver.has_batch,
                max_batch=self.max_batch if driver.has_batch else None,
            )
            self._driver = driver
        return self._driver

    @property
    def index(self) -> int:
        """Of the device, for the driver."""
        return self.device.index or 0

    def probe(self) -> Probe:
        try:
            missing = self.missing_from_torch()
            if missing is not None:
                return Probe(False, missing)
            driver = self.driver
            count = driver.device_count()
            if self.index >= count:
                return Probe(False, f"the driver sees {count} devices, and no number {self.index}")
            found = f"{driver.device_name(self.index)}, {driver.version_text}"
        except OSError as error:
            return Probe(False, f"no driver: {error}")
        except DriverError as error:
            what = "finds no device" if error.code in NO_DEVICE else "does not work"
            return Probe(False, f"the driver {what}: {error}")
        except Exception as error:  # noqa: BLE001 - a probe never raises
            return Probe(False, f"the driver does not work: {error}")
        if not driver.has_batch:
            found += ", which has no call for many copies: they are enqueued one by one"
        return Probe(True, found)

    def is_capturing(self) -> bool:
        if hasattr(torch.Stream, "is_capturing") or self.device.type != "cuda":
            return super().is_capturing()
        return torch.cuda.is_current_stream_capturing()

    def is_reached(self, event: Event) -> bool:
        with self.driver.beside_captures():
            return super().is_reached(event)

    def seconds_between(self, start: Event, end: Event) -> float:
        with self.driver.beside_captures():
            return super().seconds_between(start, end)

    def wait_for(self, event: Event) -> None:
        with self.driver.beside_captures():
            super().wait_for(event)

    def new_stream(self, lane: Lane) -> torch.Stream:
        if lane not in self.streams:
            self.streams[lane] = new_lane_stream(self.device)
        return self.streams[lane]

    def allocate_host(self, nbytes: int, numa_node: int | None = None) -> HostMemory:
        """Registered memory next to the device; pageable memory if registering is refused."""
        driver = self.driver
        node = self._node_next_to_device() if numa_node is None else numa_node
        self._boundaries = np.array([], dtype=np.uint64)
        try:
            memory = RegisteredMemory(
                nbytes,
                numa_node=node,
                driver=driver,
                index=self.index,
                piece_bytes=self.piece_bytes,
            )
        except DriverError as error:
            self.do_without_pinned_memory(
                f"registering {format_bytes(nbytes)} was refused ({error})"
            )
            return HostMemory(nbytes, numa_node=node)
        self.claim_pinned_memory()
        self._boundaries = memory.boundaries
        return memory

    def _node_next_to_device(self) -> int | None:
        """Where nobody chose: the device's own node, as long as this process may use it."""
        try:
            node = numa_node_of(self.driver.pci_bus_id(self.index))
            if node is not None:
                usable_cpus(node)
        except (ConfigurationError, DriverError) as error:
            logger.info("host memory is not placed next to the device: %s", error)
            return None
        return node

    def lower(self, plan: CopyPlan) -> Descriptors:
        """The plan as copies that each stay within one registration."""
        copies = plan.descriptors()
        if not len(self._boundaries) or plan.lane is Lane.COPY:
            return copies
        return split_at(copies, self._boundaries, host_is_source=plan.src_on_host)

    def swap_blocks(self, plan: CopyPlan, stream: Stream, keep: Keep[Any]) -> None:
        if not isinstance(stream, torch.Stream):
            raise TypeError(f"not a stream of this backend: {stream!r}")
        copies = keep(self.lower(plan))
        with self.driver.current(self.index), self.driver.beside_captures():
            self.enqueue(copies, plan, stream, keep)

    def enqueue(
        self,
        copies: Descriptors,
        plan: CopyPlan,
        stream: torch.Stream,
        keep: Keep[Any],  # noqa: ARG002 - for backends that make something for the copy
    ) -> None:
        """Enqueue the copies of ``plan`` in as few calls as the driver allows."""
        driver, handle = self.driver, handle_of(stream)
        # Batches are for memory that the driver knows.
        if driver.has_batch and self.capabilities.pinned_memory:
            any_order = plan.src_on_host and plan.settled
            try:
                for part in copies.split(self.max_batch):
                    driver.copy_batch(part, handle, any_order=any_order)
            except DriverError as error:
                if error.code != NOT_SUPPORTED:
                    raise
                # Mostly found out with the first call. What an earlier one enqueued is copied once
                # more, to the same place, behind it in the stream.
                self._do_without_batches(error)
            else:
                return
        for dst, src, nbytes in _rows(copies):
            driver.copy(dst, src, nbytes, handle)

    def _do_without_batches(self, why: object) -> None:
        logger.warning("copies are enqueued one by one from here on, which is slow: %s", why)
        self.driver.has_batch = False
        self.capabilities = replace(self.capabilities, batch_copy=False, max_batch=None)


def _rows(copies: Descriptors) -> Iterator[tuple[int, int, int]]:
    yield from zip(copies.dst.tolist(), copies.src.tolist(), copies.size.tolist(), strict=True)


def new_lane_stream(device: torch.device) -> torch.Stream:
    """A stream of the lowest priority that tells its handle."""
    if hasattr(torch.Stream, "native_handle"):
        return torch.Stream(device, priority=LOWEST_PRIORITY)
    # Before torch 2.13 only the streams of this module do; ROCm has them under the same name.
    stream: torch.Stream = torch.cuda.Stream(device, priority=LOWEST_PRIORITY)  # type: ignore[no-untyped-call]
    return stream


def handle_of(stream: torch.Stream) -> int:
    """What the driver calls the stream."""
    handle = getattr(stream, "native_handle", None)
    if handle is None:
        handle = getattr(stream, "cuda_stream", None)
    return int(handle or 0)


@contextlib.contextmanager
def logged(kind: type[Exception]) -> Iterator[None]:
    """Within, an exception of this kind is logged and goes no further."""
    try:
        yield
    except kind as error:
        logger.error("cleaning up failed: %s", error)  # noqa: TRY400 - the error says it all


def address_of(array: npt.NDArray[Any]) -> int:
    """Of an array's first element."""
    return int(array.ctypes.data)


def leading_arguments(
    copies: Descriptors, attributes: npt.NDArray[np.uint32] | None
) -> tuple[int, ...]:
    """What every call for many copies begins with: arrays, count, attributes and where they hold.

    Args:
        copies: uint64 arrays.
        attributes: one set for all copies, 24 bytes; None: no attributes.
    """
    arrays = (address_of(copies.dst), address_of(copies.src), address_of(copies.size))
    if attributes is None:
        return (*arrays, len(copies.size), 0, 0, 0)
    return (*arrays, len(copies.size), address_of(attributes), address_of(_FIRST), 1)


def attributes_of(*, any_order: bool, flags: int = 0) -> npt.NDArray[np.uint32]:
    """The attributes of a copy, as CUDA and HIP lay them out: order, two locations, flags."""
    return np.array([ORDER_ANY if any_order else ORDER_STREAM, 0, 0, 0, 0, flags], dtype=np.uint32)


def which_failed(copies: Descriptors, at: int) -> str:
    """The copy of a batch that a driver names, for people."""
    if at >= len(copies.size):
        return f"{len(copies.size)} copies"
    return (
        f"copy {at} of {len(copies.size)}: {int(copies.size[at])} bytes "
        f"from {int(copies.src[at]):#x} to {int(copies.dst[at]):#x}"
    )


def loaded_library(stem: str, maps: Path = Path("/proc/self/maps")) -> str | None:
    """The file of a library that this process has loaded; None if it has not.

    Args:
        stem: what its name begins with.
        maps: what the process has mapped.

    Raises:
        OSError: there are two, whose streams mean nothing to each other.
    """
    paths = {line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines()}
    found = sorted(path for path in paths if Path(path).name.startswith(stem))
    if len(found) > 1:
        raise OSError(f"this process has loaded two runtimes: {' and '.join(found)}")
    return found[0] if found else None


def open_library(names: Sequence[str]) -> ctypes.CDLL:
    """The first of these libraries that can be opened.

    Raises:
        OSError: none can; with what was said of each.
    """
    refused = []
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            refused.append(re.sub(r"\s+", " ", str(error)))
    raise OSError("; ".join(refused))
