"""Any accelerator that torch knows and no other backend serves. Hooks only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffload.plugins import hookimpl

if TYPE_CHECKING:
    from kvoffload.core.backend import Backend

kvoffload_interface = 1


@hookimpl
def kvoffload_backend(device: str | None) -> Backend:
    from kvoffload.backends.torch.backend import GenericBackend

    return GenericBackend(device)
