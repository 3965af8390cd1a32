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
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any

from kvoffload.core.errors import BackendUnavailableError, BrokenBackendError
from kvoffload.testing.conformance.child import SPEED, Request
from kvoffload.testing.conformance.run import FAILED, GRACE_SECONDS, PASSED, SKIPPED, Outcome
from kvoffload.testing.conformance.speed import Speed

START_SECONDS = 300.0
"""For a child to import torch, and to build the fake device if need be."""
SPEED_SECONDS = 120.0
POLL_SECONDS = 0.1
TAIL = 600
"""Characters of its output that are told of a process that died."""


@dataclass
class VariantReport:
    """What came of one variant.

    Attributes:
        variant: its name; ``"here"`` is the machine itself.
        device: that the backend named.
        asynchronous: the backend claims it.
        outcomes: one for each check that ran.
        speed: None if it was not measured.
        interrupted: it was stopped.
    """

    variant: str
    device: str = ""
    asynchronous: bool = False
    outcomes: list[Outcome] = field(default_factory=list)
    speed: Speed | None = None
    interrupted: bool = False

    def count(self, outcome: str) -> int:
        """How many checks ended like that."""
        return sum(each.outcome == outcome for each in self.outcomes)

    @property
    def level(self) -> str | None:
        """``"correct"``, ``"asynchronous"`` or ``"fast"``; None if a check failed."""
        if self.count(FAILED) or self.interrupted or not self.count(PASSED):
            return None
        if not self.asynchronous:
            return "correct"
        return "fast" if self.speed is not None and self.speed.fast else "asynchronous"


LEVELS = (None, "correct", "asynchronous", "fast")


@dataclass
class Report:
    """What came of a backend: the least that every variant reached."""

    backend: str
    distribution: str
    variants: list[VariantReport] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Every variant was run to its end, and nothing failed."""
        return bool(self.variants) and all(v.level is not None for v in self.variants)

    def as_json(self) -> dict[str, Any]:
        """The report for machines."""
        levels = [LEVELS.index(variant.level) for variant in self.variants]
        return {
            "backend": self.backend,
            "distribution": self.distribution,
            "device": ", ".join(dict.fromkeys(v.device for v in self.variants)),
            "variants": [variant.variant for variant in self.variants],
            "level": LEVELS[min(levels, default=0)],
            **{
                name: sum(variant.count(name) for variant in self.variants)
                for name in (PASSED, FAILED, SKIPPED)
            },
            "speed": {
                variant.variant: None if variant.speed is None else asdict(variant.speed)
                for variant in self.variants
            },
            "checks": [
                {
                    "name": each.name,
                    "guarantee": each.guarantee,
                    "outcome": each.outcome,
                    "reason": each.reason,
                    "variant": variant.variant,
                }
                for variant in self.variants
                for each in variant.outcomes
            ],
        }


def verify_variant(
    request: Request,
    *,
    progress: Callable[[int, int], None] = lambda _, __: None,
    stop: Callable[[], bool] = lambda: False,
) -> VariantReport:
    """Run the checks of one variant; a child that dies is replaced for the checks that are left.

    Args:
        request: what to run.
        progress: called with how many checks have ended, and how many there are.
        stop: asked all the time; once it is true the child is killed.

    Raises:
        BackendUnavailableError: the backend says that it cannot run here; with its reason.
        BrokenBackendError: it cannot even be made.
    """
    report = VariantReport(request.variant or "here")
    left = request.checks
    while True:
        child = _Child(replace(request, checks=left), report, progress, stop)
        child.follow()
        left = child.left
        if child.done or report.interrupted or not left:
            return report


class _Child:
    """One child process, from its start to its end."""

    def __init__(
        self,
        request: Request,
        report: VariantReport,
        progress: Callable[[int, int], None],
        stop: Callable[[], bool],
    ) -> None:
        self._request, self._report = request, report
        self._progress, self._stop = progress, stop
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
            hung = False
            try:
                if process.stdin is not None:
                    with contextlib.suppress(BrokenPipeError), process.stdin as asked:
                        asked.write(json.dumps(asdict(self._request)).encode())
                hung = self._listen(told)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
            if not self.done and not self._report.interrupted:
                self._died("hung" if hung else _how(code), _tail(output))

    def _listen(self, told: io.FileIO) -> bool:
        """Take messages until there are no more; True if it has been silent for too long."""
        rest, heard = b"", time.monotonic()
        while not self._report.interrupted:
            if self._stop():
                self._report.interrupted = True
            elif time.monotonic() - heard > self._patience():
                return True
            elif select.select([told], [], [], POLL_SECONDS)[0]:
                data = told.read(1 << 16)
                if not data:
                    return False
                heard = time.monotonic()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))
        return False

    def _patience(self) -> float:
        if self._running is None:
            return START_SECONDS
        if self._running == SPEED:
            return SPEED_SECONDS
        return self._request.deadline + 2 * GRACE_SECONDS

    def _take(self, message: dict[str, Any]) -> None:
        event = message.pop("event")
        report = self._report
        if event == "error":
            raise BrokenBackendError(f"the backend cannot be verified: {message['reason']}")
        if event == "unavailable":
            raise BackendUnavailableError(f"the backend cannot run: {message['reason']}")
        if event == "ready":
            report.device, report.asynchronous = message["device"], message["asynchronous"]
            self._guarantees = message["checks"]
            self.left = list(self._guarantees) if self.left is None else self.left
        elif event == "start":
            self._running = message["name"]
        elif event == "end":
            self._end(Outcome(**message))
        elif event == "speed":
            report.speed = None if message["speed"] is None else Speed(**message["speed"])
        elif event == "done":
            self.done = True

    def _end(self, outcome: Outcome) -> None:
        self._report.outcomes.append(outcome)
        self.left = [name for name in self.left or [] if name != outcome.name]
        self._running = None
        ended = len(self._report.outcomes)
        self._progress(ended, ended + len(self.left))

    def _died(self, how: str, tail: str) -> None:
        """What it was at has failed. If nothing was running, it stopped after a stuck check."""
        what = f"the process {how}" + (f"; its last words: {tail}" if tail else "")
        if self.left is None:
            raise BrokenBackendError(f"before the first check, {what}")
        if self._running in self.left:
            name = self._running
            self._end(Outcome(name, self._guarantees[name], FAILED, what))


def _how(code: int) -> str:
    if code < 0:
        return f"died of signal {-code} ({signal.Signals(-code).name})"
    return f"ended with exit code {code}"


def _tail(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode(errors="replace").strip()[-TAIL:]
