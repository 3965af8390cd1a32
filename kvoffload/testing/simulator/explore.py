"""Small programs in every interleaving.

The host and the streams are actors. Only host steps, copies and compute branch: waits and
recordings touch no memory, so that they run as soon as they can.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from kvoffload.core.engine import TransferEngine
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.lanes import Lane
from kvoffload.core.specs import DeviceLoadStoreSpec, HostLoadStoreSpec, LoadStoreSpec
from kvoffload.testing.simulator.backend import SimBackend
from kvoffload.testing.simulator.world import SimStream, World

Choose: TypeAlias = Callable[[int], int]
"""From a number of possibilities to the one taken."""

BLOCKS, CHUNKS, PAGE = 2, 2, 8


class Move(NamedTuple):
    """A job that moves one block: device blocks and chunks by their ids."""

    lane: Lane
    src: int
    dst: int

    def __str__(self) -> str:
        names = {Lane.STORE: "block {} → chunk {}", Lane.LOAD: "chunk {} → block {}"}
        return names.get(self.lane, "block {} → block {}").format(self.src, self.dst)


MOVES = tuple(
    [Move(Lane.STORE, b, c) for b in range(BLOCKS) for c in range(CHUNKS)]
    + [Move(Lane.LOAD, c, b) for b in range(BLOCKS) for c in range(CHUNKS)]
    + [Move(Lane.COPY, a, b) for a, b in itertools.permutations(range(BLOCKS), 2)]
)


def programs(jobs: int) -> Iterator[tuple[Move, ...]]:
    """All programs of so many jobs, but for those that only name blocks or chunks otherwise."""
    for program in itertools.product(MOVES, repeat=jobs):
        if _is_canonical(program):
            yield program


def _is_canonical(program: Sequence[Move]) -> bool:
    """Block 0 is named before block 1, and chunk 0 before chunk 1."""
    blocks: list[int] = []
    chunks: list[int] = []
    for lane, src, dst in program:
        (chunks if lane is Lane.LOAD else blocks).append(src)
        (chunks if lane is Lane.STORE else blocks).append(dst)
    return blocks[0] == 0 and (not chunks or chunks[0] == 0)


@dataclass
class Exploration:
    """What was found.

    Attributes:
        schedules: interleavings that were run.
        faults: one line for each that went wrong.
        complete: they were all there are.
    """

    schedules: int = 0
    faults: list[str] = field(default_factory=list)
    complete: bool = True


def explore(run: Callable[[Choose], str | None], limit: int = 100_000) -> Exploration:
    """Run every interleaving, depth first, each from the start.

    Args:
        run: builds everything anew, asks which possibility to take, and returns what went wrong.
        limit: stop after so many.
    """
    found = Exploration()
    prefix: list[int] = []
    while True:
        script = _Script(prefix)
        fault = run(script)
        found.schedules += 1
        if fault is not None:
            found.faults.append(fault)
        prefix = script.next_prefix()
        if not prefix:
            return found
        if found.schedules >= limit:
            found.complete = False
            return found


class _Script:
    """Takes the choices it was given, and then the first of each."""

    def __init__(self, prefix: Sequence[int]) -> None:
        self._prefix = prefix
        self._trail: list[tuple[int, int]] = []  # (taken, of how many)

    def __call__(self, count: int) -> int:
        at = len(self._trail)
        choice = self._prefix[at] if at < len(self._prefix) else 0
        self._trail.append((choice, count))
        return choice

    def next_prefix(self) -> list[int]:
        """The choices of the next run; none when all were taken."""
        while self._trail and self._trail[-1][0] + 1 == self._trail[-1][1]:
            self._trail.pop()
        if not self._trail:
            return []
        *before, (last, _) = self._trail
        return [choice for choice, _ in before] + [last + 1]


def run_program(program: Sequence[Move], choose: Choose, *, fenced: bool = True) -> str | None:
    """Compute writes all blocks, the jobs follow, and compute reads all blocks.

    Args:
        program: the jobs.
        choose: which actor goes next.
        fenced: whether the last compute waits for the jobs, as it must.

    Returns:
        What went wrong, if anything did.
    """
    world = World()
    tensor = torch.zeros(BLOCKS, PAGE, dtype=torch.uint8)
    memory = tensor.numpy()
    engine = TransferEngine(
        SimBackend(world), CanonicalKVCaches.from_tensors([tensor]), host_bytes=CHUNKS * PAGE
    )
    host = engine.host.memory.tensor.numpy()[: CHUNKS * PAGE].reshape(CHUNKS, PAGE)
    read: list[list[int]] = []
    blocks, chunks = [10 + b for b in range(BLOCKS)], [0] * CHUNKS

    def write() -> None:
        memory[:] = np.array([[10 + b] for b in range(BLOCKS)])

    steps: list[Callable[[], None]] = [lambda: world.compute.submit(write)]
    for job_id, move in enumerate(program):
        steps.append(lambda job_id=job_id, move=move: engine.submit(job_id, *_specs(move)))  # type: ignore[misc]
        # What the program means: one job after the other.
        source = (chunks if move.lane is Lane.LOAD else blocks)[move.src]
        (chunks if move.lane is Lane.STORE else blocks)[move.dst] = source
    if fenced:
        steps.append(lambda: engine.fence(range(len(program))))
    steps.append(lambda: world.compute.submit(lambda: read.append(memory[:, -1].tolist())))

    _interleave(world, steps, choose)
    results = [result for lane in Lane for result in engine.finished(lane)]
    found = memory[:, 0].tolist(), host[:, 0].tolist()
    engine.shutdown()
    if sorted(r.job_id for r in results) != list(range(len(program))):
        return f"{len(results)} results for {len(program)} jobs"
    for result in results:
        if not result.success:
            return f"job {result.job_id} failed: {result.error}"
    if found != (blocks, chunks):
        return f"blocks {found[0]}, chunks {found[1]}; they should be {blocks}, {chunks}"
    if read != [blocks]:
        return f"compute read {read}; it should have read {blocks}"
    return world.violations[0] if world.violations else None


def _specs(move: Move) -> tuple[LoadStoreSpec, LoadStoreSpec]:
    src = (
        HostLoadStoreSpec([move.src]) if move.lane is Lane.LOAD else DeviceLoadStoreSpec([move.src])
    )
    dst = (
        HostLoadStoreSpec([move.dst])
        if move.lane is Lane.STORE
        else DeviceLoadStoreSpec([move.dst])
    )
    return src, dst


def _interleave(world: World, steps: Sequence[Callable[[], None]], choose: Choose) -> None:
    """Run the host's steps in their order, and the device's as they come."""
    todo = list(reversed(steps))
    while True:
        world.settle()
        actors: list[SimStream | None] = [*world.runnable()]
        if todo:
            actors.append(None)  # the host
        if not actors:
            return
        actor = actors[choose(len(actors)) if len(actors) > 1 else 0]
        if actor is None:
            todo.pop()()
        else:
            actor.step()
