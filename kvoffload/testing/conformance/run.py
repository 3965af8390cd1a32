"""Running one check: with a fresh backend, on a thread of its own, against a deadline."""

from __future__ import annotations

import threading
import traceback
import zlib
from dataclasses import dataclass

from kvoffload.core.backend import Backend
from kvoffload.core.errors import KVOffloadError
from kvoffload.testing.conformance.check import (
    Check,
    CheckFailedError,
    CheckSkippedError,
    MakeBackend,
)
from kvoffload.testing.conformance.lab import Lab

GRACE_SECONDS = 5.0
"""How long a check that passed its deadline may take to end once its device goes on."""
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True)
class Outcome:
    """How a check ended.

    Attributes:
        name: of the check.
        guarantee: of which it is a part.
        outcome: ``"passed"``, ``"failed"`` or ``"skipped"``.
        reason: why, unless it passed.
        stuck: something of it still runs; nothing else should run in this process.
    """

    name: str
    guarantee: str
    outcome: str
    reason: str = ""
    stuck: bool = False


def run_check(
    check: Check, make_backend: MakeBackend, *, seed: int = 0, deadline: float = 30.0
) -> Outcome:
    """Run a check, whatever the backend does.

    Args:
        check: one of ``CHECKS``.
        make_backend: makes a fresh backend for the device in question.
        seed: of everything random.
        deadline: seconds after which it has failed.
    """
    labs: list[Lab] = []
    outcome: list[Outcome] = []

    def ended(how: str, reason: str = "") -> None:
        outcome.append(Outcome(check.name, check.guarantee.value, how, reason))

    def run() -> None:
        try:
            _run(check, make_backend, seed, labs)
        except CheckSkippedError as error:
            ended(SKIPPED, str(error))
        except (CheckFailedError, AssertionError) as error:
            ended(FAILED, str(error))
        except BaseException as error:  # noqa: BLE001 - a vendor's code may raise anything
            ended(FAILED, _told(error))
        else:
            ended(PASSED)

    thread = threading.Thread(target=run, name="conformance", daemon=True)
    thread.start()
    thread.join(deadline)
    if not thread.is_alive():
        return outcome[0]
    held = any(lab.rig.holding for lab in labs)
    for lab in labs:
        lab.rig.release()
    thread.join(GRACE_SECONDS)
    stuck = thread.is_alive()
    reason = f"it did not end within {deadline:g} s"
    if held and not stuck:
        reason += ", since something waited for the device while the check held it"
    elif stuck:
        reason += ", and still runs: something waits for ever"
    return Outcome(check.name, check.guarantee.value, FAILED, reason, stuck)


def why_unavailable(backend: Backend) -> str | None:
    """Why the backend cannot run here; a probe that misbehaves is for the checks to find."""
    try:
        probe = backend.probe()
        return None if probe.available else str(probe.reason)
    except Exception:  # noqa: BLE001 - a vendor's code may raise anything
        return None


def _run(check: Check, make_backend: MakeBackend, seed: int, labs: list[Lab]) -> None:
    own_seed = zlib.crc32(f"{seed} {check.name}".encode())
    backend = make_backend()
    for need in check.needs:
        if not getattr(backend.capabilities, need):
            backend.close()
            raise CheckSkippedError(f"the backend does not claim {need}")
    if check.cache is None:
        backend.close()
        check.run(make_backend)
        return
    lab = Lab(backend, check.cache, seed=own_seed)
    labs.append(lab)
    with lab:
        # What was claimed may depend on what memory could be had.
        for need in check.needs:
            if not getattr(backend.capabilities, need):
                raise CheckSkippedError(f"the backend does not claim {need} for this memory")
        check.run(lab)


def _told(error: BaseException) -> str:
    """The error, and where in the backend it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].name}, line {frames[-1].lineno})" if frames else ""
    kind = type(error).__name__
    what = f"{kind}: {error}" if isinstance(error, KVOffloadError) else f"raised {kind}: {error}"
    return f"{what}{where}"
