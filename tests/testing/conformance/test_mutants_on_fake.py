"""What only a device with memory of its own can show: the kit finds it on the fake one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvoffload.backends.cuda.backend import CudaBackend
from kvoffload.backends.index_copy import IndexCopy
from kvoffload.backends.torch.backend import GenericBackend
from kvoffload.core.backend import Backend, Keep
from kvoffload.core.host_memory import HostMemory
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.lanes import Lane
from kvoffload.core.plan import CopyPlan, Descriptors, Geometry, power_of_two
from kvoffload.testing.conformance import CHECKS, Guarantee, run_check
from kvoffload.testing.conformance.run import FAILED
from kvoffload.testing.fake_device import load
from kvoffload.testing.fake_device.make import maker
from kvoffload.testing.fake_device.variants import variants_of

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


class OnAStandIn(CudaBackend):
    def __init__(self, device: str) -> None:
        super().__init__(device, load().cuda_driver(13000))


class ReadsInAnyOrderAlways(OnAStandIn):
    def enqueue(
        self, copies: Descriptors, plan: CopyPlan, stream: torch.Stream, keep: Keep[Any]
    ) -> None:
        super().enqueue(copies, replace(plan, settled=True), stream, keep)


class SeesNoCapture(OnAStandIn):
    def is_capturing(self) -> bool:
        return False


class AlwaysUsesTheFirstDevice(OnAStandIn):
    @property
    def index(self) -> int:
        return 0


class KeepsTheCaches(GenericBackend):
    def unbind(self) -> None:
        pass


class KeepsItsStaging(GenericBackend):
    staging: object = None

    def unbind(self) -> None:
        self.staging = vars(self._copy)["_staging"]
        super().unbind()


class IsUrgent(GenericBackend):
    def new_stream(self, lane: Lane) -> torch.Stream:
        if lane not in self.streams:
            self.streams[lane] = torch.Stream(self.device, priority=-5)
        return self.streams[lane]


class HasOneStreamForAllLanes(GenericBackend):
    def new_stream(self, lane: Lane) -> torch.Stream:
        return super().new_stream(Lane.STORE)


class BlocksInCopiesOnTheDevice(GenericBackend):
    def swap_blocks(self, plan: CopyPlan, stream: Any, keep: Keep[Any]) -> None:
        super().swap_blocks(plan, stream, keep)
        if plan.lane is Lane.COPY and plan.nbytes > 4096:
            stream.synchronize()


class StaysWithTheFirstStreamItSaw(GenericBackend):
    first: torch.Stream | None = None

    def current_stream(self) -> torch.Stream:
        self.first = self.first or super().current_stream()
        return self.first


@pytest.mark.parametrize(
    ("mutant", "device", "name"),
    [
        (
            *(ReadsInAnyOrderAlways, "fake:0"),
            "transfers that share blocks run in the order of their submission",
        ),
        (SeesNoCapture, "fake:0", "a transfer during a graph capture is refused"),
        (AlwaysUsesTheFirstDevice, "fake:1", "every job ends exactly once"),
        (KeepsTheCaches, "fake:0", "an unregistered backend has let go of the caches"),
        (KeepsItsStaging, "fake:0", "an unregistered backend has let go of the caches"),
        (IsUrgent, "fake:0", "lanes have the lowest priority"),
        (
            *(HasOneStreamForAllLanes, "fake:0"),
            "a transfer of one direction holds up no other direction",
        ),
        (
            *(BlocksInCopiesOnTheDevice, "fake:0"),
            "large copies are enqueued while the device is busy",
        ),
        (
            *(StaysWithTheFirstStreamItSaw, "fake:0"),
            "a transfer waits for no stream but the current one",
        ),
    ],
)
def test_a_backend_fails_the_check_that_it_was_made_for(
    monkeypatch: pytest.MonkeyPatch, mutant: Callable[[str], Backend], device: str, name: str
) -> None:
    monkeypatch.setattr("kvoffload.testing.conformance.lab.SHUTDOWN_SECONDS", 0.2)
    monkeypatch.setattr("kvoffload.testing.conformance.checks.streams.PATIENCE", 0.3)
    if mutant is SeesNoCapture and not hasattr(torch.Stream, "is_capturing"):
        pytest.skip("torch's generic streams tell since 2.13")
    deadline = 2 if mutant is BlocksInCopiesOnTheDevice else 30  # found by the deadline
    outcome = run_check(CHECKS[name], lambda: mutant(device), deadline=deadline)
    print(outcome.reason)
    assert outcome.outcome == FAILED
    assert not outcome.stuck


@pytest.mark.parametrize("device", ["fake:0", "fake:1"])
@pytest.mark.parametrize("name", ["cuda", "rocm", "torch"])
def test_every_variant_is_made_on_the_device_that_is_named(name: str, device: str) -> None:
    for variant in variants_of(name):
        with contextlib.closing(maker(name, variant, device)()) as made:
            assert made.device == torch.device(device)
    with contextlib.closing(maker(name, variants_of(name)[0])()) as made:
        assert made.device == torch.device("fake:0")


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
