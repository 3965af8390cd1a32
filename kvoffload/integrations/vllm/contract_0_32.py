"""vLLM 0.32's offloading contract, in front of ours."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    TransferResult,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvoffload.core.specs import IntArray
from kvoffload.integrations.vllm import metrics
from kvoffload.integrations.vllm.chunks import HostChunks
from kvoffload.integrations.vllm.fault_tolerant import FaultTolerantConnector
from kvoffload.integrations.vllm.memory import build_transfers, chunks_within
from kvoffload.integrations.vllm.options import Options, Reader
from kvoffload.integrations.vllm.transfers import Finished, Transfers
from kvoffload.scheduler.manager import KeyState

logger = logging.getLogger(__name__)

_LOOKUP = {
    KeyState.MISSING: LookupResult.MISS,
    KeyState.PENDING: LookupResult.HIT_PENDING,
    KeyState.READY: LookupResult.HIT,
}


class HostSpec(BlockIDsLoadStoreSpec):
    """Chunks in host memory."""

    def __init__(self, chunk_ids: IntArray) -> None:
        self.block_ids = chunk_ids


class HostManager(OffloadingManager):
    """vLLM's manager, kept by :class:`HostChunks`.

    Args:
        chunks: the account.
        options: as the user set them.
        many_groups: keys of several groups come in one call, group after group.
    """

    def __init__(self, chunks: HostChunks, options: Options, *, many_groups: bool) -> None:
        self.chunks = chunks
        self._options = options
        self._many_groups = many_groups

    def _by_place(self, keys: list[bytes], context: ReqContext) -> list[bytes] | None:
        """From the head of the prefix to its tail, whatever their groups."""
        if not self._many_groups:
            return None
        return sorted(keys, key=lambda key: context.get_offload_key_position(key) or 0)

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        if not req_context.load_tier_filter.allows(Medium.CPU, Locality.LOCAL):
            return LookupResult.MISS
        return _LOOKUP[self.chunks.state(key)]

    def get_load_source(
        self,
        key: bytes,  # noqa: ARG002 - all keys are in one place
        req_context: ReqContext,  # noqa: ARG002
    ) -> CacheHitSource:
        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[bytes], req_context: ReqContext) -> LoadStoreSpec:
        named = list(keys)
        by_place = self._by_place(named, req_context)
        return HostSpec(self.chunks.prepare_load(named, req_context.req_id, by_place))

    def complete_load(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        self.chunks.complete_load(keys, req_context.req_id)

    def prepare_store(
        self, keys: Collection[bytes], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        named = list(keys)
        by_place = self._by_place(named, req_context)
        output = self.chunks.prepare_store(named, req_context.req_id, by_place)
        if output is None:
            return None
        return PrepareStoreOutput(output.keys, HostSpec(output.chunk_ids), output.evicted)

    def complete_store(
        self, keys: Collection[bytes], req_context: ReqContext, success: bool = True
    ) -> None:
        self.chunks.complete_store(keys, req_context.req_id, success)

    def on_new_request(
        self,
        req_context: ReqContext,  # noqa: ARG002 - requests are all alike
    ) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.chunks.finish(req_context.req_id)

    def reset_cache(self) -> None:
        self.chunks.reset()
        # vLLM lets its workers finish what ran before it starts anything new.
        self.chunks.settle()

    def take_events(self) -> Iterable[OffloadingEvent]:
        for event in self.chunks.take_events():
            yield OffloadingEvent(event.keys, Medium.CPU, event.removed)

    def get_stats(self) -> OffloadingConnectorStats:
        stats = OffloadingConnectorStats()
        metrics.emit(self.chunks, self._options, stats)
        return stats


class HostWorker(OffloadingWorker):
    """vLLM's worker, kept by :class:`Transfers`.

    Args:
        transfers: the jobs.
        tolerant: vLLM hears only of successes; who made this reads the failures here.
    """

    def __init__(self, transfers: Transfers, *, tolerant: bool) -> None:
        self.transfers = transfers
        self._tolerant = tolerant
        self._failed: list[Finished] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: HostSpec) -> bool:
        src = src_spec
        self.transfers.submit_store(
            job_id, src.block_ids, src.group_sizes, src.block_indices, dst_spec.block_ids
        )
        return True

    def submit_load(self, job_id: int, src_spec: HostSpec, dst_spec: GPULoadStoreSpec) -> bool:
        dst = dst_spec
        self.transfers.submit_load(
            job_id, dst.block_ids, dst.group_sizes, dst.block_indices, src_spec.block_ids
        )
        return True

    def get_finished(self) -> list[TransferResult]:
        results = []
        for job in self.transfers.get_finished():
            if job.error is None:
                results.append(TransferResult(job.job_id, True, job.nbytes, job.seconds))
                continue
            what = "store" if job.is_store else "load"
            if self._tolerant:
                logger.warning("%s %d failed: %s", what, job.job_id, job.error)
                self._failed.append(job)
                results.append(TransferResult(job.job_id, True))
            else:
                logger.error(
                    "%s %d failed: %s. vLLM's OffloadingConnector ends the engine on that; "
                    "KVOffloadConnector would go on",
                    what,
                    job.job_id,
                    job.error,
                )
                results.append(TransferResult(job.job_id, False))
        return results

    def take_failed(self) -> list[Finished]:
        """The jobs that failed since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def wait(self, job_ids: set[int]) -> None:
        self.transfers.wait(job_ids)

    def shutdown(self) -> None:
        self.transfers.shutdown()


class KVOffloadSpec(OffloadingSpec):
    """Offloads to host memory through kvoffload, on any accelerator it has a backend for."""

    THEIR_OPTIONS: ClassVar[Mapping[str, Reader]] = {}
    """Options that this version of vLLM reads itself."""
    MANAGER: ClassVar[type[HostManager]] = HostManager
    WORKER: ClassVar[type[HostWorker]] = HostWorker

    @classmethod
    def read_options(cls, extra_config: Mapping[str, Any]) -> Options:
        """Check ``kv_connector_extra_config``.

        Raises:
            ConfigurationError: something in it is wrong.
        """
        return Options.read(extra_config, cls.THEIR_OPTIONS)

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return {
            name: _metadata(metric)
            for name, metric in metrics.declared(cls.read_options(extra_config)).items()
        }

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.options = self.read_options(config.extra_config)
        self.tolerant = False
        """The connector looks after failures itself."""
        self.chunks = chunks_within(
            self.options,
            config.parallel.world_size,
            config.worker_kv_bytes_per_block,
            self.blocks_per_chunk,
        )
        self._manager: HostManager | None = None
        self._worker: HostWorker | None = None

    def get_manager(self) -> HostManager:
        if self._manager is None:
            options = self.options
            chunks = HostChunks(
                self.chunks,
                [group.group_id for group in self.config.groups],
                options.policy,
                events=self.kv_events_config.enable_kv_cache_events,
                store_threshold=options.store_threshold,
                max_tracker_size=options.max_tracker_size,
            )
            many_groups = len(self.config.groups) > 1
            self._manager = self.MANAGER(chunks, options, many_groups=many_groups)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> HostWorker:
        if self._worker is None:
            transfers = build_transfers(
                kv_caches,
                self.options,
                self.chunks,
                self.blocks_per_chunk,
                self.tokens_per_block,
            )
            self._worker = self.WORKER(transfers, tolerant=self.tolerant)
        return self._worker


def _metadata(metric: metrics.Metric) -> OffloadingMetricMetadata:
    if metric.kind == "histogram":
        return OffloadingHistogramMetadata(metric.text, buckets=metric.buckets)
    kinds = {"counter": OffloadingCounterMetadata, "gauge": OffloadingGaugeMetadata}
    return kinds[metric.kind](metric.text)


class KVOffloadConnector(FaultTolerantConnector):
    """vLLM's connector, made to survive transfers that fail; for vLLM 0.32."""

    SPEC = KVOffloadSpec


__all__ = ["HostManager", "HostSpec", "HostWorker", "KVOffloadConnector", "KVOffloadSpec"]
