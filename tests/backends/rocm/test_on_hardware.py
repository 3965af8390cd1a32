"""The rocm backend on a machine that has one: ``pytest -m rocm``. Not run yet."""

from __future__ import annotations

import pytest
import torch

from kvoffload.backends.rocm.backend import RocmBackend
from kvoffload.core.backend import Backend
from kvoffload.testing.conformance.suite import BackendConformance

pytestmark = [
    pytest.mark.rocm,
    pytest.mark.skipif(
        not RocmBackend().probe().available, reason=f"no GPU: {RocmBackend().probe().reason}"
    ),
]


def test_the_lane_runs_on_a_gpu() -> None:
    assert RocmBackend().device.type == "cuda"
    assert torch.cuda.get_device_name(0)


class TestOnHardware(BackendConformance):
    deadline = 120.0

    def make_backend(self) -> Backend:
        return RocmBackend()
