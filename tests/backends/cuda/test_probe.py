"""What the cuda backend says of a machine."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from kvoffload.backends.cuda import backend as cuda_module
from kvoffload.backends.cuda.backend import CudaBackend
from kvoffload.testing.fake_device import load
from tests.backends.cuda.test_conformance import cuda


def test_torch_was_built_without_cuda() -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch was built with CUDA")
    probe = CudaBackend().probe()
    assert not probe.available
    assert "was built without CUDA; install a build with it" in probe.reason


def test_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda_module, "LIBRARIES", ("libcuda-that-is-not-there.so.1",))
    probe = CudaBackend().probe()
    assert not probe.available
    assert probe.reason.startswith("no driver: libcuda-that-is-not-there.so.1: cannot open")


def test_a_library_that_is_not_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    probe = CudaBackend(library=ctypes.CDLL("libc.so.6")).probe()
    assert (probe.available, probe.reason) == (
        False,
        "no driver: libc.so.6 has no function cuInit",
    )


@pytest.fixture
def _calm() -> Iterator[None]:
    yield
    load().calm()


@pytest.mark.fake
@pytest.mark.usefixtures("_calm")
class TestOnTheFakeDevice:
    def test_a_driver_that_has_batches(self) -> None:
        backend = cuda(13000)
        assert backend.probe().reason == "fake device, CUDA driver 13.0"
        assert backend.capabilities.batch_copy

    def test_a_driver_too_old_for_batches_is_available_and_says_so(self) -> None:
        backend = cuda(12040)
        probe = backend.probe()
        assert probe.available
        assert "CUDA driver 12.4, which has no call for many copies" in probe.reason
        assert not backend.capabilities.batch_copy

    def test_there_is_no_such_device(self) -> None:
        probe = cuda(device="fake:2").probe()
        assert (probe.available, probe.reason) == (
            False,
            "the driver sees 2 devices, and no number 2",
        )

    def test_the_driver_refuses_to_start(self) -> None:
        load().fail_call("cuInit", code=100)
        probe = cuda().probe()
        assert not probe.available
        assert (
            "the driver finds no device: cuInit returned 100: CUDA_ERROR_NO_DEVICE" in probe.reason
        )
