"""The package as a whole: what imports what, and what an import costs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvoffload

ROOT = Path(kvoffload.__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path
    for path in ROOT.rglob("*.py")
}

# Who may import whom, by the first part of the name under kvoffload.
ALLOWED = {
    "core": {"core"},
    "scheduler": {"core", "scheduler"},
    "connector": {"core", "scheduler", "connector"},
    "plugins": {"core", "plugins"},
    "rig": {"core", "backends.thread_base", "rig"},
    "new_backend": {"core", "new_backend"},
    "replay": {"core", "scheduler", "rig", "replay"},
    "bench": {"core", "scheduler", "rig", "bench", "backends.calibration"},
    "integrations": {"core", "scheduler", "connector", "tiers", "plugins", "integrations"},
    "testing": {"core", "scheduler", "connector", "rig", "testing", "plugins", "backends"},
}
VENDORS = set(
    "amd cuda gaudi habana hip hpu intel npu nvidia rocm vllm xpu".split()  # noqa: SIM905
)
BASES = {
    f"backends.{name}"
    for name in (*("thread_base", "torch_base", "index_copy", "calibration", "_driver"),)
}


def imports(path: Path) -> set[str]:
    """Modules of kvoffload that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name.removeprefix("kvoffload.") for name in found if name in MODULES}


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module: str) -> None:
    parts = module.split(".")[1:]
    if not parts or parts[0] in ("cli", "__init__", "__main__"):
        return
    for name in imports(MODULES[module]):
        if parts[0] == "backends":
            own = ".".join(parts[:2])
            allowed = (
                name.startswith("core.")
                or name in BASES
                or name in ("plugins", "plugins.hookspecs")
                or name.startswith(own)
            )
        elif module == "kvoffload.testing.fake_device.variants":
            allowed = name.startswith(("core.", "testing.", "backends."))  # it makes backends
        else:
            allowed = any(name == a or name.startswith(f"{a}.") for a in ALLOWED[parts[0]])
        assert allowed, f"{module} imports {name}"


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("kvoffload.core")])
def test_the_core_names_no_vendor(module: str) -> None:
    words = set(re.findall("[a-z]+", MODULES[module].read_text().lower()))
    assert not words & VENDORS


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("kvoffload.")])
def test_no_assert_guards_an_argument(module: str) -> None:
    found = [
        n.lineno
        for n in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(n, ast.Assert)
    ]
    assert not found, f"{module}, lines {found}"


def loaded_by(*statements: str) -> set[str]:
    """Names in sys.modules after a fresh interpreter ran these statements."""
    report = "import sys; print(*sys.modules, file=sys.stderr, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", "\n".join((*statements, report))],
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    return set(done.stderr.split())


def test_an_import_loads_neither_torch_nor_numpy_nor_a_plugin() -> None:
    loaded = loaded_by("import kvoffload")
    assert not loaded & {"torch", "numpy", "pluggy", "typer"}
    assert not [name for name in loaded if name.startswith("kvoffload.")]


def test_help_loads_neither_torch_nor_numpy_nor_a_plugin() -> None:
    loaded = loaded_by(
        "from kvoffload.cli import main",
        "assert main(['--help']) == 0",
        "assert main(['bench', 'gpu', '--help']) == 0",
    )
    assert "typer" in loaded
    assert not loaded & {"torch", "numpy", "pluggy"}
    assert not [name for name in loaded if name.startswith("kvoffload.backends")]


def test_every_public_name_resolves() -> None:
    for name in kvoffload.__all__:
        assert getattr(kvoffload, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = kvoffload.nonsense
    assert set(kvoffload.__all__) <= set(dir(kvoffload))


def test_the_example_for_embedding_runs_and_is_short() -> None:
    example = ROOT.parent / "examples" / "embed.py"
    assert len(example.read_text().splitlines()) <= 40
    done = subprocess.run(
        [sys.executable, str(example)],
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
        env={k: v for k, v in os.environ.items() if k != "KVOFFLOAD_BACKEND"},
    )
    assert "bytes came back as they were" in done.stdout
