"""The example of a backend from outside, for a device that torch knows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvoffload as package
from kvoffload.plugins.registry import BackendRegistry
from tests.distributions import (
    install,
    kvoffload,
    lines_of_code,
    run,
    skip_without_a_compiler,
)

FOLDER = Path(package.__file__).parents[1] / "examples" / "kvoffload-xpu"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it is installed."""
    return install(FOLDER, tmp_path_factory.mktemp("xpu"))


@pytest.fixture
def here(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """It is installed in this process."""
    monkeypatch.syspath_prepend(str(site))
    yield monkeypatch
    for name in [name for name in sys.modules if name.startswith("kvoffload_xpu")]:
        del sys.modules[name]


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int = 1) -> None:
    """As far as torch's answers go, this machine has so many devices of that type."""

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return None if kind is None or (check_available and not count) else torch.device(kind)

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


def test_it_passes_every_check_on_the_fake_device(site: Path) -> None:
    skip_without_a_compiler()
    report = kvoffload(site, "verify", "xpu", "--on", "fake")
    assert report["distribution"] == "kvoffload-xpu 0.1.0"
    assert report["device"] == "fake:0"
    assert report["failed"] == 0
    assert report["passed"] > 50


def test_without_an_intel_gpu_it_says_what_is_missing(site: Path) -> None:
    said = run("-m", "kvoffload", "verify", "xpu", site=site, fails=True)
    assert said.returncode == 2
    assert f"torch {torch.__version__}" in said.stderr
    assert "xpu" in said.stderr


@pytest.mark.parametrize(
    ("kind", "count", "device", "reason"),
    [
        (None, 0, None, "was not built for xpu"),
        ("cuda", 8, None, "was not built for xpu"),
        ("xpu", 0, None, "sees 0 of type xpu, no xpu:0"),
        ("xpu", 1, "xpu:1", "sees 1 of type xpu, no xpu:1"),
        ("xpu", 2, "xpu:1", "xpu:1, with"),
        ("xpu", 1, None, "xpu:0, with"),
    ],
)
def test_its_probe_asks_torch(
    here: pytest.MonkeyPatch, kind: str | None, count: int, device: str | None, reason: str
) -> None:
    pretend(here, kind, count)
    probe = BackendRegistry().create("xpu", device).probe()
    assert reason in probe.reason
    assert probe.available is ("with" in reason)


def test_a_torch_that_fails_to_look_is_a_reason(here: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("driver too old")

    here.setattr(torch.accelerator, "current_accelerator", fail)
    probe = BackendRegistry().create("xpu").probe()
    assert not probe.available
    assert "driver too old" in probe.reason


def test_on_its_hardware_it_is_chosen_before_the_backend_for_whatever_torch_knows(
    here: pytest.MonkeyPatch,
) -> None:
    pretend(here, "xpu")
    registry = BackendRegistry()
    available = {report.name for report in registry.reports() if report.available}
    assert {"torch", "xpu"} <= available
    assert registry.choose()[0] == "xpu"


def test_on_other_hardware_it_is_not_chosen(here: pytest.MonkeyPatch) -> None:
    pretend(here, "mtia")
    assert BackendRegistry().choose()[0] == "torch"
    pretend(here, None, 0)
    assert BackendRegistry().choose()[0] == "cpu"


def test_it_has_fewer_than_60_lines_of_code() -> None:
    assert 20 < lines_of_code(FOLDER / "kvoffload_xpu") < 60


def test_it_says_that_it_never_ran_on_real_hardware() -> None:
    assert "Never run on real XPU hardware" in (FOLDER / "README.md").read_text()
