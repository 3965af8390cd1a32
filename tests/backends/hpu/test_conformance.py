"""The hpu backend on the bridge's double: eager, lazy, and where pinning is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvoffload.core.backend import Backend
from kvoffload.testing.conformance.suite import BackendConformance
from kvoffload.testing.fake_device import load
from kvoffload.testing.fake_device.hpu import FakeHabana
from kvoffload.testing.fake_device.variants import VARIANTS, variants_of
from tests.backends.hpu.laws import real

pytestmark = pytest.mark.fake


class TestEager(BackendConformance):
    def make_backend(self) -> Backend:
        return VARIANTS["hpu"]["eager"](load())


class TestLazy(BackendConformance):
    def make_backend(self) -> Backend:
        return VARIANTS["hpu"]["lazy"](load())


class TestUnpinned(BackendConformance):
    @pytest.fixture(autouse=True)
    def _refuse_to_pin(self) -> Iterator[None]:
        with FakeHabana(load(), lazy=True).refusing_to_pin():
            yield

    def make_backend(self) -> Backend:
        return real(FakeHabana(load(), lazy=True))


def test_verify_runs_both_modes() -> None:
    assert variants_of("hpu") == ["eager", "lazy"]
    modes = [VARIANTS["hpu"][name](load()).probe().reason for name in variants_of("hpu")]
    assert [mode.rsplit(", ")[-1] for mode in modes] == ["eager mode", "lazy mode"]
