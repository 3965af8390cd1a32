"""The process that runs the checks: it may hang or die, its parent does not.

``python -m kvoffload.testing.conformance.child FD`` reads one :class:`Request` as JSON from
standard input, and writes one JSON object a line to the file descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kvoffload.core.errors import ConfigurationError
from kvoffload.core.sizes import shortened

EXIT_STUCK = 3
PR_SET_PDEATHSIG = 1
"""Of ``linux/prctl.h``."""
SPEED = "speed"
"""What is running while no check is."""


@dataclass(frozen=True)
class Request:
    """What to verify.

    Attributes:
        backend: name of an installed backend; None with ``backend_class``.
        backend_class: ``module:Class`` of a backend that takes a device, or nothing.
        variant: on the fake device, in this variant; None: here.
        device: for the backend; None: its own choice.
        checks: names of those to run; None: all.
        speed: measure it, too.
        seed: of everything random.
        deadline: seconds for each check.
    """

    backend: str | None
    backend_class: str | None = None
    variant: str | None = None
    device: str | None = None
    checks: list[str] | None = None
    speed: bool = True
    seed: int = 0
    deadline: float = 30.0


def main() -> None:
    # Whatever becomes of the parent, nothing of this stays behind (prctl(2)).
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    request = Request(**json.load(sys.stdin))
    out = os.fdopen(int(sys.argv[1]), "w", buffering=1)

    def tell(event: str, **what: Any) -> None:
        print(json.dumps({"event": event, **what}), file=out, flush=True)

    logging.getLogger("kvoffload").setLevel(logging.ERROR)  # checks provoke warnings by the dozen
    code = 0
    try:
        code = _run(request, tell)
    except ConfigurationError as error:
        tell("refused", reason=str(error))
    except Exception as error:  # noqa: BLE001 - told to the parent
        tell("error", reason=f"{type(error).__name__}: {error}")
    out.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # whatever still runs


def _run(request: Request, tell: Callable[..., None]) -> int:
    make_backend = _maker(request)
    from kvoffload.testing.conformance import CHECKS, run_check
    from kvoffload.testing.conformance.run import FAILED, why_unavailable

    backend = _first(make_backend, request.device)
    missing = why_unavailable(backend)
    if missing is not None:
        tell("unavailable", reason=missing)
        return 0
    tell(
        "ready",
        device="" if backend.device is None else str(backend.device),
        asynchronous=bool(getattr(backend.capabilities, "asynchronous", False)),
        checks={name: check.guarantee.value for name, check in CHECKS.items()},
    )
    with contextlib.suppress(Exception):  # there is a check for that
        backend.close()
    failed = False
    for name in CHECKS if request.checks is None else request.checks:
        tell("start", name=name)
        outcome = run_check(
            CHECKS[name], make_backend, seed=request.seed, deadline=request.deadline
        )
        tell("end", **asdict(outcome))
        failed = failed or outcome.outcome == FAILED
        if outcome.stuck:
            return EXIT_STUCK
    if request.speed and not failed:  # how fast wrong bytes are moved says nothing
        tell("start", name=SPEED)
        tell("speed", **_speed(make_backend))
    tell("done")
    return 0


def _first(make_backend: Callable[[], Any], device: str | None) -> Any:
    """The first backend that is made; what is wrong with a device that was given names it."""
    try:
        return make_backend()
    except ConfigurationError as error:
        if device is None:
            raise
        raise ConfigurationError(f"--device {shortened(device)}: {error}") from error


def _speed(make_backend: Callable[[], Any]) -> dict[str, Any]:
    """What was measured, or why nothing was."""
    from kvoffload.testing.conformance.speed import measure

    try:
        speed = measure(make_backend)
    except BaseException as error:  # noqa: BLE001 - a vendor's code may raise anything
        return {"speed": None, "reason": f"{type(error).__name__}: {error}"}
    if speed is None:
        return {"speed": None, "reason": "time means nothing on this device"}
    return {"speed": asdict(speed), "reason": ""}


def _maker(request: Request) -> Callable[[], Any]:
    """A function that makes a fresh backend."""
    from kvoffload.testing.conformance.named_class import named_class

    if request.variant is None:
        if request.backend_class is not None:
            made_here = named_class(request.backend_class)
            device = request.device
            return lambda: made_here() if device is None else made_here(device)
        from kvoffload.plugins.registry import BackendRegistry

        registry = BackendRegistry()
        return lambda: registry.create(str(request.backend), request.device)
    if request.backend_class is not None:
        from kvoffload.testing.fake_device import load
        from kvoffload.testing.fake_device.variants import DEVICE

        load()
        made_there = named_class(request.backend_class)
        return lambda: made_there(request.device or DEVICE)
    from kvoffload.testing.fake_device.make import maker

    return maker(str(request.backend), request.variant, request.device)


if __name__ == "__main__":
    main()
