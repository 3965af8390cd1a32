"""The contiguous copy that everything is compared with."""

from __future__ import annotations

import threading

import pytest
import torch

from kvoffload.backends.cpu.backend import CpuBackend
from kvoffload.core.host_memory import HostMemory
from kvoffload.core.lanes import Lane
from kvoffload.rig import rig_for


@pytest.mark.parametrize("threads", [1, 3, 64])
@pytest.mark.parametrize("nbytes", [1, 5, 4097])
def test_it_moves_every_byte_with_as_many_threads_as_the_backend(
    threads: int, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[HostMemory] = []
    started: list[threading.Thread] = []

    def note(*arguments: int, **options: bool) -> HostMemory:
        made.append(HostMemory(*arguments, **options))
        return made[-1]

    start = threading.Thread.start
    monkeypatch.setattr("kvoffload.rig.thread.HostMemory", note)
    backend = CpuBackend()
    backend.copy_threads = threads
    with rig_for(backend) as rig:
        copy = rig.one_copy(nbytes, Lane.STORE)
        assert copy is not None
        source, target = (memory.tensor for memory in made)

        def start_and_note(thread: threading.Thread) -> None:
            started.append(thread)
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_and_note)
        for value in (7, 9):
            source.fill_(value)
            copy()
            assert torch.equal(target, source)
    backend.close()
    assert len(made) == 2, "it allocates once"
    pieces = -(-nbytes // -(-nbytes // threads))
    assert len(started) == 2 * (pieces - 1)


def test_its_seconds_are_told(backend: CpuBackend) -> None:
    with rig_for(backend) as rig:
        seconds = rig.seconds_of_one_copy(4096, Lane.LOAD)
    backend.close()
    assert seconds is not None
    assert seconds > 0
