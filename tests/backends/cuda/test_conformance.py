"""The cuda backend on stand-ins for its driver: every version, and every way it may be limited."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from kvoffload.backends.cuda.backend import CudaBackend
from kvoffload.core.backend import Backend, HostOrder
from kvoffload.testing.conformance.suite import BackendConformance
from kvoffload.testing.fake_device import load
from tests.core.test_layout_matrix import pairwise, round_trip

pytestmark = pytest.mark.fake


def cuda(version: int = 13000, device: str = "fake:0", **limits: int) -> CudaBackend:
    backend = CudaBackend(device, load().cuda_driver(version))
    for name, value in limits.items():
        setattr(backend, name, value)
    return backend


class TestBatches13(BackendConformance):
    def make_backend(self) -> Backend:
        return cuda(13000)


class TestBatches128(BackendConformance):
    def make_backend(self) -> Backend:
        return cuda(12080)


class TestWithoutBatches(BackendConformance):
    def make_backend(self) -> Backend:
        return cuda(12040)


class TestSecondDevice(BackendConformance):
    def make_backend(self) -> Backend:
        return cuda(device="fake:1")


class TestManyRegistrationsAndSmallBatches(BackendConformance):
    def make_backend(self) -> Backend:
        return cuda(piece_bytes=4096, max_batch=7)


class TestPageableMemory(BackendConformance):
    """Registering is refused: everything that is still claimed still holds."""

    @pytest.fixture(autouse=True)
    def _refuse(self) -> Iterator[None]:
        load().limit_registrations(0)
        yield
        load().limit_registrations()

    def make_backend(self) -> Backend:
        return cuda()


class TestSlowDevice(BackendConformance):
    """Every piece of work takes a while: nothing may rely on a quick device."""

    deadline = 60.0

    @pytest.fixture(autouse=True)
    def _delay(self, request: pytest.FixtureRequest) -> Iterator[None]:
        if "number of jobs" in request.node.name:
            pytest.skip("1,200 transfers take their time on a slow device")
        load().delay(0.001)
        yield
        load().calm()

    def make_backend(self) -> Backend:
        return cuda()


@pytest.mark.parametrize("version", [13000, 12080, 12040])
def test_every_pair_of_layouts_that_canonicalize_takes_round_trips(version: int) -> None:
    for case, order in zip(pairwise(), itertools.cycle(HostOrder), strict=False):
        round_trip(lambda: cuda(version), case, order, "fake:0")
