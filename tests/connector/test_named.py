"""Every point that the protocols must keep, and every case that was handed, is named by a test."""

from __future__ import annotations

import re

import pytest

from tests.connector import test_by_event_index, test_by_job_id, test_cases

NAMES = [
    name
    for module in (test_by_event_index, test_by_job_id, test_cases)
    for name in vars(module)
    if name.startswith("test_")
]
POINTS = [*(f"S1_{n}" for n in range(1, 13)), *(f"S2_{n}" for n in range(1, 12))]
CASES = ["A06", "A07", "A09", "A21", "A25", "E09", "E22", "G07", "J06"]


@pytest.mark.parametrize("name", [*POINTS, *CASES])
def test_it_is_named(name: str) -> None:
    assert [test for test in NAMES if re.search(rf"_{name}$", test)]
