"""Random programs: an engine that computes, stores, loads, copies, preempts, aborts and resets, on
a device that fails now and then.

A program is a list of operations, each with random numbers of its own, so that it can be run again
without some of them. What every block must hold is known: the content of a key is a function of the
key, and a slot of blocks holds one key. Nothing is compared in the middle of a transfer; a key that
lookups find, a read that was fenced, and everything at the end are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kvoffload.core.backend import Backend, HostOrder
from kvoffload.core.engine import CURRENT_STREAM, After, TransferEngine, TransferResult
from kvoffload.core.errors import KeyNotReadyError
from kvoffload.core.kv_caches import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from kvoffload.core.lanes import Lane
from kvoffload.core.specs import DeviceLoadStoreSpec, HostLoadStoreSpec, LoadStoreSpec
from kvoffload.scheduler.host_manager import HostOffloadingManager
from kvoffload.scheduler.keys import OffloadKey
from kvoffload.scheduler.manager import RequestContext
from kvoffload.testing.simulator.backend import SimBackend
from kvoffload.testing.simulator.world import DeadlockError, SimFault, Switches, World

BLOCKS, CHUNKS, KEYS = 16, 3, 6
PAGES = (8, 24)
GAP = 0x55  # what lies between pages
MakeBackend = Callable[[World], Backend]


@dataclass
class Outcome:
    """How a program went.

    Attributes:
        seed: of the program.
        operations: what the host did, one line each, with the index of the operation.
        steps: of host and device.
        jobs: submitted.
        faults: injected.
        corrupt: one line for each block that held what it should not have.
        lost: one line for each job that ended never, or twice, or otherwise than it should.
        leaks: one line for each thing that was not given back.
        violations: one line for each other promise that was broken.
        overtaking: who overtook whom, for the first block that was corrupt.
    """

    seed: int
    operations: list[str] = field(default_factory=list)
    steps: int = 0
    jobs: int = 0
    faults: int = 0
    corrupt: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    overtaking: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """All that went wrong."""
        return self.corrupt + self.lost + self.leaks + self.violations


@dataclass(eq=False)
class _Slot:
    """Blocks that hold the content of a key, or will when their job is done."""

    key: int
    blocks: list[int]
    job: int | None = None  # that fills them, as far as the host knows
    users: set[int] = field(default_factory=set)  # jobs that read them


@dataclass(eq=False)
class _Submitted:
    """A job whose result has not come."""

    lane: Lane
    name: str
    slot: _Slot | None = None  # that it fills
    source: _Slot | None = None  # that it reads
    key: int | None = None  # that it stores or loads by way of the manager
    context: RequestContext | None = None
    chunks: list[int] = field(default_factory=list)  # that it fills


@dataclass(eq=False)
class _Read:
    """What compute saw in a slot, once it ran."""

    slot: _Slot
    key: int
    job: int | None
    seen: list[npt.NDArray[np.uint8]] = field(default_factory=list)


def content(key: int, piece: int, tensor: int) -> npt.NDArray[np.uint8]:
    """The page of one block of a key: names the key, the block, the tensor and the offset."""
    start = 1 + key * 23 + piece * 7 + tensor * 3
    page: npt.NDArray[np.uint8] = ((start + np.arange(PAGES[tensor])) % 251).astype(np.uint8)
    return page


class Program:
    """One run of one program.

    Args:
        seed: of the program, and of the scheduler.
        make_backend: the backend under test, on the world it is given.
        skip: operations to leave out.
    """

    def __init__(
        self,
        seed: int,
        make_backend: MakeBackend = SimBackend,
        skip: Collection[int] = (),
    ) -> None:
        rng = random.Random(f"program {seed}")
        self._seed, self._skip = seed, skip
        self._length = rng.randint(55, 90)
        self._factor = rng.choice((1, 1, 2))
        self.world = World(
            f"schedule {seed}",
            Switches(
                relaxed_source=rng.random() < 0.5,
                max_batch=rng.choice((None, None, 3)),
                batch=rng.random() < 0.9,
                queue_depth=rng.choice((None, 30)),
            ),
        )
        self._faulty = rng.random() < 0.6
        # Pages lie apart, so that a backend that takes them for adjacent shows.
        gap = rng.choice((0, 8))
        self._tensors = [torch.full((BLOCKS, page + gap), GAP, dtype=torch.int8) for page in PAGES]
        self._memory = [tensor.numpy().view(np.uint8) for tensor in self._tensors]
        self._backend = make_backend(self.world)
        self._engine = TransferEngine(
            self._backend,
            CanonicalKVCaches(
                [
                    CanonicalKVCacheTensor(tensor[:, :page], page)
                    for tensor, page in zip(self._tensors, PAGES, strict=True)
                ],
                [[CanonicalKVCacheRef(index, page) for index, page in enumerate(PAGES)]],
            ),
            host_bytes=sum(PAGES) * self._factor * CHUNKS,
            block_size_factor=self._factor,
            host_order=rng.choice(list(HostOrder)),
        )
        self._manager = HostOffloadingManager(CHUNKS)
        self._free = set(range(BLOCKS))
        self._slots: list[_Slot] = []
        self._jobs: dict[int, _Submitted] = {}
        self._ended: dict[int, TransferResult] = {}
        self._reads: list[_Read] = []
        self._promised: dict[int, RequestContext] = {}
        self._void: set[RequestContext] = set()  # promises that a reset or a failed load ended
        self._next_job = 0
        self.outcome = Outcome(seed)

    # ------------------------------------------------------------------------------------ running
    def run(self) -> Outcome:
        """Do all operations, end all jobs, and look at everything."""
        try:
            for index in range(self._length):
                if index not in self._skip:
                    self._operate(index)
            self._finish()
        except DeadlockError as error:
            self.outcome.lost.append(f"a wait that never ends: {error}")
        except Exception as error:  # noqa: BLE001 - nothing may escape, of whatever kind
            self.outcome.violations.append(f"escaped: {type(error).__name__}: {error}")
        self.outcome.violations += self.world.violations
        if self.world.counters.blocked_enqueues:
            self.outcome.violations.append("the host was blocked by a full stream")
        if self.outcome.problems:
            self.outcome.overtaking = self.world.overtakings()
        self.outcome.steps += self.world.tick
        self.outcome.faults = self.world.counters.faults
        return self.outcome

    def _operate(self, index: int) -> None:
        rng = random.Random(f"operation {self._seed}:{index}")
        operation = rng.choices(
            (
                self._write,
                self._store,
                self._look_up,
                self._load,
                self._load_what_is_being_stored,
                self._copy,
                self._use,
                self._preempt,
                self._poll,
                self._abort,
                self._fault,
                self._reset,
            ),
            (16, 22, 18, 18, 6, 8, 10, 12, 14, 2, 3 if self._faulty else 0, 1),
        )[0]
        waits, ticks = self.world.counters.host_waits, self.world.tick
        said = operation(rng)
        if said is not None:
            self.outcome.operations.append(f"{index:3} {said}")
        waited = self.world.counters.host_waits > waits or self.world.tick > ticks
        if waited and operation != self._reset:
            self.outcome.violations.append(f"operation {index} waited for the device: {said}")
        self.outcome.steps += 1
        self.world.run(rng.choice((0, 0, 1, 2, 3, 5, 8)))

    def _finish(self) -> None:
        """Half of the programs shut down with jobs in flight."""
        if self._seed % 2:
            self._engine.wait(self._engine.in_flight)
            self._poll(random.Random(0))
        for context in self._promised.values():
            self._manager.release(context)
        host = self._engine.host.memory.tensor.numpy()  # outlives the engine's own reference
        self._engine.shutdown()
        self._poll(random.Random(0), host)
        if self.world.dead is None:
            self.world.drain()
        self._look(host)

    # ----------------------------------------------------------------------------------- the host
    def _allocate(self, rng: random.Random) -> list[int] | None:
        if len(self._free) < self._factor:
            return None
        blocks = rng.sample(sorted(self._free), self._factor)
        self._free -= set(blocks)
        return blocks

    def _write(self, rng: random.Random) -> str | None:
        """Compute fills new blocks with the content of a key."""
        blocks = self._allocate(rng)
        if blocks is None:
            return None
        key = rng.randrange(KEYS)
        self._slots.append(_Slot(key, blocks))
        self._submit_write(key, blocks)
        return f"compute writes key {key} into blocks {blocks}"

    def _submit_write(self, key: int, blocks: Sequence[int]) -> None:
        def work() -> None:
            for tensor, memory in enumerate(self._memory):
                for piece, block in enumerate(blocks):
                    memory[block, : PAGES[tensor]] = content(key, piece, tensor)

        what = f"compute that writes key {key} into blocks {list(blocks)}"
        self.world.compute.submit(work, what, writes=blocks)

    def _store(self, rng: random.Random) -> str | None:
        """Offer a slot's key to the manager, and store what it wants."""
        slots = [slot for slot in self._slots if len(slot.blocks) == self._factor]
        if not slots:
            return None
        slot = rng.choice(slots)
        context = RequestContext(f"store {self._next_job}")
        output = self._manager.prepare_store([_key(slot.key)], context)
        self._manager.release(context)
        if output is None or not output.keys_to_store:
            return None
        ids = np.array(slot.blocks), output.store_spec.block_ids.copy()
        job = self._submit(
            _Submitted(
                Lane.STORE,
                f"stores key {slot.key} from blocks {slot.blocks} to chunk {ids[1].tolist()}",
                source=slot,
                key=slot.key,
                context=context,
                chunks=ids[1].tolist(),
            ),
            DeviceLoadStoreSpec(ids[0]),
            HostLoadStoreSpec(ids[1]),
            self._after(rng),
        )
        slot.users.add(job)
        _overwrite(*ids)
        return f"job {job} {self._jobs[job].name}"

    def _look_up(self, rng: random.Random) -> str | None:
        """Look a key up: it is promised until it is loaded, or the request goes away."""
        key = rng.randrange(KEYS)
        if key in self._promised:
            self._manager.release(self._promised.pop(key))
            return f"the request for key {key} goes away"
        context = RequestContext(f"request {self.outcome.steps}")
        if not self._manager.lookup([_key(key)], context).hits:
            return None
        self._check_visible(key)
        self._promised[key] = context
        return f"key {key} is promised"

    def _load(self, rng: random.Random) -> str | None:
        """Load a key that was promised into new blocks; sometimes without its first block."""
        blocks = self._allocate(rng) if self._promised else None
        if blocks is None:
            return None
        key = rng.choice(sorted(self._promised))
        context = self._promised.pop(key)
        try:
            source = self._manager.prepare_load([_key(key)], context)
        except KeyNotReadyError:
            self._free |= set(blocks)
            self._manager.release(context)
            if context not in self._void:
                self.outcome.violations.append(f"key {key} was promised, and is gone")
            return None
        self._manager.release(context)
        skip = rng.randrange(self._factor)
        self._free |= set(blocks[:skip])
        slot = _Slot(key, blocks[skip:])
        ids = source.block_ids.copy(), np.array(slot.blocks)
        job = self._submit(
            _Submitted(
                Lane.LOAD,
                f"loads key {key} from chunk {ids[0].tolist()} into blocks {slot.blocks}",
                slot=slot,
                key=key,
                context=context,
            ),
            HostLoadStoreSpec(ids[0]),
            DeviceLoadStoreSpec(ids[1], None, [skip]),
            self._after(rng),
        )
        slot.job = job
        self._slots.append(slot)
        _overwrite(*ids)
        return f"job {job} {self._jobs[job].name}"

    def _load_what_is_being_stored(self, rng: random.Random) -> str | None:
        """Load from a chunk whose store is in flight: past the manager, in the order of jobs."""
        stores = [number for number, job in self._jobs.items() if job.lane is Lane.STORE]
        blocks = self._allocate(rng) if stores else None
        if blocks is None:
            return None
        store = self._jobs[rng.choice(stores)]
        slot = _Slot(store.key or 0, blocks)
        ids = np.array(store.chunks), np.array(blocks)
        job = self._submit(
            _Submitted(
                Lane.LOAD,
                f"loads key {slot.key}, being stored, from chunk {store.chunks} into {blocks}",
                slot=slot,
            ),
            HostLoadStoreSpec(ids[0]),
            DeviceLoadStoreSpec(ids[1]),
            self._after(rng),
        )
        slot.job = job
        self._slots.append(slot)
        _overwrite(*ids)
        return f"job {job} {self._jobs[job].name}"

    def _copy(self, rng: random.Random) -> str | None:
        """Copy a slot into new blocks."""
        slots = [slot for slot in self._slots if len(slot.blocks) == self._factor]
        blocks = self._allocate(rng) if slots else None
        if blocks is None:
            return None
        source = rng.choice(slots)
        slot = _Slot(source.key, blocks)
        ids = np.array(source.blocks), np.array(blocks)
        job = self._submit(
            _Submitted(
                Lane.COPY,
                f"copies key {slot.key} from blocks {source.blocks} into blocks {blocks}",
                slot=slot,
                source=source,
            ),
            DeviceLoadStoreSpec(ids[0]),
            DeviceLoadStoreSpec(ids[1]),
            self._after(rng),
        )
        source.users.add(job)
        slot.job = job
        self._slots.append(slot)
        _overwrite(*ids)
        return f"job {job} {self._jobs[job].name}"

    def _after(self, rng: random.Random) -> After:
        """Mostly what the current stream holds; sometimes an event that says the same."""
        if rng.random() < 0.7 or self.world.dead is not None:
            return CURRENT_STREAM
        mark = self._backend.new_event()
        self._backend.current_stream().record_event(mark)
        return mark

    def _submit(self, job: _Submitted, src: LoadStoreSpec, dst: LoadStoreSpec, after: After) -> int:
        number = self._next_job
        self._next_job += 1
        self._jobs[number] = job
        self.outcome.jobs += 1
        self._engine.submit(number, src, dst, after=after)
        return number

    def _use(self, rng: random.Random) -> str | None:
        """Compute reads a slot, after the job that fills it."""
        if not self._slots:
            return None
        slot = rng.choice(self._slots)
        if slot.job is not None:
            self._engine.fence([slot.job])
        read = _Read(slot, slot.key, slot.job)
        blocks = list(slot.blocks)
        self._reads.append(read)

        def work() -> None:
            read.seen = [memory[blocks].copy() for memory in self._memory]

        what = f"compute that reads key {slot.key} from blocks {blocks}"
        self.world.compute.submit(work, what, reads=blocks)
        return f"compute reads key {slot.key} from blocks {blocks}, after job {slot.job}"

    def _preempt(self, rng: random.Random) -> str | None:
        """Take a slot's blocks away, after a fence for the jobs that read them."""
        slots = [slot for slot in self._slots if slot.job is None]
        if not slots:
            return None
        slot = rng.choice(slots)
        readers = sorted(slot.users)
        self._engine.fence(readers)
        self._slots.remove(slot)
        self._give_back(slot)
        return f"blocks {slot.blocks} are taken from key {slot.key}, after jobs {readers}"

    def _abort(self, rng: random.Random) -> str | None:
        """Cancel a job; its blocks are free with its result, and not before."""
        if not self._jobs:
            return None
        job = rng.choice(sorted(self._jobs))
        self._engine.cancel([job, 10_000])
        return f"job {job} is cancelled"

    def _fault(self, rng: random.Random) -> str:
        lane, fault = rng.choice(list(Lane)), rng.choice(list(SimFault))
        self.world.inject(fault, lane)
        return f"the next {lane.value} will fail: {fault.value}"

    def _reset(self, rng: random.Random) -> str:  # noqa: ARG002 - as the other operations
        """Forget everything on the host; what is in flight stops first."""
        self._void |= set(self._promised.values())
        self._manager.reset()
        self._engine.reset()
        return "reset"

    def _poll(
        self,
        rng: random.Random,  # noqa: ARG002 - as the other operations
        host: npt.NDArray[np.uint8] | None = None,
    ) -> str | None:
        results = [result for lane in Lane for result in self._engine.finished(lane)]
        for result in results:
            job = self._jobs.pop(result.job_id, None)
            if job is None:
                self.outcome.lost.append(f"job {result.job_id} ended twice, or was never submitted")
                continue
            self._ended[result.job_id] = result
            self._apply(result, job, host)
        return f"poll: {[r.job_id for r in results]}" if results else None

    def _apply(
        self, result: TransferResult, job: _Submitted, host: npt.NDArray[np.uint8] | None
    ) -> None:
        if job.source is not None:
            job.source.users.discard(result.job_id)
        if job.context is not None and job.key is not None:
            keys = [_key(job.key)]
            if job.lane is Lane.STORE:
                self._manager.complete_store(keys, job.context, result.success)
                if result.success and self._manager.lookup(keys, job.context).hits:
                    self._manager.release(job.context)
                    self._check_visible(job.key, host)
            else:
                if not result.success and job.key in self._promised:
                    self._void.add(self._promised[job.key])
                self._manager.complete_load(keys, job.context, result.success)
        if job.slot is not None and job.slot.job == result.job_id:
            job.slot.job = None
            if not result.success:
                self._drop(job.slot)

    def _drop(self, slot: _Slot) -> None:
        """Its content is unknown. So is what was made of it meanwhile, as the results will tell."""
        self._slots.remove(slot)
        readers = sorted(slot.users)
        if readers:
            self._engine.fence(readers)
        self._give_back(slot)

    def _give_back(self, slot: _Slot) -> None:
        """The blocks are free, and poisoned: what still reads or writes them shows."""
        self._free |= set(slot.blocks)
        self._submit_write(KEYS + 1, slot.blocks)

    # -------------------------------------------------------------------------------- looking
    def _check_visible(self, key: int, host: npt.NDArray[np.uint8] | None = None) -> None:
        """The key that lookups find is in its chunk."""
        chunk = self._manager.contents().get(_key(key))
        if chunk is None:
            return
        memory = self._engine.host.memory.tensor.numpy() if host is None else host
        start, side = self._engine.host.memory.address, self._engine.geometry.host
        for tensor, page in enumerate(PAGES):
            for piece in range(self._factor):
                at = int(
                    side.base[tensor] - start + chunk * side.hi[tensor] + piece * side.lo[tensor]
                )
                if (memory[at : at + page] != content(key, piece, tensor)).any():
                    self._corrupt(f"chunk {chunk} does not hold key {key}, which lookups find")
                    return

    def _look(self, host: npt.NDArray[np.uint8]) -> None:
        """At the end everything is compared, and everything was given back."""
        outcome = self.outcome
        outcome.lost += [
            f"job {number} has no result: it {j.name}" for number, j in self._jobs.items()
        ]
        for slot in self._slots:
            if slot.job is None and self._differs(slot, [m[slot.blocks] for m in self._memory]):
                self._corrupt(f"blocks {slot.blocks} do not hold key {slot.key}")
        for memory, page in zip(self._memory, PAGES, strict=True):
            if (memory[:, page:] != GAP).any():
                self._corrupt("bytes between the pages were written")
        for read in self._reads:
            result = None if read.job is None else self._ended.get(read.job)
            filled = read.job is None or (result is not None and result.success)
            if filled and read.seen and self._differs(read.slot, read.seen):
                self._corrupt(f"compute read something else than key {read.key} in its blocks")
        for key in range(KEYS):
            self._check_visible(key, host)
        self._check_leaks()

    def _differs(self, slot: _Slot, pages: Sequence[npt.NDArray[np.uint8]]) -> bool:
        first = self._factor - len(slot.blocks)  # a load may have left out the first
        return any(
            (found[row, : PAGES[tensor]] != content(slot.key, first + row, tensor)).any()
            for tensor, found in enumerate(pages)
            for row in range(len(slot.blocks))
        )

    def _corrupt(self, what: str) -> None:
        self.outcome.corrupt.append(what)

    def _check_leaks(self) -> None:
        engine, outcome, counters = self._engine, self.outcome, self.world.counters
        leaks = {
            "jobs still running": engine.usage().running,
            "buffers not given back": engine.usage().buffers,
            "chunks in use": self._manager.usage().in_use,
            "streams not closed": counters.streams - 1,  # the caller's own
            "pins": counters.pins,
            "events alive": len(counters.live_events),
        }
        outcome.leaks += [f"{count} {what}" for what, count in leaks.items() if count]
        usage = self._manager.usage()
        if usage.free + usage.evictable + usage.in_use != usage.capacity:
            outcome.leaks.append(f"chunks do not add up: {usage}")
        for number, result in self._ended.items():
            if result.success and result.error is not None:
                outcome.violations.append(f"job {number} succeeded with an error")
            if not result.success and result.error is None:
                outcome.violations.append(f"job {number} failed without an error")


def _key(key: int) -> OffloadKey:
    return OffloadKey(b"key %d" % key)


def _overwrite(*ids: npt.NDArray[np.int64]) -> None:
    """The caller uses its arrays for something else."""
    for array in ids:
        array[:] = 0
