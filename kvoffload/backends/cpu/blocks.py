"""Block expansion as the host wants it: one copy per coalesced run, of any length."""

from __future__ import annotations

from kvoffload.core.plan import CopyPlan, Descriptors


def lower(plan: CopyPlan) -> Descriptors:
    """The plan as address ranges."""
    return plan.descriptors()
