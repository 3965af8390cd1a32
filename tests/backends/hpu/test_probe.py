"""What the probe says, and what is imported when: here, without a device."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvoffload.backends.hpu.backend import HpuBackend
from kvoffload.core.errors import BackendUnavailableError, ConfigurationError
from kvoffload.plugins.registry import select_backend


def bridge(folder: Path, *, torch: str = "", lazy: bool = False, devices: int = 0) -> Path:
    """A package as the vendor's lies there, in a folder to put onto the path."""
    package = folder / "habana_frameworks" / "torch"
    (package / "utils").mkdir(parents=True)
    for name, text in {
        "../__init__.py": "",
        "__init__.py": torch,
        "hpu.py": f"def is_available(): return {devices > 0}",
        "core.py": "def mark_step(): pass",
        "utils/__init__.py": "",
        "utils/internal.py": f"def is_lazy(): return {lazy}",
    }.items():
        (package / name).write_text(text)
    return folder


def tell(folder: Path | None, *statements: str) -> str:
    """What a fresh interpreter prints that finds the folder's packages."""
    start = [f"import sys; sys.path.insert(0, {str(folder)!r})"] if folder else []
    done = subprocess.run(
        [sys.executable, "-c", "\n".join((*start, *statements))],
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    return done.stdout


PROBE = textwrap.dedent("""
    from kvoffload.plugins.registry import BackendRegistry
    probe = BackendRegistry().create("hpu").probe()
    print(probe.available, probe.reason)
""")


def test_without_the_bridge_it_names_the_package_and_the_image() -> None:
    probe = HpuBackend().probe()
    assert not probe.available
    assert "habana_frameworks.torch is not installed" in probe.reason
    assert "habana-torch-plugin" in probe.reason
    assert "container image" in probe.reason
    with pytest.raises(BackendUnavailableError, match="habana-torch-plugin"):
        select_backend("hpu")


def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    said = tell(bridge(tmp_path), PROBE)
    assert said.startswith("False habana_frameworks.torch is installed (eager mode), but finds no")


@pytest.mark.parametrize("lazy", [False, True])
def test_with_a_device_it_names_the_mode(tmp_path: Path, lazy: bool) -> None:
    said = tell(bridge(tmp_path, lazy=lazy, devices=1), PROBE)
    mode = "lazy" if lazy else "eager"
    assert said == f"True hpu:0 through habana_frameworks.torch, {mode} mode\n"


def test_a_bridge_that_does_not_load_is_a_reason(tmp_path: Path) -> None:
    said = tell(bridge(tmp_path, torch="raise AssertionError('built for torch 2.7')"), PROBE)
    assert said == (
        "False habana_frameworks.torch cannot be used: AssertionError: built for torch 2.7\n"
    )


def test_nothing_of_the_vendor_is_imported_before_the_backend_is_used(tmp_path: Path) -> None:
    said = tell(
        bridge(tmp_path, devices=1),
        "from kvoffload.plugins.registry import BackendRegistry",
        "def vendor(): return sorted(n for n in sys.modules if n.startswith('habana'))",
        "registry = BackendRegistry()",
        "print(registry.names(), vendor())",
        "backend = registry.create('hpu')",
        "print(vendor())",
        "registry.create('cpu').probe()",
        "print(vendor())",
        "backend.probe()",
        "print('habana_frameworks.torch' in vendor())",
    )
    first, *rest = said.splitlines()
    assert "'hpu'" in first
    assert first.endswith(" []")
    assert rest == ["[]", "[]", "True"]


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("cuda:0", "serves 'hpu', not 'cuda:0'"),
        ("hpu:1", "one Gaudi, which is hpu:0, not hpu:1"),
        ("nonsense", "torch knows no device"),
    ],
)
def test_another_device_is_refused(device: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        HpuBackend(device)
