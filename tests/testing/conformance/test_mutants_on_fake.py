"""What only a device with memory of its own can show: the kit finds it on the fake one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvoffload.backends.index_copy import IndexCopy
from kvoffload.backends.torch.backend import GenericBackend
from kvoffload.core.backend import Keep
from kvoffload.core.host_memory import HostMemory
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.lanes import Lane
from kvoffload.core.plan import CopyPlan, Geometry, power_of_two
from kvoffload.testing.conformance import CHECKS, Guarantee, run_check
from kvoffload.testing.conformance.run import FAILED
from kvoffload.testing.fake_device import load

pytestmark = pytest.mark.fake


@pytest.fixture(autouse=True)
def _calm() -> Iterator[None]:
    yield
    load().calm()


MUTANTS: dict[str, tuple[type[IndexCopy], Guarantee]] = {}


def breaks(guarantee: Guarantee) -> Callable[[type[IndexCopy]], type[IndexCopy]]:
    def register(copy: type[IndexCopy]) -> type[IndexCopy]:
        MUTANTS[copy.__name__] = (copy, guarantee)
        return copy

    return register


def backend(copy: type[IndexCopy]) -> Callable[[], GenericBackend]:
    class Backend(GenericBackend):
        def bind(self, geometry: Geometry, caches: CanonicalKVCaches, host: HostMemory) -> None:
            self._copy = copy(geometry, caches, host, bucket=power_of_two)

    return lambda: Backend("fake:0")


@breaks(Guarantee.BYTES)
class PadsAScatterWithStaleData(IndexCopy):
    def _load(self, part: Any, index: torch.Tensor) -> None:
        object.__setattr__(part, "other", None)
        super()._load(part, index)


@breaks(Guarantee.BYTES)
class FreesTheIndicesEarly(IndexCopy):
    def __call__(self, plan: CopyPlan, stream: torch.Stream, keep: Keep[Any]) -> None:
        super().__call__(plan, stream, lambda value: value)


@breaks(Guarantee.ORDER)
class WorksOnTheCallersStream(IndexCopy):
    def __call__(self, plan: CopyPlan, stream: torch.Stream, keep: Keep[Any]) -> None:
        super().__call__(plan, torch.accelerator.current_stream(), keep)


@breaks(Guarantee.BYTES)
class StagesBothDirectionsInOneBuffer(IndexCopy):
    def _stage(self, lane: Lane, *rest: Any) -> torch.Tensor:
        return super()._stage(Lane.STORE, *rest)


@breaks(Guarantee.ASYNCHRONY)
class SynchronisesTheDevice(IndexCopy):
    def __call__(self, plan: CopyPlan, stream: torch.Stream, keep: Keep[Any]) -> None:
        super().__call__(plan, stream, keep)
        torch.accelerator.synchronize()


@breaks(Guarantee.ACCOUNTING)
class LeaksStaging(IndexCopy):
    def _stage(self, *key: Any) -> torch.Tensor:
        self._leaked = [*getattr(self, "_leaked", []), torch.empty(8, device="fake:0")]
        return super()._stage(*key)


def test_without_a_mutation_nothing_fails() -> None:
    for check in CHECKS.values():
        outcome = run_check(check, backend(IndexCopy))
        assert outcome.outcome != FAILED, (outcome.name, outcome.reason)


def test_the_callers_stream_is_found_out_while_it_is_held() -> None:
    check = CHECKS["without an event a transfer does not wait for compute"]
    outcome = run_check(check, backend(WorksOnTheCallersStream))
    assert outcome.outcome == FAILED
    assert "pages are wrong" in outcome.reason


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails_a_check_of_what_it_breaks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.testing.conformance.lab.SHUTDOWN_SECONDS", 0.2)
    copy, guarantee = MUTANTS[name]
    deadline = 2 if copy is SynchronisesTheDevice else 30  # found by the deadline
    if copy is StagesBothDirectionsInOneBuffer:
        load().delay(0.0005)  # so that both directions are at it at once
    for seed in range(20):
        for check in CHECKS.values():
            if check.guarantee is guarantee:
                outcome = run_check(check, backend(copy), seed=seed, deadline=deadline)
                if outcome.outcome == FAILED:
                    print(f"{outcome.name}: {outcome.reason}")
                    return
    pytest.fail(f"{name} keeps {guarantee.value}")
