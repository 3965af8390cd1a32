"""What two backends share lives in one place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kvoffload

BACKENDS = Path(kvoffload.__file__).parent / "backends"
FOLDERS = ("cpu", "cuda", "hpu", "rocm", "torch")
FILES = {"__init__.py", "backend.py", "streams.py", "blocks.py", "copy.py"}


def test_no_eight_lines_of_the_driver_backends_are_alike() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pylint", "--disable=all", "--enable=duplicate-code"),
            *("--min-similarity-lines=8", "--ignore-imports=y", "--ignore-docstrings=y"),
            *(str(BACKENDS / name) for name in ("cuda", "rocm")),
        ],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_backend_has_the_same_files() -> None:
    for name in FOLDERS:
        found = {path.name for path in (BACKENDS / name).glob("*.py")}
        assert found - {"kernel.py"} == FILES, name
