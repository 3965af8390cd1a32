"""The rocm backend on stand-ins for its runtime: every version, and every way it may be limited."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from kvoffload.backends.rocm.backend import RocmBackend
from kvoffload.core.backend import Backend, HostOrder
from kvoffload.testing.conformance.suite import BackendConformance
from kvoffload.testing.fake_device import load
from tests.core.test_layout_matrix import pairwise, round_trip

pytestmark = pytest.mark.fake

NEWEST, NO_ATTRIBUTES, FIRST_BATCHES, NO_BATCHES = 71300000, 70200002, 70100000, 50221153
VERSIONS = (NEWEST, NO_ATTRIBUTES, FIRST_BATCHES, NO_BATCHES)


def rocm(version: int = NEWEST, device: str = "fake:0", **limits: int) -> RocmBackend:
    backend = RocmBackend(device, load().hip_runtime(version))
    for name, value in limits.items():
        setattr(backend, name, value)
    return backend


class TestAttributes(BackendConformance):
    def make_backend(self) -> Backend:
        return rocm(NEWEST)


class TestNoAttributes(BackendConformance):
    def make_backend(self) -> Backend:
        return rocm(NO_ATTRIBUTES)


class TestNoBatches(BackendConformance):
    def make_backend(self) -> Backend:
        return rocm(NO_BATCHES)


class TestSecondDeviceInSmallPieces(BackendConformance):
    def make_backend(self) -> Backend:
        return rocm(FIRST_BATCHES, "fake:1", piece_bytes=4096, max_batch=7)


class TestPageableMemory(BackendConformance):
    @pytest.fixture(autouse=True)
    def _refuse(self) -> Iterator[None]:
        load().limit_registrations(0)
        yield
        load().limit_registrations()

    def make_backend(self) -> Backend:
        return rocm()


@pytest.mark.parametrize("version", VERSIONS)
def test_every_pair_of_layouts_that_canonicalize_takes_round_trips(version: int) -> None:
    for case, order in zip(pairwise(), itertools.cycle(HostOrder), strict=False):
        round_trip(lambda: rocm(version), case, order, "fake:0")
