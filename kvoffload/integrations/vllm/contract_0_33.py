"""vLLM 0.33's offloading contract: what it has beyond that of 0.32.

Its caller holds the manager's ``lock`` around every call. That of the base does nothing, which is
right for a manager that only vLLM's scheduler enters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import GPULoadStoreSpec

from kvoffload.integrations.vllm import contract_0_32
from kvoffload.integrations.vllm.fault_tolerant import FaultTolerantConnector
from kvoffload.integrations.vllm.options import Reader, whole

_FACTS = ("cpu_bytes_to_use", "eviction_policy", "store_threshold")


class HostManager(contract_0_32.HostManager):
    """As in 0.32, but told when the workers are done with what a reset left behind."""

    def reset_cache(self) -> None:
        self.chunks.reset()

    def on_reset_flushed(self) -> None:
        """No worker touches a chunk of before the reset any more."""
        self.chunks.settle()

    def config_info(self) -> Sequence[Mapping[str, str | int | float | bool]]:
        """What does not change while the engine runs, for one metric."""
        return [{name: getattr(self._options, name) for name in _FACTS}]


class HostWorker(contract_0_32.HostWorker):
    """As in 0.32, with loads that the engine waits for within its step."""

    def submit_load(
        self,
        job_id: int,
        src_spec: contract_0_32.HostSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,  # noqa: ARG002 - loads are in one lane, in the order submitted
    ) -> bool:
        return super().submit_load(job_id, src_spec, dst_spec)


class KVOffloadSpec(contract_0_32.KVOffloadSpec):
    """Offloads to host memory through kvoffload, on any accelerator it has a backend for."""

    THEIR_OPTIONS: ClassVar[Mapping[str, Reader]] = {"sync_load_budget_bytes": whole(0)}
    MANAGER = HostManager
    WORKER = HostWorker

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """Names of what :meth:`HostManager.config_info` tells."""
        cls.read_options(extra_config)
        return _FACTS


class KVOffloadConnector(FaultTolerantConnector):
    """vLLM's connector, made to survive transfers that fail; for vLLM 0.33."""

    SPEC = KVOffloadSpec


__all__ = ["HostManager", "HostWorker", "KVOffloadConnector", "KVOffloadSpec"]
