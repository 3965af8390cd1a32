"""Up to which page size a kernel copies faster than DMA, as measured on this device and driver.

``kvoffload bench calibrate`` measures it and writes it down; a backend that copies in both ways
reads it with :func:`load`. Nothing is ever measured while caches are registered.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Protocol

from kvoffload.core.cache_folder import cache_folder

logger = logging.getLogger(__name__)

DMA, KERNEL, AUTO = "dma", "kernel", "auto"
"""Ways of copying; ``auto`` chooses between the other two by page size."""

_warned: set[Path] = set()


class CopiesInTwoWays(Protocol):
    """What a backend has beside the rest of its interface if it can be calibrated."""

    way: str
    """How the jobs submitted from now on are copied: one of the above. It is set while no job is in
    flight, also while caches are bound."""

    def copy_ways(self) -> tuple[str, ...]:
        """The ways that work on this machine, without ``auto``."""

    def calibrated_for(self) -> tuple[str, str]:
        """Name of the device, and version of its driver: what a calibration holds for."""


def load(device_name: str, driver_version: str) -> int | None:
    """Largest page, in bytes, that a kernel loads faster than DMA does; 0 if there is none.

    Returns:
        None where nothing was measured. A file that cannot be read counts as that, with a warning
        the first time.
    """
    path = _path(device_name, driver_version)
    try:
        return _checked(json.loads(path.read_text(encoding="utf-8")), device_name, driver_version)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        if path not in _warned:
            _warned.add(path)
            logger.warning(
                "the calibration in %s is ignored (%s); 'kvoffload bench calibrate' makes it anew",
                path,
                error,
            )
        return None


def save(device_name: str, driver_version: str, crossover: int | None) -> Path:
    """Write down what :func:`load` is to return, at once or not at all.

    Args:
        device_name, driver_version: what it was measured on.
        crossover: bytes; None if the kernel was not faster at any size.

    Returns:
        The file.

    Raises:
        OSError: it cannot be written.
    """
    path = _path(device_name, driver_version)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(
        {
            "device_name": device_name,
            "driver_version": driver_version,
            "crossover": crossover or 0,
        },
        indent=2,
    )
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        Path(scratch).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(scratch).unlink()
        raise
    _warned.discard(path)
    return path


def _path(device_name: str, driver_version: str) -> Path:
    """A name that a person recognises, and a digest that tells alike names apart."""
    exact = json.dumps([device_name, driver_version])
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", f"{device_name}-{driver_version}").strip("-.")[:80]
    digest = hashlib.sha256(exact.encode()).hexdigest()[:12]
    return cache_folder("calibration") / f"{readable}-{digest}.json"


def _checked(found: object, device_name: str, driver_version: str) -> int:
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - as for all else that is wrong there
    crossover = found.get("crossover")
    if type(crossover) is not int or crossover < 0:
        raise ValueError("'crossover' is not a number of bytes")
    if (found.get("device_name"), found.get("driver_version")) != (device_name, driver_version):
        raise ValueError("it was made for another device or driver")
    return crossover
