"""Every check, a module for each guarantee or two. Importing this registers them."""

from kvoffload.testing.conformance.checks import (
    claims as claims,
    inputs as inputs,
    life as life,
    order as order,
    pages as pages,
    resources as resources,
)
