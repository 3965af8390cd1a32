"""The connector that turns failed loads into recomputation.

vLLM's own parts hear of successes only; what failed travels beside them, from the worker to the
scheduler, in the same report.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvoffload.core.errors import ConfigurationError
from kvoffload.integrations.vllm.chunks import HostChunks
from kvoffload.integrations.vllm.failures import LoadFailure, failed_keys, usable_prefix

logger = logging.getLogger(__name__)

MODULE = "kvoffload.integrations.vllm"
"""What a user names; it leads to the contract of the installed version."""


@dataclass
class Report(OffloadingWorkerMetadata):
    """What a worker tells the scheduler: vLLM's part, and what failed.

    Attributes:
        failed_jobs: by id, with what did not arrive; nothing of a store.
    """

    failed_jobs: dict[int, tuple[LoadFailure, ...]] = field(default_factory=dict)

    def aggregate(self, other: OffloadingWorkerMetadata) -> Report:
        both = super().aggregate(other)
        failed = dict(self.failed_jobs)
        for job_id, failures in getattr(other, "failed_jobs", {}).items():
            failed[job_id] = failed.get(job_id, ()) + failures
        return Report(both.completed_jobs, both.transfer_stats, failed)


class FaultTolerantConnector(OffloadingConnector):
    """vLLM's connector, made to survive transfers that fail.

    What a failed load should have brought is computed. A failed store becomes visible to nobody.
    """

    SPEC: ClassVar[Any]
    """The spec that it is built on."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.check(vllm_config.kv_transfer_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._many_groups = len(kv_cache_config.kv_cache_groups) > 1
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._invalid_blocks: set[int] = set()
        self._failed_jobs: dict[int, tuple[LoadFailure, ...]] = {}
        if self._many_groups and extra.get("sync_load_budget_bytes"):
            # vLLM can recompute only what a request waits for, unless there is one group.
            raise ConfigurationError(
                "sync_load_budget_bytes: a model with several groups of layers cannot recover "
                "from a failed load within a step; leave it out"
            )
        if self.connector_worker is not None:
            self.connector_worker.spec.tolerant = True

    @classmethod
    def check(cls, kv_transfer_config: Any) -> None:
        """Complete and check the configuration that vLLM's own parts will read.

        Raises:
            ConfigurationError: it asks for something else than this connector does.
        """
        extra = kv_transfer_config.kv_connector_extra_config
        extra.setdefault("spec_name", "KVOffloadSpec")
        extra.setdefault("spec_module_path", MODULE)
        named = (extra["spec_name"], extra["spec_module_path"])
        if named != ("KVOffloadSpec", MODULE):
            raise ConfigurationError(
                f"KVOffloadConnector brings its own spec; leave out spec_name and "
                f"spec_module_path, which name {named[0]!r} of {named[1]!r}"
            )
        if kv_transfer_config.kv_load_failure_policy != "recompute":
            raise ConfigurationError(
                "KVOffloadConnector computes what a failed load did not bring: say so with "
                '"kv_load_failure_policy": "recompute" in --kv-transfer-config, beside '
                f"kv_connector; it is {kv_transfer_config.kv_load_failure_policy!r}"
            )
        cls.SPEC.read_options(extra)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        cls.check(vllm_config.kv_transfer_config)
        return super().build_prom_metrics(vllm_config, *args, **kwargs)

    # ------------------------------------------------------------------------------ the worker
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        # vLLM forgets whose a load was when it hears that it ended.
        request_of = dict(self.connector_worker._load_jobs)
        results = super().get_transfer_results(finished_req_ids)
        failed_requests = set()
        for job in self.connector_worker.worker.take_failed():
            self._failed_jobs[job.job_id] = job.failures
            if job.is_store:
                continue
            if self._many_groups:
                # Block ids of several groups cannot be told apart: the request is named instead.
                failed_requests.add(request_of[job.job_id])
            else:
                self._invalid_blocks.update(b for f in job.failures for b in f.block_ids)
        return replace(results, failed_recving=results.failed_recving | failed_requests)

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        report = super().build_connector_worker_meta()
        if report is None or not self._failed_jobs:
            return report
        failed, self._failed_jobs = self._failed_jobs, {}
        return Report(report.completed_jobs, report.transfer_stats, failed)

    # --------------------------------------------------------------------------- the scheduler
    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, Report):
            for job_id, failures in report.failed_jobs.items():
                self._take_failure(job_id, failures)
        super().update_connector_output(connector_output)

    def _take_failure(self, job_id: int, failures: tuple[LoadFailure, ...]) -> None:
        scheduler = self.connector_scheduler
        job = scheduler._jobs.get(job_id)
        if job is None:
            return  # of before a reset
        chunks: HostChunks = scheduler.manager.chunks
        if job.is_store:
            chunks.distrust(job.keys, job.req_id, is_store=True)
            return
        request = scheduler._req_status[job.req_id]
        groups = scheduler.config.kv_group_configs
        of_group = [state.offload_keys for state in request.group_states]
        failed = set(failed_keys(failures, of_group, scheduler.config.blocks_per_chunk))
        # A chunk that is not whole has a key of its own, which is in no group's list.
        listed = {key for keys in of_group for key in keys}
        bad = [key for key in job.keys if key in failed or key not in listed]
        chunks.distrust(bad, job.req_id, is_store=False)
        windows = [i for i, g in enumerate(groups) if g.sliding_window_size_in_chunks is not None]
        good = usable_prefix(
            failures, [group.tokens_per_block for group in groups], needs_whole=windows
        )
        logger.warning(
            "request %s: load %d failed; its first %d tokens are good, the rest is computed",
            job.req_id,
            job_id,
            good,
        )
        # What is computed now can be stored again.
        for state in request.group_states:
            state.next_stored_chunk_idx = 0
