"""The kit as a test suite, where the device is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributions import run

SUITE = """
from kvoffload.backends.cpu.backend import CpuBackend
from kvoffload.core.backend import Probe
from kvoffload.testing.conformance.suite import BackendConformance

class Missing(CpuBackend):
    def probe(self):
        {probe}

class TestMissing(BackendConformance):
    must_run = {must_run}

    def make_backend(self):
        return Missing()
"""
NOT_HERE = "return Probe(False, 'driver 5 is needed')"


@pytest.mark.parametrize(
    ("probe", "must_run", "ends"),
    [
        (NOT_HERE, False, "2 skipped"),
        (NOT_HERE, True, "2 failed"),
        ("raise OSError('driver 5 is needed')", False, "1 failed, 1 passed"),
    ],
)
def test_without_its_device_the_kit_is_skipped_unless_it_must_run(
    tmp_path: Path, probe: str, must_run: bool, ends: str
) -> None:
    (tmp_path / "test_it.py").write_text(SUITE.format(probe=probe, must_run=must_run))
    options = ("-q", "-rs", "-p", "no:cacheprovider", "-k", "probe or (closed and twice)")
    fails = "failed" in ends
    said = run("-m", "pytest", *options, "test_it.py", cwd=tmp_path, fails=fails).stdout
    assert f"{ends}, " in said or f"{ends} in" in said
    assert "driver 5 is needed" in said
    assert ("the backend cannot run here" in said) is ("passed" not in ends)
