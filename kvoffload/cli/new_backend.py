"""``kvoffload new-backend``."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path

from kvoffload import __version__
from kvoffload.cli import EXIT_OK
from kvoffload.cli.output import plain, print_json, show
from kvoffload.core.backend import INTERFACE_VERSION
from kvoffload.new_backend import NewBackend, write
from kvoffload.plugins.registry import BackendRegistry


def run(name: str, folder: Path, *, as_json: bool) -> int:
    """Write the distribution, and print what there is now. Returns the exit code."""
    registry = BackendRegistry()
    made = write(
        name,
        folder,
        taken={each: registry.distribution(each) for each in registry.names()},
        version=__version__,
        interface=INTERFACE_VERSION,
    )
    commands = _next(made)
    if as_json:
        print_json(asdict(made) | {"folder": str(folder), "next": commands})
        return EXIT_OK
    lines = [f"{made.distribution}, in {plain(str(folder))}:"]
    lines += [f"  {file}" for file in made.files]
    lines += ["", "Next:", *(f"  {plain(command)}" for command in commands)]
    lines += ["", "It runs on the host as it is. Its README.md says what to change, in order."]
    show("\n".join(lines))
    return EXIT_OK


def _next(made: NewBackend) -> list[str]:
    """Commands that install it and prove it right."""
    where = str(made.folder)
    # To pip, a path is what has a separator in it.
    there = where if where in (".", "..") or "/" in where else f"./{where}"
    return [
        f"pip install -e {shlex.quote(f'{there}[test]')}",
        f"kvoffload verify {made.name}",
        f"pytest {shlex.quote(there)}",
    ]
