"""Transfers that fail under a real engine: with the fault-tolerant connector nobody notices."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.core.plan import CopyPlan
from kvoffload.integrations.vllm import metrics
from tests.integrations.vllm.engine import (
    Engine,
    Tokens,
    close_engine,
    engine_on,
    failing,
    loads,
    plain,
    prompts,
    right_answers,
    stores,
    tolerant,
)


@pytest.fixture
def engine(llama: Path, right: Tokens) -> Engine:
    """A fault-tolerant engine with nothing in any cache."""
    return engine_on(llama, tolerant())


def test_what_failed_loads_did_not_bring_is_computed(
    engine: Engine, right: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = engine.metric(metrics.FAILED_LOADS)
    assert engine.answer(prompts(4)).tokens == right
    with failing(monkeypatch, loads) as failed:
        assert engine.answer(prompts(4)).tokens == right
        engine.settle()
    assert len(failed) == 4
    assert engine.metric(metrics.FAILED_LOADS) == before + 4
    # What was computed instead has been stored again, and comes back.
    again = engine.answer(prompts(4))
    assert again.tokens == right
    assert again.cached == [512] * 4


def test_a_load_that_fails_behind_a_local_prefix_keeps_the_prefix(
    engine: Engine, right: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.answer(prompts(4))
    engine.settle()
    # The device keeps the head of one prompt only.
    assert engine.llm.reset_prefix_cache(reset_connector=False)
    engine.answer([prompts(4)[0][:256]])
    with failing(monkeypatch, loads) as failed:
        assert engine.answer(prompts(4)[:1]).tokens == right[:1]
        engine.settle()
    assert [len(plan.dst_units) for plan in failed] == [8]


def test_half_of_the_loads_fail_under_pressure(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(12, tokens=200, seed=1)
    right = right_answers(llama, asked, tokens=60, max_num_seqs=12)
    seen: list[CopyPlan] = []

    def every_other(plan: CopyPlan) -> bool:
        seen.append(plan)
        return len(seen) % 2 == 0

    options = {"cpu_bytes_to_use": "12MiB", "offload_prompt_only": False, "blocks_per_chunk": 2}
    engine = engine_on(llama, tolerant(**options), max_num_seqs=12)
    with failing(monkeypatch, every_other) as failed:
        for _ in range(4):
            assert engine.answer(asked, tokens=60).tokens == right
        engine.settle()
    usage = engine.manager.chunks._manager.usage()
    assert usage.free + usage.evictable == usage.capacity, "chunks were lost"
    engine.answer(prompts(1, tokens=16))
    counted = engine.metric(metrics.FAILED_LOADS) + engine.metric(metrics.FAILED_STORES)
    assert len(failed) == counted
    assert any(loads(plan) for plan in failed)
    assert any(stores(plan) for plan in failed)


def test_what_a_failed_store_should_have_kept_is_never_seen(
    engine: Engine, right: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = engine.metric(metrics.FAILED_STORES)
    with failing(monkeypatch, stores) as failed:
        assert engine.answer(prompts(4)).tokens == right
        engine.settle()
    assert len(failed) == engine.metric(metrics.FAILED_STORES) - before > 0
    usage = engine.manager.chunks._manager.usage()
    assert (usage.free, usage.evictable) == (usage.capacity, 0)
    again = engine.answer(prompts(4))
    assert again.cached == [0] * 4
    assert again.tokens == right


def test_a_submission_that_is_refused_is_a_failed_transfer(
    engine: Engine, right: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvoffload.core.errors import BlockWithheldError
    from kvoffload.core.worker import OffloadingWorker

    engine.answer(prompts(4))
    engine.settle()
    before = engine.metric(metrics.FAILED_LOADS)

    def refuse(*_: object, **__: object) -> bool:
        raise BlockWithheldError("a job stalled")

    with monkeypatch.context() as patch:
        patch.setattr(OffloadingWorker, "transfer_async", refuse)
        assert engine.answer(prompts(4)).tokens == right
        engine.settle()
    assert engine.metric(metrics.FAILED_LOADS) == before + 4


def test_with_the_plain_spec_a_failed_load_ends_the_engine(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(llama, plain())
    engine.answer(prompts(4))
    with failing(monkeypatch, loads), pytest.raises(AssertionError):
        engine.answer(prompts(4))
    close_engine()
