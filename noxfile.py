"""The lanes of CI, one session each, in environments of their own.

`pipx run nox` runs those that every machine can run; `pipx run nox -l` lists all of them. Sessions
marked "unrun" were written without the interpreter, the versions or the hardware that they need.
"""

from __future__ import annotations

import json
import os

import nox

nox.options.sessions = ["lint", "tests", "fake", "verify", "demo"]
nox.options.reuse_existing_virtualenvs = True

TORCH = os.environ.get("TORCH", "torch==2.13.0")
OLDEST = ["torch==2.9.*", "numpy==1.26.*", "pluggy==1.5.*", "typer==0.15.*", "pytest==8.3.*"]
HARDWARE = {"cuda": "cuda", "rocm": "cuda", "hpu": "hpu"}
"""Backends, and what torch calls their devices."""
MUST_FAKE = {"KVOFFLOAD_REQUIRE_FAKE": "1"}
"""Without a compiler a lane on the fake device fails; it never passes by skipping."""


def _install(session: nox.Session) -> None:
    session.install("-c", "constraints.txt", TORCH, "-e", ".[dev]")


def _verify(session: nox.Session, backend: str, *options: str, device: str) -> None:
    """Verify a backend, and that it ran where this lane means it to."""
    told = session.run(
        *("kvoffload", "verify", backend, *options, "--json"), silent=True, stderr=None
    )
    if isinstance(told, str):
        report = json.loads(told)
        session.log(f"{backend} on {report['device']}: level {report['level']}")
        if not report["device"].startswith(device):
            session.error(f"this lane is for {device}, but ran on {report['device']}")


@nox.session
def lint(session: nox.Session) -> None:
    """ruff and mypy."""
    _install(session)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """All tests, on the cpu backend."""
    _install(session)
    session.run("pytest", *session.posargs, env=MUST_FAKE)


@nox.session
def fake(session: nox.Session) -> None:
    """The tests that need the fake device; needs g++."""
    _install(session)
    session.run("pytest", "--kv-on", "fake", *session.posargs, env=MUST_FAKE)


@nox.session
def verify(session: nox.Session) -> None:
    """The conformance kit on every backend that needs no hardware; needs g++."""
    _install(session)
    session.install("--no-deps", "./examples/kvoffload-xpu")
    _verify(session, "cpu", device="cpu")
    _verify(session, "torch", "--on", "fake", device="fake")
    _verify(session, "xpu", "--on", "fake", device="fake")


@nox.session
def demo(session: nox.Session) -> None:
    """A chat workload through the whole system."""
    _install(session)
    session.run("kvoffload", "replay")


@nox.session(python=["3.12", "3.13", "3.14"])
def pythons(session: nox.Session) -> None:
    """Unrun: all tests on other Pythons."""
    _install(session)
    session.run("pytest", env=MUST_FAKE)


@nox.session(python="3.11")
def oldest(session: nox.Session) -> None:
    """Unrun: all tests on the oldest versions that pyproject.toml allows."""
    session.install(*OLDEST, "-e", ".[dev]")  # the constraints name newer ones
    session.run("pytest", env=MUST_FAKE)


@nox.session
@nox.parametrize("backend", list(HARDWARE))
def hardware(session: nox.Session, backend: str) -> None:
    """Unrun: one backend on its hardware; set TORCH to a build for it."""
    _install(session)
    _verify(session, backend, device=HARDWARE[backend])
    session.run("pytest", "--kv-backend", backend)
