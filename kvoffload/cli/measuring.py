"""What every benchmark of a backend does: hold its device, take Ctrl-C, tell how far it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from kvoffload.cli.interrupt import current
from kvoffload.cli.output import stdout_to_stderr
from kvoffload.cli.progress import progress_bar
from kvoffload.core.backend import Backend
from kvoffload.core.errors import ConfigurationError
from kvoffload.core.sizes import parse_bytes, shortened
from kvoffload.rig import DeviceRig, rig_for

MOST_BLOCKS = 1_000_000
"""Of one job: what a machine has memory and patience for."""
MOST_PAGES = 64
"""Sizes of one run."""
ON_FAKE = "on the fake device: no figure here says anything about an accelerator"
"""What every form of output says there."""


@contextlib.contextmanager
def measuring(
    backend: Backend, what: str
) -> Iterator[tuple[DeviceRig, Callable[[int, int], None]]]:
    """The backend's rig, and what a benchmark calls before each measurement.

    That shows progress, and ends the benchmark if somebody pressed Ctrl-C. When this returns or
    raises, the backend is closed and every thread joined.

    Args:
        what: is done, for the progress bar.
    """
    interrupt = current()
    interrupt.check()
    stack = contextlib.ExitStack()
    try:
        # A backend that prints must not become a part of the result.
        stack.enter_context(stdout_to_stderr())
        stack.callback(backend.close)
        rig = stack.enter_context(rig_for(backend))
        with progress_bar(what, 1) as bar:

            def step(done: int, total: int) -> None:
                interrupt.check()
                bar(done, total)

            yield rig, step
    finally:
        # What is left is short, and leaves a thread behind if it is torn.
        interrupt.calm()
        stack.close()
    interrupt.check()


def parse_pages(text: str) -> list[int]:
    """Page sizes in bytes from a list such as ``"4KiB,64KiB"``; each once, in that order.

    Raises:
        ConfigurationError: naming ``--pages``.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MOST_PAGES:
        raise ConfigurationError(
            f"--pages {shortened(text)}: {len(parts)} sizes are more than the {MOST_PAGES} that "
            "are measured"
        )
    return list(dict.fromkeys(parse_bytes(part, "--pages") for part in parts))


def check_blocks(blocks: int) -> None:
    """There are not more blocks than are measured."""
    if blocks > MOST_BLOCKS:
        raise ConfigurationError(f"--blocks {blocks}: at most {MOST_BLOCKS:,} are measured")


def named(text: str, *, fake: bool) -> str:
    """A title; on the fake device it says so."""
    return f"{text}\n{ON_FAKE}" if fake else text
