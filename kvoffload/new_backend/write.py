"""A template's files, with the backend's names filled in.

What is filled in stands between two ``@``; a file's name ends in ``.in``, so that no tool takes it
for what it will become.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvoffload.core.errors import ConfigurationError
from kvoffload.core.sizes import shortened, shown

TEMPLATE = Path(__file__).parent / "template"
SUFFIX = ".in"
RENAMED = {"package": "kvoffload_@name@", "gitignore.in": ".gitignore.in"}
"""Folders and files of the template that are called something else where they are written."""
LONGEST_NAME = 24
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@dataclass(frozen=True)
class NewBackend:
    """What was written.

    Attributes:
        name: of the backend.
        distribution: its project name, as pip knows it.
        package: what Python imports.
        folder: where it all is.
        files: relative to the folder, sorted.
    """

    name: str
    distribution: str
    package: str
    folder: Path
    files: tuple[str, ...]


def check_name(name: str, taken: Mapping[str, str]) -> None:
    """Check that a backend may be called so.

    Args:
        name: of the backend.
        taken: names of the backends that are installed, and the distribution of each.

    Raises:
        ConfigurationError: it may not; says what is allowed.
    """
    if not NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise ConfigurationError(
            f"{shown(name)} cannot name a backend: use at most {LONGEST_NAME} small letters and "
            f"digits, a letter first, in words joined by '_'; such as 'npu' or 'my_npu'"
        )
    if keyword.iskeyword(name):
        raise ConfigurationError(f"{name!r} cannot name a backend: it is a word of Python's own")
    if name in taken:
        # kvoffload itself brings some; those cannot be uninstalled one by one.
        own = f"kvoffload-{name}"
        instead = f", or 'pip uninstall {own}'" if taken[name].split(" ")[0] == own else ""
        raise ConfigurationError(
            f"a backend named {name!r} is installed already, by {taken[name]}; choose another name"
            f"{instead}"
        )


def write(
    name: str, folder: Path, *, taken: Mapping[str, str], version: str, interface: int
) -> NewBackend:
    """Write a distribution that provides one backend.

    Args:
        name: of the backend.
        folder: for it; made if need be, and empty.
        taken: names of the backends that are installed, and the distribution of each.
        version: of kvoffload, the oldest that it will work with.
        interface: version of the interface that it is written for.

    Raises:
        ConfigurationError: the name or the folder cannot be used; nothing was overwritten.
    """
    check_name(name, taken)
    filled = {
        "name": name,
        "Name": "".join(word.capitalize() for word in name.split("_")),
        "version": version,
        "interface": str(interface),
    }
    files = {_place(path, filled): _fill(path.read_text("utf-8"), filled) for path in _template()}
    if folder.is_file():
        raise ConfigurationError(f"{_path(folder)} is a file; name a folder, empty or new")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigurationError(
                f"{_path(folder)} is not empty; name a folder that is, or a new one"
            )
        for place, text in files.items():
            target = folder / place
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigurationError(
            f"cannot write to {_path(folder)}: {error.strerror or error}"
        ) from error
    return NewBackend(
        name=name,
        distribution=f"kvoffload-{name}",
        package=f"kvoffload_{name}",
        folder=folder,
        files=tuple(sorted(files)),
    )


def _template() -> list[Path]:
    return sorted(path for path in TEMPLATE.rglob(f"*{SUFFIX}") if path.is_file())


def _place(path: Path, filled: dict[str, str]) -> str:
    parts = [RENAMED.get(part, part) for part in path.relative_to(TEMPLATE).parts]
    return _fill("/".join(parts).removesuffix(SUFFIX), filled)


def _fill(text: str, filled: dict[str, str]) -> str:
    for key, value in filled.items():
        text = text.replace(f"@{key}@", value)
    return text


def _path(folder: Path) -> str:
    return shortened(str(folder))
