"""Distributions that are installed for a test: beside the environment, and by a path of their own.

A backend from outside is verified in a process of its own, as its author would.
"""

from __future__ import annotations

import ast
import io
import json
import os
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import Any

import pytest

NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def install(folder: Path, scratch: Path) -> Path:
    """Build a distribution of a copy of ``folder``, without a network; where it is importable."""
    shutil.copytree(folder, scratch / "source")
    site = scratch / "site"
    run(
        *("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"),
        *("--no-build-isolation", "--no-index", "--target", site, scratch / "source"),
    )
    return site


def run(
    *arguments: str | Path, site: Path | None = None, cwd: Path | None = None, fails: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, and with what is installed in ``site``."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | ({"PYTHONPATH": str(site)} if site is not None else {}),
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=55,
    )
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    return done


def kvoffload(site: Path, *arguments: str) -> Any:
    """What the command prints as JSON."""
    return json.loads(run("-m", "kvoffload", *arguments, "--json", site=site).stdout)


def skip_without_a_compiler() -> None:
    """Skip a test that needs the fake device where it cannot be built; CI must be able to."""
    compiler = os.environ.get("CXX", "g++")
    if os.environ.get("KVOFFLOAD_REQUIRE_FAKE") != "1" and shutil.which(compiler) is None:
        pytest.skip(f"the fake device needs the C++ compiler {compiler!r}")


def lines_of_code(package: Path) -> int:
    """Lines of all modules that hold anything but blanks, comments and docstrings."""
    return sum(len(_lines(path.read_text())) for path in package.rglob("*.py"))


def _lines(source: str) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {
        line
        for token in tokens
        if token.type not in NOT_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            code -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return code
