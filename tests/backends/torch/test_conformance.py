"""The generic backend, on the fake device."""

from __future__ import annotations

import pytest
import torch

from kvoffload.backends.torch.backend import GenericBackend
from kvoffload.core.backend import Backend
from kvoffload.testing.conformance.suite import BackendConformance

pytestmark = pytest.mark.fake


class TestFirstDevice(BackendConformance):
    def make_backend(self) -> Backend:
        return GenericBackend()


class TestSecondDevice(BackendConformance):
    def make_backend(self) -> Backend:
        return GenericBackend("fake:1")


def test_the_lane_runs_on_the_fake_device() -> None:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    assert accelerator.type == "fake"
    assert GenericBackend().device == torch.device("fake:0")
