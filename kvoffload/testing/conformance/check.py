"""What a check is, and how it says what went wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from kvoffload.core.backend import Backend
from kvoffload.testing.conformance.lab import Cache

MakeBackend: TypeAlias = Callable[[], Backend]


class Guarantee(Enum):
    """What a backend can break; in the words of the README's list where it is there.

    They are checked in this order: what fails first explains the most of what fails after it.
    """

    PROBE = "probe"
    BYTES = "5 bytes"
    ORDER = "1 order"
    INPUTS = "2 inputs are taken at submit"
    ASYNCHRONY = "3 submit only enqueues"
    ENDS_ONCE = "4 every job ends once"
    ACCOUNTING = "7 accounting"
    MEMORY = "8 memory"
    QUIET_EXIT = "9 quiet exit"
    CAPABILITIES = "capabilities"


class CheckFailedError(AssertionError):
    """The backend broke the sentence that the check is named after."""


class CheckSkippedError(Exception):
    """The check does not apply; with the reason."""


def require(condition: object, what: str) -> None:
    """Fail the check unless ``condition`` holds.

    Raises:
        CheckFailedError: with ``what``, which says what is wrong.
    """
    if not condition:
        raise CheckFailedError(what)


def skip(reason: str) -> None:
    """Leave the check.

    Raises:
        CheckSkippedError: always.
    """
    raise CheckSkippedError(reason)


@dataclass(frozen=True)
class Check:
    """One sentence about backends, and what proves it.

    Attributes:
        name: the sentence.
        guarantee: of which it is a part.
        needs: capabilities that must be claimed; without them the check is skipped.
        cache: of the lab; None: it is given a function that makes backends.
        run: raises where the backend breaks the sentence.
    """

    name: str
    guarantee: Guarantee
    needs: tuple[str, ...]
    cache: Cache | None
    run: Callable[..., None]


SMALL = Cache()
"""The cache of most checks."""

CHECKS: dict[str, Check] = {}
"""All checks, by name, in the order in which they run."""


def check(
    guarantee: Guarantee,
    *,
    needs: tuple[str, ...] = (),
    cache: Cache | None = SMALL,
    name: str | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a check, under its own name unless another is given."""

    def register(run: Callable[..., None]) -> Callable[..., None]:
        called = (name or run.__name__).replace("_", " ")
        if called in CHECKS:
            raise ValueError(f"two checks are named {called!r}")
        CHECKS[called] = Check(called, guarantee, needs, cache, run)
        return run

    return register


def sort_checks() -> None:
    """Put the checks into the order of their guarantees; within one they stay as registered."""
    order = list(Guarantee)
    ordered = sorted(CHECKS.values(), key=lambda check: order.index(check.guarantee))
    CHECKS.clear()
    CHECKS.update((check.name, check) for check in ordered)
