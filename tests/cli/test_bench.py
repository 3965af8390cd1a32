"""``kvoffload bench copy``, ``calibrate`` and ``gpu``, as a person and a script use them."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvoffload.backends import calibration
from kvoffload.backends.cpu.backend import CpuBackend
from kvoffload.bench import calibrate, memory
from kvoffload.bench.gpu import GpuReport, GpuRow
from kvoffload.bench.machine import Machine
from kvoffload.cli import main
from kvoffload.cli.gpu_report import heading, markdown, sections
from kvoffload.cli.measuring import ON_FAKE
from kvoffload.testing.fake_device import CannotBuildError
from kvoffload.testing.fake_device.build import build
from tests.bench.two_ways import DEVICE, DRIVER, TwoWays
from tests.cli.test_cli import refused
from tests.cli.test_interrupt import interrupted

QUICK = ["--blocks", "4", "--rounds", "2"]
RUN = "from kvoffload.cli import run; raise SystemExit(run())"
COPY = ["bench", "copy", "--backend", "cpu", *QUICK]


def fake(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command on the fake device, which takes a process for good."""
    try:
        build()
    except CannotBuildError as error:
        pytest.skip(str(error))
    return subprocess.run(
        [sys.executable, "-c", RUN, *arguments, "--on", "fake"],
        capture_output=True,
        text=True,
        check=False,
        timeout=55,
    )


# ------------------------------------------------------------------------------------- copy
def test_copy_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COPY, "--pages", "4KiB,64,4096", "--json"]) == 0
    out = capsys.readouterr()
    assert out.err == ""
    printed = json.loads(out.out)
    assert (printed["backend"], printed["device"], printed["fake"]) == ("cpu", "cpu", None)
    rows = printed["rows"]
    assert [(row["page_bytes"], row["direction"]) for row in rows] == [
        (4096, "store"),
        (4096, "load"),
        (64, "store"),
        (64, "load"),
    ]
    for row in rows:
        assert (row["blocks"], row["threads"], row["note"]) == (4, 1, None)
        assert min(row["gbps"], row["memcpy_gbps"]) > 0
        assert row["ratio"] == pytest.approx(row["gbps"] / row["memcpy_gbps"])


def test_copy_prints_a_table_for_people(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 3 << 19)
    assert main([*COPY, "--pages", "16KiB"]) == 0
    out = capsys.readouterr().out
    for word in ("cpu on cpu", "16 KiB", "store", "load", "one copy", "2 instead of 4 blocks"):
        assert word in out
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 << 16)
    said = refused(capsys, *COPY, "--pages", "16KiB")
    assert "--pages 16 KiB" in said
    assert "smaller page" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pages", ""], ["--pages"]),
        (["--pages", "4KiB,,8KiB"], ["--pages"]),
        (["--pages", "0"], ["--pages", "0"]),
        (["--pages", "4k"], ["--pages", "'4k'", "KiB"]),
        (["--pages", ",".join(map(str, range(1, 100)))], ["--pages", "99 sizes", "64"]),
        (["--blocks", "0"], ["--blocks", "0"]),
        (["--blocks", "1000001"], ["--blocks 1000001", "1,000,000"]),
        (["--rounds", "0"], ["--rounds", "0"]),
        (["--seed", "-1"], ["--seed", "-1"]),
        (["--backend", "nonsense"], ["--backend nonsense", "cpu"]),
        (["--backend", "cuda"], ["--backend cuda", "not available"]),
        (["--on", "moon"], ["--on moon", "fake"]),
        (["--on", "fake:nonsense"], ["--on fake:nonsense", "default"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
@pytest.mark.parametrize("command", ["copy", "gpu"])
def test_wrong_input_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], command: str, arguments: list[str], words: list[str]
) -> None:
    said = refused(capsys, "bench", command, *arguments)
    for word in words:
        assert word in said


def test_a_page_that_no_machine_has_room_for_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = refused(capsys, *COPY, "--pages", "1PiB")
    assert "--pages 1 PiB" in said
    assert "smaller page" in said


def test_wrong_bytes_are_not_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CpuBackend, "swap_blocks", lambda self, plan, stream, keep: None)
    assert main([*COPY, "--pages", "64", "--json"]) == 1
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.count("\n") == 1
    assert "nothing was measured" in out.err


def test_a_transfer_that_fails_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the engine fell off")

    monkeypatch.setattr(CpuBackend, "swap_blocks", fail)
    assert main([*COPY, "--pages", "64"]) == 1
    assert "the engine fell off" in capsys.readouterr().err


INTERRUPTING = """
from kvoffload.bench.pool import Pool
check = Pool.check
Pool.check = lambda self, rng: (check(self, rng), interrupt({times}))
"""


@pytest.mark.parametrize("times", [1, 3])
def test_ctrl_c_while_copies_are_measured(times: int) -> None:
    done = interrupted(INTERRUPTING.format(times=times), *COPY, "--pages", "64", "--json")
    assert (done.returncode, done.stderr) == (130, "kvoffload: interrupted\n")
    assert done.stdout == ""


def test_copy_on_the_fake_device_says_so() -> None:
    arguments = ("bench", "copy", *QUICK, "--pages", "4KiB")
    done = fake(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert (printed["backend"], printed["device"], printed["fake"]) == (
        "torch",
        "fake:0",
        "default",
    )
    assert len(printed["rows"]) == 2
    assert ON_FAKE in fake(*arguments).stdout


def test_a_backend_that_the_fake_device_cannot_hold_is_refused() -> None:
    done = fake("bench", "copy", "--backend", "cpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--on fake --backend cpu" in done.stderr


# -------------------------------------------------------------------------------- calibrate
def test_a_backend_of_one_way_has_nothing_to_calibrate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = refused(capsys, "bench", "calibrate")
    assert "backend cpu copies in one way only; there is nothing to calibrate" in said


def test_without_the_hardware_the_backend_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "bench", "calibrate", "--backend", "cuda")
    assert "--backend cuda" in said
    assert "not available" in said


@pytest.fixture
def two_ways(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TwoWays:
    """The backend that the command chooses; it measures little."""
    backend = TwoWays()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("kvoffload.cli.bench_calibrate.choose", lambda name: ("two", backend))
    quick = functools.partial(calibrate.run, pages=[64, 128], blocks=4, rounds=1)
    monkeypatch.setattr(calibrate, "run", quick)
    return backend


@pytest.mark.parametrize("found", [None, 64])
def test_what_was_calibrated_is_written_down(
    two_ways: TwoWays,
    found: int | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(calibrate, "crossover", lambda rows: found)
    assert main(["bench", "calibrate", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["backend"], printed["device"], printed["driver"]) == ("two", DEVICE, DRIVER)
    assert printed["crossover"] == found
    assert Path(printed["file"]).is_file()
    assert [row["page_bytes"] for row in printed["rows"]] == [64, 128]
    assert calibration.load(DEVICE, DRIVER) == (found or 0)
    assert main(["bench", "calibrate"]) == 0
    out = capsys.readouterr().out
    assert DEVICE in out
    assert ("up to 64 B" if found else "DMA is faster for every page") in out


def test_ctrl_c_while_calibrating_writes_nothing(
    two_ways: TwoWays,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    swap_blocks = two_ways.swap_blocks

    def interrupt_once(*arguments: Any) -> None:
        if not two_ways.used:
            os.kill(os.getpid(), signal.SIGINT)
        swap_blocks(*arguments)

    monkeypatch.setattr(two_ways, "swap_blocks", interrupt_once)
    assert main(["bench", "calibrate", "--json"]) == 130
    assert capsys.readouterr() == ("", "kvoffload: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_one_line(
    two_ways: TwoWays, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kvoffload").write_text("a file")
    assert "XDG_CACHE_HOME" in refused(capsys, "bench", "calibrate")


# -------------------------------------------------------------------------------------- gpu
def test_gpu_without_an_accelerator_says_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = refused(capsys, "bench", "gpu")
    for word in ("no accelerator", "cuda:", "rocm:", "hpu:"):
        assert word in said
    assert main(["bench", "gpu", "--or-skip"]) == 0
    out = capsys.readouterr()
    assert (out.out, out.err.count("\n")) == ("", 1)
    assert out.err.startswith("kvoffload: skipped: there is no accelerator")


@pytest.mark.parametrize("options", [[], ["--backend", "cuda"]])
def test_gpu_is_skipped_where_the_backend_that_was_named_cannot_run(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not options:
        monkeypatch.setenv("KVOFFLOAD_BACKEND", "cuda")
    assert "not available" in refused(capsys, "bench", "gpu", *options)
    assert main(["bench", "gpu", "--or-skip", *options]) == 0
    said = capsys.readouterr().err
    assert said.startswith("kvoffload: skipped: ")
    assert "not available" in said
    assert "nope" in refused(capsys, "bench", "gpu", "--or-skip", "--backend", "nope")


def test_an_accelerator_that_was_not_chosen_is_no_reason_to_skip(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda:0")
    )
    said = refused(capsys, "bench", "gpu", "--or-skip", "--backend", "cpu")
    assert "backend cpu was chosen" in said
    assert "cuda:0" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--on", "fake", "--out", "new.md"], ["--on fake", "only what was measured"]),
        (["--out", "there.md"], ["--out there.md", "already"]),
        (["--out", "nowhere/new.md"], ["--out nowhere/new.md", "no folder nowhere"]),
    ],
)
def test_a_file_that_must_not_be_written_is_refused_first(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.md").write_text("kept")
    said = refused(capsys, "bench", "gpu", *arguments)
    for word in words:
        assert word in said
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"there.md": "kept"}


GPU = ("bench", "gpu", "--blocks", "4", "--rounds", "1", "--pages", "2KiB")


def test_gpu_on_the_fake_device_measures_everything_and_says_where() -> None:
    done = fake(*GPU, "--json")
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    assert (printed["fake"], printed["notice"]) == ("default", ON_FAKE)
    rows = printed["rows"]
    assert {(r["page_bytes"], r["ids"], r["way"], r["direction"]) for r in rows} == {
        (2048, ids, None, direction)
        for ids in ("random", "contiguous")
        for direction in ("store", "load", "both")
    }
    assert len(rows) == 6
    for row in rows:
        assert row["ratio"] == pytest.approx(row["gbps"] / row["one_copy_gbps"])
    assert [row["blocks"] for row in printed["submits"]] == [4, 4]
    assert [row["direction"] for row in printed["products"]] == ["store", "load", "both"]
    for name in ("card", "driver", "torch", "python", "kvoffload", "date"):
        assert printed["machine"][name]


def test_a_measurement_becomes_a_markdown_file() -> None:
    report = GpuReport(
        pinned=False,
        one_copy_bytes=256 << 20,
        rows=[GpuRow(4096, "random", "dma", "store", 2000, 40.0, 50.0, 0.8, "fewer")],
        products_note="it does not multiply",
    )
    machine = Machine(
        "H|200", "580.1", "CUDA 13.0", "2.13", "3.12", "0.1", "Linux", 16, "2026-01-31"
    )
    lines = heading("cuda", "cuda:0", machine, report, fake=False)
    text = markdown(lines, machine, "kvoffload bench gpu --out x.md", sections(report))
    assert text.startswith("# cuda on H|200 (cuda:0)\n")
    for line in (
        "- card: H|200",
        "- driver: 580.1",
        "- date: 2026-01-31",
        "- command: `kvoffload bench gpu --out x.md`",
        "| page | ids | way | direction | blocks | GB/s | one copy | ratio |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: |",
        "| 4 KiB | random | dma | store | 2,000 | 40.00 | 50.00 | 0.80 |",
        "4 KiB: fewer",
        "Not measured: it does not multiply",
    ):
        assert f"\n{line}\n" in text
    assert "could not be pinned" in text
    assert ON_FAKE not in text
    assert ON_FAKE in heading("cuda", "fake:0", machine, report, fake=True)
