"""The command line as a person, a script and an impatient person use it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload.backends.cpu.backend import CpuBackend
from kvoffload.cli import main
from kvoffload.core.host_memory import memory_limit

QUICK = ["replay", "--device-blocks", "100", "--page-bytes", "64", "--limit", "150"]


def test_replay_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--host-bytes", "64KiB", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["requests"] == 150
    assert report["blocks"] == (
        report["device_hit_blocks"] + report["host_hit_blocks"] + report["computed_blocks"]
    )
    assert report["hit_rate"] == pytest.approx(
        (report["device_hit_blocks"] + report["host_hit_blocks"]) / report["blocks"]
    )
    assert report["backend"] == "cpu"
    assert (report["corrupt_blocks"], report["failed_jobs"]) == (0, 0)
    assert 0 < report["host_bytes_resident"] <= 64 * 1024
    for field in ("stored_chunks", "evicted_chunks", "bytes_stored", "bytes_loaded", "seconds"):
        assert field in report


def test_replay_prints_a_summary_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--seed", "3"]) == 0
    out = capsys.readouterr()
    assert "every byte was as it should be" in out.out
    assert "seed 3" in out.out
    assert out.err == ""


def test_a_broken_copy_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CpuBackend, "swap_blocks", lambda self, plan, stream, keep: None)
    assert main([*QUICK, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["corrupt_blocks"] > 0
    assert main(QUICK) == 1
    assert "FAILED" in capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that the command says before it exits with 2."""
    assert main(list(arguments)) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.count("\n") == 1
    assert out.err.startswith("kvoffload: error: ")
    return out.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trace", "/nonexistent/t.jsonl"], ["--trace", "/nonexistent/t.jsonl", "No such file"]),
        (["--device-blocks", "3"], ["--device-blocks 3", "blocks"]),
        (["--device-blocks", "0"], ["--device-blocks", "0"]),
        (["--device-blocks", "-5"], ["--device-blocks", "-5"]),
        (["--device-blocks", "many"], ["--device-blocks", "many"]),
        (["--layers", "0"], ["--layers", "0"]),
        (["--page-bytes", "-1"], ["--page-bytes", "-1"]),
        (["--concurrency", "0"], ["--concurrency", "0"]),
        (["--limit", "0"], ["--limit", "0"]),
        (["--host-bytes", "0"], ["--host-bytes", "0"]),
        (["--host-bytes", "-4096"], ["--host-bytes", "-4096"]),
        (["--host-bytes", "1g!"], ["--host-bytes", "1g!"]),
        (["--host-bytes", "1g"], ["--host-bytes", "1g", "GiB"]),
        (["--host-bytes", ""], ["--host-bytes"]),
        (["--host-bytes", "100"], ["--host-bytes", "100", "65536"]),
        (["--host-bytes", "900TiB"], ["--host-bytes", str(900 << 40), str(memory_limit().nbytes)]),
        (["--device-blocks", str(1 << 50)], ["--device-blocks", str(1 << 50)]),
        (["--backend", "nonsense"], ["nonsense", "cpu"]),
        (["--backend", "cuda"], ["cuda", "not available"]),
        (["--nonsense"], ["--nonsense"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_clear_line_F07(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    said = refused(capsys, "replay", *arguments)
    for word in words:
        assert word in said


def test_a_bad_trace_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text("")
    assert "no request" in refused(capsys, "replay", "--trace", str(trace))
    trace.write_text('{"timestamp": 0, "hash_ids": [1]}\n{"timestamp": 0\n')
    assert "t.jsonl:2" in refused(capsys, "replay", "--trace", str(trace))
    trace.write_text(json.dumps({"timestamp": 0, "hash_ids": list(range(11))}))
    said = refused(capsys, "replay", "--trace", str(trace), "--device-blocks", "10")
    assert "--device-blocks 10" in said
    assert "11 blocks" in said


INTERRUPT_ITSELF = """
import os, signal, sys, threading
from kvoffload.cli import main
from kvoffload.replay.replay import Replay

admit = Replay._admit
def admit_and_interrupt(self, request, number):
    admit(self, request, number)
    if number == 50:
        os.kill(os.getpid(), signal.SIGINT)

Replay._admit = admit_and_interrupt
code = main(["replay", "--json", "--limit", "200"])
left = [t.name for t in threading.enumerate() if "kvoffload" in t.name]
sys.exit(code if not left else f"threads left: {left}")
"""


def test_ctrl_c_ends_after_the_request_at_hand_and_says_what_was_done() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPT_ITSELF],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 130, done.stderr
    report = json.loads(done.stdout)
    assert report["interrupted"]
    assert report["requests"] == 50
    assert report["corrupt_blocks"] == 0
    assert done.stderr == "kvoffload: interrupted after 50 of 200 requests\n"


def test_ctrl_c_before_the_replay_begins_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvoffload.cli.replay.chat", interrupt)
    assert main(QUICK) == 130
    assert capsys.readouterr().err == "kvoffload: interrupted\n"


def test_backends_lists_all_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends", "--json"]) == 0
    found = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["backends"]}
    assert found["cpu"]["available"]
    assert found["cpu"]["distribution"].startswith("kvoffload ")
    assert found["cpu"]["capabilities"]["asynchronous"] is True
    assert "without CUDA" in found["cuda"]["reason"]
    assert main(["backends"]) == 0
    out = capsys.readouterr().out
    for name in ("cpu", "cuda", "rocm", "hpu", "not available"):
        assert name in out


def test_bench_plan_prints_lowering_and_floor_of_one_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "plan", "--layers", "4", "--blocks", "50", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 12
    for row in rows:
        assert row["ratio"] == pytest.approx(row["lowering_us"] / row["floor_us"])
    assert main(["bench", "plan", "--layers", "4", "--blocks", "50"]) == 0
    assert "ratio" in capsys.readouterr().out


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvoffload 0.")
    for command in ([], ["replay"], ["backends"], ["bench"], ["bench", "plan"]):
        assert main([*command, "--help"]) == 0
        assert "--help" in capsys.readouterr().out
