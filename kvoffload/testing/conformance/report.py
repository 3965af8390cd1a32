"""What came of verifying a backend."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kvoffload.testing.conformance.check import Guarantee
from kvoffload.testing.conformance.run import FAILED, PASSED, SKIPPED, Outcome
from kvoffload.testing.conformance.speed import Speed
from kvoffload.testing.fake_device.variants import DEVICE

LEVELS = (None, "correct", "asynchronous", "fast")


@dataclass
class VariantReport:
    """What came of one variant.

    Attributes:
        variant: its name; ``"here"`` is the machine itself.
        device: that the backend named; empty as long as it has named none.
        asynchronous: the backend claims it.
        outcomes: one for each check that ran.
        speed: None if it was not measured.
        speed_reason: why it was not.
        interrupted: it was stopped.
        whole: every check was asked for.
    """

    variant: str
    device: str = ""
    asynchronous: bool = False
    outcomes: list[Outcome] = field(default_factory=list)
    speed: Speed | None = None
    speed_reason: str = ""
    interrupted: bool = False
    whole: bool = True

    def count(self, outcome: str) -> int:
        """How many checks ended like that."""
        return sum(each.outcome == outcome for each in self.outcomes)

    @property
    def first_failure(self) -> Outcome | None:
        """The failure to begin with."""
        return next((each for each in self.outcomes if each.outcome == FAILED), None)

    @property
    def ok(self) -> bool:
        """It was run to its end, and nothing failed."""
        ended = not self.interrupted and self.first_failure is None
        return ended and bool(self.count(PASSED) or not self.whole)

    @property
    def emulated(self) -> bool:
        """It ran on the fake device, where time means nothing."""
        return self.device == DEVICE

    @property
    def level(self) -> str | None:
        """``"correct"``, ``"asynchronous"`` or ``"fast"``; None if a check failed or was left out.

        Never ``"fast"`` on the fake device.
        """
        if not self.ok or not self.whole:
            return None
        # What is claimed may be withdrawn for the memory that could be had.
        unproved = any(
            each.outcome == SKIPPED and each.guarantee == Guarantee.ASYNCHRONY.value
            for each in self.outcomes
        )
        if not self.asynchronous or unproved:
            return "correct"
        fast = self.speed is not None and self.speed.fast and not self.emulated
        return "fast" if fast else "asynchronous"


@dataclass
class Report:
    """What came of a backend: the least that every variant reached."""

    backend: str
    distribution: str
    variants: list[VariantReport] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Every variant was run to its end, and nothing failed."""
        return bool(self.variants) and all(variant.ok for variant in self.variants)

    @property
    def interrupted(self) -> bool:
        """A variant was stopped."""
        return any(variant.interrupted for variant in self.variants)

    @property
    def level(self) -> str | None:
        """Of the variant that reached the least."""
        return LEVELS[min((LEVELS.index(v.level) for v in self.variants), default=0)]

    def count(self, outcome: str) -> int:
        """How many checks ended like that, of all variants."""
        return sum(variant.count(outcome) for variant in self.variants)

    def as_json(self) -> dict[str, Any]:
        """The report for machines."""
        devices = dict.fromkeys(v.device for v in self.variants if v.device)
        return {
            "backend": self.backend,
            "distribution": self.distribution,
            "device": ", ".join(devices) or None,
            "variants": [variant.variant for variant in self.variants],
            "interrupted": self.interrupted,
            "level": self.level,
            **{name: self.count(name) for name in (PASSED, FAILED, SKIPPED)},
            "speed": {
                variant.variant: None if variant.speed is None else asdict(variant.speed)
                for variant in self.variants
            },
            "speed_reason": {
                variant.variant: variant.speed_reason or None for variant in self.variants
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
