"""The same tests, on the fake device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvoffload.backends.torch.backend import GenericBackend
from kvoffload.core.backend import Backend
from kvoffload.testing.fake_device import load
from tests.connector import test_by_event_index, test_by_job_id, test_cases, test_scheduler_side

pytestmark = pytest.mark.fake

for module in (test_by_event_index, test_by_job_id, test_cases, test_scheduler_side):
    globals().update({n: test for n, test in vars(module).items() if n.startswith("test_")})


@pytest.fixture
def make_backend() -> Callable[[], Backend]:
    """Makes a backend on the fake device."""
    return lambda: GenericBackend("fake:0")


def test_where_pinning_is_refused_there_is_a_warning_and_the_copies_are_right_S1_5(
    connect: Callable[..., Any], protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    load().fail_call("pin_memory", code=1, times=1)
    lab = connect(protocol)
    assert not lab.engine.host.memory.pinned
    assert "not pinned" in caplog.text
    lab.keep([1, 2], [5, 6])
    lab.load_into("r", [5, 6], [3, 4])
    lab.step()
    lab.settle()
    lab.expect([3, 4], [5, 6])
