"""One rank of a simulated engine: a device, a part of the cache, and its side of a protocol."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvoffload.connector import events, jobs
from kvoffload.core.backend import Backend
from kvoffload.core.kv_caches import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from kvoffload.core.worker import OffloadingWorker
from kvoffload.testing.simulator.launcher import SteppedLauncher
from kvoffload.testing.simulator.program import GAP, PAGES, MakeBackend, content
from kvoffload.testing.simulator.world import Switches, World

PROTOCOLS: Mapping[str, Any] = {"jobs": jobs, "events": events}
"""By name, the module that holds the protocol."""
RANK_STRIDE = 31
"""Distance between what two ranks hold of the same key."""

Wrong: TypeAlias = Callable[[str], None]


class Rank:
    """A simulated device, and a worker side on it.

    Args:
        number: of the rank.
        seed: of its scheduler.
        protocol: a key of :data:`PROTOCOLS`.
        make_backend: the backend under test, on the world it is given.
        rng: chooses how the device behaves.
        blocks: of the device.
        chunks: of host memory.
        factor: blocks per chunk.
        writes: whether it stores.
        has_layers: whether it has a part of the cache.
    """

    def __init__(
        self,
        number: int,
        seed: str,
        protocol: str,
        make_backend: MakeBackend,
        rng: random.Random,
        *,
        blocks: int,
        chunks: int,
        factor: int,
        writes: bool,
        has_layers: bool,
    ) -> None:
        self.number = number
        self.holds = writes and has_layers
        """What it stores and loads is compared."""
        self.world = World(
            f"{seed}:{number}",
            Switches(
                relaxed_source=rng.random() < 0.5,
                max_batch=rng.choice((None, 3)),
                queue_depth=rng.choice((None, 30)),
            ),
        )
        gap = rng.choice((0, 8))
        self._tensors = [torch.full((blocks, page + gap), GAP, dtype=torch.int8) for page in PAGES]
        self.memory = [tensor.numpy().view(np.uint8) for tensor in self._tensors]
        self.launcher = SteppedLauncher()
        self._chunks, self._factor, self._make_backend = chunks, factor, make_backend
        options = {"launcher": self.launcher} if protocol == "events" else {}
        self.side = PROTOCOLS[protocol].WorkerSide(self._make_worker, writes=writes, **options)
        self.side.register_kv_caches(self._caches() if has_layers else CanonicalKVCaches([], []))
        self.worker: OffloadingWorker | None = self.side.worker
        engine = None if self.worker is None else self.worker.engine
        self.engine = engine
        self.host = None if engine is None else engine.host.memory.tensor.numpy()
        self.loading: dict[str, int] = {}
        """Loads whose end this rank has not reported, by request."""

    def _caches(self) -> CanonicalKVCaches:
        return CanonicalKVCaches(
            [
                CanonicalKVCacheTensor(tensor[:, :page], page)
                for tensor, page in zip(self._tensors, PAGES, strict=True)
            ],
            [[CanonicalKVCacheRef(index, page) for index, page in enumerate(PAGES)]],
        )

    def _make_worker(self, caches: CanonicalKVCaches) -> OffloadingWorker:
        backend: Backend = self._make_backend(self.world)
        return OffloadingWorker.for_caches(
            backend,
            caches,
            host_bytes=sum(PAGES) * self._factor * self._chunks,
            block_size_factor=self._factor,
        )

    # ------------------------------------------------------------------------------ device work
    def _page(self, key: int, piece: int, tensor: int) -> npt.NDArray[np.uint8]:
        return content(key + RANK_STRIDE * self.number, piece, tensor)

    def write(self, key: int, pieces: Mapping[int, int]) -> None:
        """Compute writes pieces of a key: by piece, the block."""
        taken = dict(pieces)

        def work() -> None:
            for tensor, memory in enumerate(self.memory):
                for piece, block in taken.items():
                    memory[block, : PAGES[tensor]] = self._page(key, piece, tensor)

        what = f"compute that writes key {key} into blocks {list(taken.values())}"
        self.world.compute.submit(work, what, writes=taken.values())

    def read(self, key: int, pieces: Mapping[int, int], wrong: Wrong) -> None:
        """Compute reads pieces of a key, and says if they are not there."""
        taken = dict(pieces)
        what = f"compute that reads key {key} from blocks {list(taken.values())}"
        self.world.compute.submit(
            lambda: self.compare(key, taken, wrong), what, reads=taken.values()
        )

    def compare(self, key: int, pieces: Mapping[int, int], wrong: Wrong) -> None:
        """Say if the pieces are not in their blocks now."""
        if not self.holds:
            return
        for tensor, memory in enumerate(self.memory):
            for piece, block in pieces.items():
                if (memory[block, : PAGES[tensor]] != self._page(key, piece, tensor)).any():
                    wrong(f"rank {self.number}: block {block} does not hold key {key}")
                    return

    # ----------------------------------------------------------------------------- host memory
    def compare_chunk(self, key: int, chunk: int, wrong: Wrong) -> None:
        """Say if a chunk that lookups find does not hold its key."""
        if not self.holds or self.engine is None or self.host is None:
            return
        start, side = self.engine.host.layout, self.engine.geometry.host
        for tensor, page in enumerate(PAGES):
            for piece in range(self._factor):
                at = int(start.offset[tensor] + chunk * side.hi[tensor] + piece * side.lo[tensor])
                if (self.host[at : at + page] != self._page(key, piece, tensor)).any():
                    wrong(
                        f"rank {self.number}: chunk {chunk} does not hold key {key}, which "
                        f"lookups find"
                    )
                    return

    # ------------------------------------------------------------------------------------ the end
    def leaks(self) -> list[str]:
        """What was not given back, after a shutdown."""
        counters = self.world.counters
        found = {
            "streams not closed": counters.streams - 1,  # the caller's own
            "pins": counters.pins,
            "events alive": len(counters.live_events),
            "launches": len(self.launcher.waiting),
        }
        if self.engine is not None:
            found["jobs still running"] = self.engine.usage().running
            found["buffers not given back"] = self.engine.usage().buffers
        said = [f"rank {self.number}: {count} {what}" for what, count in found.items() if count]
        if any(
            (memory[:, page:] != GAP).any() for memory, page in zip(self.memory, PAGES, strict=True)
        ):
            said.append(f"rank {self.number}: bytes between the pages were written")
        return said


def pieces_of(blocks: Sequence[int | None], first: int = 0) -> dict[int, int]:
    """By piece, the blocks of a chunk that are there."""
    return {first + at: block for at, block in enumerate(blocks) if block is not None}
