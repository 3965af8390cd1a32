"""What was calibrated is found again on the same device and driver, and nowhere else."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from kvoffload.backends.calibration import load, save


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_it_is_kept_by_device_and_driver(tmp_path: Path) -> None:
    assert load("H200", "580.1") is None
    path = save("H200", "580.1", 16384)
    assert path.parent == tmp_path / "kvoffload/calibration"
    assert [load("H200", "580.1"), load("H200", "580.2"), load("H100", "580.1")] == [
        16384,
        None,
        None,
    ]
    save("H200", "580.1", 4096)
    assert load("H200", "580.1") == 4096
    assert list(path.parent.iterdir()) == [path]


def test_a_kernel_that_is_never_faster_is_known_as_that() -> None:
    save("H200", "580.1", None)
    assert load("H200", "580.1") == 0


def test_any_name_can_be_a_file() -> None:
    names = ["a/b", "a b", "../../a", "a" * 500, "\0", "é", ""]
    for size, name in enumerate(names, start=1):
        save(name, name, size)
    assert [load(name, name) for name in names] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '"x"',
        "{}",
        '{"crossover": "4096"}',
        '{"crossover": -1}',
        '{"crossover": true}',
        '{"crossover": 4096}',
        '{"crossover": 4096, "device_name": "other", "driver_version": "580.1"}',
        "[" * 100_000,
    ],
)
def test_a_damaged_file_is_ignored_with_one_warning(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = save("H200", "580.1", 4096)
    path.write_text(text)
    with caplog.at_level(logging.WARNING, "kvoffload"):
        assert [load("H200", "580.1") for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert "bench calibrate" in record.getMessage()
    save("H200", "580.1", 8192)
    assert load("H200", "580.1") == 8192


def test_bytes_that_are_no_text_are_damage_too() -> None:
    path = save("H200", "580.1", 4096)
    path.write_bytes(b"\xff\xfe")
    assert load("H200", "580.1") is None


def test_a_write_that_fails_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    path = save("H200", "580.1", 4096)

    def refuse(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(OSError, match="no space"):
        save("H200", "580.1", 8192)
    assert json.loads(path.read_text())["crossover"] == 4096
    assert list(path.parent.iterdir()) == [path]
