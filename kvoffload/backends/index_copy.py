"""A copy for any device that gathers and scatters rows, out of torch's operations.

A store gathers the pages of a transfer into a staging buffer on the device, laid out as the rows of
host memory are, and copies each run of consecutive chunks in one piece. A load is its mirror. So
nothing is gathered or scattered on the host, and indices go up once for each transfer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvoffload.backends.torch_base import TorchBackend
from kvoffload.core.backend import Keep
from kvoffload.core.errors import ClosedError
from kvoffload.core.host_memory import HostMemory
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.lanes import Lane
from kvoffload.core.plan import CopyPlan, Geometry, GroupIndices
from kvoffload.core.specs import IntArray

STAGING_BYTES = 32 * 1024 * 1024
"""Device memory of one staging buffer; larger transfers pass through it in parts."""
WIDE = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
"""Elements that pages may be moved as: the wider, the fewer."""


@dataclass(frozen=True)
class _Segment:
    """Tensors of a group whose pages lie side by side in a host row. In elements, not bytes.

    Unit ``u`` is at ``first + (u // factor) * hi + (u % factor) * lo`` and ``width`` wide.
    """

    first: int
    width: int
    hi: int
    lo: int
    columns: tuple[tuple[int, slice], ...]  # tensor, and its place in the row

    def runs(self, units: IntArray, factor: int) -> Iterator[tuple[int, int, int]]:
        """Units that are adjacent in host memory: first position, how many, first element."""
        starts = np.ones(len(units), dtype=bool)
        if self.lo == self.width:
            starts[1:] = np.diff(units) != 1
            if self.hi != factor * self.lo:
                starts[1:] |= units[1:] % factor == 0
        at = np.flatnonzero(starts)
        lengths = np.diff(at, append=len(units))
        where = self.first + (units[at] // factor) * self.hi + (units[at] % factor) * self.lo
        yield from zip(at.tolist(), lengths.tolist(), where.tolist(), strict=True)


@dataclass(frozen=True)
class Part:
    """What passes through the staging buffer at a time."""

    group: int
    units: IntArray  # host units, or source blocks of a copy on the device
    rows: int  # at least as many: a length that the device has seen before
    index: slice  # of the device blocks in the uploaded indices
    other: slice | None  # of the source blocks of a copy, or of the rows that fill a padded load


class IndexCopy:
    """Moves plans between one set of caches and its host memory.

    Args:
        geometry, caches, host: what a backend's ``bind`` is given.
        bucket: from a number of rows to the length that index arrays are padded to, for a device
            that compiles for every shape it sees; it must map a power of two to itself. Runs of
            chunks are then copied in powers of two as well. By default nothing is padded.
        widest: bytes of the widest element that the device moves well: 8, 4, 2 or 1.
        staging_bytes: device memory for each direction; at least a row is taken.
        on: makes what is enqueued within its context go onto the stream; entered once for each
            transfer. By default the stream itself, as torch's generic streams are such contexts.
    """

    def __init__(
        self,
        geometry: Geometry,
        caches: CanonicalKVCaches,
        host: HostMemory,
        *,
        bucket: Callable[[int], int] | None = None,
        widest: int = 8,
        staging_bytes: int = STAGING_BYTES,
        on: Callable[[Any], AbstractContextManager[Any]] = lambda stream: stream,
    ) -> None:
        self._on = on
        self._bucket = bucket
        self._factor = geometry.host.factor
        size, dtype = _element(geometry, host, widest)
        self._tensors = [entry.tensor.view(torch.uint8).view(dtype) for entry in caches.tensors]
        self._host = host.tensor.view(dtype)
        self._device = caches.device
        self._segments = [_segments(geometry, g, host, size) for g in range(len(geometry.groups))]
        widths = [max(segment.width for segment in segments) for segments in self._segments]
        elements = max(staging_bytes // size, *widths)
        self._most_rows = [_largest_power_of_two(elements // width) for width in widths]
        self._elements, self._dtype = elements, dtype
        self._staging: dict[tuple[Lane, str], torch.Tensor] = {}

    def __call__(self, plan: CopyPlan, stream: Any, keep: Keep[Any]) -> None:
        """Enqueue the copy of ``plan`` on ``stream``: see :meth:`Backend.swap_blocks`."""
        parts, indices = self._lower(plan)
        with self._on(stream):
            index = keep(self._upload(indices, keep))
            move = {Lane.STORE: self._store, Lane.LOAD: self._load, Lane.COPY: self._copy}
            for part in parts:
                move[plan.lane](part, index)

    def _upload(self, indices: IntArray, keep: Keep[Any]) -> torch.Tensor:
        host = torch.from_numpy(indices)
        if self._host.is_pinned():
            host = keep(host.pin_memory())
        return host.to(self._device, non_blocking=True)

    def _lower(self, plan: CopyPlan) -> tuple[list[Part], IntArray]:
        """The plan in parts that fit the staging buffer, and all their indices in one array."""
        parts: list[Part] = []
        pieces: list[IntArray] = []
        end = 0

        def place(values: IntArray) -> slice:
            nonlocal end
            pieces.append(values)
            end += len(values)
            return slice(end - len(values), end)

        for whole in plan.indices(lambda count: count):
            for blocks, units in self._cut(whole, device_first=plan.dst_on_host):
                count = len(blocks)
                rows = self._bucket(count) if self._bucket is not None else count
                # The last one again: harmless to gather, and to scatter if the data repeat too.
                again = np.minimum(np.arange(rows), count - 1)
                index = place(blocks[again])
                other = None
                if plan.lane is Lane.COPY:
                    other = place(units[again])
                elif plan.lane is Lane.LOAD and self._bucket is not None:
                    other = place(again)  # also if there is nothing to fill: one length less
                parts.append(Part(whole.group, units, rows, index, other))
        if self._bucket is not None:
            pieces.append(np.zeros(self._bucket(end) - end, dtype=np.int64))
        return parts, np.concatenate(pieces)

    def _cut(
        self, whole: GroupIndices, *, device_first: bool
    ) -> Iterator[tuple[IntArray, IntArray]]:
        """Device blocks that are gathered or scattered, and what is on the other side."""
        blocks, units = (whole.src, whole.dst) if device_first else (whole.dst, whole.src)
        step = self._most_rows[whole.group]
        for start in range(0, len(blocks), step):
            yield blocks[start : start + step], units[start : start + step]

    def _stage(self, lane: Lane, rows: int, width: int, which: str = "rows") -> torch.Tensor:
        """``(rows, width)`` of the lane's buffer. Its stream orders who uses it."""
        key = (lane, which)
        if key not in self._staging:
            self._staging[key] = torch.empty(self._elements, dtype=self._dtype, device=self._device)
        return self._staging[key][: rows * width].view(rows, width)

    def _store(self, part: Part, index: torch.Tensor) -> None:
        blocks = index[part.index]
        for segment in self._segments[part.group]:
            staged = self._stage(Lane.STORE, part.rows, segment.width)
            for tensor, column in segment.columns:
                torch.index_select(self._tensors[tensor], 0, blocks, out=staged[:, column])
            for chunk, rows in self._pieces(segment, part.units):
                chunk.copy_(staged[rows], non_blocking=True)

    def _load(self, part: Part, index: torch.Tensor) -> None:
        blocks = index[part.index]
        for segment in self._segments[part.group]:
            staged = self._stage(Lane.LOAD, part.rows, segment.width)
            for chunk, rows in self._pieces(segment, part.units):
                staged[rows].copy_(chunk, non_blocking=True)
            if part.other is not None and part.rows > len(part.units):
                filled = self._stage(Lane.LOAD, part.rows, segment.width, "filled")
                staged = torch.index_select(staged, 0, index[part.other], out=filled)
            for tensor, column in segment.columns:
                self._tensors[tensor].index_copy_(0, blocks, staged[:, column])

    def _copy(self, part: Part, index: torch.Tensor) -> None:
        if part.other is None:
            raise ValueError("a copy on the device has sources")
        for segment in self._segments[part.group]:
            for tensor, column in segment.columns:
                staged = self._stage(Lane.COPY, part.rows, column.stop - column.start)
                torch.index_select(self._tensors[tensor], 0, index[part.other], out=staged)
                self._tensors[tensor].index_copy_(0, index[part.index], staged)

    def _pieces(self, segment: _Segment, units: IntArray) -> Iterator[tuple[torch.Tensor, slice]]:
        """Contiguous pieces of host memory, and the staged rows that belong there."""
        for at, length, where in segment.runs(units, self._factor):
            for start, rows in self._lengths(length):
                first = where + start * segment.width
                yield (
                    self._host[first : first + rows * segment.width].view(rows, segment.width),
                    slice(at + start, at + start + rows),
                )

    def _lengths(self, length: int) -> Iterator[tuple[int, int]]:
        """A run in pieces whose lengths the device has seen before."""
        if self._bucket is None:
            yield 0, length
            return
        start = 0
        while start < length:
            rows = _largest_power_of_two(length - start)
            yield start, rows
            start += rows


class IndexCopyBackend(TorchBackend):
    """A backend that lacks only its probe: streams and pinned memory are torch's, the copy is
    :class:`IndexCopy`. Right on any device that torch knows; arguments as there."""

    _copy: IndexCopy | None = None

    def new_copy(
        self, geometry: Geometry, caches: CanonicalKVCaches, host: HostMemory
    ) -> IndexCopy:
        """The copy of these caches, for a backend that wants it in another way."""
        return IndexCopy(geometry, caches, host)

    def bind(self, geometry: Geometry, caches: CanonicalKVCaches, host: HostMemory) -> None:
        self._copy = self.new_copy(geometry, caches, host)

    def unbind(self) -> None:
        self._copy = None

    def swap_blocks(self, plan: CopyPlan, stream: Any, keep: Keep[Any]) -> None:
        if self._copy is None:
            raise ClosedError("no caches are bound")
        self._copy(plan, stream, keep)


def _largest_power_of_two(most: int) -> int:
    return 1 << (most.bit_length() - 1)


def _element(geometry: Geometry, host: HostMemory, widest: int) -> tuple[int, torch.dtype]:
    """The widest element that every page, stride and address is a multiple of."""
    sides = (geometry.device, geometry.host)
    common = math.gcd(
        *geometry.page_bytes.tolist(),
        *(int(n) for side in sides for a in (side.base, side.hi, side.lo) for n in a.tolist()),
        *(int(n) for n in geometry.device.start.tolist()),
        host.nbytes,
        host.address,
    )
    return next((size, dtype) for size, dtype in WIDE if size <= widest and common % size == 0)


def _segments(geometry: Geometry, group: int, host: HostMemory, size: int) -> list[_Segment]:
    side, page = geometry.host, geometry.page_bytes
    found: list[_Segment] = []
    for tensor in sorted(geometry.groups[group].tolist(), key=lambda t: int(side.base[t])):
        first = (int(side.base[tensor]) - host.address) // size
        width, hi, lo = (int(values[tensor]) // size for values in (page, side.hi, side.lo))
        last = found[-1] if found else None
        if last and last.first + last.width == first and (last.hi, last.lo) == (hi, lo):
            column = slice(last.width, last.width + width)
            found[-1] = _Segment(
                last.first, last.width + width, hi, lo, (*last.columns, (tensor, column))
            )
        else:
            found.append(_Segment(first, width, hi, lo, ((tensor, slice(0, width)),)))
    return found
