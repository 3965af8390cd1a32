"""Discovery, loading and choice, each with distributions made on the spot."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvoffload.core.errors import (
    AmbiguousBackendError,
    BackendError,
    BackendNotFoundError,
    BackendUnavailableError,
    BrokenBackendError,
    ConfigurationError,
    DuplicateBackendError,
    HookError,
    InterfaceVersionError,
)
from kvoffload.plugins.registry import BackendRegistry, select_backend

GOOD = """
from kvoffload.plugins import hookimpl
kvoffload_interface = 1

@hookimpl
def kvoffload_backend(device):
    import torch
    from kvoffload.backends.cpu.backend import CpuBackend
    from kvoffload.core.backend import Probe
    class Fake(CpuBackend):
        def probe(self):
            return Probe({available}, "so it was made")
    backend = Fake()
    backend.device = torch.device("meta")
    return backend
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a distribution with one backend on sys.path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def make(distribution: str, backend: str, source: str) -> None:
        module = f"fake_{distribution}"
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{distribution}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n"
        )
        (info / "entry_points.txt").write_text(f"[kvoffload.backends]\n{backend} = {module}\n")
        importlib.invalidate_caches()

    yield make
    for name in set(sys.modules) - before:
        if name.startswith("fake_"):
            del sys.modules[name]


def good(available: bool = True) -> str:
    return GOOD.replace("{available}", str(available))


def test_names_are_read_without_importing_anything(install: Install) -> None:
    install("marker", "marked", "raise AssertionError('imported')")
    names = BackendRegistry().names()
    assert {"cpu", "cuda", "rocm", "hpu", "marked"} <= set(names)
    assert "fake_marker" not in sys.modules


def test_a_chosen_backend_is_loaded_alone(install: Install) -> None:
    install("bad", "bad", "raise AssertionError('imported')")
    install("one", "one", good())
    BackendRegistry().select("one")
    assert "fake_bad" not in sys.modules


def test_without_a_name_the_only_available_accelerator_is_chosen(install: Install) -> None:
    assert BackendRegistry().choose()[0] == "cpu"
    install("off", "off", good(available=False))
    assert BackendRegistry().choose()[0] == "cpu"
    install("one", "one", good())
    assert BackendRegistry().choose()[0] == "one"


def test_several_available_accelerators_need_a_name(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("one", "one", good())
    install("two", "two", good())
    with pytest.raises(AmbiguousBackendError, match=r"one, two.*KVOFFLOAD_BACKEND"):
        select_backend()
    monkeypatch.setenv("KVOFFLOAD_BACKEND", "two")
    assert BackendRegistry().choose()[0] == "two"
    assert BackendRegistry().choose("one")[0] == "one"


def test_a_name_never_falls_back(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("off", "off", good(available=False))
    with pytest.raises(BackendUnavailableError, match="'off' is not available: so it was made"):
        select_backend("off")
    monkeypatch.setenv("KVOFFLOAD_BACKEND", "nonsense")
    with pytest.raises(BackendNotFoundError, match=r"'nonsense' is installed; installed: .*cpu"):
        select_backend()


@pytest.mark.parametrize(
    ("source", "error", "says"),
    [
        ("import nonexistent_thing", BrokenBackendError, "nonexistent_thing"),
        ("raise SystemExit(3)", BrokenBackendError, "SystemExit"),
        ("x = (", BrokenBackendError, "SyntaxError"),
        ("kvoffload_interface = 1", HookError, "kvoffload_backend"),
        (good().replace("def kvoffload_backend", "def kvoffload_backnd"), HookError, "backnd"),
        (good().replace("(device)", "(device, colour)"), HookError, "colour"),
        (good().replace("interface = 1", "interface = 0"), InterfaceVersionError, "0.*1"),
        (good().replace("interface = 1", "interface = 2"), InterfaceVersionError, "2.*1"),
        (
            good().replace("kvoffload_interface = 1", ""),
            InterfaceVersionError,
            "declare 'kvoffload_interface'",
        ),
        (good().replace("return backend", "return 7"), BrokenBackendError, "7, not a Backend"),
        (good().replace("return backend", "1 / 0"), BrokenBackendError, "ZeroDivisionError"),
    ],
    ids=[
        "import",
        "exit",
        "syntax",
        "no hook",
        "misspelt hook",
        "unknown argument",
        "older interface",
        "newer interface",
        "no interface",
        "wrong result",
        "hook raises",
    ],
)
def test_a_broken_plugin_is_a_clear_error_and_hides_nothing_F11(
    install: Install,
    caplog: pytest.LogCaptureFixture,
    source: str,
    error: type[BackendError],
    says: str,
) -> None:
    install("broken", "oops", source)
    registry = BackendRegistry()
    for _ in range(2):  # the second time it is refused just so
        with pytest.raises(error, match=rf"(?s)'oops' of broken 1.5.*{says}"):
            registry.create("oops")
    with caplog.at_level(logging.WARNING):
        assert registry.choose()[0] == "cpu"
    assert "broken 1.5" in caplog.text
    report = {r.name: r for r in registry.reports()}
    assert report["cpu"].available
    assert report["oops"].error is not None
    assert report["oops"].distribution == "broken 1.5"
    assert not report["oops"].available


def test_two_distributions_that_claim_one_name_are_both_named(install: Install) -> None:
    install("first", "same", good())
    install("second", "same", good())
    registry = BackendRegistry()
    with pytest.raises(DuplicateBackendError, match=r"first 1\.5, second 1\.5|second.*first"):
        registry.create("same")
    assert registry.choose()[0] == "cpu"
    assert "claimed by several" in str({r.name: r for r in registry.reports()}["same"].error)


def test_a_probe_that_raises_is_a_reason(install: Install) -> None:
    install("shaky", "shaky", good().replace("return Probe", "raise OSError('gone')\n#"))
    with pytest.raises(BackendUnavailableError, match="its probe failed: OSError: gone"):
        select_backend("shaky")


def test_two_backends_do_not_answer_for_each_other(install: Install) -> None:
    install("one", "one", good())
    registry = BackendRegistry()
    one, cpu = registry.create("one"), registry.create("cpu")
    assert type(one).__name__ == "Fake"
    assert type(cpu).__name__ == "CpuBackend"


def test_the_planned_backends_say_what_is_missing_here() -> None:
    reports = {r.name: r for r in BackendRegistry().reports()}
    for name in ("cuda", "rocm", "hpu"):
        assert not reports[name].available
        assert "does not implement the copy for it yet" in str(reports[name].reason)
        with pytest.raises(BackendUnavailableError, match=name):
            select_backend(name)
    assert "habana_frameworks.torch is not installed" in str(reports["hpu"].reason)


def test_a_device_that_the_backend_does_not_serve_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'cpu', not 'cuda:1'"):
        select_backend("cpu", device="cuda:1")
