"""Numbers of bytes, as people write them."""

from __future__ import annotations

import re

from kvoffload.core.errors import CapacityError

_UNITS = {"": 1, "B": 1} | {
    name: base**power
    for base, suffix in ((1000, "B"), (1024, "iB"))
    for power, letter in enumerate("KMGT", start=1)
    for name in (letter + suffix, letter.lower() + suffix)
}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: int | str, name: str = "size") -> int:
    """A positive number of bytes from ``4294967296``, ``"4GiB"``, ``"1.5 GB"``.

    Raises:
        CapacityError: not a number of bytes, or not positive; the message starts with ``name``.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise CapacityError(f"{name}: {value!r} is not a number of bytes; write one like '4GiB'")
    if isinstance(value, str):
        match = _PATTERN.fullmatch(value)
        unit = _UNITS.get(match[2]) if match else None
        if match is None or unit is None:
            hint = "; did you mean 'GiB'?" if match and match[2].lower() == "g" else ""
            raise CapacityError(
                f"{name}: {value!r} is not a number of bytes; "
                f"write one like '4GiB' or '500MB'{hint}"
            )
        value = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if value < 1:
        raise CapacityError(f"{name}: {value} bytes; it must be at least 1")
    return value


def format_bytes(nbytes: int) -> str:
    """``268435456`` as ``"256 MiB"``; exact where it can be."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} TiB"
