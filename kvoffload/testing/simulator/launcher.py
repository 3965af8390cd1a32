"""A launcher that runs when a scheduler steps it: the other thread, made deterministic."""

from __future__ import annotations

from collections import deque

from kvoffload.connector.events.launcher import Launch, Launcher


class SteppedLauncher(Launcher):
    """Holds launches back until :meth:`step`."""

    def __init__(self) -> None:
        self.waiting: deque[Launch] = deque()

    def submit(self, launch: Launch) -> None:
        self.waiting.append(launch)

    def step(self) -> bool:
        """Run the oldest launch; False if there is none."""
        if not self.waiting:
            return False
        self.waiting.popleft()()
        return True

    def drain(self) -> None:
        while self.step():
            pass

    def close(self) -> None:
        self.drain()
