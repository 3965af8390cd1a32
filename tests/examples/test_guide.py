"""docs/write-a-backend.md: what it shows works as it says."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import kvoffload as package
from kvoffload.backends.index_copy import IndexCopyBackend
from kvoffload.backends.thread_base import ThreadBackend
from kvoffload.backends.torch_base import TorchBackend
from kvoffload.core.backend import Backend, Capabilities
from kvoffload.testing.conformance import CHECKS, Guarantee
from kvoffload.testing.fake_device.variants import VARIANTS
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


@pytest.mark.parametrize("name", ["GatherBackend", "PlainBackend"])
def test_its_backends_on_threads_pass_every_check(tmp_path: Path, name: str) -> None:
    source = block("python", f"class {name}")
    assert source.count("\n") < 40
    (tmp_path / "guide.py").write_text(source)
    report = kvoffload(tmp_path, "verify", "--backend-class", f"guide:{name}")
    assert report["device"] == "cpu"
    assert report["failed"] == 0
    assert report["passed"] > 50


def test_it_says_what_each_base_claims() -> None:
    table = GUIDE.partition("| base | claims |\n")[2].partition("\n\n")[0]
    default = Capabilities()
    for base in (Backend, ThreadBackend, TorchBackend, IndexCopyBackend):
        (line,) = (line for line in table.splitlines() if f"`{base.__name__}`" in line)
        assert {field.name for field in fields(Capabilities) if f"`{field.name}" in line} == {
            field.name
            for field in fields(Capabilities)
            if getattr(base.capabilities, field.name) != getattr(default, field.name)
        }


def test_it_names_the_variants_of_the_fake_device() -> None:
    for backend, variants in VARIANTS.items():
        assert f"`{backend}`" in GUIDE
        for variant in variants:
            assert f"`{variant}`" in GUIDE


def test_its_table_of_failures_is_in_the_order_of_the_checks() -> None:
    places = [GUIDE.index(f"| {guarantee.value} |") for guarantee in Guarantee]
    assert places == sorted(places)


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
