"""The Makefile sets up once, and again when something changed; with a Python that only notes it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKE = shutil.which("make")

# Makes an environment whose pip and kvoffload only write down what they were called with.
PYTHON = """#!/bin/sh
mkdir -p "$3/bin"
for name in pip kvoffload; do
  printf '#!/bin/sh\\nfor word; do echo "$word"; done >> %s.log\\n' "$name" > "$3/bin/$name"
  chmod +x "$3/bin/$name"
done
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    if MAKE is None or not (ROOT / "Makefile").exists():
        pytest.skip("there is no make, or no Makefile")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copyfile(ROOT / name, tmp_path / name)
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def make(project: Path, torch: str) -> None:
    subprocess.run(
        [str(MAKE), "demo", "PYTHON=./python", f"TORCH={torch}"],
        cwd=project,
        check=True,
        capture_output=True,
        timeout=50,
    )


def installs(project: Path) -> list[str]:
    """What torch every run of pip was asked for."""
    words = (project / "pip.log").read_text().splitlines()
    return [words[i + 2] for i, word in enumerate(words) if word == "-c"]


@pytest.mark.parametrize(
    "torch", ["torch==2.13.0", "torch>=2.9", "torch>=2.9,<3; python_version > '3'", "torch<3 & #`"]
)
def test_it_sets_up_once_and_leaves_nothing_else(project: Path, torch: str) -> None:
    before = {path.name for path in project.iterdir()}
    make(project, torch)
    make(project, torch)
    assert installs(project) == [torch]
    made = {path.name for path in project.iterdir()} - before
    assert made == {".venv", "pip.log", "kvoffload.log"}


def test_it_sets_up_anew_when_something_changed(project: Path) -> None:
    torches = ["torch>=2.9", "torch==2.9", "torch>=2.9"]
    for torch in torches:
        make(project, torch)
    assert installs(project) == torches
    for count, name in enumerate(("pyproject.toml", "constraints.txt"), start=4):
        (stamp,) = (project / ".venv").glob(".ready-*")
        os.utime(stamp, (1000, 1000))
        os.utime(project / name, (2000, 2000))
        make(project, "torch>=2.9")
        assert len(installs(project)) == count


def test_the_benchmark_of_accelerators_may_be_skipped_and_takes_options(project: Path) -> None:
    subprocess.run(
        [str(MAKE), "bench-gpu", "PYTHON=./python", "BENCH=--out x.md"],
        cwd=project,
        check=True,
        capture_output=True,
        timeout=50,
    )
    words = (project / "kvoffload.log").read_text().split()
    assert words == ["bench", "gpu", "--or-skip", "--out", "x.md"]
