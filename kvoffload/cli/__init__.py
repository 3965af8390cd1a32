"""The command line.

Nothing here imports torch, numpy or a plugin until a command runs, so that ``--help`` is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: without the program's name; those of the process by default.

    Returns:
        0; 1 if something was corrupt or failed; 2 for wrong input; 130 for Ctrl-C.
    """
    from kvoffload.cli.app import app
    from kvoffload.core.errors import BackendError, ConfigurationError

    try:
        # Commands only say what to do, so that typer neither catches nor prints what that raises.
        command = app(args=None if arguments is None else list(arguments), standalone_mode=False)
    except Exception as error:
        # Usage errors, whatever module of which version of typer defines them.
        if hasattr(error, "format_message"):
            return _refuse(error.format_message())
        raise
    if not callable(command):
        return command if isinstance(command, int) else EXIT_OK
    try:
        code: int = command()
    except (ConfigurationError, BackendError) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        print("kvoffload: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return code


def _refuse(message: str) -> int:
    print(f"kvoffload: error: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_USAGE
