"""The simulated device: memory, streams, events, and who runs next."""

from __future__ import annotations

import bisect
import ctypes
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvoffload.core.errors import CopyError
from kvoffload.core.lanes import Lane
from kvoffload.core.plan import CopyPlan, Descriptors

KEPT_ACCESSES = 250
"""The latest ones, for telling who overtook whom: more than a program has."""


class SimFault(Enum):
    """Where the next copy of a lane goes wrong."""

    SUBMIT = "submit"
    """Enqueuing raises, with nothing enqueued."""
    PARTIAL = "partial"
    """Enqueuing raises, with half of the copies enqueued."""
    EXECUTE = "execute"
    """Half of the copies run, then the device fails."""
    QUERY = "query"
    """All copies run, and asking for the end fails."""


class DeadlockError(RuntimeError):
    """Somebody waits, and nothing can run."""


class BatchUnsupportedError(RuntimeError):
    """This device has no call for many copies, or not for these."""


@dataclass(frozen=True)
class Switches:
    """How the device behaves.

    Attributes:
        relaxed_source: a copy whose source may be read in any order is read when it is enqueued.
        queue_depth: pieces of work that a stream holds; enqueuing more blocks the host.
        max_batch: most copies of one call; more are a fault.
        batch: there is a call for many copies.
        default_stream: copies may go onto the caller's own stream. On real devices a batch may
            not, and nothing that is to run beside compute should.
        eager_compute: how likely the compute stream is chosen although another could run. Small:
            a device that computes first hides what goes wrong.
    """

    relaxed_source: bool = False
    queue_depth: int | None = None
    max_batch: int | None = None
    batch: bool = True
    default_stream: bool = False
    eager_compute: float = 0.1


@dataclass
class Counters:
    """What happened. All but the last three only grow; those count what there is."""

    launches: int = 0
    descriptors: int = 0
    bytes: int = 0
    queries: int = 0
    host_waits: int = 0  # the host blocked until the device got somewhere
    blocked_enqueues: int = 0  # the host blocked because a stream was full
    faults: int = 0
    events_created: int = 0
    streams: int = 0
    pins: int = 0
    live_events: weakref.WeakSet[SimEvent] = field(default_factory=weakref.WeakSet)


class SimEvent:
    """A point in a stream. A wait is for the recording that it saw."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.recorded = 0  # how often it was enqueued
        self.reached = 0  # up to which recording it came
        self._tick = 0
        self._error: Exception | None = None
        world.counters.events_created += 1
        world.counters.live_events.add(self)

    def query(self) -> bool:
        """False while running, True when done; raises the error of the work before it."""
        self._world.counters.queries += 1
        self._world.check_alive()
        if self.reached < self.recorded:
            return False
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Step the device until the event is reached."""
        self._world.counters.host_waits += 1
        self._world.check_alive()
        self._world.until(lambda: self.reached >= self.recorded)

    def elapsed_time(self, end: SimEvent) -> float:
        """Ticks from this event to ``end``, as milliseconds."""
        return float(end._tick - self._tick)

    def reach(self, recording: int, tick: int, error: Exception | None) -> None:
        self.reached = max(self.reached, recording)
        self._tick, self._error = tick, error


@dataclass(eq=False)
class Access:
    """Something that touches memory, from the moment it was enqueued.

    Attributes:
        serial: order in which such things were enqueued.
        what: for people.
        reads, writes: blocks and chunks, by name.
        tick: when it first ran; None if it has not.
    """

    serial: int
    what: str
    reads: frozenset[str]
    writes: frozenset[str]
    tick: int | None = None

    def conflicts(self, other: Access) -> list[str]:
        """What both touch, and one of them writes."""
        touched = self.reads | self.writes, other.reads | other.writes
        return sorted((self.writes & touched[1]) | (other.writes & touched[0]))


class _Op:
    """Something in a stream."""

    local = False  # it touches no memory: when it runs makes no difference to anybody's bytes

    def ready(self) -> bool:
        return True

    def run(self, stream: SimStream) -> bool:
        """Do one step in ``stream``; True when it was the last."""
        raise NotImplementedError


class _Wait(_Op):
    local = True

    def __init__(self, event: SimEvent) -> None:
        self._event, self._recording = event, event.recorded

    def ready(self) -> bool:
        return self._event.reached >= self._recording

    def run(self, _: SimStream) -> bool:
        return True


class _Record(_Op):
    local = True

    def __init__(self, event: SimEvent) -> None:
        event.recorded += 1
        self._event, self._recording = event, event.recorded

    def run(self, stream: SimStream) -> bool:
        self._event.reach(self._recording, stream.world.tick, stream.error)
        stream.error = None
        return True


class _Work(_Op):
    def __init__(self, work: Callable[[], None], access: Access) -> None:
        self._work, self._access = work, access

    def run(self, stream: SimStream) -> bool:
        if stream.error is None:
            self._access.tick = stream.world.tick
            self._work()
        return True


class _Fail(_Op):
    def __init__(self, error: Exception) -> None:
        self._error = error

    def run(self, stream: SimStream) -> bool:
        stream.error = stream.error or self._error
        return True


class _Copies(_Op):
    """A batch; one copy a step."""

    def __init__(
        self, copies: Descriptors, plan: CopyPlan, held: object, world: World, relaxed: bool
    ) -> None:
        self._copies, self._plan = copies, plan
        self._held = weakref.ref(held)
        self._next = 0
        self._early = (
            [
                ctypes.string_at(src, size)
                for src, size in zip(copies.src.tolist(), copies.size.tolist(), strict=True)
            ]
            if relaxed
            else None
        )
        self._world = world
        self._access = world.note(*_describe(plan))

    def run(self, stream: SimStream) -> bool:
        at, self._next = self._next, self._next + 1
        last = self._next >= len(self._copies.size)
        if stream.error is not None:
            return last
        if self._held() is None or not self._plan.is_lowered:
            self._world.violate("memory was given back that a running copy needs")
            return last
        src, dst, size = (int(column[at]) for column in self._copies)
        if not (self._world.owns(src, size) and self._world.owns(dst, size)):
            self._world.violate(f"a copy of {size} bytes left the registered memory")
            return last
        if self._access.tick is None:
            self._access.tick = self._world.tick
        if self._early is not None:
            ctypes.memmove(dst, self._early[at], size)
        else:
            ctypes.memmove(dst, src, size)
        return last


def _describe(plan: CopyPlan) -> tuple[str, list[str], list[str]]:
    """A copy for people, and the names of what it reads and writes."""
    sides = []
    for side, units in ((plan.src, plan.src_units), (plan.dst, plan.dst_units)):
        what = "chunk" if side is plan.geometry.host else "block"
        sides.append([f"{what} {unit}" for unit in dict.fromkeys((units // side.factor).tolist())])
    what = f"the {plan.lane.value} of {', '.join(sides[0])} to {', '.join(sides[1])}"
    return what, sides[0], sides[1]


class SimStream:
    """A queue of operations. It satisfies the protocol of streams."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.ops: deque[_Op] = deque()
        self.error: Exception | None = None
        self.held = False
        world.streams.append(self)
        world.counters.streams += 1

    def _enqueue(self, op: _Op) -> None:
        self.world.check_alive()
        # The caller's own stream is the caller's to keep from filling up.
        depth = None if self.name == "compute" else self.world.switches.queue_depth
        if depth is not None and len(self.ops) >= depth:
            self.world.counters.blocked_enqueues += 1
            self.world.until(lambda: len(self.ops) < depth)
        self.ops.append(op)

    def wait_event(self, event: SimEvent) -> None:
        """Later work starts after this recording of the event."""
        self._enqueue(_Wait(event))

    def record_event(self, event: SimEvent) -> SimEvent:
        """Reach the event after the work so far, with its error if it had one."""
        self._enqueue(_Record(event))
        return event

    def submit(
        self,
        work: Callable[[], None],
        what: str = "compute",
        reads: Iterable[int] = (),
        writes: Iterable[int] = (),
    ) -> None:
        """Run ``work``, which touches these device blocks, as one step of device work."""
        access = self.world.note(
            what,
            [f"block {block}" for block in reads],
            [f"block {block}" for block in writes],
        )
        self._enqueue(_Work(work, access))

    def copy(self, copies: Descriptors, plan: CopyPlan, held: object, *, relaxed: bool) -> None:
        """One call to the device: the copies run one a step.

        Raises:
            BatchUnsupportedError: there are several, and the device takes no batch.
        """
        world, count = self.world, len(copies.size)
        if count > 1 and not world.switches.batch:
            raise BatchUnsupportedError("this device takes one copy a call")
        if world.switches.max_batch is not None and count > world.switches.max_batch:
            world.violate(
                f"a batch of {count} copies, where {world.switches.max_batch} are allowed"
            )
        if self.name == "compute" and not world.switches.default_stream:
            world.violate("a copy was enqueued on the caller's stream")
        world.counters.launches += 1
        world.counters.descriptors += count
        world.counters.bytes += int(copies.size.sum())
        self._enqueue(_Copies(copies, plan, held, world, relaxed))

    def fail(self, error: Exception) -> None:
        """The device fails here; work up to the next event is skipped."""
        self._enqueue(_Fail(error))

    def ready(self) -> bool:
        return bool(self.ops) and not self.held and self.ops[0].ready()

    def step(self) -> None:
        """Run one step of the operation at the head."""
        self.world.tick += 1
        op = self.ops[0]
        if op.run(self):
            self.ops.popleft()


class World:
    """One device and its scheduler.

    Args:
        seed: of the scheduler's choices.
        switches: how the device behaves.
    """

    def __init__(self, seed: int | str = 0, switches: Switches | None = None) -> None:
        self.switches = switches or Switches()
        self.counters = Counters()
        self.streams: list[SimStream] = []
        self.tick = 0
        self.dead: Exception | None = None
        self.violations: list[str] = []
        self.accesses: deque[Access] = deque(maxlen=KEPT_ACCESSES)
        self._serial = 0
        self._random = random.Random(seed)
        self._faults: dict[Lane, SimFault] = {}
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.compute = SimStream(self, "compute")

    # ------------------------------------------------------------------------------------ memory
    def own(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Copies may touch just these address ranges."""
        ordered = sorted(set(ranges))
        self._starts, self._ends = [r[0] for r in ordered], [r[1] for r in ordered]

    def owns(self, address: int, size: int) -> bool:
        at = bisect.bisect_right(self._starts, address) - 1
        return at >= 0 and address + size <= self._ends[at]

    # ------------------------------------------------------------------------------------ faults
    def inject(self, fault: SimFault, lane: Lane) -> None:
        """Let the next copy of the lane go wrong."""
        self._faults[lane] = fault

    def take_fault(self, lane: Lane) -> SimFault | None:
        fault = self._faults.pop(lane, None)
        self.counters.faults += fault is not None
        return fault

    def die(self) -> None:
        """A sticky error: the device runs nothing any more, and every call fails."""
        self.counters.faults += 1
        self.dead = CopyError("the device was lost")

    def check_alive(self) -> None:
        if self.dead is not None:
            raise self.dead

    def violate(self, what: str) -> None:
        """Note something that must never happen."""
        self.violations.append(what)

    def note(self, what: str, reads: Iterable[str], writes: Iterable[str]) -> Access:
        """Something that touches memory is being enqueued."""
        self._serial += 1
        access = Access(self._serial, what, frozenset(reads), frozenset(writes))
        self.accesses.append(access)
        return access

    def overtakings(self) -> list[str]:
        """Who ran before a conflicting access that was enqueued earlier, one line each."""
        ran = [access for access in self.accesses if access.tick is not None]
        lines = []
        for late in ran:
            for early in ran:
                if early.serial >= late.serial or (late.tick or 0) >= (early.tick or 0):
                    continue
                shared = late.conflicts(early)
                if shared:
                    lines.append(
                        f"{late.what} (tick {late.tick}) overtook {early.what} "
                        f"(tick {early.tick}) on {shared[0]}"
                    )
        return lines

    # --------------------------------------------------------------------------------- scheduler
    def settle(self) -> None:
        """Run all waits and recordings that can run: they touch no memory."""
        if self.dead is not None:
            return
        progress = True
        while progress:
            progress = False
            for stream in self.streams:
                while stream.ready() and stream.ops[0].local:
                    stream.step()
                    progress = True

    def runnable(self) -> list[SimStream]:
        """Streams that can take a step, after :meth:`settle`."""
        if self.dead is not None:
            return []
        return [stream for stream in self.streams if stream.ready()]

    def choose(self, streams: Sequence[SimStream]) -> SimStream:
        """Who runs next: seldom the compute stream, if another can."""
        others = [stream for stream in streams if stream is not self.compute]
        if not others or (
            len(others) < len(streams) and self._random.random() < self.switches.eager_compute
        ):
            return self.compute if self.compute in streams else streams[0]
        return self._random.choice(others)

    def run(self, steps: int) -> int:
        """Take at most so many steps; how many there were."""
        for taken in range(steps):
            self.settle()
            streams = self.runnable()
            if not streams:
                return taken
            self.choose(streams).step()
        self.settle()
        return steps

    def until(self, condition: Callable[[], bool]) -> None:
        """Step until the condition holds.

        Raises:
            DeadlockError: nothing can run, and it does not.
        """
        self.settle()
        while not condition():
            streams = self.runnable()
            if not streams:
                raise DeadlockError("somebody waits, and nothing can run")
            self.choose(streams).step()
            self.settle()

    def drain(self) -> None:
        """Step until all streams are empty."""
        self.until(lambda: self.dead is not None or not any(s.ops for s in self.streams))

    def remove(self, streams: Iterable[Any]) -> None:
        """These streams are gone; work that is still in them is a violation."""
        for stream in streams:
            if stream.ops:
                self.violate(f"stream {stream.name} was closed with work in it")
            self.streams.remove(stream)
            self.counters.streams -= 1
