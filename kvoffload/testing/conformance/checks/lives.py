"""Guarantees 7, 8 and 9, over the lives of several caches and backends."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path

from torch.multiprocessing.reductions import StorageWeakRef

from kvoffload.testing.conformance.check import Guarantee, MakeBackend, check, require, skip
from kvoffload.testing.conformance.lab import Lab

LENT = 4 << 20
"""Bytes of host memory that are taken and given back."""
STATUS = Path("/proc/self/status")


def _every_way(lab: Lab, first: int) -> None:
    lab.fill_all(first)
    jobs = [lab.store([1, 7], [0, 5]), lab.load([0, 5], [2, 3]), lab.copy([2], [9])]
    lab.succeed(*jobs)
    lab.check()


@check(Guarantee.QUIET_EXIT, cache=None)
def two_backends_work_side_by_side_and_one_outlives_the_other(make_backend: MakeBackend) -> None:
    with Lab(make_backend()) as lab:
        _every_way(lab, 0)
        with Lab(make_backend()) as other:
            _every_way(other, 50)
            _every_way(lab, 100)
        _every_way(lab, 150)


@check(Guarantee.ACCOUNTING, cache=None)
def an_unregistered_backend_has_let_go_of_the_caches(make_backend: MakeBackend) -> None:
    def one_life(*, used: bool) -> int:
        """Bytes in use after the caches were given up, while the backend is still open."""
        with Lab(make_backend()) as lab:
            if used:
                _every_way(lab, 0)
            storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in lab.tensors]  # type: ignore[no-untyped-call]
            lab.let_go()
            gc.collect()
            kept = sum(not storage.expired() for storage in storages)  # type: ignore[no-untyped-call]
            require(not kept, f"{kept} of {len(storages)} tensors are kept after unbind")
            return lab.rig.allocated_bytes() or 0

    one_life(used=True)  # whatever is made once for all
    kept = one_life(used=True) - one_life(used=False)
    require(kept <= 0, f"{kept} bytes of the device are kept after unbind")


def _resident() -> int:
    """Bytes of this process that occupy memory."""
    for line in STATUS.read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


@check(Guarantee.MEMORY, cache=None)
def released_host_memory_is_given_back(make_backend: MakeBackend) -> None:
    if not STATUS.exists():
        skip("this system does not tell how much memory a process has")
    with contextlib.closing(make_backend()) as backend:

        def lend(times: int) -> int:
            for _ in range(times):
                memory = backend.allocate_host(LENT)
                array = memory.numpy()
                require(not array.any(), "memory that was used before is not zeroed")
                array[:] = 1
                del array
                memory.release()
                del memory
            gc.collect()
            return _resident()

        # The first ones may stay: allocators of pinned memory keep it for the next.
        before = lend(3)
        grown = lend(8) - before
        require(grown < 4 * LENT, f"{grown} bytes more after {8 * LENT} were lent and released")
