"""docs/write-a-backend.md: what it shows works as it says."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import kvoffload as package
from kvoffload.core.backend import Capabilities
from kvoffload.testing.conformance import CHECKS, Guarantee
from tests.distributions import kvoffload, run, skip_without_a_compiler

GUIDE = (Path(package.__file__).parents[1] / "docs" / "write-a-backend.md").read_text()


def block(language: str, holds: str) -> str:
    """The one block of code that holds these words."""
    (found,) = (b for b in re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL) if holds in b)
    return str(found)


def test_its_backend_passes_every_check_on_the_fake_device(tmp_path: Path) -> None:
    skip_without_a_compiler()
    (tmp_path / "guide.py").write_text(block("python", "class MygpuBackend"))
    report = kvoffload(tmp_path, "verify", "--backend-class", "guide:MygpuBackend", "--on", "fake")
    assert report["device"] == "fake:0"
    assert report["failed"] == 0
    assert report["passed"] > 50


def test_its_plan_lowers_as_it_says(tmp_path: Path) -> None:
    (tmp_path / "see.py").write_text(block("python", "plan.descriptors()\n"))
    assert run(tmp_path / "see.py").stdout == block("text", "cache +")


def test_it_names_every_capability_and_every_guarantee() -> None:
    for field in fields(Capabilities):
        assert f"| `{field.name}` |" in GUIDE
    for guarantee in Guarantee:
        assert f"| {guarantee.value} |" in GUIDE


def test_the_checks_that_it_names_exist() -> None:
    table = "".join(line for line in GUIDE.splitlines() if line.startswith("| `"))
    named = re.findall('"([a-z ]+)…?"', table)
    assert len(named) > 5
    for name in named:
        assert any(check.startswith(name) for check in CHECKS), name
