"""What the command line writes, and where: results to standard output, all else to standard error.

Nothing is imported at the top that ``--help`` does not need.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType


class OutputError(Exception):
    """Standard output did not take what was written to it.

    Args:
        error: why.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.nobody_reads = isinstance(error, BrokenPipeError)


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Around what writes to standard output, and around nothing else.

    Raises:
        OutputError: it could not be written.
    """
    streams = sys.stdout, sys.stderr
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        raise OutputError(error) from error
    except SystemExit as leaving:
        # typer and rich replace the streams and leave when nobody reads.
        if isinstance(leaving.__context__, BrokenPipeError):
            sys.stdout, sys.stderr = streams
            raise OutputError(leaving.__context__) from leaving
        raise


def print_json(value: Any) -> None:
    """Print one JSON object for machines."""
    text = json.dumps(value, indent=2)
    with writing():
        print(text)


def show(*parts: RenderableType) -> None:
    """Print for people. A string is printed as it is: none of it is markup."""
    from rich.console import Console

    with writing():
        for part in parts:
            if isinstance(part, str):
                print(part)
            else:
                Console().print(part)


def say(message: str) -> None:
    """Print one line to standard error, whatever is in the message and whoever reads it."""
    with contextlib.suppress(OSError, ValueError):
        print(f"kvoffload: {plain(' '.join(message.split()))}", file=sys.stderr)


def plain(text: str) -> str:
    """``text`` without what a terminal would obey, or an encoding refuse."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


@contextlib.contextmanager
def forgiving() -> Iterator[None]:
    """Within, standard output replaces the characters that it cannot encode."""
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper) or stream.errors != "strict":
        yield
        return
    stream.reconfigure(errors="replace")
    try:
        yield
    finally:
        # What could not be written was told already.
        with contextlib.suppress(OSError, ValueError):
            stream.reconfigure(errors="strict")


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Within, what anything prints goes to standard error: a result stays a result.

    A vendor's library and the programs that it starts know only the file descriptor, so that is
    redirected as well.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        with contextlib.suppress(OSError):  # one of them is closed
            saved = os.dup(1)
            stack.callback(os.close, saved)
            os.dup2(2, 1)
            stack.callback(os.dup2, saved, 1)
            stack.callback(_flush_c)
        yield


def _flush_c() -> None:
    """Write what C code has printed and not yet written."""
    import ctypes

    ctypes.CDLL(None).fflush(None)
