"""A double of what our adapter touches of vLLM 0.33: the same names, signatures and calls.

Its connector asserts, as vLLM's does, that no result is a failure, and completes jobs under the
manager's lock.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

VERSION = "0.33.0"


# ------------------------------------------------------------------------------ v1.kv_offload.base
class Medium(Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


@dataclass
class TierFilter:
    allowed: bool = True

    def allows(self, medium: Medium | None, locality: Locality | None) -> bool:
        return self.allowed


@dataclass
class ReqContext:
    req_id: str
    load_tier_filter: TierFilter = field(default_factory=TierFilter)
    positions: dict[bytes, int] = field(default_factory=dict)

    def get_offload_key_position(self, key: bytes) -> int | None:
        return self.positions.get(key)


class LookupResult(Enum):
    MISS = auto()
    HIT = auto()
    HIT_PENDING = auto()
    RETRY = auto()


@dataclass
class RequestOffloadingContext:
    policy: str = "chunk_level"


class LoadStoreSpec:
    pass


@dataclass
class PrepareStoreOutput:
    keys_to_store: list[bytes]
    store_spec: LoadStoreSpec
    evicted_keys: list[bytes]


@dataclass
class OffloadingEvent:
    keys: list[bytes]
    medium: Medium
    removed: bool
    locality: Locality | None = None
    ownership: str | None = None
    removal_expected: bool = False
    metadata_only: bool = False


@dataclass(frozen=True)
class OffloadingMetricMetadata:
    documentation: str
    labelnames: tuple[str, ...] = ()


@dataclass(frozen=True)
class OffloadingCounterMetadata(OffloadingMetricMetadata):
    pass


@dataclass(frozen=True)
class OffloadingGaugeMetadata(OffloadingMetricMetadata):
    multiprocess_mode: str = "mostrecent"


@dataclass(frozen=True)
class OffloadingHistogramMetadata(OffloadingMetricMetadata):
    buckets: tuple[float, ...] | None = None


class OffloadingManager(ABC):
    @property
    def lock(self) -> AbstractContextManager[Any]:
        return nullcontext()

    @abstractmethod
    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult: ...

    @abstractmethod
    def prepare_load(self, keys: Collection[bytes], req_context: ReqContext) -> LoadStoreSpec: ...

    @abstractmethod
    def prepare_store(
        self, keys: Collection[bytes], req_context: ReqContext
    ) -> PrepareStoreOutput | None: ...

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext: ...

    def on_reset_flushed(self) -> None:
        return

    def has_pending_work(self) -> bool:
        return False

    def config_info(self) -> Sequence[Mapping[str, Any]]:
        return [{}]

    def shutdown(self) -> None:
        return


class BlockIDsLoadStoreSpec(LoadStoreSpec, ABC):
    def __init__(self, block_ids: list[int]) -> None:
        self.block_ids = np.array(block_ids, dtype=np.int32)


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    def __init__(
        self, block_ids: list[int], group_sizes: Sequence[int], block_indices: Sequence[int]
    ) -> None:
        super().__init__(block_ids)
        self.group_sizes, self.block_indices = group_sizes, block_indices


@dataclass
class CanonicalKVCaches:
    tensors: list[Any]
    group_data_refs: list[list[Any]]


@dataclass
class TransferResult:
    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None


class OffloadingWorker(ABC):
    @abstractmethod
    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool: ...

    @abstractmethod
    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool: ...

    @abstractmethod
    def get_finished(self) -> list[TransferResult]: ...

    @abstractmethod
    def wait(self, job_ids: set[int]) -> None: ...

    def shutdown(self) -> None:
        return


class OffloadingSpec(ABC):
    def __init__(self, config: Any) -> None:
        self.config = config
        self.extra_config = config.extra_config
        self.kv_events_config = SimpleNamespace(enable_kv_cache_events=True)
        self.tokens_per_block = tuple(group.tokens_per_block for group in config.groups)
        self.blocks_per_chunk = config.cache.blocks_per_chunk

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        return ()

    @abstractmethod
    def get_manager(self) -> OffloadingManager: ...

    @abstractmethod
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker: ...


class CacheHitSource(Enum):
    HOST = "host"


# ----------------------------------------------------------------------------------- the connector
@dataclass
class OffloadingWorkerMetadata:
    completed_jobs: dict[int, int] = field(default_factory=dict)
    transfer_stats: Any = None

    def aggregate(self, other: OffloadingWorkerMetadata) -> OffloadingWorkerMetadata:
        merged = dict(self.completed_jobs)
        for job_id, count in other.completed_jobs.items():
            merged[job_id] = merged.get(job_id, 0) + count
        return OffloadingWorkerMetadata(merged, self.transfer_stats)


@dataclass
class OffloadingConnectorStats:
    seen: dict[str, float] = field(default_factory=dict)

    def set_gauge(self, name: str, value: float) -> None:
        self.seen[name] = value

    def increase_counter(self, name: str, value: float) -> None:
        self.seen[name] = self.seen.get(name, 0) + value

    observe_histogram = increase_counter


@dataclass
class TransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class OffloadingConnector:
    """Both sides in one; a test puts its jobs and requests into them."""

    def __init__(self, vllm_config: Any, role: str, kv_cache_config: Any) -> None:
        spec = vllm_config.make_spec(vllm_config.offloading_config)
        self.connector_worker: Any = None
        self.connector_scheduler: Any = None
        if role == "worker":
            self.connector_worker = SimpleNamespace(
                spec=spec, worker=None, _load_jobs={}, completed={}
            )
        else:
            self.connector_scheduler = SimpleNamespace(
                manager=spec.get_manager(),
                _jobs={},
                _req_status={},
                config=SimpleNamespace(
                    kv_group_configs=kv_cache_config.group_configs,
                    blocks_per_chunk=spec.blocks_per_chunk,
                ),
            )

    def register(self, caches: CanonicalKVCaches) -> None:
        self.connector_worker.worker = self.connector_worker.spec.get_worker(caches)

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        worker, received = self.connector_worker, set()
        for result in worker.worker.get_finished():
            assert result.success
            worker.completed[result.job_id] = 1
            request = worker._load_jobs.pop(result.job_id, None)
            if request is not None:
                received.add(request)
        return TransferResults(finished_recving=received)

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        completed, self.connector_worker.completed = self.connector_worker.completed, {}
        return OffloadingWorkerMetadata(completed) if completed else None

    def update_connector_output(self, output: Any) -> None:
        scheduler = self.connector_scheduler
        for job_id in output.kv_connector_worker_meta.completed_jobs:
            job = scheduler._jobs.pop(job_id)
            context = scheduler._req_status[job.req_id].req_context
            with scheduler.manager.lock:
                complete = (
                    scheduler.manager.complete_store
                    if job.is_store
                    else scheduler.manager.complete_load
                )
                complete(job.keys, context)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any) -> Any:
        return vllm_config.kv_transfer_config.kv_connector_extra_config["spec_name"]


def modules() -> dict[str, ModuleType]:
    """By name, what an import of vLLM 0.33 would find."""
    here = vars(sys.modules[__name__])
    base = "vllm.distributed.kv_transfer.kv_connector.v1"
    content: dict[str, Iterable[str]] = {
        "vllm": [],
        "vllm.distributed": [],
        "vllm.distributed.kv_transfer": [],
        "vllm.distributed.kv_transfer.kv_connector": [],
        base: [],
        f"{base}.offloading": [],
        f"{base}.offloading.common": ["OffloadingWorkerMetadata"],
        f"{base}.offloading.metrics": ["OffloadingConnectorStats"],
        f"{base}.offloading_connector": ["OffloadingConnector"],
        "vllm.v1": [],
        "vllm.v1.kv_offload": [],
        "vllm.v1.kv_offload.base": [n for n, v in here.items() if isinstance(v, type)],
        "vllm.v1.metrics": [],
        "vllm.v1.metrics.cache_hit_source": ["CacheHitSource"],
    }
    made = {}
    for name, names in content.items():
        made[name] = ModuleType(name)
        vars(made[name]).update({each: here[each] for each in names})
    vars(made["vllm"])["__version__"] = VERSION
    return made
