"""Every check, a module for each guarantee or two. Importing this registers them, in order."""

from kvoffload.testing.conformance.check import sort_checks
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

sort_checks()
