"""The fake device is built once, by one process at a time, and by nobody who did not ask."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

import kvoffload
from kvoffload.testing.fake_device import build as building
from kvoffload.testing.fake_device.build import SOURCES, CannotBuildError, build, find_header

ROOT = Path(kvoffload.__file__).parents[1]
BUILD = "from kvoffload.testing.fake_device.build import build; print(build())"


class Compiler:
    """A stand-in for g++ that writes down what it is asked for, and makes what it is asked for.

    Args:
        folder: empty, for its script and its notes.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "compiler"
        self.notes = folder / "notes"
        self.gate = folder / "gate"
        self.reached = folder / "reached"
        self.cache = folder / "cache"
        self.notes.touch()
        self.make("touch")

    def make(self, how: str) -> None:
        """How it makes a file: a command of the shell, given its path."""
        self.path.write_text(
            textwrap.dedent(f"""\
                #!/bin/sh
                if [ "$1" = --version ]; then echo "test compiler 1"; exit; fi
                target=
                for word; do if [ "$last" = -o ]; then target=$word; fi; last=$word; done
                echo "$(basename "$target")" >> {self.notes}
                {how} "$target"
                """)
        )
        self.path.chmod(0o755)

    def environment(self) -> dict[str, str]:
        return os.environ | {"CXX": str(self.path), "XDG_CACHE_HOME": str(self.cache)}

    def start(self) -> subprocess.Popen[str]:
        """A process that builds with it, in a session of its own."""
        return subprocess.Popen(
            [sys.executable, "-c", BUILD],
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def made(self) -> list[str]:
        return self.notes.read_text().split()

    def linked(self) -> int:
        return self.made().count("libfake.so")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """The compiler of this process and of those it starts."""
    made = Compiler(tmp_path)
    for name in ("CXX", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, made.environment()[name])
    return made


# ------------------------------------------------------------------------------------ the compiler


@pytest.mark.parametrize("named", [None, "no-such-compiler"])
def test_without_a_compiler_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if named is None:
        monkeypatch.delenv("CXX", raising=False)
    else:
        monkeypatch.setenv("CXX", named)
    with pytest.raises(CannotBuildError, match=rf"'{named or 'g..'}'.*install g\+\+ 11"):
        build()
    assert not (tmp_path / "cache").exists()


def test_what_the_compiler_complains_of_is_told(compiler: Compiler) -> None:
    compiler.make("echo 'it does not like this' >&2; exit 1;")
    with pytest.raises(CannotBuildError, match="it does not like this"):
        build()
    compiler.make("touch")
    assert build().exists()  # the failure left nothing behind


def test_each_source_is_compiled_once_and_linked_once(compiler: Compiler) -> None:
    first = build()
    objects = {f"{Path(name).stem}.o" for name in building.REQUIRED}
    objects |= {f"{Path(n).stem}.o" for n, h in building.WITH_HEADER.items() if find_header(h)}
    assert sorted(compiler.made()) == sorted([*objects, "libfake.so"])
    assert build() == first
    assert compiler.linked() == 1
    assert {path.name for path in first.parent.iterdir()} == {"libfake.so", "lock"}


def test_it_is_built_anew_when_a_source_changes(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = shutil.copytree(SOURCES, tmp_path / "src")
    monkeypatch.setattr(building, "SOURCES", copied)
    built = {build()}
    for name in (*building.REQUIRED, "runtime.h"):
        with (copied / name).open("a") as file:
            file.write("// changed\n")
        built.add(build())
    assert len(built) == len(building.REQUIRED) + 2


def test_it_is_built_anew_when_a_vendors_header_changes(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = tmp_path / "toolkit/include"
    headers.mkdir(parents=True)
    monkeypatch.setenv("CUDA_HOME", str(headers.parent))
    built = set()
    for text in ("one version", "another"):
        (headers / "cuda.h").write_text(text)
        assert find_header("cuda.h") == headers
        built.add(build())
    assert len(built) == 2


def test_without_a_vendors_header_its_stand_ins_are_left_out(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "find_header", lambda name: None)
    build()
    assert sorted(compiler.made()) == ["hip_driver.o", "libfake.so", "runtime.o", "torch_device.o"]


# --------------------------------------------------------------------------------- many processes


def test_of_two_that_build_at_once_one_builds(compiler: Compiler) -> None:
    both = [compiler.start() for _ in range(2)]
    outputs = [process.communicate(timeout=50) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    assert Path(outputs[0][0].strip()).exists()
    assert compiler.linked() == 1


def test_a_build_that_is_killed_blocks_nobody(compiler: Compiler) -> None:
    os.mkfifo(compiler.gate)
    os.mkfifo(compiler.reached)
    compiler.make(f"echo x > {compiler.reached}; cat {compiler.gate}; touch")
    process = compiler.start()
    compiler.reached.read_text()  # a compiler runs, under the lock
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not list(compiler.cache.rglob("libfake.so"))
    compiler.make("touch")
    assert build().exists()


# ------------------------------------------------------------------------------ against the header


def syntax_of(source: Path) -> subprocess.CompletedProcess[str]:
    compiler, folder = shutil.which("g++"), find_header("cuda.h")
    if compiler is None:
        pytest.skip("no g++")
    if folder is None:
        pytest.skip("no cuda.h")
    return subprocess.run(
        [
            *(compiler, "-std=c++20", "-fsyntax-only"),
            *(f"-isystem{folder}", f"-I{SOURCES}", str(source)),
        ],
        env=os.environ | {"LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


def test_the_stand_ins_have_the_prototypes_of_the_header() -> None:
    done = syntax_of(SOURCES / "cuda_driver.cpp")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [
        ("cuMemcpyBatchAsync_v2", r"size_t\* sizes", "unsigned int* sizes"),
        ("cuMemcpyBatchAsync", r"size_t\* fail_index,", ""),
        ("cuMemcpyAsync", "size_t size", "unsigned int size"),
        ("cuMemHostRegister_v2", "unsigned int flags", "unsigned long flags"),
        ("cuGetProcAddress_v2", "cuuint64_t", "int"),
    ],
)
def test_a_wrong_prototype_does_not_compile(
    tmp_path: Path, function: str, right: str, wrong: str
) -> None:
    text = (SOURCES / "cuda_driver.cpp").read_text()
    changed, count = re.subn(
        rf"(CUDAAPI {function}\([^{{]*?){right}", rf"\g<1>{wrong}", text, count=1
    )
    assert count == 1
    copied = tmp_path / "cuda_driver.cpp"
    copied.write_text(changed)
    done = syntax_of(copied)
    assert done.returncode != 0
    assert re.search(rf"conflicting declaration.*{function}", done.stderr), done.stderr


# ----------------------------------------------------------------------- the package, and importing


def test_a_wheel_has_the_sources() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["kvoffload"]
    package = Path(kvoffload.__file__).parent
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    needed = {SOURCES / n for n in (*building.REQUIRED, *building.WITH_HEADER, "runtime.h")}
    assert needed <= packed
    assert packed >= set(SOURCES.iterdir())


def run(script: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=55,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", ["kvoffload", "kvoffload.testing.fake_device"])
def test_importing_builds_nothing_and_loads_nothing(compiler: Compiler, module: str) -> None:
    script = f"""
import {module}, torch
from pathlib import Path
print(torch.accelerator.current_accelerator(), torch._C._get_privateuse1_backend_name())
print("libfake" in Path("/proc/self/maps").read_text())
"""
    assert "fake" not in run(script, compiler.environment()).lower()
    assert compiler.made() == []
    assert not compiler.cache.exists()


def test_loading_makes_it_the_accelerator() -> None:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no compiler")
    script = """
import torch
from kvoffload.testing.fake_device import load
assert load() is load()
print(torch.accelerator.current_accelerator(), torch.accelerator.device_count())
print(torch.arange(3, device="fake").tolist())
"""
    assert run(script, dict(os.environ)) == "fake 2\n[0, 1, 2]\n"
