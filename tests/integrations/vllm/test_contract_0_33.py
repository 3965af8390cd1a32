"""vLLM 0.33's contract, against a double of it: no build of it runs on a CPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.core.errors import ConfigurationError, UnsupportedVersionError
from kvoffload.core.lanes import Lane
from kvoffload.integrations import vllm as ours
from kvoffload.integrations.vllm import metrics
from tests.integrations.vllm import double_0_33 as double
from tests.integrations.vllm.test_transfers import PAGE, caches

ADAPTERS = [
    f"kvoffload.integrations.vllm.{name}"
    for name in ("contract_0_32", "contract_0_33", "fault_tolerant")
]
GROUPS = (0, 2)
"""vLLM's numbers of the groups that it offloads."""


@pytest.fixture(autouse=True)
def vllm_0_33(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The double is what an import of vLLM finds, and the adapters are imported on it."""
    for name, module in double.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    before: dict[str, Any] = {name: sys.modules.pop(name, None) for name in ADAPTERS}
    yield
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def offloading_config(**extra: Any) -> SimpleNamespace:
    return SimpleNamespace(
        groups=[SimpleNamespace(group_id=group, tokens_per_block=16) for group in GROUPS],
        extra_config={"cpu_bytes_to_use": 64 * PAGE, **extra},
        parallel=SimpleNamespace(world_size=1),
        worker_kv_bytes_per_block=PAGE,
        cache=SimpleNamespace(blocks_per_chunk=1),
    )


def make_spec(**extra: Any) -> Any:
    return ours.KVOffloadSpec(offloading_config(**extra))


def key(name: object, group: int = 0) -> bytes:
    return str(name).encode() + group.to_bytes(4, "big")


def a_request(name: str, *keys: bytes) -> double.ReqContext:
    return double.ReqContext(name, positions={each: place for place, each in enumerate(keys)})


def test_the_module_leads_to_the_adapter_of_the_installed_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contract = importlib.import_module("kvoffload.integrations.vllm.contract_0_33")
    assert ours.KVOffloadSpec is contract.KVOffloadSpec
    assert ours.KVOffloadConnector is contract.KVOffloadConnector
    assert set(ours.__all__) <= set(dir(ours))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = ours.nonsense
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.34.1")
    with pytest.raises(UnsupportedVersionError, match=r"vLLM 0.34.1 is installed"):
        _ = ours.KVOffloadSpec


def test_a_key_comes_back_through_manager_and_worker() -> None:
    spec = make_spec()
    manager, worker = spec.get_manager(), spec.get_worker(caches([[0], [0]]))
    assert manager is spec.get_manager()
    keys = [key(1), key(2), key(1, group=2)]
    context = a_request("a", *keys)
    manager.on_new_request(context)
    assert manager.lookup(keys[0], context) is double.LookupResult.MISS
    output = manager.prepare_store(keys, context)
    assert output.keys_to_store == keys
    assert manager.lookup(keys[0], context) is double.LookupResult.HIT_PENDING
    blocks = double.GPULoadStoreSpec([1, 2, 3], [2, 1], [0, 0])
    assert worker.submit_store(1, blocks, output.store_spec)
    worker.wait({1, 99})
    (result,) = worker.get_finished()
    assert (result.job_id, result.success, result.transfer_size) == (1, True, 3 * PAGE)
    manager.complete_store(set(keys), context)
    assert manager.lookup(keys[0], context) is double.LookupResult.HIT
    assert manager.get_load_source(keys[0], context) is double.CacheHitSource.HOST
    source = manager.prepare_load(keys, context)
    target = double.GPULoadStoreSpec([5, 6, 7], [2, 1], [0, 0])
    assert worker.submit_load(2, source, target, expedited=True)
    worker.wait({2})
    assert [result.success for result in worker.get_finished()] == [True]
    manager.complete_load(set(keys), context)
    manager.on_request_finished(context)
    (event,) = manager.take_events()
    assert (set(event.keys), event.medium, event.removed) == (set(keys), double.Medium.CPU, False)
    stats = manager.get_stats().seen
    assert stats[metrics.USAGE] == 0
    assert stats[metrics.ALLOCATION] == 3
    assert set(stats) <= set(spec.build_metric_definitions(spec.extra_config))
    worker.shutdown()
    manager.shutdown()


def test_a_request_that_may_not_load_from_host_memory_finds_nothing() -> None:
    manager = make_spec().get_manager()
    context = a_request("a")
    output = manager.prepare_store([key(1)], context)
    manager.complete_store(output.keys_to_store, context)
    context.load_tier_filter = double.TierFilter(allowed=False)
    assert manager.lookup(key(1), context) is double.LookupResult.MISS


def test_chunks_of_before_a_reset_are_free_when_the_workers_have_flushed() -> None:
    manager = make_spec().get_manager()
    keys = [key(name) for name in range(64)]
    context = a_request("a", *keys)
    assert manager.prepare_store(keys, context) is not None
    manager.reset_cache()
    assert manager.lookup(keys[0], context) is double.LookupResult.MISS
    assert manager.prepare_store(keys, context) is None
    manager.on_reset_flushed()
    output = manager.prepare_store(keys, context)
    assert output.keys_to_store == keys


def test_the_facts_that_are_declared_are_those_that_are_told() -> None:
    spec = make_spec(sync_load_budget_bytes=0)
    (facts,) = spec.get_manager().config_info()
    assert tuple(facts) == spec.config_info_keys(spec.extra_config)
    assert facts["cpu_bytes_to_use"] == 64 * PAGE


# ------------------------------------------------------------------------------- the connector
def vllm_config(policy: str = "recompute", **extra: Any) -> SimpleNamespace:
    config = offloading_config(**extra)
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config=config.extra_config, kv_load_failure_policy=policy
        ),
        offloading_config=config,
        make_spec=ours.KVOffloadSpec,
    )


def cache_config(groups: int) -> SimpleNamespace:
    one = SimpleNamespace(tokens_per_block=16, sliding_window_size_in_chunks=None)
    return SimpleNamespace(kv_cache_groups=[None] * groups, group_configs=[one] * len(GROUPS))


def connectors(groups: int) -> tuple[Any, Any]:
    """The worker's and the scheduler's."""
    worker, scheduler = (
        ours.KVOffloadConnector(vllm_config(), role, cache_config(groups))
        for role in ("worker", "scheduler")
    )
    worker.register(caches([[0], [0]]))
    return worker, scheduler


def begin(scheduler: Any, keys: list[bytes]) -> Any:
    """Request "b" loads what request "a" has stored."""
    manager = scheduler.connector_scheduler.manager
    context = a_request("a", *keys)
    manager.complete_store(manager.prepare_store(keys, context).keys_to_store, context)
    states = [
        SimpleNamespace(offload_keys=[k for k in keys if k[-1] == group], next_stored_chunk_idx=9)
        for group in GROUPS
    ]
    context = a_request("b", *keys)
    scheduler.connector_scheduler._jobs[4] = SimpleNamespace(
        req_id="b", keys=set(keys), is_store=False
    )
    scheduler.connector_scheduler._req_status["b"] = SimpleNamespace(
        req_context=context, group_states=states
    )
    return manager.prepare_load(keys, context)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_failed_load_is_told_as_vllm_can_recompute_it_H18(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, scheduler = connectors(groups)
    keys = [key(1), key(2), key(1, group=2), key(2, group=2)]
    source = begin(scheduler, keys)
    ours_worker = worker.connector_worker.worker
    backend = ours_worker.transfers.worker.engine.backend
    right = backend.swap_blocks

    def fail_in_group_1(plan: Any, stream: Any, keep: Any) -> None:
        if plan.lane is Lane.LOAD and plan.bounds[2] > plan.bounds[1]:
            raise OSError("broken")
        right(plan, stream, keep)

    monkeypatch.setattr(backend, "swap_blocks", fail_in_group_1)
    worker.connector_worker._load_jobs[4] = "b"
    ours_worker.submit_load(4, source, double.GPULoadStoreSpec([11, 5, 6, 11], [2, 2], [0, 0]))
    ours_worker.wait({4})
    results = worker.get_transfer_results(set())
    assert results.finished_recving == {"b"}
    # Ids mean something to vLLM only where there is one group.
    assert results.failed_recving == (set() if groups == 1 else {"b"})
    assert worker.get_block_ids_with_load_errors() == ({6, 11} if groups == 1 else set())
    assert worker.get_block_ids_with_load_errors() == set()

    report = worker.build_connector_worker_meta()
    both = report.aggregate(report)
    assert both.completed_jobs == {4: 2}
    assert set(both.failed_jobs) == {4}
    scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=report))
    manager = scheduler.connector_scheduler.manager
    assert [manager.lookup(k, a_request("c")).name for k in keys] == ["HIT"] * 2 + ["MISS"] * 2
    states = scheduler.connector_scheduler._req_status["b"].group_states
    assert [state.next_stored_chunk_idx for state in states] == [0, 0]
    assert manager.get_stats().seen[metrics.FAILED_LOADS] == 1
    assert worker.build_connector_worker_meta() is None
    ours_worker.shutdown()


def test_a_failure_of_before_a_reset_is_nobodys() -> None:
    _, scheduler = connectors(2)
    contract = importlib.import_module("kvoffload.integrations.vllm.fault_tolerant")
    report = contract.Report(failed_jobs={77: ()})
    scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=report))
    assert metrics.FAILED_LOADS not in scheduler.connector_scheduler.manager.get_stats().seen


def test_without_the_connector_vllm_is_told_of_the_failure() -> None:
    worker = make_spec().get_worker(caches([[0], [0]]))
    spec = importlib.import_module("kvoffload.integrations.vllm.contract_0_33")
    chunks = importlib.import_module("kvoffload.integrations.vllm.contract_0_32").HostSpec([0])
    assert spec.HostWorker is type(worker)
    worker.submit_load(1, chunks, double.GPULoadStoreSpec([0], [1, 0], [0, 0]))
    assert [(r.job_id, r.success) for r in worker.get_finished()] == [(1, False)]
    assert worker.take_failed() == []
    worker.shutdown()


def test_the_connector_brings_its_own_spec() -> None:
    config = vllm_config()
    assert ours.KVOffloadConnector.build_prom_metrics(config, {}, [], {}) == "KVOffloadSpec"
    extra = config.kv_transfer_config.kv_connector_extra_config
    assert extra["spec_module_path"] == "kvoffload.integrations.vllm"
    with pytest.raises(ConfigurationError, match=r"brings its own spec.*'CPUOffloadingSpec'"):
        ours.KVOffloadConnector(
            vllm_config(spec_name="CPUOffloadingSpec"), "worker", cache_config(1)
        )


def test_the_connector_wants_to_be_told_to_recompute() -> None:
    with pytest.raises(ConfigurationError, match='"kv_load_failure_policy": "recompute"'):
        ours.KVOffloadConnector(vllm_config(policy="fail"), "worker", cache_config(1))


def test_loads_within_a_step_need_a_single_group() -> None:
    config = vllm_config(sync_load_budget_bytes=1 << 20)
    assert ours.KVOffloadConnector(config, "worker", cache_config(1))
    with pytest.raises(ConfigurationError, match="sync_load_budget_bytes: a model with several"):
        ours.KVOffloadConnector(config, "worker", cache_config(2))
