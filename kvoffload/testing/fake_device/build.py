"""Building the fake device: once per source, compiler and torch, with g++ alone.

The compiler is called directly, under a lock of the operating system, and the library appears under
its name when it is complete: nothing is left to go stale when a build is killed.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

from kvoffload.core.cache_folder import cache_folder
from kvoffload.core.errors import ConfigurationError

SOURCES = Path(__file__).parent / "src"
REQUIRED = ("runtime.cpp", "torch_device.cpp", "hip_driver.cpp")
WITH_HEADER = {"cuda_driver.cpp": "cuda.h"}
"""A vendor's stand-ins, and the header of the vendor's that they are checked against."""
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror=return-type")


class CannotBuildError(ConfigurationError):
    """The fake device cannot be built here; says what is missing."""


def build() -> Path:
    """The library, built if it is not there yet; takes some ten seconds.

    Raises:
        CannotBuildError: no compiler, or it refused.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise CannotBuildError(
            f"the fake device needs the C++ compiler {compiler!r}, which is not on the PATH; "
            "install g++ 11 or later, or name another one in CXX"
        )
    sources = [SOURCES / name for name in REQUIRED]
    headers = sorted(SOURCES.glob("*.h"))
    includes = [f"-isystem{folder}" for folder in _torch_folders("include")]
    for name, header in WITH_HEADER.items():
        folder = find_header(header)
        if folder is not None:
            sources.append(SOURCES / name)
            headers.append(folder / header)
            includes.append(f"-isystem{folder}")
    target = (
        cache_folder("fake-device") / _digest(compiler, sources, headers, includes) / "libfake.so"
    )
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():  # another process may have been quicker
            _compile(compiler, sources, includes, target)
    return target


def find_header(name: str) -> Path | None:
    """The folder of a vendor's header: of a CUDA installation, or of its package from PyPI."""
    purelib = Path(sysconfig.get_path("purelib"))
    candidates = [
        *(Path(os.environ[v]) / "include" for v in ("CUDA_HOME", "CUDA_PATH") if v in os.environ),
        *sorted(purelib.glob("nvidia/cu*/include"), reverse=True),  # nvidia-cuda-runtime
        purelib / "nvidia/cuda_runtime/include",  # nvidia-cuda-runtime-cu12
        Path("/usr/local/cuda/include"),
    ]
    return next((folder for folder in candidates if (folder / name).is_file()), None)


def _torch_folders(kind: str) -> list[Path]:
    root = Path(torch.__file__).parent
    if kind == "lib":
        return [root / "lib"]
    return [root / "include", root / "include/torch/csrc/api/include"]


def _digest(compiler: str, sources: list[Path], headers: list[Path], includes: list[str]) -> str:
    digest = hashlib.sha256()
    version = _run([compiler, "--version"])
    for text in (torch.__version__, version, *FLAGS, *includes):
        digest.update(f"{text}\0".encode())
    for path in (*sources, *headers):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, sources: list[Path], includes: list[str], target: Path) -> None:
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        commands = [
            [compiler, *FLAGS, abi, *includes, "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(_run, commands))
        libraries = _torch_folders("lib")[0]
        linked = Path(scratch) / target.name
        _run(
            [
                *(compiler, "-shared", "-Wl,-Bsymbolic", "-o", str(linked)),
                *map(str, objects),
                *(f"-L{libraries}", "-lc10", "-ltorch", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"),
            ]
        )
        linked.rename(target)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuildError(
            f"building the fake device failed: {shlex.join(command)}\n{done.stderr[-3000:]}"
        )
    return done.stdout
