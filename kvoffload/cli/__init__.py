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
        code = app(args=None if arguments is None else list(arguments), standalone_mode=False)
    except (ConfigurationError, BackendError) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        print("kvoffload: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        # Typer's own usage errors, whatever module of which version defines them.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            return _refuse(error.format_message())
        if type(error).__name__ == "Abort":
            print("kvoffload: interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
        raise
    return code if isinstance(code, int) else EXIT_OK


def _refuse(message: str) -> int:
    print(f"kvoffload: error: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_USAGE
