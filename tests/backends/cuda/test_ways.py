"""Which copies go which way, and where registrations end: arithmetic, without a driver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvoffload.backends import calibration
from kvoffload.backends._driver import numa_node_of, split_at
from kvoffload.backends.cuda import backend as cuda_module, kernel
from kvoffload.backends.cuda.backend import ENVIRONMENT, CudaBackend
from kvoffload.backends.cuda.blocks import OVERLAP_BYTES, choose_ways, prefers_overlap
from kvoffload.core.errors import ConfigurationError
from kvoffload.core.plan import Descriptors


def copies(*rows: tuple[int, int, int]) -> Descriptors:
    return Descriptors(*np.array(rows, dtype=np.uint64).reshape(-1, 3).T)


def rows(found: Descriptors) -> list[tuple[int, ...]]:
    return [tuple(int(v) for v in row) for row in zip(*found, strict=True)]


@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 60)), max_size=8),
    st.sets(st.integers(1, 150), max_size=5),
    st.booleans(),
)
def test_no_copy_crosses_a_boundary_and_the_same_bytes_move(
    ranges: list[tuple[int, int]], boundaries: set[int], host_is_source: bool
) -> None:
    far = 10_000
    whole = copies(
        *(
            (start, far + start, n) if host_is_source else (far + start, start, n)
            for start, n in ranges
        )
    )
    edges = np.array(sorted(boundaries), dtype=np.uint64)
    split = split_at(whole, edges, host_is_source=host_is_source)
    moved = [(s + i, d + i) for s, d, n in rows(split) for i in range(n)]
    assert moved == [(s + i, d + i) for s, d, n in rows(whole) for i in range(n)]
    for src, dst, size in rows(split):
        host = src if host_is_source else dst
        assert size > 0
        assert not [b for b in boundaries if host < b < host + size]


def test_the_size_that_is_really_moved_decides_L06() -> None:
    # A page of 32 KiB that arrives in two fragments of 16 KiB, and one that is whole.
    fragments = copies((0, 0, 16384), (16384, 65536, 16384), (32768, 131072, 32768))
    ways = choose_ways(fragments, kernel_up_to=16384)
    assert rows(ways.kernel) == rows(fragments)[:2]
    assert rows(ways.dma) == rows(fragments)[2:]


def test_what_is_not_aligned_never_goes_to_the_kernel_L06() -> None:
    odd = copies((0, 0, 12), (4, 0, 16), (0, 4, 16), (8, 16, 24))
    ways = choose_ways(odd, kernel_up_to=1 << 20)
    assert rows(ways.kernel) == [(8, 16, 24)]
    assert rows(ways.dma) == rows(odd)[:3]


def test_without_a_threshold_everything_is_dma() -> None:
    some = copies((0, 0, 8), (8, 8, 8))
    assert rows(choose_ways(some, 0).dma) == rows(some)
    assert rows(choose_ways(some, 0).kernel) == []


def test_overlap_is_asked_for_only_where_every_copy_is_short() -> None:
    assert prefers_overlap(copies((0, 0, OVERLAP_BYTES), (1, 1, 5)))
    assert not prefers_overlap(copies((0, 0, OVERLAP_BYTES + 1), (1, 1, 5)))


def test_a_way_is_chosen_by_argument_then_by_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENVIRONMENT, "dma")
    assert CudaBackend().way == "dma"
    assert CudaBackend(way="auto").way == "auto"
    monkeypatch.setenv(ENVIRONMENT, "")
    assert CudaBackend().way == "auto"
    monkeypatch.setenv(ENVIRONMENT, "fast")
    with pytest.raises(ConfigurationError, match=f"{ENVIRONMENT}: 'fast' is none of dma, kernel"):
        CudaBackend()


def test_a_kernel_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="pip install triton"):
        CudaBackend(way="kernel")
    with pytest.raises(ConfigurationError, match="pip install triton"):
        kernel.CopyKernel()
    assert CudaBackend().copy_ways() == ("dma",)


class Named:
    version_text = "CUDA driver 13.0"

    def device_name(self, index: int) -> str:
        return f"card {index}"


def test_auto_is_dma_until_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "is_available", lambda: True)
    monkeypatch.setattr(cuda_module.CudaBackend, "driver", Named())
    measured: list[tuple[str, str]] = []

    def load(device: str, driver: str) -> int | None:
        measured.append((device, driver))
        return None if device == "card 0" else 8192

    monkeypatch.setattr(calibration, "load", load)
    assert CudaBackend(way="auto").kernel_up_to == 0
    assert CudaBackend("cuda:1", way="auto").kernel_up_to == 8192
    assert measured == [("card 0", "CUDA driver 13.0"), ("card 1", "CUDA driver 13.0")]
    assert CudaBackend("cuda:1", way="dma").kernel_up_to == 0
    assert CudaBackend("cuda:1", way="kernel").kernel_up_to == sys.maxsize
    assert CudaBackend("cuda:1", way="auto", kernel_up_to=512).kernel_up_to == 512


def test_the_node_of_a_device_is_read_from_its_bus_id(tmp_path: Path) -> None:
    root = tmp_path
    for bus_id, text in (("0000:3b:00.0", "1\n"), ("0000:3c:00.0", "-1\n"), ("0000:3d:00.0", "x")):
        folder = root / "sys/bus/pci/devices" / bus_id
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(text)
    assert numa_node_of("0000:3B:00.0", root) == 1
    for other in ("0000:3c:00.0", "0000:3d:00.0", "0000:99:00.0"):
        assert numa_node_of(other, root) is None


def test_nothing_of_a_gpu_is_imported_before_the_backend_is_chosen() -> None:
    code = (
        "import sys\n"
        "from kvoffload.plugins.registry import BackendRegistry\n"
        "registry = BackendRegistry()\n"
        "backend = registry.create('cuda')\n"
        "assert 'triton' not in sys.modules\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'libcuda' not in open('/proc/self/maps').read()\n"
        "backend.probe()\n"
        "assert 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
