"""The process that runs the checks: it may hang or die, its parent does not.

``python -m kvoffload.testing.conformance.child FD`` reads one :class:`Request` as JSON from
standard input, and writes one JSON object a line to the file descriptor.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

EXIT_STUCK = 3
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
    request = Request(**json.load(sys.stdin))
    out = os.fdopen(int(sys.argv[1]), "w", buffering=1)

    def tell(event: str, **what: Any) -> None:
        print(json.dumps({"event": event, **what}), file=out, flush=True)

    logging.getLogger("kvoffload").setLevel(logging.ERROR)  # checks provoke warnings by the dozen
    code = 0
    try:
        code = _run(request, tell)
    except Exception as error:  # noqa: BLE001 - told to the parent
        tell("error", reason=f"{type(error).__name__}: {error}")
    out.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # whatever still runs


def _run(request: Request, tell: Callable[..., None]) -> int:
    make_backend = _maker(request)
    from kvoffload.testing.conformance import CHECKS, run_check
    from kvoffload.testing.conformance.speed import measure

    backend = make_backend()
    missing = _missing(backend)
    if missing is not None:
        tell("unavailable", reason=missing)
        return 0
    tell(
        "ready",
        device=str(backend.device),
        asynchronous=bool(getattr(backend.capabilities, "asynchronous", False)),
        checks={name: check.guarantee.value for name, check in CHECKS.items()},
    )
    backend.close()
    for name in CHECKS if request.checks is None else request.checks:
        tell("start", name=name)
        outcome = run_check(
            CHECKS[name], make_backend, seed=request.seed, deadline=request.deadline
        )
        tell("end", **asdict(outcome))
        if outcome.stuck:
            return EXIT_STUCK
    if request.speed:
        tell("start", name=SPEED)
        speed = measure(make_backend)
        tell("speed", speed=None if speed is None else asdict(speed))
    tell("done")
    return 0


def _missing(backend: Any) -> str | None:
    """Why the backend cannot run here; a probe that misbehaves is for the checks to find."""
    try:
        probe = backend.probe()
        return None if probe.available else str(probe.reason)
    except Exception:  # noqa: BLE001 - a vendor's code may raise anything
        return None


def _maker(request: Request) -> Callable[[], Any]:
    """A function that makes a fresh backend."""
    if request.variant is None:
        if request.backend_class is not None:
            made_here = _class(request.backend_class)
            device = request.device
            return lambda: made_here() if device is None else made_here(device)
        from kvoffload.plugins.registry import BackendRegistry

        registry = BackendRegistry()
        return lambda: registry.create(str(request.backend), request.device)
    if request.backend_class is not None:
        from kvoffload.testing.fake_device import load
        from kvoffload.testing.fake_device.variants import DEVICE

        load()
        made_there = _class(request.backend_class)
        return lambda: made_there(DEVICE)
    from kvoffload.testing.fake_device.make import maker

    return maker(str(request.backend), request.variant)


def _class(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found


if __name__ == "__main__":
    main()
