"""Host memory is one mapping, costs what is used, and lives as long as it is used."""

from __future__ import annotations

import gc
import logging
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from kvoffload.core import host_memory
from kvoffload.core.errors import CapacityError, ConfigurationError
from kvoffload.core.host_memory import HostMemory, cpus_of_node, memory_limit
from kvoffload.core.host_pool import HostLayout, HostPool
from kvoffload.core.sizes import format_bytes, parse_bytes


def test_untouched_memory_costs_nothing() -> None:
    memory = HostMemory(64 << 20)
    assert memory.resident_bytes() == 0
    memory.tensor[: 3 << 20] = 1
    assert 3 << 20 <= memory.resident_bytes() <= 5 << 20
    memory.release()
    memory.release()
    assert memory.resident_bytes() == 0


def test_a_tensor_over_released_memory_stays_valid() -> None:
    memory = HostMemory(1 << 20)
    tensor = memory.tensor
    tensor[:] = 7
    memory.release()
    gc.collect()
    assert int(tensor.sum()) == 7 << 20
    with pytest.raises(ValueError, match="released"):
        _ = memory.tensor


def test_more_than_the_machine_has_is_refused_with_both_numbers() -> None:
    wanted = memory_limit().nbytes + 1
    with pytest.raises(CapacityError, match=f"{wanted}.*{memory_limit().nbytes}"):
        HostMemory(wanted)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        (4096, 4096),
        ("4GiB", 4 << 30),
        ("4 GiB", 4 << 30),
        ("1.5KiB", 1536),
        ("500MB", 500_000_000),
        ("2TiB", 2 << 40),
        ("3kB", 3000),
    ],
)
def test_sizes_as_people_write_them(text: str | int, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    "value", [0, -1, "0", "-1", "1g", "1g!", "", "GiB", "1e9", None, True, 1.5]
)
def test_what_is_not_a_number_of_bytes_is_refused_F07(value: object) -> None:
    with pytest.raises(CapacityError, match="host_bytes"):
        parse_bytes(value, "host_bytes")  # type: ignore[arg-type]


def test_sizes_for_people() -> None:
    assert [format_bytes(n) for n in (1, 1024, 256 << 20, 3 << 40)] == [
        "1 B",
        "1 KiB",
        "256 MiB",
        "3 TiB",
    ]


def fake_machine(root: Path, cgroup: str, limits: dict[str, str]) -> Path:
    """A file system as control groups and NUMA nodes show themselves."""
    for path, text in ({"proc/self/cgroup": cgroup} | limits).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "limits", "expected"),
    [
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/memory.max": "4096\n"}, 4096),
        ("0::/a/b\n", {"sys/fs/cgroup/a/memory.max": "8192"}, 8192),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "5000"}, 5000),
        ("0::/a\n", {"sys/fs/cgroup/a/memory.max": "max\n"}, None),
        (
            "0::/a/b\n",
            {"sys/fs/cgroup/a/memory.max": "100", "sys/fs/cgroup/a/b/memory.max": "200"},
            100,
        ),
        (
            "4:cpu,memory:/x\n0::/\n",
            {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "300"},
            300,
        ),
        ("nonsense\n\n0::/\n", {"sys/fs/cgroup/memory.max": "²"}, None),
        ("4:cpu:/x\n", {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "300"}, None),
    ],
)
def test_limits_of_control_groups_are_seen(
    tmp_path: Path, cgroup: str, limits: dict[str, str], expected: int | None
) -> None:
    found = memory_limit(fake_machine(tmp_path, cgroup, limits))
    machine = memory_limit(tmp_path / "nothing").nbytes
    assert found.nbytes == (expected or machine)
    assert ("control group" in found.source) == (expected is not None)


def test_a_kernel_without_the_populate_advice_touches_page_by_page_D03(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_memory, "MADV_POPULATE_WRITE", 9999)  # EINVAL
    with caplog.at_level(logging.INFO):
        memory = HostMemory(3 << 20, populate=True)
    assert memory.resident_bytes() == 3 << 20
    assert caplog.text.count("page by page") == 1
    assert int(memory.tensor.sum()) == 0


def test_populated_memory_is_resident() -> None:
    memory = HostMemory(3 << 20, populate=True)
    assert memory.resident_bytes() == 3 << 20


def test_pages_are_placed_by_a_thread_of_the_chosen_node_D18(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = min(os.sched_getaffinity(0))
    root = fake_machine(tmp_path, "", {"sys/devices/system/node/node1/cpulist": f"{cpu}\n"})
    seen: list[set[int]] = []
    populate = HostMemory._populate

    def watch(self: HostMemory) -> None:
        seen.append(os.sched_getaffinity(0))
        populate(self)

    monkeypatch.setattr(HostMemory, "_populate", watch)
    monkeypatch.setattr(host_memory, "cpus_of_node", lambda node: cpus_of_node(node, root))
    before = os.sched_getaffinity(0)
    memory = HostMemory(1 << 20, numa_node=1)
    assert seen == [{cpu}]
    assert os.sched_getaffinity(0) == before, "the caller may still run where it likes"
    assert memory.numa_node == 1
    assert memory.resident_bytes() == 1 << 20
    with pytest.raises(ConfigurationError, match="numa_node 7"):
        HostMemory(1 << 20, numa_node=7)


def test_processor_lists_are_read_as_the_kernel_writes_them_D18(tmp_path: Path) -> None:
    root = fake_machine(tmp_path, "", {"sys/devices/system/node/node0/cpulist": "0-2,8,10-11\n"})
    assert cpus_of_node(0, root) == {0, 1, 2, 8, 10, 11}


def test_a_huge_pool_costs_what_is_touched_and_no_loop_over_blocks_D19(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages, nbytes = 1 << 20, 200 << 30
    unlimited = host_memory.MemoryLimit(1 << 50, "the test")
    monkeypatch.setattr(host_memory, "memory_limit", lambda: unlimited)
    monkeypatch.setattr(host_memory, "_map", sparse)
    monkeypatch.setattr(HostMemory, "_populate", lambda self: pytest.fail("populated unasked"))
    HostLayout.within(pages, np.array([pages]), [np.array([0])])  # numpy imports on first use
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        layout = HostLayout.within(nbytes, np.array([pages]), [np.array([0])])
        pool = HostPool(layout, HostMemory)
        pool.side().prove(np.array([pages]), "host")
    finally:
        sys.setprofile(None)
    assert layout.capacity.chunks == (nbytes // pages,)
    assert calls < 500, "start-up work grows with the number of blocks"
    pool.memory.tensor[100 << 30 : (100 << 30) + (1 << 20)] = 1
    assert 1 << 20 <= pool.resident_bytes() <= 4 << 20
    pool.release()


def sparse(nbytes: int) -> mmap.mmap:
    """A mapping that the kernel does not account for, so that it may exceed the machine."""
    no_reserve = 0x4000  # MAP_NORESERVE of Linux on x86 and ARM
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
