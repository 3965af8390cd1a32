"""The laws hold, and each of them is what kills a mutant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvoffload.backends.hpu.backend import HpuBackend
from kvoffload.backends.hpu.copy import HpuCopy
from kvoffload.backends.index_copy import Part
from kvoffload.core.backend import Keep, Stream
from kvoffload.core.host_memory import HostMemory
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.plan import CopyPlan, Geometry
from kvoffload.core.specs import IntArray
from kvoffload.testing.fake_device.hpu import DEVICE, FakeHabana
from tests.backends.hpu import laws

pytestmark = pytest.mark.fake

LAWS: list[Callable[[laws.Make], None]] = [
    laws.one_step_per_transfer,
    laws.events_are_polled_and_streams_are_not,
    laws.nothing_waits_for_the_device,
    laws.shapes_are_bounded,
    laws.shapes_of_several_groups_are_bounded,
    laws.ids_go_up_once,
    laws.padding_writes_no_other_block,
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_backend_keeps_the_law(law: Callable[[laws.Make], None]) -> None:
    law(laws.real)


class NeverMarksAStep(HpuBackend):
    @property
    def lazy(self) -> bool:
        return False


class MarksAfterItsStreamWasLeft(NeverMarksAStep):
    def swap_blocks(self, plan: CopyPlan, stream: Stream, keep: Keep[Any]) -> None:
        super().swap_blocks(plan, stream, keep)
        self.bridge.core.mark_step()


class AsksItsStream(HpuBackend):
    def swap_blocks(self, plan: CopyPlan, stream: Any, keep: Keep[Any]) -> None:
        super().swap_blocks(plan, stream, keep)
        stream.query()


class SynchronisesTheDevice(HpuBackend):
    def swap_blocks(self, plan: CopyPlan, stream: Stream, keep: Keep[Any]) -> None:
        super().swap_blocks(plan, stream, keep)
        self.bridge.hpu.synchronize()


class WithCopy(HpuBackend):
    """A backend with another copy."""

    copy: type[HpuCopy]

    def bind(self, geometry: Geometry, caches: CanonicalKVCaches, host: HostMemory) -> None:
        self._copy = self.copy(geometry, caches, host, self.step)
        if isinstance(self._copy, MarksEveryPart):
            self._copy.mark = self.bridge.core.mark_step


class MarksEveryPart(HpuCopy):
    mark: Callable[[], None]

    def _store(self, part: Part, index: torch.Tensor) -> None:
        super()._store(part, index)
        self.mark()


class PadsNothing(HpuCopy):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._bucket = None


class PadsButCopiesRunsOfAnyLength(HpuCopy):
    def _lengths(self, length: int) -> Any:
        yield 0, length


class UploadsForEveryLayer(HpuCopy):
    def _stage(self, *key: Any) -> torch.Tensor:
        for _ in self._tensors:
            self._upload(np.zeros(4, dtype=np.int64), lambda value: value)
        return super()._stage(*key)


class PadsWithAnotherBlock(HpuCopy):
    def _lower(self, plan: CopyPlan) -> tuple[list[Part], IntArray]:
        parts, indices = super()._lower(plan)
        for part in parts:
            indices[part.index][len(part.units) :] = 0
        return parts, indices


class ScattersWhatWasStagedBefore(HpuCopy):
    def _load(self, part: Part, index: torch.Tensor) -> None:
        super()._load(Part(part.group, part.units, part.rows, part.index, None), index)


def using(copy: type[HpuCopy]) -> type[HpuBackend]:
    return type(copy.__name__, (WithCopy,), {"copy": copy})


@pytest.mark.parametrize(
    ("mutant", "law"),
    [
        (NeverMarksAStep, laws.one_step_per_transfer),
        (MarksAfterItsStreamWasLeft, laws.one_step_per_transfer),
        (using(MarksEveryPart), laws.one_step_per_transfer),
        (AsksItsStream, laws.events_are_polled_and_streams_are_not),
        (SynchronisesTheDevice, laws.nothing_waits_for_the_device),
        (using(PadsNothing), laws.shapes_are_bounded),
        (using(PadsNothing), laws.shapes_of_several_groups_are_bounded),
        (using(PadsButCopiesRunsOfAnyLength), laws.shapes_are_bounded),
        (using(UploadsForEveryLayer), laws.ids_go_up_once),
        (using(PadsWithAnotherBlock), laws.padding_writes_no_other_block),
        (using(ScattersWhatWasStagedBefore), laws.padding_writes_no_other_block),
    ],
    ids=lambda each: each.__name__,
)
def test_a_mutant_breaks_the_law(
    mutant: type[HpuBackend], law: Callable[[laws.Make], None]
) -> None:
    def make(habana: FakeHabana) -> HpuBackend:
        return mutant(DEVICE, habana)

    with pytest.raises(AssertionError):
        law(make)
