"""The generic backend, on the fake device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvoffload.backends.index_copy import IndexCopy
from kvoffload.backends.torch.backend import GenericBackend
from kvoffload.core.backend import Backend
from kvoffload.core.host_memory import HostMemory
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.plan import Geometry, power_of_two
from kvoffload.testing.conformance import Lab
from kvoffload.testing.conformance.suite import BackendConformance
from kvoffload.testing.fake_device import load

pytestmark = pytest.mark.fake


class TestFirstDevice(BackendConformance):
    def make_backend(self) -> Backend:
        return GenericBackend()


class TestSecondDevice(BackendConformance):
    def make_backend(self) -> Backend:
        return GenericBackend("fake:1")


class Padded(GenericBackend):
    """As a device that compiles for every shape wants it, and with very little staging."""

    def bind(self, geometry: Geometry, caches: CanonicalKVCaches, host: HostMemory) -> None:
        self._copy = IndexCopy(
            geometry, caches, host, bucket=power_of_two, widest=4, staging_bytes=1000
        )


class TestPaddedAndInSmallParts(BackendConformance):
    def make_backend(self) -> Backend:
        return Padded("fake:0")


class TestUnpinned(BackendConformance):
    """Where pinning is refused, everything still holds that is still claimed."""

    @pytest.fixture(autouse=True)
    def _refuse_to_pin(self) -> Iterator[None]:
        fake = load()
        fake.fail_call("pin_memory", code=1, times=1 << 40)
        yield
        fake.calm()

    def make_backend(self) -> Backend:
        return GenericBackend("fake:0")


def test_the_lane_runs_on_the_fake_device() -> None:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    assert accelerator.type == "fake"
    assert GenericBackend().device == torch.device("fake:0")


def test_polling_during_a_capture_ends_no_job() -> None:
    fake = load()
    with Lab(GenericBackend("fake:0")) as lab:
        lab.fill_all()
        job = lab.store([1], [0])
        lab.rig.synchronize()
        fake.set_global_capture(True)
        assert lab.worker.get_finished() == []
        assert lab.engine.in_flight == [job]
        fake.set_global_capture(False)
        lab.succeed(job)
