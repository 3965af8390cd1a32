"""The command line.

Nothing here imports torch, numpy or a plugin until a command runs, so that ``--help`` is quick.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from kvoffload.cli.interrupt import Interrupt
from kvoffload.cli.output import OutputError, forgiving, print_json, say, writing

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_NOBODY_READS = 0, 1, 2, 130, 141


def run() -> int:
    """The program: :func:`main` for this process, which is to exit with what it returns.

    From the first line to the last, Ctrl-C and a closed or full output are no traceback.
    """
    interrupt = Interrupt()
    signal.signal(signal.SIGINT, interrupt)
    if logging.lastResort is not None:
        # The library is quiet by itself; a person at the command line wants to see warnings.
        logging.getLogger("kvoffload").addHandler(logging.lastResort)
    sys.unraisablehook = _unraisable
    # A stream that was closed by the caller is None, and printing to None prints to another one.
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    code = _guarded(None, interrupt)
    # While the interpreter leaves there is nothing to interrupt, nor anybody to tell.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A KeyboardInterrupt that passed through an exec of text, as dataclasses have it, counts as
    # unhandled, and Python would kill itself as it leaves; until text is executed once more.
    exec("")
    for stream in (sys.stdout, sys.stderr):
        _let_go(stream)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: without the program's name; those of the process by default.

    Returns:
        0; 1 if something was corrupt or failed, or the output could not be written; 2 for wrong
        input; 130 for Ctrl-C; 141 if nobody reads the output.
    """
    return _guarded(arguments, Interrupt())


def _guarded(arguments: Sequence[str] | None, interrupt: Interrupt) -> int:
    """Run a command, and turn what ends it early into an exit code."""
    try:
        with interrupt.installed():
            try:
                with forgiving():
                    return _run(arguments, interrupt)
            finally:
                interrupt.calm()
    except KeyboardInterrupt:
        say("interrupted")
        return EXIT_INTERRUPTED
    except OutputError as error:
        if interrupt.is_set():
            return EXIT_INTERRUPTED
        if error.nobody_reads:
            return EXIT_NOBODY_READS
        say(f"error: cannot write the output: {error}")
        return EXIT_FAILED


def _run(arguments: Sequence[str] | None, interrupt: Interrupt) -> int:
    from kvoffload.cli.app import app
    from kvoffload.core.errors import BackendError, ConfigurationError

    interrupt.check()
    given = sys.argv[1:] if arguments is None else list(arguments)
    as_json = "--json" in given[: given.index("--") if "--" in given else None]
    try:
        try:
            # Commands only say what to do, so that typer neither catches nor prints what that
            # raises; all that can be written here is help and the version.
            with writing():
                command = app(args=given, standalone_mode=False)
        except Exception as error:
            # Usage errors, whatever module of which version of typer defines them.
            if hasattr(error, "format_message"):
                return _refuse(error, _squeezed(error.format_message()), as_json)
            raise
        # typer makes an exit code of a KeyboardInterrupt.
        interrupt.check()
        if not callable(command):
            return command if isinstance(command, int) else EXIT_OK
        code: int = command()
    except OutputError:
        raise
    except Exception as error:
        # An import that Ctrl-C tore may fail in any way.
        interrupt.check()
        if isinstance(error, ConfigurationError | BackendError):
            return _refuse(error, str(error), as_json)
        if isinstance(error, MemoryError):
            return _refuse(error, f"not enough memory for that: {error}", as_json)
        raise
    return code


def _refuse(error: Exception, message: str, as_json: bool) -> int:
    """Say what is wrong; a machine that asked for JSON gets it as JSON, too."""
    say(f"error: {message}")
    if as_json:
        print_json({"error": {"type": type(error).__name__, "message": message}})
    return EXIT_USAGE


def _squeezed(message: str) -> str:
    """A message of typer's, which repeats what it was given however long that is."""
    from kvoffload.core.sizes import shortened

    return shortened(" ".join(shortened(word) for word in message.split()), 300)


def _unraisable(what: UnraisableHookArgs, /) -> None:
    # KeyboardInterrupt in a callback that cannot raise: its flag is set all the same.
    if what.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(what)


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")


def _let_go(stream: TextIO) -> None:
    """Drop what a broken stream still holds; the interpreter would complain of it as it leaves."""
    try:
        stream.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
