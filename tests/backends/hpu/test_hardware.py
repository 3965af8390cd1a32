"""On a machine with a Gaudi: ``pytest -m hpu``."""

from __future__ import annotations

import pytest
import torch

from kvoffload.backends.hpu.backend import HpuBackend
from kvoffload.core.backend import Backend
from kvoffload.testing.conformance.lab import Lab
from kvoffload.testing.conformance.suite import BackendConformance

PROBE = HpuBackend().probe()
pytestmark = [
    pytest.mark.hpu,
    pytest.mark.skipif(not PROBE.available, reason=PROBE.reason),
]


class TestGaudi(BackendConformance):
    def make_backend(self) -> Backend:
        return HpuBackend()


def test_the_device_in_use_is_a_gaudi() -> None:
    backend = HpuBackend()
    with Lab(backend) as lab:
        assert backend.device == torch.device("hpu:0")
        assert {tensor.device.type for tensor in lab.tensors} == {"hpu"}
        assert backend.warm_up(8) > 0
        lab.fill_all()
        lab.succeed(lab.store([1, 2, 3], [0, 1, 2]), lab.load([2, 0], [5, 6]))
        lab.check()
