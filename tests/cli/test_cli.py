"""The command line as a person, a script and an impatient person use it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvoffload.backends.cpu.backend import CpuBackend
from kvoffload.cli import main
from kvoffload.core.host_memory import memory_limit
from kvoffload.replay.workload import chat

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
        (["--host-bytes", "1gb"], ["did you mean 'GB'?"]),
        (["--host-bytes", "1.5"], ["--host-bytes", "1.5", "whole"]),
        (["--host-bytes", "2PiB"], [str(2 << 50), str(memory_limit().nbytes)]),
        (["--host-bytes", ""], ["--host-bytes"]),
        (["--host-bytes", "100"], ["--host-bytes", "100", "65536"]),
        (["--host-bytes", "900TiB"], ["--host-bytes", str(900 << 40), str(memory_limit().nbytes)]),
        (["--device-blocks", str(1 << 50)], ["--device-blocks", str(1 << 50)]),
        (["--backend", "nonsense"], ["--backend nonsense", "cpu"]),
        (["--backend", "cuda"], ["--backend cuda", "not available"]),
        (["--backend", ""], ["--backend ''"]),
        (["--trace", "x.jsonl", "--seed", "0"], ["--seed", "--trace"]),
        (["--trace", "[bold]\x1b[31m\nx"], ["--trace [bold]\\x1b[31m x: No such file"]),
        (["--seed", "-1"], ["--seed", "-1"]),
        (["--limit", "1000001"], ["--limit 1000001", "1,000,000"]),
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


def test_a_backend_that_the_variable_names_is_blamed_on_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, says in (("nope", "no backend named 'nope'"), ("cuda", "not available")):
        monkeypatch.setenv("KVOFFLOAD_BACKEND", name)
        said = refused(capsys, "replay")
        assert said.startswith(f"kvoffload: error: KVOFFLOAD_BACKEND={name}: ")
        assert says in said


@pytest.mark.parametrize("digits", [400, 5000])
@pytest.mark.parametrize(
    ("command", "option"),
    [
        *(
            ("replay", option)
            for option in (
                "backend",
                "block-size-factor",
                "concurrency",
                "device-blocks",
                "host-bytes",
                "layers",
                "limit",
                "page-bytes",
                "seed",
                "trace",
            )
        ),
        *(("bench plan", option) for option in ("layers", "blocks", "seed")),
        *(("bench copy", option) for option in ("pages", "blocks", "rounds", "seed", "on")),
        *(("bench gpu", option) for option in ("pages", "blocks", "rounds", "seed", "on")),
        *(("bench naive", option) for option in ("layers", "blocks", "pages", "seed")),
    ],
)
def test_an_absurd_number_is_one_line_that_does_not_repeat_it(
    capsys: pytest.CaptureFixture[str], command: str, option: str, digits: int
) -> None:
    for value in ("9" * digits, "-" + "9" * digits, "9" * digits + ".5GiB"):
        said = refused(capsys, *command.split(), f"--{option}={value}")
        assert f"--{option}" in said
        assert max(len(run) for run in re.findall("9+", said)) <= 80
        assert len(said) < 400
    assert len(refused(capsys, "9" * digits)) < 400
    assert len(refused(capsys, "replay", "--" + "9" * digits)) < 400


@pytest.mark.parametrize(
    "options",
    [
        ["--layers", str(2**62), "--page-bytes", str(2**62), "--device-blocks", str(2**62)],
        ["--block-size-factor", str(2**62)],
        ["--host-bytes", str(2**62)],
    ],
)
def test_large_numbers_are_refused_together(
    capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    said = refused(capsys, "replay", *options)
    for option in options:
        assert option in said


def test_device_and_host_memory_must_fit_this_machine_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    half = memory_limit().nbytes * 6 // 10
    options = ["--device-blocks", "100", "--layers", "1", "--page-bytes", str(half // 100)]
    said = refused(capsys, "replay", "--host-bytes", str(half), *options)
    assert "together" in said
    assert str(memory_limit().nbytes) in said
    for option in ("--host-bytes", "--device-blocks", "--layers", "--page-bytes"):
        assert option in said


def test_a_bench_that_no_machine_could_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for bench in ("plan", "naive"):
        said = refused(capsys, "bench", bench, "--layers", "1000000000")
        assert "--layers 1000000000" in said


@pytest.mark.parametrize("command", [[], ["bench"]])
def test_without_a_command_there_is_help_and_no_empty_error(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert main(command) == 2
    out = capsys.readouterr()
    assert "Usage" in out.out
    assert out.err == ""


def test_the_path_of_a_trace_is_printed_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = Path("[red]:smile:.jsonl")
    trace.write_text('{"timestamp": 0, "hash_ids": [1]}')
    assert main([*QUICK, "--trace", str(trace)]) == 0
    assert "[red]:smile:.jsonl" in capsys.readouterr().out


def test_the_summary_tells_of_refused_stores_and_what_helps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = [*QUICK, "--host-bytes", "1KiB", "--concurrency", "30"]
    assert main([*small, "--json"]) == 0
    refused_stores = json.loads(capsys.readouterr().out)["refused_stores"]
    assert refused_stores > 0
    assert main(small) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"stores refused {refused_stores}," in out
    assert "--host-bytes" in out
    assert main([*QUICK, "--concurrency", "1"]) == 0
    assert "refused" not in capsys.readouterr().out


def test_a_run_without_reuse_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "hash_ids": [1]}\n{"timestamp": 1, "hash_ids": [2]}')
    assert main([*QUICK, "--trace", str(trace)]) == 0
    out = capsys.readouterr().out
    assert "No block was reused" in out
    assert "would have been reused" not in out


def test_backends_lists_all_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends", "--json"]) == 0
    found = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["backends"]}
    assert found["cpu"]["available"]
    assert found["cpu"]["distribution"].startswith("kvoffload ")
    assert found["cpu"]["capabilities"]["asynchronous"] is True
    assert "without CUDA" in found["cuda"]["reason"]
    assert found["cuda"]["capabilities"] is None
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
    assert main(["replay", "--help"]) == 0
    assert f"{len(chat(0)):,}" in capsys.readouterr().out
    benches = [
        ["bench", name] for name in ("plan", "ordering", "copy", "calibrate", "gpu", "naive")
    ]
    for command in ([], ["replay"], ["backends"], ["bench"], *benches):
        assert main([*command, "--help"]) == 0
        assert "--help" in capsys.readouterr().out
