"""Backends that are wrong in one way each, beside a slow one that is right."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch

from kvoffload.backends.thread_base import ThreadBackend, ThreadEvent, ThreadStream
from kvoffload.core.backend import Capabilities, Keep, Probe
from kvoffload.core.host_memory import HostMemory
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.lanes import Lane
from kvoffload.core.plan import CopyPlan, Geometry, Side
from kvoffload.testing.conformance import Guarantee

MUTANTS: dict[str, tuple[type[Reference], Guarantee]] = {}
"""By name: the backend, and the guarantee that it breaks."""


RUN_ON = (
    *(Guarantee.ORDER, Guarantee.INPUTS, Guarantee.ASYNCHRONY),
    *(Guarantee.ENDS_ONCE, Guarantee.QUIET_EXIT),
)
"""Who breaks these may still copy when it should have ended."""


def breaks(guarantee: Guarantee) -> Callable[[type[Reference]], type[Reference]]:
    def register(backend: type[Reference]) -> type[Reference]:
        MUTANTS[backend.__name__] = (backend, guarantee)
        backend.runs_on = guarantee in RUN_ON
        return backend

    return register


ALIVE: deque[object] = deque(maxlen=50)
"""Memory of the latest backends. What a mutant still copies when it should have ended must not take
the process of the tests down."""


class Piece(NamedTuple):
    """One page of one tensor."""

    src: int
    dst: int
    size: int


class Reference(ThreadBackend):
    """Right, and as plain as can be: a page at a time, by the formula of a plan's sides."""

    runs_on = False
    """It may still copy when it should have ended."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.device = torch.device(device or "cpu")

    def probe(self) -> Probe:
        return Probe(True, "the reference of the mutants")

    def bind(self, geometry: Geometry, caches: CanonicalKVCaches, host: HostMemory) -> None:
        if self.runs_on:
            ALIVE.append((caches, host.numpy()))

    def units(self, plan: CopyPlan, group: int) -> Iterator[tuple[int, int]]:
        pairs = slice(int(plan.bounds[group]), int(plan.bounds[group + 1]))
        yield from zip(plan.src_units[pairs].tolist(), plan.dst_units[pairs].tolist(), strict=True)

    def address(self, side: Side, tensor: int, unit: int) -> int:
        block, piece = divmod(unit, side.factor)
        return int(side.base[tensor] + block * side.hi[tensor] + piece * side.lo[tensor])

    def pieces(self, plan: CopyPlan) -> list[Piece]:
        return [
            Piece(
                self.address(plan.src, tensor, src),
                self.address(plan.dst, tensor, dst),
                int(plan.geometry.page_bytes[tensor]),
            )
            for group, tensors in enumerate(plan.geometry.groups)
            for src, dst in self.units(plan, group)
            for tensor in tensors.tolist()
        ]

    def swap_blocks(self, plan: CopyPlan, stream: Any, keep: Keep[Any]) -> None:
        pieces = keep(self.pieces(plan))
        stream.submit(lambda: move(pieces))


def move(pieces: list[Piece]) -> None:
    for piece in pieces:
        ctypes.memmove(piece.dst, piece.src, piece.size)


# --------------------------------------------------------------------------------------- order
@breaks(Guarantee.ORDER)
class IgnoresTheStreamItIsGiven(Reference):
    def __init__(self, device: str | None = None) -> None:
        super().__init__(device)
        self.own = ThreadStream("kvoffload-own")

    def swap_blocks(self, plan: CopyPlan, stream: Any, keep: Keep[Any]) -> None:
        super().swap_blocks(plan, self.own, keep)

    def close(self) -> None:
        self.own.close()
        super().close()


@breaks(Guarantee.ORDER)
class CopiesOnTheCallersStream(Reference):
    def swap_blocks(self, plan: CopyPlan, stream: Any, keep: Keep[Any]) -> None:
        current = self.current_stream()
        super().swap_blocks(plan, current if hasattr(current, "submit") else stream, keep)


@breaks(Guarantee.ORDER)
class CopiesAtOnce(Reference):
    def swap_blocks(self, plan: CopyPlan, stream: Any, keep: Keep[Any]) -> None:
        move(self.pieces(plan))


@breaks(Guarantee.ORDER)
class ReadsHostMemoryAtSubmit(Reference):
    def swap_blocks(self, plan: CopyPlan, stream: Any, keep: Keep[Any]) -> None:
        pieces = self.pieces(plan)
        if plan.lane is not Lane.LOAD:
            stream.submit(lambda: move(pieces))
            return
        early = [(piece, ctypes.string_at(piece.src, piece.size)) for piece in pieces]
        stream.submit(lambda: [ctypes.memmove(p.dst, data, p.size) for p, data in early] and None)


class ForgetfulStream(ThreadStream):
    def wait_event(self, event: Any) -> None:
        # Looks at the event when its turn comes: it may have been recorded again by then. Not for
        # ever, since that may be behind itself.
        self._enqueue(lambda: event.point.reached.wait(0.5) and None)


@breaks(Guarantee.ORDER)
class WaitsForTheLatestRecording(Reference):
    def new_stream(self, lane: Lane) -> ThreadStream:
        if lane not in self.streams:
            self.streams[lane] = ForgetfulStream(f"kvoffload-{lane.value}")
        return self.streams[lane]


class DeafStream(ThreadStream):
    def wait_event(self, event: Any) -> None:
        pass


@breaks(Guarantee.ORDER)
class LoadsWaitForNobody(Reference):
    def new_stream(self, lane: Lane) -> ThreadStream:
        if lane is Lane.LOAD and lane not in self.streams:
            self.streams[lane] = DeafStream("kvoffload-deaf")
        return super().new_stream(lane)


class HastyEvent(ThreadEvent):
    def query(self) -> bool:
        return True


@breaks(Guarantee.ORDER)
class EventsAreAlwaysReached(Reference):
    def new_event(self) -> ThreadEvent:
        return HastyEvent()


@breaks(Guarantee.ORDER)
class StaysWithTheFirstStreamItSaw(Reference):
    first: Any = None

    def current_stream(self) -> Any:
        if not isinstance(self.first, ThreadStream):
            self.first = super().current_stream()
        return self.first


# ------------------------------------------------------------------------- inputs, asynchrony
@breaks(Guarantee.INPUTS)
class ReadsIndicesLate(Reference):
    latest: list[Piece]

    def swap_blocks(self, plan: CopyPlan, stream: Any, keep: Keep[Any]) -> None:
        self.latest = self.pieces(plan)
        stream.submit(lambda: move(self.latest))


@breaks(Guarantee.ASYNCHRONY)
class BlocksInSwapBlocks(Reference):
    def swap_blocks(self, plan: CopyPlan, stream: Any, keep: Keep[Any]) -> None:
        super().swap_blocks(plan, stream, keep)
        stream.synchronize()


@breaks(Guarantee.ASYNCHRONY)
class MakesAStreamEveryTime(Reference):
    def __init__(self, device: str | None = None) -> None:
        super().__init__(device)
        self.made: list[ThreadStream] = []

    def new_stream(self, lane: Lane) -> ThreadStream:
        self.made.append(ThreadStream("kvoffload-another"))
        return self.made[-1]

    def close(self) -> None:
        for stream in self.made:
            stream.close()


@breaks(Guarantee.ASYNCHRONY)
class BlocksInCopiesOnTheDevice(Reference):
    def swap_blocks(self, plan: CopyPlan, stream: Any, keep: Keep[Any]) -> None:
        super().swap_blocks(plan, stream, keep)
        if plan.lane is Lane.COPY and plan.nbytes > 4096:
            stream.synchronize()


@breaks(Guarantee.ASYNCHRONY)
class HasOneStreamForAllLanes(Reference):
    def new_stream(self, lane: Lane) -> ThreadStream:
        return super().new_stream(Lane.STORE)


# --------------------------------------------------------------------------------------- bytes
@breaks(Guarantee.BYTES)
class IsOffByOneAtTheLastBlock(Reference):
    def address(self, side: Side, tensor: int, unit: int) -> int:
        last = int(side.count[tensor]) * side.factor - 1
        return super().address(side, tensor, min(unit, last - 1))


@breaks(Guarantee.BYTES)
class EntersEveryChunkAtItsStart(Reference):
    def units(self, plan: CopyPlan, group: int) -> Iterator[tuple[int, int]]:
        pairs = list(super().units(plan, group))
        skip = pairs[0][0] % plan.src.factor if plan.src_on_host and pairs else 0
        yield from ((src - skip, dst) for src, dst in pairs)


@breaks(Guarantee.BYTES)
class SwapsTensorsOfEqualPages(Reference):
    def pieces(self, plan: CopyPlan) -> list[Piece]:
        pieces = super().pieces(plan)
        if plan.lane is Lane.LOAD:
            for first in range(0, len(pieces) - 1, 2):
                one, two = pieces[first : first + 2]
                if one.size == two.size:
                    pieces[first : first + 2] = [
                        one._replace(dst=two.dst),
                        two._replace(dst=one.dst),
                    ]
        return pieces


@breaks(Guarantee.BYTES)
class IgnoresTheSecondGroup(Reference):
    def units(self, plan: CopyPlan, group: int) -> Iterator[tuple[int, int]]:
        return super().units(plan, group) if group == 0 else iter(())


@breaks(Guarantee.BYTES)
class MovesEveryTensorForEveryGroup(Reference):
    def pieces(self, plan: CopyPlan) -> list[Piece]:
        return [
            Piece(
                self.address(plan.src, tensor, src),
                self.address(plan.dst, tensor, dst),
                int(page),
            )
            for group in range(len(plan.geometry.groups))
            for src, dst in self.units(plan, group)
            for tensor, page in enumerate(plan.geometry.page_bytes)
            if max(src // plan.src.factor, dst // plan.dst.factor)
            < min(int(plan.src.count[tensor]), int(plan.dst.count[tensor]))
        ]


@breaks(Guarantee.BYTES)
class MovesAByteTooFew(Reference):
    def pieces(self, plan: CopyPlan) -> list[Piece]:
        return [piece._replace(size=piece.size - 1) for piece in super().pieces(plan)]


@breaks(Guarantee.BYTES)
class WritesAByteTooMany(Reference):
    def pieces(self, plan: CopyPlan) -> list[Piece]:
        # Not behind host memory, which may be the end of a mapping.
        extra = 0 if plan.dst_on_host else 1
        return [piece._replace(size=piece.size + extra) for piece in super().pieces(plan)]


@breaks(Guarantee.BYTES)
class TruncatesTo32Bits(Reference):
    def address(self, side: Side, tensor: int, unit: int) -> int:
        base = int(side.base[tensor])
        return base + ((super().address(side, tensor, unit) - base) & 0xFFFFFFFF)


@breaks(Guarantee.BYTES)
class DropsWhatOneCallDoesNotTake(Reference):
    def pieces(self, plan: CopyPlan) -> list[Piece]:
        return super().pieces(plan)[:10_000]


@breaks(Guarantee.BYTES)
class LaysChunksInItsOwnOrder(Reference):
    """What it loads is what it stored; but a tier below would take one chunk for another."""

    def units(self, plan: CopyPlan, group: int) -> Iterator[tuple[int, int]]:
        host = plan.geometry.host
        last = int(plan.geometry.blocks(host)[group]) * host.factor - 1
        for src, dst in super().units(plan, group):
            yield last - src if plan.src_on_host else src, last - dst if plan.dst_on_host else dst


@breaks(Guarantee.BYTES)
class ForgetsCopiesOnTheDevice(Reference):
    def swap_blocks(self, plan: CopyPlan, stream: Any, keep: Keep[Any]) -> None:
        if plan.lane is not Lane.COPY:
            super().swap_blocks(plan, stream, keep)


class ShortensCopies(Reference):
    most: int

    def pieces(self, plan: CopyPlan) -> list[Piece]:
        return [piece._replace(size=min(piece.size, self.most)) for piece in super().pieces(plan)]


@breaks(Guarantee.BYTES)
class MovesAtMost64KiBOfAPage(ShortensCopies):
    most = 64 << 10


@breaks(Guarantee.BYTES)
class MovesAtMost2MiBOfAPage(ShortensCopies):
    most = 2 << 20


@breaks(Guarantee.BYTES)
class MovesAtMost512KiBOfARun(Reference):
    def swap_blocks(self, plan: CopyPlan, stream: Any, keep: Keep[Any]) -> None:
        runs = zip(*(column.tolist() for column in plan.descriptors()), strict=True)
        pieces = keep([Piece(src, dst, min(size, 512 << 10)) for src, dst, size in runs])
        stream.submit(lambda: move(pieces))


@breaks(Guarantee.BYTES)
class KnowsOnlyPowersOfTwoBlocksPerChunk(Reference):
    def pieces(self, plan: CopyPlan) -> list[Piece]:
        factor = plan.geometry.host.factor
        return super().pieces(plan) if factor & (factor - 1) == 0 else []


@breaks(Guarantee.BYTES)
class MovesTwoGroupsAtMost(Reference):
    def units(self, plan: CopyPlan, group: int) -> Iterator[tuple[int, int]]:
        return super().units(plan, group) if group < 2 else iter(())


@breaks(Guarantee.BYTES)
class MovesWholeWordsInRows(Reference):
    def pieces(self, plan: CopyPlan) -> list[Piece]:
        host, pages = plan.geometry.host, plan.geometry.page_bytes
        pieces = super().pieces(plan)
        if (host.hi == pages * host.factor).all():
            return pieces
        return [piece._replace(size=piece.size & ~7) for piece in pieces]


@breaks(Guarantee.BYTES)
class TruncatesHostOffsetsTo31Bits(Reference):
    def address(self, side: Side, tensor: int, unit: int) -> int:
        whole, start = super().address(side, tensor, unit), int(side.start[0])
        return start + ((whole - start) & 0x7FFFFFFF) if side is self.host else whole

    def bind(self, geometry: Geometry, caches: CanonicalKVCaches, host: HostMemory) -> None:
        super().bind(geometry, caches, host)
        self.host = geometry.host


# ---------------------------------------------------------------------------------------- life
@breaks(Guarantee.ENDS_ONCE)
class SwallowsAnError(Reference):
    def swap_blocks(self, plan: CopyPlan, stream: Any, keep: Keep[Any]) -> None:
        with contextlib.suppress(Exception):
            super().swap_blocks(plan, stream, keep)


class ForgivingEvent(ThreadEvent):
    def query(self) -> bool:
        return self.point.reached.is_set()


@breaks(Guarantee.ENDS_ONCE)
class EventsTellNoError(Reference):
    def new_event(self) -> ThreadEvent:
        return ForgivingEvent()


@breaks(Guarantee.ENDS_ONCE)
class Hangs(Reference):
    let_go = threading.Event()
    """Of the tests: nothing may be left running."""

    def swap_blocks(self, plan: CopyPlan, stream: Any, keep: Keep[Any]) -> None:
        stream.submit(lambda: self.let_go.wait() and None)


@breaks(Guarantee.QUIET_EXIT)
class LeavesItsThreads(Reference):
    left: list[ThreadStream] = []  # noqa: RUF012 - of the tests, as above

    def close(self) -> None:
        self.left += self.streams.values()
        self.streams = {}


@breaks(Guarantee.QUIET_EXIT)
class SharesItsStreamsWithOthers(Reference):
    shared: dict[Lane, ThreadStream] = {}  # noqa: RUF012 - that is what is wrong

    def __init__(self, device: str | None = None) -> None:
        super().__init__(device)
        self.streams = self.shared

    def close(self) -> None:
        while self.shared:
            self.shared.popitem()[1].close()


@breaks(Guarantee.QUIET_EXIT)
class CannotBeClosedTwice(Reference):
    closed = False

    def close(self) -> None:
        super().close()
        if self.closed:
            raise RuntimeError("closed twice")
        self.closed = True


# ------------------------------------------------------------------------- accounting, memory
@breaks(Guarantee.ACCOUNTING)
class KeepsEveryPlan(Reference):
    def swap_blocks(self, plan: CopyPlan, stream: Any, keep: Keep[Any]) -> None:
        self.plans = [*getattr(self, "plans", []), plan]
        super().swap_blocks(plan, stream, keep)


@breaks(Guarantee.ACCOUNTING)
class LeaksALittle(Reference):
    def __init__(self, device: str | None = None) -> None:
        super().__init__(device)
        self.leaked: list[object] = []

    def swap_blocks(self, plan: CopyPlan, stream: Any, keep: Keep[Any]) -> None:
        self.leaked.append(object())
        super().swap_blocks(plan, stream, keep)


@breaks(Guarantee.MEMORY)
class HandsOutUsedMemory(Reference):
    def allocate_host(self, nbytes: int, numa_node: int | None = None) -> HostMemory:
        memory = super().allocate_host(nbytes, numa_node)
        memory.numpy()[:] = 0xEE
        return memory


@breaks(Guarantee.MEMORY)
class TakesTwiceTheMemory(Reference):
    def allocate_host(self, nbytes: int, numa_node: int | None = None) -> HostMemory:
        memory = HostMemory(2 * nbytes, numa_node=numa_node, populate=True)
        memory.nbytes = nbytes
        return memory


class KeptMemory(HostMemory):
    kept: ClassVar[deque[object]] = deque(maxlen=50)

    def release(self) -> None:
        self.kept.append(self._mapping)
        self._mapping = None
        super().release()


@breaks(Guarantee.MEMORY)
class NeverGivesMemoryBack(Reference):
    def allocate_host(self, nbytes: int, numa_node: int | None = None) -> HostMemory:
        return KeptMemory(nbytes, numa_node=numa_node)


class RecycledMemory(HostMemory):
    pool: dict[int, tuple[Any, Any]] = {}  # noqa: RUF012 - that is what is wrong

    def _allocate(self) -> Any:
        if self.nbytes not in self.pool:
            return super()._allocate()
        self._mapping, array = self.pool.pop(self.nbytes)
        return array

    def release(self) -> None:
        if self._array is not None:
            self.pool[self.nbytes] = (self._mapping, self._array)
        self._array = None


@breaks(Guarantee.MEMORY)
class RecyclesMemoryAsItIs(Reference):
    def allocate_host(self, nbytes: int, numa_node: int | None = None) -> HostMemory:
        return RecycledMemory(nbytes, numa_node=numa_node)


@breaks(Guarantee.ACCOUNTING)
class KeepsTheCaches(Reference):
    def bind(self, geometry: Geometry, caches: CanonicalKVCaches, host: HostMemory) -> None:
        self.caches = caches  # and never lets go


# ------------------------------------------------------------------------ capabilities, probe
@breaks(Guarantee.CAPABILITIES)
class ClaimsPinnedMemory(Reference):
    capabilities = replace(Reference.capabilities, pinned_memory=True)


class WrongClock(ThreadEvent):
    def elapsed_time(self, end: ThreadEvent) -> float:
        return -1.0


@breaks(Guarantee.CAPABILITIES)
class MeasuresNonsense(Reference):
    def new_event(self) -> ThreadEvent:
        return WrongClock()


class StoppedClock(ThreadEvent):
    def elapsed_time(self, end: ThreadEvent) -> float:
        return 0.0


@breaks(Guarantee.CAPABILITIES)
class MeasuresNothing(Reference):
    def new_event(self) -> ThreadEvent:
        return StoppedClock()


class SecondsClock(ThreadEvent):
    def elapsed_time(self, end: ThreadEvent) -> float:
        return super().elapsed_time(end) / 1e3


@breaks(Guarantee.CAPABILITIES)
class MeasuresInSeconds(Reference):
    def new_event(self) -> ThreadEvent:
        return SecondsClock()


class MicrosecondClock(ThreadEvent):
    def elapsed_time(self, end: ThreadEvent) -> float:
        return 1e6 + super().elapsed_time(end) * 1e3


@breaks(Guarantee.CAPABILITIES)
class MeasuresInAnotherUnit(Reference):
    def new_event(self) -> ThreadEvent:
        return MicrosecondClock()


@breaks(Guarantee.CAPABILITIES)
class CapabilitiesAreText(Reference):
    capabilities = Capabilities(asynchronous="yes", timing_events=True)  # type: ignore[arg-type]


@breaks(Guarantee.CAPABILITIES)
class NamesNoDevice(Reference):
    def __init__(self, device: str | None = None) -> None:
        super().__init__(device)
        self.device = None  # type: ignore[assignment]


@breaks(Guarantee.PROBE)
class RaisesInProbe(Reference):
    def probe(self) -> Probe:
        raise OSError("libaccelerator.so: cannot open shared object file")


@breaks(Guarantee.PROBE)
class GivesNoReason(Reference):
    def probe(self) -> Probe:
        return Probe(True, "")


# ------------------------------------------- not in the table: they take their process with them
class DiesOnCopies(Reference):
    def swap_blocks(self, plan: CopyPlan, stream: Any, keep: Keep[Any]) -> None:
        if plan.lane is Lane.COPY:
            ctypes.string_at(0)
        super().swap_blocks(plan, stream, keep)


class DiesWhenItIsClosed(Reference):
    def close(self) -> None:
        super().close()
        os._exit(1)


class WritesIntoEveryPipe(Reference):
    def swap_blocks(self, plan: CopyPlan, stream: Any, keep: Keep[Any]) -> None:
        for descriptor in range(3, 20):
            with contextlib.suppress(OSError):
                os.write(descriptor, b"nonsense\n")
        super().swap_blocks(plan, stream, keep)


class DiesWithLargePages(Reference):
    def swap_blocks(self, plan: CopyPlan, stream: Any, keep: Keep[Any]) -> None:
        if plan.nbytes > 32 << 20:
            ctypes.string_at(0)
        super().swap_blocks(plan, stream, keep)


class KeepsTheInterpreterLock(Reference):
    def swap_blocks(self, plan: CopyPlan, stream: Any, keep: Keep[Any]) -> None:
        ctypes.PyDLL(None).sleep(1000)


class RaisesWhenItIsMade(Reference):
    def __init__(self, device: str | None = None) -> None:
        raise OSError("no such driver")


class HasNoRoomForMuch(Reference):
    """Right, as far as the checks go; it cannot be measured."""

    def bind(self, geometry: Geometry, caches: CanonicalKVCaches, host: HostMemory) -> None:
        super().bind(geometry, caches, host)
        if int(geometry.page_bytes.max()) > 1 << 16:
            raise MemoryError("no room for such pages")


class TakesOtherArguments(Reference):
    def swap_blocks(self, plan: CopyPlan) -> None:  # type: ignore[override]
        """As nobody calls it."""


class CannotBeClosedUnused(Reference):
    def close(self) -> None:
        if not self.streams:
            raise RuntimeError("nothing to close")
        super().close()
