"""What a vendor implements: :class:`Backend`, with the streams and events it hands out.

Only the core waits and records; a backend never orders anything. What hardware can do is a named
capability, so the core never asks which hardware it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeVar

import torch

from kvoffload.core.host_memory import HostMemory
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.lanes import Lane
from kvoffload.core.plan import CopyPlan, Geometry

INTERFACE_VERSION = 1
"""Version of this interface. It changes when a backend written for the old one would break."""

T = TypeVar("T")
Keep = Callable[[T], T]


class Event(Protocol):
    """A point in a stream's work. ``torch.Event`` satisfies it.

    It can be recorded again at once: whoever was told to wait for it waits for the recording that
    it saw.
    """

    def query(self) -> bool:
        """False while the work before it runs, True when it is done; raises when it failed.

        An event that raises has stopped: nothing before it still runs.
        """

    def synchronize(self) -> None:
        """Block the calling thread until the work before it is done or has failed."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from this event to ``end``."""


class Stream(Protocol):
    """A queue of device work, first in, first out. ``torch.Stream`` satisfies it."""

    def wait_event(self, event: Any, /) -> None:
        """Later work of this stream starts after the event; the calling thread goes on."""

    def record_event(self, event: Any, /) -> Any:
        """Record the event after the stream's work so far.

        It raises only when the device has failed for good, and runs nothing any more.
        """


class HostOrder(Enum):
    """How chunks lie in host memory."""

    PLANES = "planes"
    """A plane per tensor: consecutive chunks coalesce. Fewest descriptors for DMA."""
    TENSOR_MAJOR = "tensor-major rows"
    """A row per chunk, in it the pieces of one tensor after those of another."""
    BLOCK_MAJOR = "block-major rows"
    """A row per chunk, in it all tensors of one block after those of another."""


@dataclass(frozen=True)
class Capabilities:
    """What hardware and backend can do; nothing is assumed until it is claimed.

    Attributes:
        asynchronous: ``swap_blocks`` returns before the copy has run.
        timing_events: ``elapsed_time`` of two events of this backend is meaningful.
        pinned_memory: ``allocate_host`` gives page-locked memory.
        register_memory: existing host memory can be page-locked in place.
        register_limit: most bytes of one registration, where there is a limit.
        batch_copy: many copies in one call.
        max_batch: most copies of one call, where there is a limit.
        queue_depth: pieces of work that a stream holds, where there is a limit: enqueuing more
            would block the host. A single transfer may exceed it if batches are small or absent.
        kernels_read_host: device kernels can read host memory.
        host_order: the order of host memory that this backend copies fastest.
    """

    asynchronous: bool = False
    timing_events: bool = False
    pinned_memory: bool = False
    register_memory: bool = False
    register_limit: int | None = None
    batch_copy: bool = False
    max_batch: int | None = None
    queue_depth: int | None = None
    kernels_read_host: bool = False
    host_order: HostOrder = HostOrder.PLANES


@dataclass(frozen=True)
class Probe:
    """Whether a backend can run here.

    Attributes:
        available: it can.
        reason: what it found, or what is missing and how to get it.
    """

    available: bool
    reason: str


class Backend(ABC):
    """One accelerator, as the core sees it.

    A backend is constructed cheaply and without touching the device; :meth:`probe` looks. Its
    device, and its driver library where it has one, are constructor arguments.

    Two methods are the backend's own, :meth:`probe` and :meth:`swap_blocks`; the rest comes with a
    base: ``kvoffload.backends.torch_base`` for any device that torch knows,
    ``kvoffload.backends.thread_base`` for what it does not.
    """

    device: torch.device | None = None
    """Where the caches live, as torch says it; the conformance kit demands that it is named."""
    capabilities: Capabilities = Capabilities()
    bound: bool = False
    """Caches are bound; kept by the core."""
    fallback: bool = False
    """Chosen automatically only where no other accelerator's backend is available."""

    @abstractmethod
    def probe(self) -> Probe:
        """Whether this backend can run on this machine, and why not. Never raises."""

    @abstractmethod
    def swap_blocks(self, plan: CopyPlan, stream: Stream, keep: Keep[Any]) -> None:
        """Enqueue the copy of ``plan`` on ``stream``; return without waiting for it.

        Args:
            plan: what moves; its arrays stay unchanged until the job has ended.
            stream: one that :meth:`new_stream` made. Nothing may run anywhere else.
            keep: ``keep(x)`` returns ``x`` and holds it until the job has ended.

        Raises:
            Exception: the job fails with it. What was enqueued before may still run; the core waits
                for it.
        """

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream on which the calling thread enqueues device work now."""

    def is_capturing(self) -> bool:
        """The calling thread's current stream is being captured into a graph."""
        return False

    @abstractmethod
    def new_stream(self, lane: Lane) -> Stream:
        """The stream for a lane, kept by the backend; lowest priority where there are any."""

    @abstractmethod
    def new_event(self) -> Event:
        """An event that can be recorded again and again, timed where that is claimed."""

    def is_reached(self, event: Event) -> bool:
        """Ask an event of this backend: see :meth:`Event.query`.

        Where the device refuses to answer just now, as while a graph is being captured, the event
        is not reached: an error here means that the work before it has stopped.
        """
        return event.query()

    def seconds_between(self, start: Event, end: Event) -> float:
        """Seconds from one reached event to another: see :meth:`Event.elapsed_time`."""
        return start.elapsed_time(end) / 1e3

    def wait_for(self, event: Event) -> None:
        """Block the calling thread: see :meth:`Event.synchronize`."""
        event.synchronize()

    # Not abstract: a backend that needs no preparation has nothing to do here.
    def bind(  # noqa: B027
        self, geometry: Geometry, caches: CanonicalKVCaches, host: HostMemory
    ) -> None:
        """Called once before the first copy, with the tensors behind the geometry's addresses."""

    def unbind(self) -> None:  # noqa: B027
        """Called after the last copy has ended and before any of that memory is freed."""

    def allocate_host(self, nbytes: int, numa_node: int | None = None) -> HostMemory:
        """Zeroed host memory, pinned where that is claimed.

        Args:
            nbytes: its size.
            numa_node: where its pages belong; by default wherever suits the backend.

        Raises:
            CapacityError: there is not that much.
            ConfigurationError: there is no such node.
        """
        return HostMemory(nbytes, numa_node=numa_node)

    def close(self) -> None:  # noqa: B027
        """Give streams and threads back. Works twice."""
