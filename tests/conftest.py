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
from tests.lab import Lab

# Tensors here are tiny; more threads only get in each other's way.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kv-backend",
        default="cpu",
        help="The backend that the contract tests run on; it must be available.",
    )
    parser.addoption("--kv-seed", type=int, default=0, help="Seed of everything random.")


def pytest_report_header(config: pytest.Config) -> str:
    return (
        f"kvoffload: backend {config.getoption('kv_backend')}, seed {config.getoption('kv_seed')}"
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
