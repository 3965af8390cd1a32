"""What the rocm backend says of a machine, and of a real runtime where Debian's is installed."""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
from pathlib import Path

import pytest
import torch

from kvoffload.backends._driver import loaded_library
from kvoffload.backends.rocm import backend as rocm_module
from kvoffload.backends.rocm.backend import RocmBackend
from kvoffload.backends.rocm.blocks import ENVIRONMENT
from kvoffload.backends.rocm.copy import LIBRARIES, HipRuntime
from kvoffload.core.errors import ConfigurationError
from kvoffload.testing.fake_device.build import SOURCES


def test_torch_was_built_without_rocm() -> None:
    if torch.version.hip is not None:
        pytest.skip("this torch was built with ROCm")
    probe = RocmBackend().probe()
    assert not probe.available
    assert "was built without ROCm; install a build with it" in probe.reason


def test_libraries_are_looked_for_from_the_plain_name_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def refuse(name: str) -> ctypes.CDLL:
        asked.append(name)
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    monkeypatch.setattr(rocm_module, "loaded_library", lambda stem: None)
    monkeypatch.setattr(torch.version, "hip", "7.2")
    probe = RocmBackend().probe()
    assert tuple(asked) == LIBRARIES
    assert LIBRARIES[:3] == ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")
    assert probe.reason.startswith("no driver: libamdhip64.so: cannot open")


def test_the_runtime_that_torch_has_loaded_is_the_one(tmp_path: Path) -> None:
    line = "7f00-7f01 r-xp 00000000 00:00 0    {}\n"
    maps = tmp_path / "maps"
    maps.write_text(line.format("/opt/torch/lib/libamdhip64.so.7") * 3 + line.format("[stack]"))
    assert loaded_library("libamdhip64.so", maps) == "/opt/torch/lib/libamdhip64.so.7"
    assert loaded_library("libother.so", maps) is None
    with maps.open("a") as more:
        more.write(line.format("/opt/rocm/lib/libamdhip64.so.6.1"))
    with pytest.raises(OSError, match=r"two runtimes: /opt/rocm/lib.* and /opt/torch/lib"):
        loaded_library("libamdhip64.so", maps)


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5"])
def test_a_wrong_limit_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, text)
    with pytest.raises(ConfigurationError, match=f"{ENVIRONMENT}: '{text}' is not a whole number"):
        RocmBackend()


def real_runtime() -> ctypes.CDLL:
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    pytest.skip("no libamdhip64 is installed (Debian: libamdhip64-5)")


def test_a_real_runtime_without_a_device_says_exactly_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = real_runtime()
    if Path("/dev/kfd").exists():
        pytest.skip("this machine has a device")
    monkeypatch.setattr(torch.version, "hip", "5.2")
    probe = RocmBackend(library=library).probe()
    assert not probe.available
    assert re.fullmatch(
        r"the driver finds no device: hip\w+ returned 10[01]: hipError(No|Invalid)Device.*",
        probe.reason,
    ), probe.reason


def test_the_newest_call_is_absent_from_a_real_old_runtime() -> None:
    library = real_runtime()
    for name, arguments in HipRuntime.functions.items():
        function = getattr(library, name)  # every one that is needed is there
        function.argtypes = arguments
    version = ctypes.c_int()
    if library.hipRuntimeGetVersion(ctypes.byref(version)) == 0 and version.value < 70_000_000:
        assert not hasattr(library, "hipMemcpyBatchAsync")


def declared(text: str) -> dict[str, str]:
    """Prototypes of C or Cython: types alone, by name."""
    found = {}
    for result, name, arguments in re.findall(
        r"(hipError_t|const char \*|const char\*)\s*(hip\w+)\(([^)]*)\)", text
    ):
        kinds = []
        for argument in filter(None, (part.strip() for part in arguments.split(","))):
            kind = re.sub(r"\s*\b\w+$", "", re.sub(r"\s+", " ", argument))
            kind = kind.replace("unsigned long", "size_t").replace(" *", "*").replace("* *", "**")
            kinds.append(kind.replace(" *", "*").strip())
        found[name] = f"{result.replace(' ', '')}({', '.join(kinds)})"
    return found


def test_the_stand_ins_are_declared_as_hip_python_declares_them() -> None:
    try:
        version = importlib.metadata.version("hip-python")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("hip-python 7.2 is not installed (pip install 'hip-python==7.2.*')")
    if not version.startswith("7.2."):
        pytest.skip(f"hip-python {version} is not 7.2")
    files = importlib.metadata.files("hip-python") or []
    header = next(Path(str(file.locate())) for file in files if file.name == "chip.pxd")
    theirs = declared(header.read_text())
    ours = declared((SOURCES / "hip_api.h").read_text())
    assert set(HipRuntime.functions) | {"hipMemcpyBatchAsync"} <= set(ours)
    assert ours == {name: theirs[name] for name in ours}
