"""Every check, a module for each guarantee or two. Importing this registers them, in order."""

from kvoffload.testing.conformance.check import sort_checks
from kvoffload.testing.conformance.checks import (
    claims as claims,
    inputs as inputs,
    life as life,
    order as order,
    pages as pages,
    resources as resources,
)

sort_checks()
