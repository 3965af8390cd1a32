"""A real engine in this process, and what a test wants to know of it."""

from __future__ import annotations

import copy
import importlib.util
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from kvoffload.backends.cpu.backend import CpuBackend
from kvoffload.core.backend import Keep, Stream
from kvoffload.core.lanes import Lane
from kvoffload.core.plan import CopyPlan
from kvoffload.integrations.vllm import tiny

VLLM = importlib.util.find_spec("vllm") is not None
if VLLM:
    tiny.prepare()

Tokens: TypeAlias = list[tuple[int, ...]]
Config: TypeAlias = dict[str, Any] | None
MODULE = "kvoffload.integrations.vllm"


def plain(**options: Any) -> dict[str, Any]:
    """vLLM's own connector with our spec."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KVOffloadSpec",
            "spec_module_path": MODULE,
            "cpu_bytes_to_use": "64MiB",
            **options,
        },
    }


def tolerant(**options: Any) -> dict[str, Any]:
    """The fault-tolerant connector."""
    return {
        "kv_connector": "KVOffloadConnector",
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"cpu_bytes_to_use": "64MiB", **options},
    }


def prompts(count: int, tokens: int = 512, seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens, of which none begins like another."""
    numbers = random.Random(seed)
    return [[numbers.randrange(3, tiny.VOCABULARY) for _ in range(tokens)] for _ in range(count)]


@dataclass(frozen=True)
class Answers:
    """What the engine said.

    Attributes:
        tokens: of each prompt.
        cached: tokens of each prompt that were not computed.
    """

    tokens: Tokens
    cached: list[int]


class Engine:
    """An engine on a model in a folder. A process can have one at a time: see :func:`engine_on`."""

    def __init__(self, folder: Path, kv_transfer_config: Config, settings: dict[str, Any]) -> None:
        self.llm = tiny.engine(folder, copy.deepcopy(kv_transfer_config), **settings)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.events: list[Any] = []
        if self.core.scheduler.connector is not None:
            self._record_events()

    def close(self) -> None:
        """Works twice."""
        if self.core is not None:
            self.core.shutdown()
            self.llm = self.core = None

    def _record_events(self) -> None:
        manager = self.manager
        take = manager.chunks.take_events

        def recording() -> Any:
            taken = take()
            self.events += taken
            return taken

        manager.chunks.take_events = recording

    @property
    def manager(self) -> Any:
        """Ours, behind vLLM's scheduler."""
        return self.core.scheduler.connector.connector_scheduler.manager

    @property
    def transfers(self) -> Any:
        """Ours, behind vLLM's worker."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().connector_worker.worker.transfers

    def answer(
        self, asked: Sequence[Sequence[int]], tokens: int = 16, ignore_eos: bool = True
    ) -> Answers:
        """Let the engine go on from every prompt, all at once."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in asked],
            SamplingParams(
                temperature=0, max_tokens=tokens, ignore_eos=ignore_eos, detokenize=False
            ),
            use_tqdm=False,
        )
        return Answers(
            [tuple(output.outputs[0].token_ids) for output in outputs],
            [output.num_cached_tokens for output in outputs],
        )

    def metric(self, name: str) -> float:
        """The value of one metric, or the sum of a histogram."""
        assert name in self.declared(), f"{name} is not declared"
        found = [m for m in self.llm.get_metrics() if m.name == name]
        return float(sum(m.value if hasattr(m, "value") else m.sum for m in found))

    @staticmethod
    def declared() -> set[str]:
        """Names of all metrics, whether or not anything has happened."""
        from prometheus_client import REGISTRY

        return {family.name for family in REGISTRY.collect()}

    def settle(self) -> None:
        """Step until every transfer has ended and was told."""
        connector = self.core.scheduler.connector
        while connector is not None and connector.has_pending_push_work():
            self.llm.llm_engine.step()


_alive: list[tuple[str, Engine]] = []
_answers: dict[str, Tokens] = {}


def engine_on(folder: Path, config: Config = None, **settings: Any) -> Engine:
    """An engine with nothing in any cache; one that is alive is used again if it is the same."""
    name = repr((folder, config, settings))
    if not (_alive and _alive[0][0] == name):
        close_engine()
        _alive.append((name, Engine(folder, config, settings)))
    engine = _alive[0][1]
    engine.settle()
    offloads = engine.core.scheduler.connector is not None
    assert engine.llm.reset_prefix_cache(reset_connector=offloads)
    if offloads:
        engine.manager.chunks.take_events()
    engine.events.clear()
    return engine


def close_engine() -> None:
    """Close the engine that is alive, if one is."""
    while _alive:
        _alive.pop()[1].close()


def right_answers(
    folder: Path, asked: Sequence[Sequence[int]], tokens: int = 16, **settings: Any
) -> Tokens:
    """What the model answers without offloading. Ask for this first: there is one engine."""
    name = repr((folder, asked, tokens, settings))
    if name not in _answers:
        _answers[name] = engine_on(folder, **settings).answer(asked, tokens).tokens
    return _answers[name]


Damage: TypeAlias = Callable[[CopyPlan], bool]
"""Whether to damage this transfer."""


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, damage: Damage) -> Iterator[list[CopyPlan]]:
    """Within, transfers fail that ``damage`` picks; yields those that did."""
    failed: list[CopyPlan] = []
    right = CpuBackend.swap_blocks

    def swap_blocks(self: CpuBackend, plan: CopyPlan, stream: Stream, keep: Keep[Any]) -> None:
        if damage(plan):
            failed.append(plan)
            raise OSError("this copy was made to fail")
        right(self, plan, stream, keep)

    with monkeypatch.context() as patch:
        patch.setattr(CpuBackend, "swap_blocks", swap_blocks)
        yield failed


@contextmanager
def corrupting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CopyPlan]]:
    """Within, loads bring the bytes of other chunks; yields those that did."""
    corrupt: list[CopyPlan] = []
    right = CpuBackend.swap_blocks

    def swap_blocks(self: CpuBackend, plan: CopyPlan, stream: Stream, keep: Keep[Any]) -> None:
        if plan.lane is Lane.LOAD:
            corrupt.append(plan)
            units = int(plan.src.count.min()) * plan.src.factor
            plan.src_units = (plan.src_units + 1) % units
        right(self, plan, stream, keep)

    with monkeypatch.context() as patch:
        patch.setattr(CpuBackend, "swap_blocks", swap_blocks)
        yield corrupt


def loads(plan: CopyPlan) -> bool:
    """Pick every load."""
    return plan.lane is Lane.LOAD


def stores(plan: CopyPlan) -> bool:
    """Pick every store."""
    return plan.lane is Lane.STORE
