"""Device memory and device work, held without the code under test.

Replay, benchmarks and the conformance kit drive a device through a :class:`DeviceRig`. It never
calls ``swap_blocks``, so that what it reads is what really is in device memory. Rigs come with
kvoffload, one for each kind of stream; a vendor writes none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from kvoffload.backends.thread_base import ThreadBackend
from kvoffload.core.backend import Backend
from kvoffload.core.errors import ConfigurationError
from kvoffload.rig.base import Bytes, DeviceRig, Fault
from kvoffload.rig.thread import ThreadRig
from kvoffload.rig.torch_device import TorchRig

__all__ = ["Bytes", "DeviceRig", "Fault", "ThreadRig", "TorchRig", "register_rig", "rig_for"]

Serves: TypeAlias = Callable[[Backend], bool]
RigFactory: TypeAlias = Callable[[Any], DeviceRig]

_RIGS: list[tuple[Serves, RigFactory]] = []


def register_rig(serves: Serves, rig: RigFactory) -> None:
    """``rig`` holds the devices of the backends that ``serves`` picks; the latest one wins."""
    _RIGS.insert(0, (serves, rig))


def rig_for(backend: Backend) -> DeviceRig:
    """The rig for this backend's device.

    Raises:
        ConfigurationError: there is none for its kind of device.
    """
    for serves, rig in _RIGS:
        if serves(backend):
            return rig(backend)
    raise ConfigurationError(
        f"no rig can hold the device of {type(backend).__name__}: it is neither on thread_base, "
        f"nor is its device ({backend.device}) an accelerator of torch's"
    )


register_rig(lambda backend: backend.device is not None and backend.device.type != "cpu", TorchRig)
register_rig(lambda backend: isinstance(backend, ThreadBackend), ThreadRig)
