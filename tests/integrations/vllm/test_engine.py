"""vLLM on kvoffload: the same tokens, and what its users see of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.integrations.vllm import metrics
from tests.integrations.vllm.engine import (
    Engine,
    Tokens,
    corrupting,
    engine_on,
    plain,
    prompts,
    right_answers,
    tolerant,
)

LOADED = "vllm:kv_offload_load_bytes"
HITS = "vllm:external_prefix_cache_hits"


@pytest.fixture
def fresh(llama: Path, right: Tokens) -> Engine:
    """An engine that tells its events, with nothing in any cache."""
    from vllm.config import KVEventsConfig

    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    return engine_on(llama, plain(offload_prompt_only=False), kv_events_config=events)


def test_what_comes_back_from_host_memory_gives_the_same_tokens(
    fresh: Engine, right: Tokens
) -> None:
    loaded, hits = fresh.metric(LOADED), fresh.metric(HITS)
    first, second = fresh.answer(prompts(4)), fresh.answer(prompts(4))
    assert first.cached == [0] * 4
    assert second.cached == [512] * 4
    assert first.tokens == second.tokens == right
    assert fresh.metric(LOADED) > loaded
    assert fresh.metric(HITS) == hits + 4 * 512


@pytest.mark.parametrize("make", [plain, tolerant])
def test_chunks_of_four_blocks_give_the_same_tokens(llama: Path, right: Tokens, make: type) -> None:
    # A prompt that leaves inside of a chunk, and one that enters inside of it.
    part = [prompt[:300] for prompt in prompts(4)]
    right_part = right_answers(llama, part)
    engine = engine_on(llama, make(blocks_per_chunk=4))
    assert engine.transfers.worker.engine.geometry.block_size_factor == 4
    assert engine.answer(prompts(4)).tokens == right
    again = engine.answer(prompts(4))
    assert again.tokens == right
    assert again.cached == [512] * 4
    assert engine.answer(part).tokens == right_part
    assert engine.metric(LOADED) > 0
    assert engine.metric(HITS) > 0
    # The device has the first block of a chunk, and not the rest.
    engine.settle()
    assert engine.llm.reset_prefix_cache(reset_connector=False)
    engine.answer([prompt[:40] for prompt in prompts(4)], tokens=1)
    assert engine.answer(prompts(4)).tokens == right


def test_loads_that_are_corrupted_on_purpose_give_other_tokens(
    fresh: Engine, right: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fresh.answer(prompts(4)).tokens == right
    with corrupting(monkeypatch) as corrupt:
        assert fresh.answer(prompts(4)).tokens != right
        fresh.settle()
    assert corrupt


def test_many_requests_at_once_are_preempted_and_chunks_evicted(llama: Path) -> None:
    asked = prompts(12, tokens=200, seed=1)
    settings = {"max_num_seqs": 12}
    right = right_answers(llama, asked, tokens=120, **settings)
    # 64 chunks of 128 KiB: less than a third of what is asked for.
    options = {"cpu_bytes_to_use": "8MiB", "offload_prompt_only": False}
    engine = engine_on(llama, tolerant(**options), **settings)
    assert engine.manager.chunks._manager.usage().capacity == 64
    for _ in range(3):
        assert engine.answer(asked, tokens=120).tokens == right
    engine.settle()
    assert engine.metric("vllm:num_preemptions") > 0
    assert engine.metric(LOADED) > 0
    usage = engine.manager.chunks._manager.usage()
    assert usage.free + usage.evictable == usage.capacity, "chunks were lost"
    assert engine.metric(metrics.ALLOCATION) > 64, "nothing had to be evicted"
    assert engine.metric(metrics.FAILED_LOADS) == engine.metric(metrics.FAILED_STORES) == 0


def conversation(engine: Engine) -> list[int]:
    """What is cached of the second turn of four conversations, answered with 64 tokens each."""
    asked = prompts(4, tokens=256, seed=2)
    answers = engine.answer(asked, tokens=64).tokens
    engine.settle()
    engine.answer(prompts(4, seed=3))  # what the device had is gone
    return engine.answer([a + list(b) for a, b in zip(asked, answers, strict=True)]).cached


def test_generated_tokens_are_offloaded_too_if_wanted(fresh: Engine, llama: Path) -> None:
    # The last token that is generated is nowhere yet, so neither is its block.
    assert conversation(fresh) == [256 + 32] * 4
    assert conversation(engine_on(llama, plain())) == [256] * 4


def test_a_reset_of_the_prefix_cache_forgets_what_is_offloaded(
    fresh: Engine, right: Tokens
) -> None:
    fresh.answer(prompts(4))
    fresh.settle()
    assert fresh.manager.chunks._manager.usage().evictable > 0
    assert fresh.llm.reset_prefix_cache(reset_connector=True)
    usage = fresh.manager.chunks._manager.usage()
    assert (usage.free, usage.in_use) == (usage.capacity, 0)
    again = fresh.answer(prompts(4))
    assert again.cached == [0] * 4
    assert again.tokens == right
    assert fresh.answer(prompts(4)).cached == [512] * 4


def test_a_reset_while_transfers_run_loses_no_chunk(fresh: Engine, right: Tokens) -> None:
    from vllm import SamplingParams

    # Two steps: the prompts are computed, and their stores are on their way or not yet submitted.
    for number, prompt in enumerate(prompts(4)):
        fresh.llm.llm_engine.add_request(
            str(number),
            {"prompt_token_ids": prompt},
            SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False),
        )
    connector = fresh.core.scheduler.connector
    while not connector.connector_scheduler._jobs:
        fresh.llm.llm_engine.step()
    connector.reset_cache()
    usage = fresh.manager.chunks._manager.usage()
    assert usage.free == usage.capacity
    while fresh.llm.llm_engine.has_unfinished_requests():
        fresh.llm.llm_engine.step()
    assert fresh.answer(prompts(4)).tokens == right
    assert fresh.answer(prompts(4)).tokens == right
    fresh.settle()
    usage = fresh.manager.chunks._manager.usage()
    assert usage.free + usage.evictable == usage.capacity


def test_every_key_is_stored_once_and_removed_once_in_order(fresh: Engine) -> None:
    fresh.answer(prompts(4))
    fresh.answer(prompts(4, seed=1))
    fresh.answer(prompts(4))
    fresh.settle()
    assert fresh.llm.reset_prefix_cache(reset_connector=True)
    fresh.answer(prompts(1, tokens=40, seed=9))
    fresh.settle()
    found: set[bytes] = set()
    for event in fresh.events:
        for key in event.keys:
            assert (key in found) is event.removed
            (found.discard if event.removed else found.add)(key)
    assert sum(len(e.keys) for e in fresh.events if not e.removed) == 8 * 16 + 1
    assert sum(len(e.keys) for e in fresh.events if e.removed) == 8 * 16


def test_all_metrics_are_declared_before_anything_happens(llama: Path) -> None:
    engine = engine_on(llama, plain(store_threshold=2))
    assert {
        metrics.USAGE,
        metrics.WRITE_USAGE,
        metrics.READ_USAGE,
        metrics.ALLOCATION,
        metrics.SKIPPED,
        metrics.FAILED_LOADS,
        metrics.FAILED_STORES,
        LOADED,
        "vllm:kv_offload_store_bytes",
        "vllm:kv_offload_load_size",
        "vllm:kv_offload_store_size",
    } <= engine.declared()
    engine.answer(prompts(4))
    engine.settle()
    assert engine.metric("vllm:kv_offload_store_bytes") == 0
    assert engine.metric(metrics.SKIPPED) == 4 * 16
    engine.answer(prompts(4))
    engine.settle()
    engine.answer(prompts(1, tokens=16))
    assert engine.metric("vllm:kv_offload_store_bytes") == 4 * 16 * 128 * 1024


def test_a_step_submits_without_waiting(fresh: Engine) -> None:
    fresh.transfers.submit_seconds = []
    fresh.answer(prompts(4))
    fresh.answer(prompts(4))
    fresh.settle()
    # Not a measurement: that is what the benchmark is for.
    assert 0 < max(fresh.transfers.submit_seconds) < 1
    fresh.transfers.submit_seconds = None
