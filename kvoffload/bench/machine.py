"""What a measurement was made with, as far as the machine tells."""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

import kvoffload
from kvoffload.core.backend import Backend

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Machine:
    """Names and versions; what nobody tells is ``"unknown"``.

    Attributes:
        card: the device's name.
        driver: its version.
        toolkit: what torch was built with.
        cpu_cores: that this process may use.
        date: of today, UTC.
    """

    card: str
    driver: str
    toolkit: str
    torch: str
    python: str
    kvoffload: str
    system: str
    cpu_cores: int
    date: str


def describe(backend: Backend) -> Machine:
    """The machine, and the device of the backend."""
    card, driver = _card(backend), _driver()
    told = getattr(backend, "calibrated_for", None)
    if callable(told):
        card, driver = told()
    cuda, hip = torch.version.cuda, torch.version.hip
    return Machine(
        card=card,
        driver=driver,
        toolkit=f"CUDA {cuda}" if cuda else f"HIP {hip}" if hip else UNKNOWN,
        torch=torch.__version__,
        python=platform.python_version(),
        kvoffload=kvoffload.__version__,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu_cores=len(os.sched_getaffinity(0)),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


def _card(backend: Backend) -> str:
    try:
        module = torch.get_device_module(backend.device)
        return str(module.get_device_name(backend.device))
    except Exception:  # noqa: BLE001 - not every device has a module or a name
        return UNKNOWN


def _driver() -> str:
    try:
        words = NVIDIA_DRIVER.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return UNKNOWN
    return next((word for word in words if word[:1].isdigit() and "." in word), UNKNOWN)
