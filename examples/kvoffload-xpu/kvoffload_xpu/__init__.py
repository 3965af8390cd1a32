"""Intel GPUs as a backend of kvoffload. Hooks only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffload.plugins import hookimpl

if TYPE_CHECKING:
    from kvoffload.core.backend import Backend

kvoffload_interface = 1


@hookimpl
def kvoffload_backend(device: str | None) -> Backend:
    from kvoffload_xpu.backend import XpuBackend

    return XpuBackend(device)
