"""Numbers of bytes as people write them, and as a message repeats them."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload.core.errors import CapacityError
from kvoffload.core.sizes import format_bytes, parse_bytes, shortened, shown


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        ("1.5KiB", 1536),
        ("1.0", 1),
        ("0.1GiB", 107374182),
        ("3PiB", 3 << 50),
        ("3PB", 3 * 10**15),
        ("9007199254740993", 9007199254740993),
        ("9007199254740993.0", 9007199254740993),
        (np.int64(4096), 4096),
        (np.uint8(7), 7),
    ],
)
def test_numbers_of_bytes_are_exact(value: str | int, nbytes: int) -> None:
    found = parse_bytes(value)
    assert found == nbytes
    assert type(found) is int


@pytest.mark.parametrize("value", ["1.5", "1.5B", "0.5", True, np.True_, np.float64(4), 4.0, b"4"])
def test_what_is_not_a_whole_number_of_bytes_is_refused(value: object) -> None:
    with pytest.raises(CapacityError, match=r"^host_bytes: .*number of bytes"):
        parse_bytes(value, "host_bytes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "meant"),
    [("1g", "GiB"), ("1M", "MiB"), ("1gb", "GB"), ("1gib", "GiB"), ("1p", "PiB")],
)
def test_a_unit_that_is_nearly_right_gets_a_hint(text: str, meant: str) -> None:
    with pytest.raises(CapacityError, match=f"did you mean '{meant}'"):
        parse_bytes(text)


def test_a_unit_that_is_not_nearly_right_gets_none() -> None:
    with pytest.raises(CapacityError) as caught:
        parse_bytes("1 parsec")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    ["9" * 400, "9" * 5000, "9" * 400 + ".5GiB", "1." + "9" * 5000, 10**400, 10**5000, 1 << 63],
    ids=["400", "5000", "400.5GiB", "1.5000", "10**400", "10**5000", "2**63"],
)
def test_absurd_numbers_are_refused_in_a_short_line(value: str | int) -> None:
    with pytest.raises(CapacityError) as caught:
        parse_bytes(value, "host_bytes")
    assert len(str(caught.value)) < 200


def test_a_message_repeats_what_it_can() -> None:
    assert shown("1g") == "'1g'"
    assert shown("x" * 78) == repr("x" * 78)
    assert shown(10**5000) == "<int>"
    long = shortened("head" + "x" * 100 + "tail")
    assert len(long) <= 80
    assert long.startswith("head")
    assert long.endswith("tail")


def test_sizes_for_people_have_no_end() -> None:
    assert format_bytes(5 << 50) == "5 PiB"
    assert format_bytes(7 << 60) == "7 EiB"
    assert format_bytes(10**400).endswith(" EiB")
