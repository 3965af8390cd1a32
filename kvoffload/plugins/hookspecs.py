"""What a plugin provides, on one screen.

A distribution names a module under the entry-point group :data:`GROUP`; the entry point's name is
the backend's. The module holds::

    from kvoffload.plugins import hookimpl

    kvoffload_interface = 1  # the interface version it was written for; a literal, not an import

    @hookimpl
    def kvoffload_backend(device):
        from mypackage.backend import MyBackend
        return MyBackend(device)

Importing the module must not import torch or a driver: only the hook does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from kvoffload.core.backend import Backend

GROUP = "kvoffload.backends"
"""The entry-point group."""

hookspec = pluggy.HookspecMarker("kvoffload")
hookimpl = pluggy.HookimplMarker("kvoffload")


@hookspec(firstresult=True)
def kvoffload_backend(device: str | None) -> Backend:  # type: ignore[empty-body]
    """Construct the backend, cheaply and without touching the device.

    Args:
        device: such as ``"cuda:1"``, or None for the default device.

    Returns:
        A new backend. Whether it can run here is for its ``probe()`` to say.

    Raises:
        ConfigurationError: the backend cannot serve ``device``.
    """
