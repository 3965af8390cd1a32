"""Models with layers of several kinds: sliding windows, and recurrent state (Mamba's kind)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvoffload.core.plan import CopyPlan
from kvoffload.integrations.vllm import metrics, tiny
from kvoffload.scheduler.manager import KeyState
from tests.integrations.vllm.engine import (
    Tokens,
    corrupting,
    engine_on,
    failing,
    loads,
    prompts,
    right_answers,
    tolerant,
)

MODELS: dict[str, dict[str, Any]] = {
    "sliding": {
        "model": "Olmo3",
        "pad_token_id": 0,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    # Short convolutions keep a state of the kind that Mamba's layers do, in the same spec of vLLM.
    "recurrent": {
        "model": "Lfm2",
        "pad_token_id": 0,
        "layer_types": ["conv", "full_attention"] * 2,
        "conv_dim": 256,
        "conv_dim_out": 256,
        "block_dim": 256,
        "block_multiple_of": 256,
        "block_auto_adjust_ff_dim": False,
        "block_ffn_dim_multiplier": 1.0,
        "conv_use_xavier_init": True,
    },
}
SPECS = {
    "sliding": ["SlidingWindowSpec", "FullAttentionSpec"],
    "recurrent": ["MambaSpec", "FullAttentionSpec"],
}
ASKED = prompts(8)
# vLLM's short convolutions answer a little differently in company, with and without offloading.
SETTINGS = {
    "sliding": {"num_gpu_blocks_override": 140},
    "recurrent": {"num_gpu_blocks_override": 60, "max_num_seqs": 1},
}


@pytest.fixture(scope="module", params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def hybrid(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(folder=tmp_path_factory.mktemp(kind), **MODELS[kind])


@pytest.fixture(scope="module")
def right(hybrid: Path, kind: str) -> Tokens:
    tokens = right_answers(hybrid, ASKED, **SETTINGS[kind])
    assert len(set(tokens)) == len(ASKED), "the model answers every prompt alike"
    return tokens


@pytest.mark.parametrize("factor", [1, 2])
def test_loads_of_all_groups_give_the_same_tokens(
    hybrid: Path, kind: str, right: Tokens, factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "recurrent" and factor > 1:
        pytest.skip("vLLM stores a recurrent state at the end of a prompt's last block only")
    engine = engine_on(hybrid, tolerant(blocks_per_chunk=factor), **SETTINGS[kind])
    groups = engine.core.scheduler.kv_cache_config.kv_cache_groups
    assert [type(group.kv_cache_spec).__name__ for group in groups] == SPECS[kind]
    assert engine.answer(ASKED).tokens == right
    again = engine.answer(ASKED)
    assert again.tokens == right
    assert engine.metric("vllm:external_prefix_cache_hits") > 0
    assert engine.metric("vllm:kv_offload_load_bytes") > 0
    with corrupting(monkeypatch) as corrupt:
        assert engine.answer(ASKED).tokens != right
        engine.settle()
    assert corrupt


@pytest.mark.parametrize("group", [0, 1])
def test_a_load_that_fails_in_one_group_blames_no_other_H18(
    hybrid: Path, kind: str, right: Tokens, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_group(plan: CopyPlan) -> bool:
        return loads(plan) and int(plan.bounds[group + 1] - plan.bounds[group]) > 0

    engine = engine_on(hybrid, tolerant(), **SETTINGS[kind])
    assert engine.answer(ASKED).tokens == right
    engine.settle()
    stored: list[set[bytes]] = [set(), set()]
    for key in engine.manager.chunks._manager.contents():
        stored[key.group].add(key.block_hash)
    blamed: list[bytes] = []
    distrust = engine.manager.chunks.distrust

    def noting(keys: list[bytes], *args: Any, **kwargs: Any) -> None:
        blamed.extend(keys)
        distrust(keys, *args, **kwargs)

    engine.manager.chunks.distrust = noting
    with failing(monkeypatch, of_group) as failed:
        assert engine.answer(ASKED[:2]).tokens == right[:2]
        engine.settle()
    assert failed
    assert engine.metric(metrics.FAILED_LOADS) >= 2
    assert blamed
    assert set(blamed) <= stored[group]
    assert all(engine.manager.chunks.state(key) is KeyState.READY for key in stored[1 - group])
    assert engine.answer(ASKED).tokens == right
