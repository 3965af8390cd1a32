"""Discovery, loading and choice, each with distributions made on the spot."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from kvoffload.cli import main
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

UNTELLABLE = """
class UntellableError(Exception):
    def __str__(self):
        raise RuntimeError
    __repr__ = __str__
raise UntellableError
"""

RAISING_DEVICE = """class Fake(CpuBackend):
        device = property(lambda self: 1 / 0, lambda self, device: None)
"""

HOLDER = """
from kvoffload.plugins import hookimpl

class Plugin:
    kvoffload_interface = 1

    @hookimpl
    def kvoffload_backend(self, device):
        from kvoffload.backends.cpu.backend import CpuBackend
        return CpuBackend()

plugin = Plugin()
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a distribution with one backend on sys.path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def make(
        distribution: str,
        backend: str,
        source: str,
        *,
        attribute: str = "",
        entry_points: str | bytes = "",
        metadata: bool = True,
    ) -> None:
        module = f"fake_{distribution}"
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{distribution}-1.5.dist-info"
        info.mkdir()
        if metadata:
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n"
            )
        points = entry_points or f"[kvoffload.backends]\n{backend} = {module}{attribute}\n"
        (info / "entry_points.txt").write_bytes(
            points if isinstance(points, bytes) else points.encode()
        )
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


def test_a_backend_that_names_no_device_is_not_chosen_in_place_of_cpu(install: Install) -> None:
    install("nowhere", "nowhere", good().replace('torch.device("meta")', "None"))
    registry = BackendRegistry()
    assert registry.choose("nowhere")[1].device is None
    assert registry.choose()[0] == "cpu"


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
        ("raise GeneratorExit", BrokenBackendError, "GeneratorExit"),
        (
            good().replace("return backend", "raise GeneratorExit"),
            BrokenBackendError,
            "GeneratorExit",
        ),
        (good().replace("return backend", "raise SystemExit(0)"), BrokenBackendError, "SystemExit"),
        (good().replace("interface = 1", "interface = True"), InterfaceVersionError, "True.*1"),
        (good().replace("interface = 1", "interface = 1.0"), InterfaceVersionError, r"1\.0.*1"),
        (good().replace("interface = 1", "interface = '1'"), InterfaceVersionError, "'1'.*1"),
        (good().replace('torch.device("meta")', '"meta:0"'), BrokenBackendError, "device.*meta:0"),
        (
            good().replace("backend.device =", "backend.capabilities = {}; backend.device ="),
            BrokenBackendError,
            "capabilities.*{}",
        ),
        (
            good().replace("class Fake(CpuBackend):", RAISING_DEVICE),
            BrokenBackendError,
            "ZeroDivisionError",
        ),
        (UNTELLABLE, BrokenBackendError, "UntellableError"),
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
        "import raises no exception",
        "hook raises no exception",
        "hook exits",
        "interface True",
        "interface 1.0",
        "interface '1'",
        "device is a string",
        "capabilities are a dictionary",
        "device raises",
        "error raises when it is told",
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


def test_backends_say_what_is_missing_here() -> None:
    reports = {r.name: r for r in BackendRegistry().reports()}
    for name in ("cuda", "rocm", "hpu"):
        if reports[name].available:
            pytest.skip(f"this machine has what {name} needs")
        assert reports[name].reason
        with pytest.raises(BackendUnavailableError, match=name):
            select_backend(name)


def test_a_device_that_the_backend_does_not_serve_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'cpu', not 'cuda:1'"):
        select_backend("cpu", device="cuda:1")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("None", "its probe returned None, not a Probe"),
        ("True", "its probe returned True, not a Probe"),
        ("(True, 'ready')", "its probe returned (True, 'ready'), not a Probe"),
        ("Probe(1, 'ready')", "'available' must be True or False"),
        ("Probe(True, None)", "'reason' a string"),
    ],
)
def test_a_probe_that_answers_anything_else_is_a_reason(
    install: Install, answer: str, says: str
) -> None:
    install("odd", "odd", GOOD.replace('Probe({available}, "so it was made")', answer))
    with pytest.raises(BackendUnavailableError) as caught:
        select_backend("odd")
    assert says in str(caught.value)
    registry = BackendRegistry()
    assert registry.choose()[0] == "cpu"
    report = {r.name: r for r in registry.reports()}["odd"]
    assert says in str(report.reason)
    assert (report.available, report.capabilities) == (False, None)


@pytest.mark.parametrize("ends", ["SystemExit", "GeneratorExit"])
def test_a_probe_that_would_end_the_process_is_a_reason(install: Install, ends: str) -> None:
    install("ends", "ends", good().replace("return Probe", f"raise {ends}\n#"))
    with pytest.raises(BackendUnavailableError, match=f"its probe failed: {ends}"):
        select_backend("ends")


@pytest.mark.parametrize("source", ["raise KeyboardInterrupt", "hook", "probe"])
def test_ctrl_c_stays_ctrl_c(install: Install, source: str) -> None:
    raising = {
        "hook": good().replace("return backend", "raise KeyboardInterrupt"),
        "probe": good().replace("return Probe", "raise KeyboardInterrupt\n#"),
    }
    install("one", "one", raising.get(source, source))
    with pytest.raises(KeyboardInterrupt):
        select_backend("one")


def test_what_a_backend_claims_can_always_be_printed(install: Install) -> None:
    claims = """
    from dataclasses import dataclass
    from kvoffload.core.backend import Capabilities
    @dataclass(frozen=True)
    class Mine(Capabilities):
        device: object = torch.device("meta")
        ratio: float = float("inf")
        digits: int = 10**5000
        plain: float = 0.5
    backend.capabilities = Mine(max_batch=7)
    return backend
"""
    install("rich", "rich", good().replace("    return backend\n", claims))
    (report,) = (r for r in BackendRegistry().reports() if r.name == "rich")
    said = json.loads(json.dumps(asdict(report), allow_nan=False))["capabilities"]
    assert said["device"] == "meta"
    assert said["ratio"] == "inf"
    assert said["plain"] == 0.5
    assert said["max_batch"] == 7
    assert said["host_order"] == "planes"


def test_two_names_can_stand_for_one_module(install: Install) -> None:
    points = "[kvoffload.backends]\none = fake_both\nother = fake_both\n"
    install("both", "", good(), entry_points=points)
    registry = BackendRegistry()
    for _ in range(2):
        for name in ("one", "other"):
            assert registry.choose(name)[0] == name
    with pytest.raises(AmbiguousBackendError, match="one, other"):
        registry.choose()


def test_a_name_that_one_distribution_gives_twice_is_told_so(install: Install) -> None:
    points = "[kvoffload.backends]\nsame = fake_twice\nsame = fake_twice:other\n"
    install("twice", "", good(), entry_points=points)
    with pytest.raises(DuplicateBackendError) as caught:
        BackendRegistry().create("same")
    assert "claimed 2 times by twice 1.5, for fake_twice, fake_twice:other" in str(caught.value)
    assert "uninstall" not in str(caught.value)


@pytest.mark.parametrize(
    "points", [b"[kvoffload.backends]\nnonsense\n", b"\xff\xfe\x00", b"[other]\nnonsense\n"]
)
def test_entry_points_that_cannot_be_read_take_no_others_down(
    install: Install, caplog: pytest.LogCaptureFixture, points: bytes
) -> None:
    install("malformed", "", "", entry_points=points)
    install("one", "one", good())
    with caplog.at_level(logging.WARNING):
        registry = BackendRegistry()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "malformed 1.5" in caplog.text
    assert {"cpu", "one"} <= set(registry.names())
    assert registry.choose("one")[0] == "one"


def test_of_two_distributions_of_one_name_the_first_on_the_path_counts(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("one", "one", good())
    earlier = tmp_path / "earlier" / "One-2.0.dist-info"
    earlier.mkdir(parents=True)
    (earlier / "METADATA").write_text("Metadata-Version: 2.1\nName: One\nVersion: 2.0\n")
    (earlier / "entry_points.txt").write_text("[kvoffload.backends]\none = fake_one\n")
    monkeypatch.syspath_prepend(str(earlier.parent))
    (report,) = (r for r in BackendRegistry().reports() if r.name == "one")
    assert report.distribution == "One 2.0"
    assert report.available


def test_a_distribution_without_metadata_is_named_by_its_folder(install: Install) -> None:
    install("bare", "bare", good(), metadata=False)
    (report,) = (r for r in BackendRegistry().reports() if r.name == "bare")
    assert "None" not in report.distribution
    assert "bare-1.5.dist-info" in report.distribution


def test_an_instance_can_hold_the_hook_but_neither_class_nor_function(install: Install) -> None:
    install("instance", "instance", HOLDER, attribute=":plugin")
    install("class", "class", HOLDER, attribute=":Plugin")
    install("function", "function", good(), attribute=":kvoffload_backend")
    registry = BackendRegistry()
    assert registry.choose("instance")[0] == "instance"
    for name in ("class", "function"):
        with pytest.raises(HookError, match=rf"{name} 1\.5.*name a module or an instance"):
            registry.create(name)


def test_a_version_that_cannot_be_read_is_broken(install: Install) -> None:
    raising = "@property\n    def kvoffload_interface(self):\n        raise OSError('gone')"
    source = HOLDER.replace("kvoffload_interface = 1", raising)
    install("raising", "raising", source, attribute=":plugin")
    registry = BackendRegistry()
    with pytest.raises(BrokenBackendError, match=r"'raising' of raising 1\.5.*OSError: gone"):
        registry.create("raising")
    assert registry.choose()[0] == "cpu"


def test_an_empty_name_is_a_name_and_an_empty_variable_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(BackendNotFoundError, match="''"):
        select_backend("")
    monkeypatch.setenv("KVOFFLOAD_BACKEND", "")
    assert BackendRegistry().choose()[0] == "cpu"


def test_an_error_about_the_variable_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, error in (("nope", BackendNotFoundError), ("cuda", BackendUnavailableError)):
        monkeypatch.setenv("KVOFFLOAD_BACKEND", name)
        with pytest.raises(error, match=f"^KVOFFLOAD_BACKEND={name}: "):
            select_backend()
    monkeypatch.setenv("KVOFFLOAD_BACKEND", "cpu")
    with pytest.raises(ConfigurationError, match=r"^KVOFFLOAD_BACKEND=cpu: .*cuda:1"):
        select_backend(device="cuda:1")


def test_a_plugin_that_prints_does_not_become_part_of_the_list(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    prints = "import os\nprint('from python')\nos.write(1, b'from C')\nos.system('echo from sh')\n"
    install("loud", "loud", prints + good())
    assert main(["backends", "--json"]) == 0
    out = capfd.readouterr()
    assert "loud" in {entry["name"] for entry in json.loads(out.out)["backends"]}
    for said in ("from python", "from C", "from sh"):
        assert said in out.err


def test_a_backend_that_is_not_available_claims_nothing(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("off", "off", good(available=False))
    install("broken", "broken", "1 / 0")
    found = {r.name: r for r in BackendRegistry().reports()}
    assert found["off"].capabilities is found["broken"].capabilities is None
    assert found["cpu"].capabilities is not None
    assert main(["backends"]) == 0
    assert capsys.readouterr().out.count("host_order") == 1


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import nonexistent_thing", "nonexistent_thing"),
        (good().replace("def kvoffload_backend", "def kvoffload_backnd"), "backnd"),
        (good().replace("(device)", "(device, colour)"), "colour"),
        (good().replace("interface = 1", "interface = 2"), "interface version 2"),
        (good().replace("return backend", "return 7"), "7, not a Backend"),
        (good(available=False), "so it was made"),
    ],
    ids=[
        "import",
        "misspelt hook",
        "unknown argument",
        "newer interface",
        "wrong result",
        "not available",
    ],
)
def test_verify_tells_in_one_line_why_a_backend_cannot_be_verified(
    install: Install, capsys: pytest.CaptureFixture[str], source: str, error: str
) -> None:
    install("broken", "oops", source)
    assert main(["verify", "oops"]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert error in out.err
    assert out.err.startswith("kvoffload: error: ")
    assert out.err.count("\n") == 1


def test_verify_refuses_a_name_that_is_claimed_twice_or_by_nobody(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("first", "same", good())
    install("second", "same", good())
    assert main(["verify", "same"]) == 2
    said = capsys.readouterr().err
    assert "first 1.5" in said
    assert "second 1.5" in said
    assert main(["verify", "nobody"]) == 2
    assert "no backend named 'nobody' is installed; installed: cpu" in capsys.readouterr().err
