"""The hpu backend, tied together."""

from __future__ import annotations

from typing import Any

from kvoffload.backends.hpu.copy import HpuCopy
from kvoffload.backends.hpu.streams import PACKAGE, HpuStreams, is_installed
from kvoffload.backends.index_copy import IndexCopyBackend
from kvoffload.core.backend import Probe
from kvoffload.core.errors import ClosedError, ConfigurationError
from kvoffload.core.host_memory import HostMemory
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.lanes import Lane
from kvoffload.core.plan import Geometry

NOT_INSTALLED = (
    f"{PACKAGE} is not installed: install habana-torch-plugin with the Intel Gaudi software suite, "
    "or run in the suite's PyTorch container image; it is not on PyPI"
)


class HpuBackend(HpuStreams, IndexCopyBackend):
    """Intel Gaudi accelerators, through the vendor's torch bridge; arguments as there."""

    def probe(self) -> Probe:
        try:
            if self._bridge is None and not is_installed():
                return Probe(False, NOT_INSTALLED)
            found = bool(self.bridge.hpu.is_available())
            mode = "lazy" if self.lazy else "eager"
        except Exception as error:  # noqa: BLE001 - a probe never raises
            return Probe(False, f"{PACKAGE} cannot be used: {type(error).__name__}: {error}")
        if not found:
            return Probe(
                False,
                f"{PACKAGE} is installed ({mode} mode), but finds no Gaudi: is its driver loaded, "
                "and a device visible here and free?",
            )
        return Probe(True, f"{self.device} through {PACKAGE}, {mode} mode")

    def new_copy(self, geometry: Geometry, caches: CanonicalKVCaches, host: HostMemory) -> HpuCopy:
        return HpuCopy(geometry, caches, host, self.step)

    def warm_up(self, largest: int) -> int:
        """Let the device compile for all lengths of transfers, before there are any.

        Block 0 is read, and its own bytes are written back: nothing else may use the caches
        meanwhile. Blocks until it is done.

        Args:
            largest: blocks of a group in the largest transfer.

        Returns:
            How many lengths were run, over all groups and directions.

        Raises:
            ClosedError: no caches are bound.
            ConfigurationError: ``largest`` is not positive.
        """
        if largest < 1:
            raise ConfigurationError(f"a transfer has at least one block, not {largest}")
        copy, lengths = self._bound(), 0
        held: list[Any] = []

        def keep(value: Any) -> Any:
            held.append(value)
            return value

        before = self.new_event()
        self.current_stream().record_event(before)
        for lane in Lane:
            stream, done = self.new_stream(lane), self.new_event()
            stream.wait_event(before)
            try:
                lengths += copy.warm_up(lane, largest, stream, keep)
            finally:
                stream.record_event(done)
                done.synchronize()
                held.clear()
        return lengths

    def _bound(self) -> HpuCopy:
        if not isinstance(self._copy, HpuCopy):
            raise ClosedError("no caches are bound")
        return self._copy
