"""Every check, in modules by what they need. Importing this registers them, by guarantee."""

from kvoffload.testing.conformance.check import CHECKS
from kvoffload.testing.conformance.checks import (
    claims as claims,
    clock as clock,
    inputs as inputs,
    life as life,
    lives as lives,
    order as order,
    pages as pages,
    resources as resources,
    shapes as shapes,
    streams as streams,
)

_guarantees = list(dict.fromkeys(check.guarantee for check in CHECKS.values()))
_ordered = sorted(CHECKS.items(), key=lambda item: _guarantees.index(item[1].guarantee))
CHECKS.clear()
CHECKS.update(_ordered)
