"""Options and fixtures of every test."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kvoffload.core.backend import Backend
from kvoffload.plugins.registry import BackendRegistry
from kvoffload.testing.conformance.lab import Lab

_NO_FAKE = pytest.StashKey[str]()
"""Why there is no fake device."""

# Tensors here are tiny; more threads only get in each other's way.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kv-backend",
        default="cpu",
        help="The backend that the conformance tests run on; it must be available.",
    )
    parser.addoption(
        "--kv-on",
        choices=["here", "fake"],
        default="here",
        help="'fake' runs the tests that need the fake device, and no others: one process a lane.",
    )
    parser.addoption("--kv-seed", type=int, default=0, help="Seed of everything random.")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("kv_on") == "fake":
        from kvoffload.testing.fake_device import CannotBuildError, load

        try:
            load()
        except CannotBuildError as error:
            # CI must run this lane; a machine without a compiler need not.
            if os.environ.get("KVOFFLOAD_REQUIRE_FAKE") == "1":
                raise pytest.UsageError(str(error)) from error
            config.stash[_NO_FAKE] = str(error)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_fake = config.getoption("kv_on") == "fake"
    other = [item for item in items if bool(item.get_closest_marker("fake")) != on_fake]
    config.hook.pytest_deselected(items=other)
    items[:] = [item for item in items if bool(item.get_closest_marker("fake")) == on_fake]
    if _NO_FAKE in config.stash:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=config.stash[_NO_FAKE]))


def pytest_report_header(config: pytest.Config) -> str:
    return (
        f"kvoffload: backend {config.getoption('kv_backend')} on {config.getoption('kv_on')}, "
        f"seed {config.getoption('kv_seed')}"
    )


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on --kv-seed and the test's name alone."""
    seed = (request.config.getoption("kv_seed"), zlib.crc32(request.node.nodeid.encode()))
    print(f"rng seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def make_backend(request: pytest.FixtureRequest) -> Callable[[], Backend]:
    """Makes the lane's backend; a lane whose backend cannot run fails."""
    wanted = str(request.config.getoption("kv_backend"))
    registry = BackendRegistry()

    def make() -> Backend:
        name, chosen = registry.choose(wanted)
        assert name == wanted
        return chosen

    return make


@pytest.fixture
def backend(make_backend: Callable[[], Backend]) -> Backend:
    """The lane's backend."""
    return make_backend()


@pytest.fixture
def lab(backend: Backend) -> Iterator[Lab]:
    """A small cache on the lane's backend."""
    with Lab(backend) as made:
        yield made


@pytest.fixture(autouse=True)
def _no_thread_left_behind() -> Iterator[None]:
    """Every test joins the threads that it started."""
    before = set(threading.enumerate())
    yield
    left = [t.name for t in threading.enumerate() if t not in before and "kvoffload" in t.name]
    assert not left, f"threads still running: {left}"


@pytest.fixture(autouse=True)
def _no_backend_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    if "KVOFFLOAD_BACKEND" in os.environ:
        monkeypatch.delenv("KVOFFLOAD_BACKEND")
