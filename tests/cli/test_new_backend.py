"""``kvoffload new-backend``: what it writes installs, passes every check, and is short."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest

import kvoffload as package
from kvoffload.cli import main
from kvoffload.new_backend.write import LONGEST_NAME, TEMPLATE
from kvoffload.plugins.registry import BackendRegistry
from tests.distributions import install, kvoffload, lines_of_code, run
from tests.test_package import loaded_by

ROOT = Path(package.__file__).parents[1]
FILES = [
    ".gitignore",
    "README.md",
    "kvoffload_my_npu/__init__.py",
    "kvoffload_my_npu/backend.py",
    "kvoffload_my_npu/blocks.py",
    "kvoffload_my_npu/copy.py",
    "kvoffload_my_npu/streams.py",
    "pyproject.toml",
    "tests/test_conformance.py",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new backend, as it was written."""
    made = tmp_path_factory.mktemp("new") / "deep" / "npu"
    assert main(["new-backend", "my_npu", str(made)]) == 0
    return made


@pytest.fixture(scope="module")
def site(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it is installed."""
    return install(folder, tmp_path_factory.mktemp("installed"))


def test_it_passes_every_check(site: Path) -> None:
    report = kvoffload(site, "verify", "my_npu")
    assert report["distribution"] == "kvoffload-my_npu 0.1.0"
    assert report["device"] == "cpu"
    assert report["failed"] == 0
    assert report["passed"] > 50
    assert report["level"] in ("asynchronous", "fast")


def test_its_own_tests_pass_before_it_is_installed(folder: Path) -> None:
    said = run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=folder).stdout
    assert " passed" in said
    assert "failed" not in said


def test_it_is_listed_and_is_not_chosen_by_itself(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(site))
    registry = BackendRegistry()
    (report,) = (r for r in registry.reports() if r.name == "my_npu")
    assert (report.available, report.error) == (True, None)
    assert registry.choose()[0] == "cpu"
    assert registry.choose("my_npu")[0] == "my_npu"
    for name in [name for name in sys.modules if name.startswith("kvoffload_my_npu")]:
        del sys.modules[name]


def test_a_name_that_is_installed_says_how_to_have_it_again(site: Path, tmp_path: Path) -> None:
    arguments = ("new-backend", "my_npu", tmp_path / "again")
    said = run("-m", "kvoffload", *arguments, site=site, fails=True).stderr
    assert "choose another name, or 'pip uninstall kvoffload-my_npu'" in said


def test_its_package_has_fewer_than_60_lines_of_code(folder: Path) -> None:
    assert 30 < lines_of_code(folder / "kvoffload_my_npu") < 60


@pytest.mark.parametrize("name", ["a", "my_npu", "n" * LONGEST_NAME])
def test_its_code_is_clean_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    assert main(["new-backend", name, str(tmp_path)]) == 0
    settings = ROOT / "pyproject.toml"
    # A hook imports its backend when it is asked.
    run("-m", "ruff", "check", "--config", settings, "--ignore", "PLC0415", ".", cwd=tmp_path)
    run("-m", "ruff", "format", "--config", settings, "--check", ".", cwd=tmp_path)
    for path in tmp_path.rglob("*.*"):
        if path.is_file():
            assert "@" not in path.read_text().replace("@hookimpl", "")


def test_it_says_what_it_wrote_and_what_comes_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-backend", "my_npu", "a folder"]) == 0
    out = capsys.readouterr()
    said = [line.strip() for line in out.out.splitlines()]
    assert [line for line in said if line in FILES] == FILES
    for command in (
        "pip install -e './a folder[test]'",
        "kvoffload verify my_npu",
        "pytest './a folder'",
    ):
        assert command in said
    assert out.err == ""
    written = Path("a folder").rglob("*")
    assert sorted(str(p.relative_to("a folder")) for p in written if p.is_file()) == FILES


def test_json_names_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-backend", "my_npu", str(tmp_path / "x"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["files"] == FILES
    assert told["folder"] == str(tmp_path / "x")
    assert told["package"] == "kvoffload_my_npu"
    assert told["distribution"] == "kvoffload-my_npu"
    assert len(told["next"]) == 3


@pytest.mark.parametrize(
    ("name", "says"),
    [
        *(
            (name, "cannot name a backend")
            for name in (
                *("Npu", "1npu", "_npu", "npu_", "a__b", "my-npu", "a.b", "", "a b", "ä", "a/b"),
                "../npu",
                "n" * (LONGEST_NAME + 1),
                "9" * 5000,
                "npu\n",
            )
        ),
        ("class", "a word of Python's own"),
        ("cpu", "'cpu' is installed already, by kvoffload 0."),
        ("torch", "'torch' is installed already"),
    ],
)
def test_a_name_that_cannot_be_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, says: str
) -> None:
    assert main(["new-backend", "--", name, str(tmp_path / "x")]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert says in out.err
    assert out.err.count("\n") == 1
    assert len(out.err) < 400
    assert not (tmp_path / "x").exists()


def test_a_folder_that_cannot_be_used_is_refused_and_stays_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full, file = tmp_path / "full", tmp_path / "file"
    full.mkdir()
    (full / "mine").write_text("mine")
    file.write_text("mine")
    for place, says in (
        (full, "is not empty"),
        (file, "is a file"),
        (file / "deeper", "Not a directory"),
    ):
        assert main(["new-backend", "npu", str(place)]) == 2
        said = capsys.readouterr().err
        assert says in said
        assert str(place) in said
    assert [path.name for path in full.iterdir()] == ["mine"]
    assert file.read_text() == "mine"


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert main(["new-backend", "npu", str(tmp_path)]) == 0
    assert (tmp_path / "kvoffload_npu" / "backend.py").is_file()


def test_its_help_loads_neither_torch_nor_numpy_nor_a_plugin() -> None:
    loaded = loaded_by("from kvoffload.cli import main", "main(['new-backend', '--help'])")
    assert "typer" in loaded
    assert not loaded & {"torch", "numpy", "pluggy"}


def test_the_template_is_part_of_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["kvoffload"]
    packed = {path for pattern in patterns for path in TEMPLATE.parents[1].glob(pattern)}
    files = {path for path in TEMPLATE.rglob("*") if path.is_file()}
    assert len(files) == len(FILES)
    assert files <= packed
