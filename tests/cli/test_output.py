"""Output that nobody reads, that nothing holds, or that cannot be encoded."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload.cli import main

FULL = Path("/dev/full")


def run(*arguments: str, stdout: int, encoding: str = "utf-8") -> tuple[int, str]:
    """The exit code and standard error of a process that writes to ``stdout``."""
    done = subprocess.run(
        [sys.executable, "-m", "kvoffload", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=50,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )
    return done.returncode, done.stderr


COMMANDS = [
    ["--help"],
    ["--version"],
    ["backends"],
    ["verify", "--list-checks"],
    ["verify", "cpu", "--check", "probe"],
    ["simulate", "--seeds", "1"],
    ["replay", "--limit", "3"],
    ["replay", "--limit", "3", "--json"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_when_nobody_reads_it_ends_quietly(command: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        assert run(*command, stdout=write) == (141, "")
    finally:
        os.close(write)


def test_a_reader_that_goes_away_ends_a_command_that_prints_as_it_goes() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "kvoffload", "verify", "cpu"], stdout=subprocess.PIPE
    ) as process:
        if process.stdout is not None:
            assert process.stdout.readline() == b"cpu on cpu (here)\n"
            process.stdout.close()
        assert process.wait(50) == 141


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_full_disk_is_one_line(command: list[str]) -> None:
    with FULL.open("w") as full:
        code, said = run(*command, stdout=full.fileno())
    assert code == 1
    assert said == "kvoffload: error: cannot write the output: No space left on device\n"


def test_an_encoding_that_lacks_a_character_gets_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "träce.jsonl"
    trace.write_text('{"timestamp": 0, "hash_ids": [1]}')
    small = ["--device-blocks", "10", "--page-bytes", "64"]
    for command in (["replay", "--trace", str(trace), *small], ["backends"], ["--help"]):
        written = io.BytesIO()
        stream = io.TextIOWrapper(written, encoding="ascii")
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(command) == 0
        assert written.getvalue().isascii()
        assert stream.errors == "strict"
        monkeypatch.undo()


def test_a_closed_stream_takes_nothing_and_nothing_goes_to_the_other(tmp_path: Path) -> None:
    out = tmp_path / "out"
    shell = '"$0" -m kvoffload replay --device-blocks 0 2>&- >"$1"'
    done = subprocess.run(
        ["sh", "-c", shell, sys.executable, str(out)], check=False, timeout=50, env=os.environ
    )
    assert done.returncode == 2
    assert out.read_text() == ""
