"""Verifying a backend: the checks in a child process, which may hang or die."""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import IO, Any

from kvoffload.core.errors import (
    BackendUnavailableError,
    BrokenBackendError,
    ConfigurationError,
)
from kvoffload.testing.conformance.check import Guarantee
from kvoffload.testing.conformance.child import EXIT_STUCK, SPEED, Request
from kvoffload.testing.conformance.report import VariantReport
from kvoffload.testing.conformance.run import FAILED, GRACE_SECONDS, Outcome
from kvoffload.testing.conformance.speed import Speed

START_SECONDS = 300.0
"""For a child to import torch, and to build the fake device if need be."""
SPEED_SECONDS = 120.0
POLL_SECONDS = 0.1
TAIL = 600
"""Characters of its output that are told of a process that died."""


def verify_variant(
    request: Request,
    *,
    progress: Callable[[int, int], None] = lambda _, __: None,
    changed: Callable[[VariantReport], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    fail_fast: bool = False,
) -> VariantReport:
    """Run the checks of one variant; a child that dies is replaced for the checks that are left.

    Args:
        request: what to run.
        progress: called with how many checks have ended, and how many there are.
        changed: called with the report as it is, once the device is known and after each check.
        stop: asked all the time; once it is true the child is killed.
        fail_fast: the first check that fails is the last one.

    Raises:
        BackendUnavailableError: the backend says that it cannot run here; with its reason.
        BrokenBackendError: it cannot even be made.
        ConfigurationError: there is no such class, or the backend does not serve that device.
    """
    report = VariantReport(request.variant or "here", whole=request.checks is None)
    left = request.checks
    while True:
        speed = request.speed and report.first_failure is None
        child = _Child(replace(request, checks=left, speed=speed), report, fail_fast, stop)
        child.progress, child.changed = progress, changed
        child.follow()
        left = child.left
        if child.done or report.interrupted or not left:
            if request.speed and report.speed is None and not report.speed_reason:
                report.speed_reason = "interrupted" if report.interrupted else "a check failed"
            return report


class _Child:
    """One child process, from its start to its end."""

    progress: Callable[[int, int], None]
    changed: Callable[[VariantReport], None]

    def __init__(
        self,
        request: Request,
        report: VariantReport,
        fail_fast: bool,
        stop: Callable[[], bool],
    ) -> None:
        self._request, self._report = request, report
        self._fail_fast, self._stop = fail_fast, stop
        self._guarantees: dict[str, str] = {}
        self._running: str | None = None
        self.left = request.checks
        """Names of the checks that have not ended."""
        self.done = False
        """It did all that it was asked to."""

    def follow(self) -> None:
        """Run it, and take what it tells."""
        reading, writing = os.pipe()
        with tempfile.TemporaryFile("w+b") as output, os.fdopen(reading, "rb", 0) as told:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvoffload.testing.conformance.child", str(writing)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(writing,),
                env=dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
            os.close(writing)
            how = None
            try:
                if process.stdin is not None:
                    with contextlib.suppress(BrokenPipeError), process.stdin as asked:
                        asked.write(json.dumps(asdict(self._request)).encode())
                how = self._listen(told, process)
                if how is None and not (self.done or self._report.interrupted):
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(GRACE_SECONDS)  # so that it can say how it ended
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
            if not self.done and not self._report.interrupted:
                self._died(how or _how(code), _tail(output), code)

    def _listen(self, told: io.FileIO, process: subprocess.Popen[bytes]) -> str | None:
        """Take messages until there are no more; what it did instead of ending, if it did."""
        rest, heard = b"", time.monotonic()
        while not (self._report.interrupted or self.done):
            if self._stop():
                self._report.interrupted = True
            elif time.monotonic() - heard > self._patience():
                return "hung"
            elif select.select([told], [], [], POLL_SECONDS)[0]:
                data = told.read(1 << 16)
                if not data:
                    return None
                heard = time.monotonic()
                *lines, rest = (rest + data).split(b"\n")
                try:
                    messages = [json.loads(line) for line in lines]
                except ValueError:
                    return "wrote into a pipe that is not its own"
                for message in messages:
                    if not self.done:
                        self._take(message)
            elif process.poll() is not None:
                return None  # somebody whom it started holds the pipe
        return None

    def _patience(self) -> float:
        if self._running is None:
            return START_SECONDS
        if self._running == SPEED:
            return SPEED_SECONDS
        return self._request.deadline + 2 * GRACE_SECONDS

    def _take(self, message: dict[str, Any]) -> None:
        event = message.pop("event")
        report = self._report
        if event == "refused":
            raise ConfigurationError(message["reason"])
        if event == "error":
            raise BrokenBackendError(f"the backend cannot be verified: {message['reason']}")
        if event == "unavailable":
            raise BackendUnavailableError(f"the backend cannot run: {message['reason']}")
        if event == "ready":
            report.device, report.asynchronous = message["device"], message["asynchronous"]
            self._guarantees = message["checks"]
            self.left = list(self._guarantees) if self.left is None else self.left
            self.changed(report)
        elif event == "start":
            self._running = message["name"]
        elif event == "end":
            self._end(Outcome(**message))
        elif event == "speed":
            report.speed = None if message["speed"] is None else Speed(**message["speed"])
            report.speed_reason = message["reason"]
        elif event == "done":
            self.done = True

    def _end(self, outcome: Outcome) -> None:
        self._report.outcomes.append(outcome)
        self.left = [name for name in self.left or [] if name != outcome.name]
        self._running = None
        ended = len(self._report.outcomes)
        self.progress(ended, ended + len(self.left))
        self.changed(self._report)
        if self._fail_fast and outcome.outcome == FAILED:
            self.done = True

    def _died(self, how: str, tail: str, code: int) -> None:
        """What it was at has failed, or what it was about to do. It stops itself when stuck."""
        what = f"the process {how}" + (f"; its last words: {tail}" if tail else "")
        if self.left is None:
            raise BrokenBackendError(f"before the first check, {what}")
        if self._running == SPEED:
            self._report.speed_reason = what
            self._end(Outcome("the speed is measured", Guarantee.BYTES.value, FAILED, what))
        elif self._running in self.left or (self.left and code != EXIT_STUCK):
            name = self._running or self.left[0]
            self._end(Outcome(name, self._guarantees[name], FAILED, what))


def _how(code: int) -> str:
    if code < 0:
        return f"died of signal {-code} ({signal.Signals(-code).name})"
    return f"ended with exit code {code}"


def _tail(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode(errors="replace").strip()[-TAIL:]
