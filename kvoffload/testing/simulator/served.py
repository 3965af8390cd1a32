"""Random programs of an engine that serves requests through one of the two protocols.

Requests arrive, are admitted, load what is found, compute the rest and store it; they are
preempted, aborted, and give blocks back while they run; somebody else takes blocks now and then;
several ranks follow, at their own pace, on devices that fail now and then. As in
:mod:`kvoffload.testing.simulator.program`, the content of a key is a function of the key, so that
what every block must hold is known.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvoffload.connector import Outcome as StepOutcome, aggregate, common_num_chunks, events, jobs
from kvoffload.core.errors import ConfigurationError
from kvoffload.core.lanes import Lane
from kvoffload.core.specs import DeviceLoadStoreSpec
from kvoffload.scheduler.host_manager import HostOffloadingManager
from kvoffload.scheduler.keys import OffloadKey
from kvoffload.testing.simulator.backend import SimBackend
from kvoffload.testing.simulator.program import MakeBackend, Outcome
from kvoffload.testing.simulator.rank import PROTOCOLS, Rank, pieces_of
from kvoffload.testing.simulator.world import DeadlockError, SimFault

BLOCKS = 10
FAMILIES = 3
"""Of requests that begin alike."""
LONGEST = 3
"""Chunks of a request."""
NOBODYS = 29
"""The key of what is written into blocks that somebody else takes."""
DRAINING_STEPS = 300
"""Empty steps after which everything must have ended."""


class _State(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"


@dataclass(eq=False)
class _Request:
    """One that the engine serves.

    Attributes:
        keys: of its chunks.
        left: steps that it runs after its last chunk.
        blocks: of each chunk; None where it gave them back.
        done: leading chunks whose content is there, or will be when the load is.
        offered: of those, the ones that were offered to be stored, or loaded.
        redo: blocks that a failed load left without content: key, piece and block.
    """

    name: str
    keys: list[int]
    left: int
    state: _State = _State.WAITING
    blocks: list[list[int] | None] = field(default_factory=list)
    done: int = 0
    offered: int = 0
    skipped: int = 0  # leading blocks that were computed, not loaded
    hits: int = 0
    redo: list[tuple[int, int, int]] = field(default_factory=list)

    def own(self) -> list[int]:
        return [block for blocks in self.blocks if blocks for block in blocks]


@dataclass
class _Step:
    """What a step computes: for each request, what it writes and reads."""

    writes: dict[str, list[tuple[int, dict[int, int]]]] = field(default_factory=dict)
    reads: dict[str, list[tuple[int, dict[int, int]]]] = field(default_factory=dict)
    taken: list[int] = field(default_factory=list)  # by somebody else

    def forget(self, name: str) -> None:
        self.writes.pop(name, None)
        self.reads.pop(name, None)


class ServedProgram:
    """One run of one program.

    Args:
        seed: of the program, and of the schedulers.
        make_backend: the backend under test, on the world it is given.
        skip: operations to leave out.
        protocol: ``"jobs"`` or ``"events"``.

    Raises:
        ConfigurationError: there is no such protocol.
    """

    def __init__(
        self,
        seed: int,
        make_backend: MakeBackend = SimBackend,
        skip: Collection[int] = (),
        *,
        protocol: str = "jobs",
    ) -> None:
        if protocol not in PROTOCOLS:
            raise ConfigurationError(
                f"there is no protocol {protocol!r}; there are {', '.join(PROTOCOLS)}"
            )
        rng = random.Random(f"served {seed}")
        self._seed, self._skip = seed, skip
        self._length = rng.randint(40, 70)
        self._factor = rng.choice((1, 1, 2))
        self._faulty = rng.random() < 0.6
        count = rng.choice((1, 2, 2, 3))
        self._ranks = [
            Rank(
                number,
                f"served {seed}",
                protocol,
                make_backend,
                rng,
                blocks=BLOCKS,
                chunks=rng.choice((1, 2, 4)),
                factor=self._factor,
                # The first has its part of everything; others may be without one, or not write.
                writes=number == 0 or rng.random() < 0.85,
                has_layers=number == 0 or rng.random() < 0.85,
            )
            for number in range(count)
        ]
        self._manager = HostOffloadingManager(
            common_num_chunks(rank.side.num_chunks for rank in self._ranks)
        )
        self._scheduler = PROTOCOLS[protocol].SchedulerSide(
            self._manager, workers=count, block_size_factor=self._factor
        )
        self._free = set(range(BLOCKS))
        self._requests: dict[str, _Request] = {}
        self._held: dict[str, list[int]] = {}  # of requests that are gone, until they are released
        self._next = 0
        self._draining = False
        self.outcome = Outcome(seed)

    # ------------------------------------------------------------------------------------ running
    def run(self) -> Outcome:
        """Do all operations, end everything, and look at everything."""
        outcome = self.outcome
        try:
            for index in range(self._length):
                if index not in self._skip:
                    self._operate(index)
            self._finish()
        except DeadlockError as error:
            outcome.lost.append(f"a wait that never ends: {error}")
        except Exception as error:  # noqa: BLE001 - nothing may escape, of whatever kind
            outcome.violations.append(f"escaped: {type(error).__name__}: {error}")
        for rank in self._ranks:
            outcome.violations += rank.world.violations
            outcome.steps += rank.world.tick
            outcome.faults += rank.world.counters.faults
            if outcome.problems:
                outcome.overtaking += rank.world.overtakings()
        return outcome

    def _operate(self, index: int) -> None:
        rng = random.Random(f"operation {self._seed}:{index}")
        operation = rng.choices(
            (self._arrive, self._step, self._abort, self._slide, self._fault, self._device),
            (16, 50, 6, 6, 6 if self._faulty else 0, 16),
        )[0]
        said = operation(rng)
        if said is not None:
            self.outcome.operations.append(f"{index:3} {said}")
        self.outcome.steps += 1

    def _finish(self) -> None:
        """Most programs serve what is left; some shut down with everything in flight."""
        quiet = self._seed % 4 != 0
        if quiet:
            self._serve_the_rest()
        for key, chunk in self._manager.contents().items():
            for rank in self._ranks:
                rank.compare_chunk(_number(key), chunk, self._corrupt)
        for rank in self._ranks:
            rank.side.shutdown()
            rank.side.shutdown()
            if rank.world.dead is None:
                rank.world.drain()
            self.outcome.leaks += rank.leaks()
        if quiet:
            self._look_at_accounts()

    def _serve_the_rest(self) -> None:
        self._draining = True
        rng = random.Random(f"rest {self._seed}")
        for _ in range(DRAINING_STEPS):
            if not self._has_work():
                return
            self._step(rng)
            for rank in self._ranks:
                rank.world.run(20)
        self.outcome.lost += [f"request {r.name} is {r.state.value} for ever" for r in self._all()]
        self.outcome.lost += [f"the blocks of {name} are never released" for name in self._held]
        if self._scheduler.has_pending_work():
            self.outcome.lost.append("a transfer never ends")

    def _has_work(self) -> bool:
        return (
            bool(self._requests or self._held)
            or self._scheduler.has_pending_work()
            or any(rank.side.has_pending_work() for rank in self._ranks)
        )

    def _look_at_accounts(self) -> None:
        outcome, usage = self.outcome, self._manager.usage()
        for rank in self._ranks:
            outcome.lost += [
                f"rank {rank.number}: a load for {name} has no end" for name in rank.loading
            ]
        if usage.in_use:
            outcome.leaks.append(f"{usage.in_use} chunks in use")
        if usage.free + usage.evictable + usage.in_use != usage.capacity:
            outcome.leaks.append(f"chunks do not add up: {usage}")
        if len(self._free) != BLOCKS:
            outcome.leaks.append(f"{BLOCKS - len(self._free)} blocks were not given back")

    def _corrupt(self, what: str) -> None:
        self.outcome.corrupt.append(what)

    def _all(self, *states: _State) -> list[_Request]:
        return [r for r in self._requests.values() if not states or r.state in states]

    @contextmanager
    def _never_waiting(self, what: str) -> Iterator[None]:
        """Nothing in here may wait for a device."""
        before = [(r.world.counters.host_waits, r.world.tick) for r in self._ranks]
        yield
        if before != [(r.world.counters.host_waits, r.world.tick) for r in self._ranks]:
            self.outcome.violations.append(f"{what} waited for the device")

    # ------------------------------------------------------------------------------ operations
    def _arrive(self, rng: random.Random) -> str:
        family, length = rng.randrange(FAMILIES), rng.randint(1, LONGEST)
        name = f"r{self._next}"
        self._next += 1
        keys = [family * LONGEST + at for at in range(length)]
        self._requests[name] = _Request(name, keys, rng.randint(0, 3))
        return f"{name} arrives: keys {keys}"

    def _abort(self, rng: random.Random) -> str | None:
        if not self._requests:
            return None
        request = rng.choice(self._all())
        self._end(request, aborted=True)
        return f"{request.name}, {request.state.value}, is aborted"

    def _slide(self, rng: random.Random) -> str | None:
        """A running request does not need its first chunk any more."""
        running = [r for r in self._all(_State.RUNNING) if r.done and r.blocks[0] and not r.redo]
        if not running:
            return None
        request = rng.choice(running)
        blocks = request.blocks[0] or []
        request.blocks[0] = None
        request.offered = max(request.offered, 1)
        self._free |= set(blocks)
        return f"{request.name} gives blocks {blocks} back"

    def _fault(self, rng: random.Random) -> str:
        rank, lane = rng.choice(self._ranks), rng.choice((Lane.STORE, Lane.LOAD))
        fault = rng.choice(list(SimFault))
        rank.world.inject(fault, lane)
        return f"rank {rank.number}: the next {lane.value} will fail: {fault.value}"

    def _device(self, rng: random.Random) -> None:
        for rank in self._ranks:
            if rng.random() < 0.5:
                rank.launcher.step()
            rank.world.run(rng.choice((0, 1, 2, 5, 20)))

    # ------------------------------------------------------------------------------------ a step
    def _step(self, rng: random.Random) -> str:
        said: list[str] = []
        step = _Step()
        running = self._all(_State.RUNNING)
        first = rng.random() < 0.5
        if first:
            self._plan_running(running, step, rng, said)
        self._admit(step, rng, said)
        if not first:
            self._plan_running(running, step, rng, said)
        if rng.random() < 0.1 and not self._draining and (busy := sorted(step.writes)):
            # Aborted between its scheduling and its step.
            request = self._requests[rng.choice(busy)]
            step.forget(request.name)
            said.append(f"{request.name} is aborted before it is computed")
            self._end(request, aborted=True)
        if rng.random() < 0.3 and self._free:
            step.taken = rng.sample(sorted(self._free), 1)
            self._scheduler.allocated(step.taken)
            said.append(f"somebody else takes blocks {step.taken}")
        metadata = self._scheduler.build_metadata()
        if rng.random() < 0.04:
            said.append("the model fails")
            self._break_off(metadata, step, said)
            return "step: " + "; ".join(said)
        self._execute(metadata, step, rng)
        for request in running:
            if request.name in self._requests and request.left < 0:
                said.append(f"{request.name} finishes")
                self._end(request)
        self._poll(rng, said)
        return "step: " + "; ".join(said)

    def _plan_running(
        self, running: list[_Request], step: _Step, rng: random.Random, said: list[str]
    ) -> None:
        for request in running:
            if self._requests.get(request.name) is not request:
                continue
            if request.state is not _State.RUNNING:
                continue  # preempted in this step
            writes = step.writes.setdefault(request.name, [])
            reads = step.reads.setdefault(request.name, [])
            for key, piece, block in request.redo:
                writes.append((key, {piece: block}))
            request.redo = []
            if request.done < len(request.keys):
                blocks = request.blocks[request.done] or []
                writes.append((request.keys[request.done], pieces_of(blocks)))
                said.append(f"{request.name} computes key {request.keys[request.done]} in {blocks}")
                request.done += 1
            else:
                request.left -= 1
            for key, chunk in zip(request.keys[: request.done], request.blocks, strict=False):
                if chunk:
                    reads.append((key, pieces_of(chunk)))
            if rng.random() < 0.7:
                self._offer(request, said)

    def _offer(self, request: _Request, said: list[str]) -> None:
        places = [i for i in range(request.offered, request.done) if request.blocks[i]]
        request.offered = request.done
        if places:
            keys = [request.keys[i] for i in places]
            blocks = [block for i in places for block in request.blocks[i] or []]
            number = self._scheduler.store(request.name, [_key(key) for key in keys], blocks)
            said.append(f"{request.name} stores keys {keys} from {blocks} ({number})")
            self.outcome.jobs += number is not None

    def _admit(self, step: _Step, rng: random.Random, said: list[str]) -> None:
        for request in self._all(_State.WAITING)[:2]:
            needed = len(request.keys) * self._factor
            if len(self._free) < needed:
                victims = [r for r in self._all(_State.RUNNING, _State.LOADING) if not r.redo]
                if not victims or self._draining or rng.random() < 0.5:
                    return
                self._preempt(rng.choice(victims), step, said)
            if len(self._free) < needed:
                return
            taken = rng.sample(sorted(self._free), needed)
            self._free -= set(taken)
            self._scheduler.allocated(taken)
            factor = self._factor
            request.blocks = [taken[at : at + factor] for at in range(0, needed, factor)]
            self._look_up(request, taken, step, rng, said)

    def _look_up(
        self,
        request: _Request,
        taken: list[int],
        step: _Step,
        rng: random.Random,
        said: list[str],
    ) -> None:
        keys = [_key(key) for key in request.keys]
        hits = self._scheduler.lookup(request.name, keys).hits
        request.hits = request.done = request.offered = hits
        if not hits:
            request.state = _State.RUNNING
            said.append(f"{request.name} begins in blocks {taken}")
            return
        request.state = _State.LOADING
        request.skipped = rng.randrange(self._factor)
        if request.skipped:
            computed = pieces_of(taken[: request.skipped])
            step.writes.setdefault(request.name, []).append((request.keys[0], computed))
        target = taken[request.skipped : hits * self._factor]
        number = self._scheduler.load(
            request.name, keys[:hits], DeviceLoadStoreSpec(target, None, [request.skipped])
        )
        self.outcome.jobs += 1
        said.append(f"{request.name} loads keys {request.keys[:hits]} into {target} ({number})")

    def _preempt(self, request: _Request, step: _Step, said: list[str]) -> None:
        said.append(f"{request.name} loses blocks {request.own()}")
        step.forget(request.name)
        self._scheduler.preempted(request.name)
        self._free |= set(request.own())
        request.blocks, request.state, request.done, request.offered = [], _State.WAITING, 0, 0
        # A load of its that is in flight is still reported, for a request that began again.
        del self._requests[request.name]
        request.name += "'"
        self._requests[request.name] = request

    def _end(self, request: _Request, *, aborted: bool = False) -> None:
        del self._requests[request.name]
        if self._scheduler.request_finished(request.name, aborted=aborted):
            self._held[request.name] = request.own()
            return
        self._free |= set(request.own())
        if any(request.name in rank.loading for rank in self._ranks):
            self.outcome.violations.append(
                f"the blocks of {request.name} are free while a load writes to them"
            )

    def _execute(self, metadata: Any, step: _Step, rng: random.Random) -> None:
        for rank in self._ranks:
            rank.side.handle_preemptions(metadata)
            with self._never_waiting("a step"):
                rank.side.start_step(metadata)
                for name in _loading(metadata):
                    rank.loading[name] = rank.loading.get(name, 0) + 1
                for writes in step.writes.values():
                    for key, pieces in writes:
                        rank.write(key, pieces)
                if step.taken:
                    rank.write(NOBODYS, pieces_of(step.taken))
                for reads in step.reads.values():
                    for key, pieces in reads:
                        rank.read(key, pieces, self._corrupt)
                rank.side.finish_step()
            if rng.random() < 0.4:
                rank.launcher.step()
            rank.world.run(rng.choice((0, 0, 1, 2, 3, 5, 8)))

    def _break_off(self, metadata: Any, step: _Step, said: list[str]) -> None:
        """The step begins and is never finished: what it was to compute begins again."""
        for rank in self._ranks:
            rank.side.handle_preemptions(metadata)
            rank.side.start_step(metadata)
            for name in _loading(metadata):
                rank.loading[name] = rank.loading.get(name, 0) + 1
        for name in sorted(step.writes):
            self._preempt(self._requests[name], step, said)

    def _poll(self, rng: random.Random, said: list[str]) -> None:
        reports = []
        with self._never_waiting("a poll"):
            for rank in self._ranks:
                for name in rank.side.get_finished().loaded or ():
                    self._loaded_on(rank, name)
                reports.append(rank.side.take_worker_metadata())
                rank.side.take_statistics()
        together = rng.random() < 0.5
        for report in [aggregate(reports)] if together else reports:
            self._apply(self._scheduler.update(report), said)

    def _loaded_on(self, rank: Rank, name: str) -> None:
        rank.loading[name] = rank.loading.get(name, 0) - 1
        if rank.loading[name] < 0:
            self.outcome.lost.append(f"rank {rank.number}: a load for {name} has ended twice")
        if not rank.loading[name]:
            del rank.loading[name]

    def _apply(self, ended: StepOutcome, said: list[str]) -> None:
        contents = self._manager.contents()
        for key in ended.stored:
            if key in contents:
                for rank in self._ranks:
                    rank.compare_chunk(_number(key), contents[key], self._corrupt)
        for name in ended.released:
            said.append(f"the blocks of {name} are released")
            self._free |= set(self._held.pop(name))
        for name in ended.loaded:
            self._go_on(name, set(ended.invalid_blocks.get(name, {}).get(0, ())), said)

    def _go_on(self, name: str, invalid: set[int], said: list[str]) -> None:
        """The load of a request has ended: what it left without content is computed."""
        request = self._requests.get(name)
        if request is None or request.state is not _State.LOADING:
            self.outcome.lost.append(f"a load ended for {name}, which waits for none")
            return
        request.state = _State.RUNNING
        said.append(f"{name} is loaded, but for blocks {sorted(invalid)}")
        for at, key in enumerate(request.keys[: request.hits]):
            loaded = {
                piece: block
                for piece, block in pieces_of(request.blocks[at] or []).items()
                if at or piece >= request.skipped
            }
            request.redo += [(key, p, b) for p, b in loaded.items() if b in invalid]
            good = {piece: block for piece, block in loaded.items() if block not in invalid}
            for rank in self._ranks:
                rank.compare(key, good, self._corrupt)


def _loading(metadata: jobs.Metadata | events.Metadata) -> list[str]:
    """Whom the step's loads serve."""
    if isinstance(metadata, jobs.Metadata):
        return [job.request_id for job in metadata.loads]
    return [name for names in metadata.load_requests.values() for name in names]


def _key(key: int) -> OffloadKey:
    return OffloadKey(b"key %d" % key)


def _number(key: OffloadKey) -> int:
    return int(key.block_hash.split()[1])
