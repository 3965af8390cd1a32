"""Host memory is one mapping, costs what is used, and lives as long as it is used."""

from __future__ import annotations

import gc

import pytest

from kvoffload.core.errors import CapacityError
from kvoffload.core.host_memory import HostMemory, total_memory
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
    wanted = total_memory() + 1
    with pytest.raises(CapacityError, match=f"{wanted}.*{total_memory()}"):
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
