"""The manager against a slow model, over random programs: guarantees 6 and 7."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvoffload.scheduler.host_manager import HostOffloadingManager
from kvoffload.scheduler.keys import OffloadKey
from kvoffload.scheduler.manager import RequestContext
from kvoffload.scheduler.policy import LRUPolicy

CAPACITY = 6
KEYS = [OffloadKey(bytes([n])) for n in range(10)]
CONTEXTS = [RequestContext(name) for name in "ABC"]

contexts = st.sampled_from(CONTEXTS)
batches = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5, unique=True)

Held = dict[OffloadKey, int]
"""Chunk id by key."""


class ManagerAgainstModel(RuleBasedStateMachine):
    """The model keeps of each chunk only what the guarantees speak of."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = HostOffloadingManager(CAPACITY)
        self.known: Held = {}  # what lookups find, or will find when its store is complete
        self.ready: set[OffloadKey] = set()
        self.promised: dict[RequestContext, Held] = {context: {} for context in CONTEXTS}
        self.loads: dict[RequestContext, list[Held]] = {context: [] for context in CONTEXTS}
        self.stores: list[tuple[RequestContext, Held]] = []

    def in_use(self) -> set[int]:
        loads = [held for per_context in self.loads.values() for held in per_context]
        stores = [held for _, held in self.stores]
        return {
            chunk for held in [*self.promised.values(), *loads, *stores] for chunk in held.values()
        }

    def forget(self, key: OffloadKey) -> None:
        self.known.pop(key, None)
        self.ready.discard(key)

    @rule(context=contexts, keys=batches)
    def lookup(self, context: RequestContext, keys: list[OffloadKey]) -> None:
        run = next((i for i, key in enumerate(keys) if key not in self.ready), len(keys))
        found = self.manager.lookup(keys, context)
        assert found.hits == run
        assert found.pending == (run < len(keys) and keys[run] in self.known)
        self.promised[context] = {key: self.known[key] for key in keys[:run]}

    @rule(context=contexts, count=st.integers(1, 3))
    def load_what_is_promised(self, context: RequestContext, count: int) -> None:
        promised = self.promised[context]
        keys = [key for key, chunk in promised.items() if self.known.get(key) == chunk][:count]
        if keys:
            spec = self.manager.prepare_load(keys, context)
            load = {key: promised.pop(key) for key in keys}
            assert spec.block_ids.tolist() == list(load.values())
            self.loads[context].append(load)

    @rule(context=contexts, success=st.booleans())
    def complete_a_load(self, context: RequestContext, success: bool) -> None:
        if self.loads[context]:
            load = self.loads[context].pop(0)
            self.manager.complete_load(list(load), context, success)
            for key, chunk in load.items():
                if not success and self.known.get(key) == chunk:
                    self.forget(key)

    @rule(context=contexts, keys=batches)
    def prepare_store(self, context: RequestContext, keys: list[OffloadKey]) -> None:
        in_use = self.in_use()
        new = [key for key in keys if key not in self.known]
        evictable = {k for k, chunk in self.known.items() if chunk not in in_use} - set(keys)
        free = CAPACITY - len(set(self.known.values()) | in_use)
        output = self.manager.prepare_store(keys, context)
        if len(new) > free + len(evictable):
            assert output is None
            return
        assert output is not None
        assert output.keys_to_store == new
        assert len(output.evicted_keys) == max(len(new) - free, 0)
        assert set(output.evicted_keys) <= evictable
        for key in output.evicted_keys:
            self.forget(key)
        ids = output.store_spec.block_ids.tolist()
        assert not set(ids) & (set(self.known.values()) | in_use), "a chunk was given out twice"
        held = dict(zip(new, ids, strict=True))
        self.known |= held
        if held:
            self.stores.append((context, held))

    @rule(index=st.integers(0, 9), success=st.booleans())
    def complete_a_store(self, index: int, success: bool) -> None:
        if self.stores:
            context, held = self.stores.pop(index % len(self.stores))
            if any(c == context and c2 & held.keys() for c, h in self.stores for c2 in [h.keys()]):
                self.stores.append((context, held))  # told apart by age alone: not this one yet
                return
            self.manager.complete_store(list(held), context, success)
            for key, chunk in held.items():
                if self.known.get(key) == chunk:
                    self.ready.add(key)
                    if not success:
                        self.forget(key)

    @rule(context=contexts, keys=batches)
    def touch(self, context: RequestContext, keys: list[OffloadKey]) -> None:
        self.manager.touch(keys, context)

    @rule(context=contexts)
    def release(self, context: RequestContext) -> None:
        self.manager.release(context)
        self.promised[context] = {}

    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.known = {}
        self.ready = set()
        self.promised = {context: {} for context in CONTEXTS}

    @invariant()
    def chunks_add_up(self) -> None:
        usage = self.manager.usage()
        assert usage.free + usage.evictable + usage.in_use == usage.capacity == CAPACITY
        assert usage.in_use == len(self.in_use())


def run(examples: int, steps: int, phases: tuple[Phase, ...] = tuple(Phase)) -> None:
    run_state_machine_as_test(
        ManagerAgainstModel,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_random_programs_agree_with_the_model_E18() -> None:
    run(examples=200, steps=50)


def _promises_hold_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostOffloadingManager, "_acquire", lambda self, chunk: None)
    patch.setattr(HostOffloadingManager, "_release", lambda self, chunk: None)


def _evicts_what_is_in_use(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LRUPolicy, "hold", lambda self, key: None)


def _visible_before_it_is_stored(patch: pytest.MonkeyPatch) -> None:
    prepare_store = HostOffloadingManager.prepare_store

    def mutated(self: HostOffloadingManager, *args: object) -> object:
        output = prepare_store(self, *args)  # type: ignore[arg-type]
        for key in output.keys_to_store if output else ():
            self._chunks[key].ready = True
        return output

    patch.setattr(HostOffloadingManager, "prepare_store", mutated)


def _failed_stores_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostOffloadingManager, "_disown", lambda self, chunk: None)


@pytest.mark.parametrize(
    "mutate",
    [
        _promises_hold_nothing,
        _evicts_what_is_in_use,
        _visible_before_it_is_stored,
        _failed_stores_stay,
    ],
)
def test_the_model_kills(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        run(examples=200, steps=50, phases=(Phase.generate,))
