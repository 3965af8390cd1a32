"""Holding a stream until somebody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvoffload.testing.fake_device import FakeDevice


@contextmanager
def until_waited_for(fake: FakeDevice, stream: torch.Stream) -> Iterator[None]:
    """Hold the stream for a call that must wait for it; release it when the call does."""
    before = fake.counts().synchronizations
    returned = threading.Event()

    def waited() -> bool:
        return fake.counts().synchronizations > before

    def release() -> None:
        while not waited() and not returned.wait(0.001):
            pass
        fake.release(stream)

    thread = threading.Thread(target=release)
    fake.hold(stream)
    thread.start()
    try:
        yield
        assert waited()
    finally:
        returned.set()
        thread.join()
