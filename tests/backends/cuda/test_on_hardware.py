"""The cuda backend on a machine that has one: ``pytest -m cuda``. Not run yet."""

from __future__ import annotations

import pytest
import torch

from kvoffload.backends.cuda.backend import CudaBackend
from kvoffload.core.backend import Backend
from kvoffload.testing.conformance.suite import BackendConformance

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not CudaBackend().probe().available, reason=f"no GPU: {CudaBackend().probe().reason}"
    ),
]


def test_the_lane_runs_on_a_gpu() -> None:
    assert CudaBackend().device.type == "cuda"
    assert torch.cuda.get_device_name(0)


class TestOnHardware(BackendConformance):
    deadline = 120.0

    def make_backend(self) -> Backend:
        return CudaBackend()
