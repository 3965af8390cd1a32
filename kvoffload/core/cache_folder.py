"""Where things are kept that take long to make and can always be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """The folder ``name`` for this user: below ``XDG_CACHE_HOME``, else below ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME")
    # As its specification has it: a relative path is to be ignored.
    base = Path(root) if root and Path(root).is_absolute() else Path.home() / ".cache"
    return base / "kvoffload" / name
