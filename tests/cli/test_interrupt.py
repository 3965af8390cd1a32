"""Ctrl-C at every moment: an exit code, one line, no traceback and no thread left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from kvoffload.cli import main
from kvoffload.cli.interrupt import Interrupt, current

RUN = """
import os, signal, sys, threading
from kvoffload.cli import run

def interrupt(times=1):
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)

{before}
code = run()
left = [t.name for t in threading.enumerate() if "kvoffload" in t.name]
sys.exit(code if not left else f"threads left: {{left}}")
"""


def interrupted(before: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process that does ``before`` and then runs the command; it has ``interrupt(times)``."""
    return subprocess.run(
        [sys.executable, "-c", RUN.format(before=before), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


WHILE_ADMITTING = """
from kvoffload.replay.replay import Replay
admit = Replay._admit

def admit_and_interrupt(self, request, number):
    admit(self, request, number)
    if number == 50:
        interrupt({times})

Replay._admit = admit_and_interrupt
"""


@pytest.mark.parametrize("times", [1, 2, 5])
def test_ctrl_c_ends_after_the_request_at_hand_and_says_what_was_done(times: int) -> None:
    options = ("--json", "--limit", "200", "--concurrency", "1")
    done = interrupted(WHILE_ADMITTING.format(times=times), "replay", *options)
    assert done.returncode == 130, done.stderr
    assert done.stderr == "kvoffload: interrupted after 49 of 200 requests\n"
    report = json.loads(done.stdout)
    assert report["interrupted"]
    assert report["requests"] == 49
    assert report["corrupt_blocks"] == 0


# An exec of text marks the interpreter, which would then kill itself as it leaves.
WHILE_IMPORTING = """
class Finder:
    def find_spec(self, name, *_):
        if name == "{module}":
            exec("interrupt({times})")

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize("module", ["typer", "torch", "kvoffload.replay.workload"])
def test_ctrl_c_while_modules_are_loaded(module: str, times: int) -> None:
    done = interrupted(WHILE_IMPORTING.format(module=module, times=times), "replay", "--json")
    assert done.returncode == 130, done.stderr
    assert done.stderr == "kvoffload: interrupted\n"
    assert done.stdout == ""


AS_IT_LEAVES = """
import atexit
atexit.register(interrupt, 3)
"""


def test_ctrl_c_as_the_interpreter_leaves_changes_nothing() -> None:
    done = interrupted(AS_IT_LEAVES, "--version")
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_while_backends_are_probed() -> None:
    probing = """
from kvoffload.backends.cpu.backend import CpuBackend
probe = CpuBackend.probe
CpuBackend.probe = lambda self: (interrupt({times}), probe(self))[1]
"""
    for times in (1, 2):
        done = interrupted(probing.format(times=times), "backends", "--json")
        assert (done.returncode, done.stderr) == (130, "kvoffload: interrupted\n")
        assert done.stdout == ""


def test_main_puts_the_handler_of_before_back() -> None:
    def mine(*_: object) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGINT, mine)
    try:
        assert main(["--version"]) == 0
        assert signal.getsignal(signal.SIGINT) is mine
        assert main(["--nonsense"]) == 2
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


def test_main_works_in_any_thread() -> None:
    codes: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=lambda: codes.append(main(["backends", "--json"])))
    thread.start()
    thread.join()
    assert codes == [0]
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_before_the_replay_begins_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it went on")

    monkeypatch.setattr("kvoffload.cli.replay.chat", slow)
    assert main(["replay"]) == 130
    assert capsys.readouterr().err == "kvoffload: interrupted\n"


def press(interrupt: Interrupt) -> None:
    interrupt(signal.SIGINT, None)


def test_the_first_asks_the_second_raises_and_later_ones_do_nothing() -> None:
    interrupt = Interrupt()
    assert not interrupt.is_set()
    interrupt.check()
    press(interrupt)
    assert interrupt.is_set()
    with pytest.raises(KeyboardInterrupt):
        press(interrupt)
    for _ in range(3):
        press(interrupt)


def test_where_nothing_can_be_torn_the_first_raises() -> None:
    interrupt = Interrupt()
    with pytest.raises(KeyboardInterrupt), interrupt.at_once():
        press(interrupt)
    press(interrupt)
    with pytest.raises(KeyboardInterrupt), interrupt.at_once():
        raise AssertionError("it was asked to end before")


def test_once_calm_nothing_raises() -> None:
    interrupt = Interrupt()
    interrupt.calm()
    for _ in range(3):
        press(interrupt)
    assert interrupt.is_set()


def test_a_command_finds_the_one_that_is_installed() -> None:
    interrupt = Interrupt()
    with interrupt.installed():
        assert current() is interrupt
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.is_set()
    assert current() is not interrupt
