"""A contract double of ``habana_frameworks.torch``, over the fake device.

It takes what the real one takes, and counts what costs time there: steps, and who causes them;
waiting for the whole device; and shapes that were not seen before, for each of which the real one
compiles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvoffload.testing.fake_device.library import DEVICE_TYPE, FakeDevice

DEVICE = f"{DEVICE_TYPE}:0"
MEMORY_BYTES = 96 << 30
"""What it says it has: as a Gaudi 2."""
COMPILED = ("index_select", "index_copy_", "index_copy", "index_put_", "_index_put_impl_")
COPIED = ("copy_", "_to_copy", "_copy_from")


@dataclass
class HpuCounts:
    """What happened. What has happened before a test is its own to subtract.

    Attributes:
        steps: ``mark_step()``.
        steps_on: stream ids that were current then.
        implied_steps: recorded events, and queries and synchronisations of streams that were not
            current, each of which marks a step; in lazy mode alone.
        foreign: those queries and synchronisations, in both modes.
        device_synchronizations: ``hpu.synchronize()``.
        stray: operations that no step launched before their stream was left; in lazy mode alone.
    """

    steps: int = 0
    steps_on: list[int] = field(default_factory=list)
    implied_steps: int = 0
    foreign: int = 0
    device_synchronizations: int = 0
    stray: int = 0


class Stream(torch.Stream):
    """``torch.hpu.Stream``: takes no events but its own kind. See :class:`FakeHabana`."""

    habana: FakeHabana

    def __new__(
        cls,
        device: Any = None,  # noqa: ARG004 - as the real one has no use for it: there is one device
        priority: int = 0,  # noqa: ARG004 - and one priority
        **known: int,
    ) -> Stream:
        return super().__new__(cls, **known) if known else super().__new__(cls, DEVICE)

    def query(self) -> bool:
        self._look()
        return super().query()

    def synchronize(self) -> None:
        self._look()
        super().synchronize()

    def _look(self) -> None:
        if self != self.habana.hpu.current_stream():
            self.habana.counts.foreign += 1
            self.habana.imply_step()

    def record_event(self, event: Any = None) -> Any:
        made = self.habana.hpu.Event() if event is None else event
        _event(made).record(self)
        return made

    def wait_event(self, event: Any) -> None:
        super().wait_event(_event(event).event)

    def record_inner(self, event: torch.Event) -> None:
        """For :class:`Event` alone."""
        super().record_event(event)


class Event:
    """``torch.hpu.Event``: no class of torch's. See :class:`FakeHabana`.

    Args:
        enable_timing: as the real one.
    """

    habana: FakeHabana

    def __init__(self, enable_timing: bool = False) -> None:
        self.event = torch.Event(DEVICE, enable_timing=enable_timing)

    def record(self, stream: Stream | None = None) -> None:
        self.habana.imply_step()
        (self.habana.hpu.current_stream() if stream is None else stream).record_inner(self.event)

    def wait(self, stream: Stream | None = None) -> None:
        (self.habana.hpu.current_stream() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        return self.event.query()

    def synchronize(self) -> None:
        self.event.synchronize()

    def elapsed_time(self, end: Event) -> float:
        return self.event.elapsed_time(_event(end).event)


def _event(event: Any) -> Event:
    if not isinstance(event, Event):
        raise TypeError(f"expected a torch.hpu.Event, not {event!r}")
    return event


class Hpu:
    """``torch.hpu``, as far as it is used.

    Attributes:
        Stream, Event: classes.
    """

    def __init__(self, habana: FakeHabana) -> None:
        self._habana = habana
        self.Stream = type("Stream", (Stream,), {"habana": habana})
        self.Event = type("Event", (Event,), {"habana": habana})

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def current_stream(self) -> Any:
        return self._own(torch.accelerator.current_stream(DEVICE))

    def default_stream(self) -> Any:
        named = self.current_stream()
        return self.Stream(stream_id=0, device_index=0, device_type=named.device_type)

    def _own(self, stream: torch.Stream) -> Any:
        return self.Stream(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """What is enqueued within goes there; None changes nothing."""
        if stream is None:
            yield
            return
        with stream:
            self._habana.leave_stream()
            try:
                yield
            finally:
                self._habana.leave_stream()

    def synchronize(self) -> None:
        self._habana.counts.device_synchronizations += 1
        self._habana.imply_step()
        torch.accelerator.synchronize(DEVICE)

    def mem_get_info(self) -> tuple[int, int]:
        """Free and total bytes."""
        return MEMORY_BYTES - self._habana.fake.counts().device_bytes, MEMORY_BYTES


class FakeHabana:
    """``habana_frameworks.torch`` in one of its modes.

    Work runs at once in lazy mode, too: only what would be launched when is kept account of.

    Args:
        fake: the device.
        lazy: as with ``PT_HPU_LAZY_MODE=1``.
    """

    def __init__(self, fake: FakeDevice, *, lazy: bool) -> None:
        self.fake = fake
        self.counts = HpuCounts()
        self.hpu = Hpu(self)
        self.core = SimpleNamespace(mark_step=self._mark_step)
        self.utils = SimpleNamespace(internal=SimpleNamespace(is_lazy=lambda: lazy))
        self._lazy = lazy
        self._gathered = 0  # operations that no step has launched; where they are watched

    def _mark_step(self) -> None:
        self.counts.steps += 1
        self.counts.steps_on.append(self.hpu.current_stream().stream_id)
        self._gathered = 0

    def imply_step(self) -> None:
        """A step is marked by something else than a marker."""
        if self._lazy:
            self.counts.implied_steps += 1
            self._gathered = 0

    def leave_stream(self) -> None:
        """Another stream becomes the current one."""
        self.counts.stray += self._gathered
        self._gathered = 0

    def gather(self) -> None:
        """An operation waits for a step."""
        if self._lazy:
            self._gathered += 1

    @contextlib.contextmanager
    def refusing_to_pin(self) -> Iterator[None]:
        """There is no pinned memory."""
        self.fake.fail_call("pin_memory", code=1, times=1 << 40)
        try:
            yield
        finally:
            self.fake.fail_call("pin_memory", code=0, times=0)

    def watch(self) -> Recompiles:
        """Count the recompiles of this thread's device work: a context manager."""
        return Recompiles(self)


Operand: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype]
"""What a compiler sees of a tensor: type of device, shape, strides, dtype. Not where it begins."""


class Recompiles(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation as torch dispatches it.

    Attributes:
        operations: gathers, scatters and copies, in their order; those of the host alone are named
            ``"host …"``, and are gathers and scatters only.
    """

    def __init__(self, habana: FakeHabana) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._habana = habana
        self.operations: list[tuple[str, tuple[Operand, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        given = kwargs or {}
        result = func(*args, **given)
        if name in COMPILED or name in COPIED:
            both = (*args, *given.values(), *((result,) if name == "_to_copy" else ()))
            operands = tuple(_operand(each) for each in both if isinstance(each, torch.Tensor))
            if any(device == DEVICE_TYPE for device, *_ in operands):
                self._habana.gather()
                self.operations.append((name, operands))
            elif name in COMPILED:
                self.operations.append((f"host {name}", operands))
        return result

    @property
    def shapes(self) -> set[tuple[str, tuple[Operand, ...]]]:
        """Of the device's operations, each once: so often the real one compiles."""
        return {each for each in self.operations if not each[0].startswith("host ")}


def _operand(tensor: torch.Tensor) -> Operand:
    return tensor.device.type, tuple(tensor.shape), tensor.stride(), tensor.dtype
