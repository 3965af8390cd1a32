"""Numbers of bytes, as people write them; and what they wrote, as a message repeats it."""

from __future__ import annotations

import operator
import re
from fractions import Fraction
from typing import SupportsIndex

from kvoffload.core.errors import CapacityError

_UNITS = {"": 1, "B": 1} | {
    name: base**power
    for base, suffix in ((1000, "B"), (1024, "iB"))
    for power, letter in enumerate("KMGTP", start=1)
    for name in (letter + suffix, letter.lower() + suffix)
}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_LARGEST = (1 << 63) - 1  # an address or a size of any machine is less
_DIGITS = 40  # more would only be slow to read


def parse_bytes(value: SupportsIndex | str, name: str = "size") -> int:
    """A positive number of bytes from ``4294967296``, ``"4GiB"``, ``"1.5 GB"``.

    Parts of a byte are dropped where a unit made them, as in ``"0.1GiB"``.

    Args:
        value: a string, or any integer, numpy's included.
        name: of the setting, which a message starts with.

    Raises:
        CapacityError: not a number of bytes, not positive, or more than any machine has.
    """
    number = _parse(value, name) if isinstance(value, str) else _integer(value, name)
    if number > _LARGEST:
        raise CapacityError(f"{name}: {shown(value)} is more than any machine has")
    if number < 1:
        raise CapacityError(f"{name}: {shown(value)}; it must be at least 1 byte")
    return number


def _integer(value: SupportsIndex, name: str) -> int:
    try:
        # True and False are integers to Python, and numpy's may be, but nobody means bytes.
        number = None if type(value).__name__ in ("bool", "bool_") else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise CapacityError(
            f"{name}: {shown(value)} is not a number of bytes; write one like '4GiB'"
        )
    return number


def _parse(text: str, name: str) -> int:
    match = _PATTERN.fullmatch(text)
    if match is None or match[2] not in _UNITS:
        hint = _hint(match[2]) if match else ""
        raise CapacityError(
            f"{name}: {shown(text)} is not a number of bytes; write one like '4GiB' or '500MB'"
            f"{hint}"
        )
    digits, unit = match[1], match[2]
    if len(digits) > _DIGITS:
        raise CapacityError(f"{name}: {shown(text)} has too many digits for a number of bytes")
    amount = Fraction(digits) * _UNITS[unit]
    if _UNITS[unit] == 1 and amount.denominator > 1:
        raise CapacityError(f"{name}: {shown(text)} is not a whole number of bytes")
    return int(amount)


def _hint(unit: str) -> str:
    """What was probably meant: ``gb`` is GB, and ``g`` or ``gib`` is GiB."""
    power, rest = unit[:1].upper(), unit[1:].lower()
    meant = power + {"": "iB", "i": "iB", "ib": "iB", "b": "B"}.get(rest, "?")
    return f"; did you mean '{meant}'?" if meant in _UNITS else ""


def format_bytes(nbytes: int) -> str:
    """``268435456`` as ``"256 MiB"``; exact where it can be."""
    amount = float(min(nbytes, 1 << 1000))  # as much as a float holds
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if amount < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} EiB"


def shown(value: object, limit: int = 80) -> str:
    """``repr(value)`` for a message, :func:`shortened`."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - of an integer of very many digits, or of somebody's object
        text = f"<{type(value).__name__}>"
    return shortened(text, limit)


def shortened(text: str, limit: int = 80) -> str:
    """``text`` for a message: without its middle where it is longer than ``limit``."""
    if len(text) <= limit:
        return text
    half = (limit - 3) // 2
    return f"{text[:half]}...{text[-half:]}"
