"""Where the tests of the connector run: here, and again on the fake device (test_on_fake.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvoffload.backends.cpu.backend import CpuBackend
from kvoffload.core.backend import Backend
from kvoffload.rig import DeviceRig, rig_for
from kvoffload.testing.simulator import SimBackend
from tests.connector.connected import Connected

HERE: dict[str, Callable[[], Backend]] = {"cpu": CpuBackend, "simulator": SimBackend}


@pytest.fixture(params=HERE)
def make_backend(request: pytest.FixtureRequest) -> Callable[[], Backend]:
    """Makes a backend of this place."""
    return HERE[request.param]


@pytest.fixture
def connect(make_backend: Callable[[], Backend]) -> Iterator[Callable[..., Connected]]:
    """Makes a lab on a protocol: ``connect("jobs", …)``."""
    with ExitStack() as stack:

        def made(*args: Any, **options: Any) -> Connected:
            return stack.enter_context(Connected(make_backend(), *args, **options))

        yield made


@pytest.fixture
def rig_and_backend(
    make_backend: Callable[[], Backend],
) -> Iterator[tuple[DeviceRig, Backend]]:
    """A device to make tensors on, and a backend for it."""
    backend = make_backend()
    with rig_for(backend) as rig:
        yield rig, backend


@pytest.fixture(params=["jobs", "events"])
def protocol(request: pytest.FixtureRequest) -> str:
    """Each of the two."""
    return str(request.param)
