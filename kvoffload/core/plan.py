"""What moves where: :class:`Geometry`, fixed at registration, and :class:`CopyPlan`, one per job.

A plan is neutral. A backend turns it into what its hardware wants with one of two lowerings,
``descriptors()`` for DMA engines and ``indices()`` for devices that gather and scatter.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.core.blocks import chunk_units, chunks_touched, expand_block_ids
from kvoffload.core.buffers import BufferPool
from kvoffload.core.errors import (
    BlockCountError,
    BlockRangeError,
    DuplicateBlockError,
    LayoutError,
    UnroutableError,
)
from kvoffload.core.lanes import Lane
from kvoffload.core.specs import DeviceLoadStoreSpec, HostLoadStoreSpec, IntArray, LoadStoreSpec


@dataclass(frozen=True, eq=False)
class Side:
    """Where the pages of one side lie.

    Page ``(t, unit)`` is at ``base[t] + (unit // factor) * hi[t] + (unit % factor) * lo[t]``. That
    one form carries padded, interleaved and offset caches, and every order of host memory.

    Attributes:
        base: int64[tensors], address of unit 0, in bytes.
        hi: int64[tensors], bytes from one block (or chunk) to the next.
        lo: int64[tensors], bytes from one piece of a block (or chunk) to the next.
        factor: pieces per block or chunk.
        count: int64[tensors], blocks or chunks.
        start, end: int64[tensors], the allocation that every page must lie in.
    """

    base: IntArray
    hi: IntArray
    lo: IntArray
    factor: int
    count: IntArray
    start: IntArray
    end: IntArray

    def prove(self, page_bytes: IntArray, name: str) -> None:
        """Check, in unbounded integers, that all pages lie inside their allocation and apart.

        Raises:
            LayoutError: naming the tensor and the numbers.
        """
        for t, page in enumerate(page_bytes.tolist()):
            base, hi, lo = int(self.base[t]), int(self.hi[t]), int(self.lo[t])
            blocks, pieces = int(self.count[t]), self.factor
            start, end = int(self.start[t]), int(self.end[t])
            last = base + (blocks - 1) * hi + (pieces - 1) * lo + page
            if min(page, blocks, pieces) < 1 or min(hi, lo) < 0 or base < start or last > end:
                raise LayoutError(
                    f"{name} tensor {t}: {blocks} × {pieces} pages of {page} bytes at "
                    f"{base} + {hi}·block + {lo}·piece reach [{base}, {last}), "
                    f"outside of their allocation [{start}, {end})"
                )
            apart = (pieces == 1 or lo >= page) and (blocks == 1 or hi >= page)
            nested = hi >= (pieces - 1) * lo + page or lo >= (blocks - 1) * hi + page
            if not apart or (blocks > 1 and pieces > 1 and not nested):
                raise LayoutError(
                    f"{name} tensor {t}: pages of {page} bytes overlap at strides "
                    f"{hi} (block) and {lo} (piece)"
                )


@dataclass(frozen=True, eq=False)
class Geometry:
    """Where every page lies on both sides, proved once; everything a plan needs but the ids.

    Attributes:
        page_bytes: int64[tensors], bytes of one page.
        groups: for each group the int64 indices of the tensors it moves, each once.
        device, host: the two sides. ``host.factor`` is a multiple of ``device.factor``.

    Raises:
        LayoutError: a page lies outside its allocation, or pages overlap.
    """

    page_bytes: IntArray
    groups: Sequence[IntArray]
    device: Side
    host: Side

    def __post_init__(self) -> None:
        self.device.prove(self.page_bytes, "device")
        self.host.prove(self.page_bytes, "host")
        if self.host.factor % self.device.factor:
            raise LayoutError(
                f"a chunk of {self.host.factor} pieces does not hold whole blocks of "
                f"{self.device.factor}"
            )

    @property
    def block_size_factor(self) -> int:
        """Device blocks per chunk."""
        return self.host.factor // self.device.factor

    @functools.cached_property
    def group_bytes(self) -> IntArray:
        """int64[groups], bytes that one unit of each group moves."""
        return np.array([int(self.page_bytes[t].sum()) for t in self.groups], dtype=np.int64)

    @functools.cached_property
    def group_tensors(self) -> IntArray:
        """int64[groups], tensors of each group."""
        return np.array([len(tensors) for tensors in self.groups], dtype=np.int64)

    @functools.cached_property
    def pool_of_group(self) -> IntArray:
        """int64[groups]: groups with the same number share tensors, and so share block ids."""
        return pools_of(self.groups)

    @functools.cached_property
    def num_pools(self) -> int:
        """How many sets of groups there are that share tensors."""
        return int(self.pool_of_group.max()) + 1

    def blocks(self, side: Side) -> IntArray:
        """int64[groups], how many blocks (or chunks) of ``side`` each group can name."""
        return self._host_blocks if side is self.host else self._device_blocks

    @functools.cached_property
    def _device_blocks(self) -> IntArray:
        return np.array([int(self.device.count[t].min()) for t in self.groups], dtype=np.int64)

    @functools.cached_property
    def _host_blocks(self) -> IntArray:
        return np.array([int(self.host.count[t].min()) for t in self.groups], dtype=np.int64)

    @functools.cached_property
    def num_resources(self) -> int:
        """Blocks and chunks of all pools: how many numbers :meth:`resources` can give."""
        return int(self._first_resource[-1])

    @functools.cached_property
    def _first_resource(self) -> IntArray:
        """Of the device blocks of each pool, of the chunks of each pool, and the end."""
        pools = self.pool_of_group
        counts = [
            int(blocks[pools == pool].max())
            for blocks in (self._device_blocks, self._host_blocks)
            for pool in range(int(pools.max()) + 1)
        ]
        return np.concatenate(([0], np.cumsum(counts)))

    def resources(self, side: Side, units: IntArray, sizes: IntArray) -> IntArray:
        """Numbers of the blocks or chunks that hold these units, one name for one place.

        Args:
            side: of this geometry.
            units: int64[n], group after group.
            sizes: int64[groups], how many units belong to each group.
        """
        blocks = units if side.factor == 1 else units // side.factor
        count = self.num_pools
        first = self._first_resource[count if side is self.host else 0 :]
        numbers: IntArray = blocks + (
            first[0] if count == 1 else np.repeat(first[self.pool_of_group], sizes)
        )
        return numbers

    @functools.cached_property
    def _strands(self) -> dict[tuple[int, bool, bool], list[_Strand]]:
        return {}

    def strands(self, group: int, src: Side, dst: Side) -> list[_Strand]:
        """The group's tensors, sorted into sets that coalesce alike."""
        key = (group, src is self.host, dst is self.host)
        if key not in self._strands:
            self._strands[key] = _sort_into_strands(self, group, src, dst)
        return self._strands[key]


def pools_of(groups: Sequence[IntArray]) -> IntArray:
    """Number the sets of groups that are connected by shared tensors: int64[groups]."""
    pools: list[set[int]] = []
    for tensors in groups:
        mine = set(tensors.tolist())
        for other in [pool for pool in pools if pool & mine]:
            pools.remove(other)
            mine |= other
        pools.append(mine)
    first = [next(i for i, pool in enumerate(pools) if int(t[0]) in pool) for t in groups]
    order = {pool: number for number, pool in enumerate(dict.fromkeys(first))}
    return np.array([order[pool] for pool in first], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class _Strand:
    """Tensors of one group whose consecutive units are adjacent (or not) in the same places."""

    src_base: IntArray
    dst_base: IntArray
    src_step: tuple[IntArray, IntArray]  # (hi, lo): one column, or one value where all agree
    dst_step: tuple[IntArray, IntArray]
    page_bytes: IntArray
    joins: tuple[bool, bool, bool, bool]  # adjacent within / across: source, then destination


def _sort_into_strands(geometry: Geometry, group: int, src: Side, dst: Side) -> list[_Strand]:
    tensors = geometry.groups[group]
    page = geometry.page_bytes[tensors]
    flags = np.stack(
        [
            adjacent
            for side in (src, dst)
            for adjacent in (
                side.lo[tensors] == page,
                (side.hi[tensors] == page * side.factor)
                & ((side.lo[tensors] == page) | (side.factor == 1)),
            )
        ],
        axis=1,
    )

    def column(values: IntArray) -> IntArray:
        return values[:1] if (values == values[0]).all() else values[:, None]

    strands = []
    for joins in np.unique(flags, axis=0):
        mine = tensors[(flags == joins).all(axis=1)]
        strands.append(
            _Strand(
                src_base=src.base[mine, None],
                dst_base=dst.base[mine, None],
                src_step=(column(src.hi[mine]), column(src.lo[mine])),
                dst_step=(column(dst.hi[mine]), column(dst.lo[mine])),
                page_bytes=geometry.page_bytes[mine, None],
                joins=(bool(joins[0]), bool(joins[1]), bool(joins[2]), bool(joins[3])),
            )
        )
    return strands


class Descriptors(NamedTuple):
    """Copies of ``size[i]`` bytes from address ``src[i]`` to ``dst[i]``: uint64[m] each."""

    src: npt.NDArray[np.uint64]
    dst: npt.NDArray[np.uint64]
    size: npt.NDArray[np.uint64]

    def split(self, most: int | None) -> Iterator[Descriptors]:
        """Parts of at most ``most`` copies, for calls that take no more; one part if None."""
        step = most or max(len(self.size), 1)
        for start in range(0, len(self.size), step):
            part = slice(start, start + step)
            yield Descriptors(self.src[part], self.dst[part], self.size[part])


class GroupIndices(NamedTuple):
    """The unit pairs of one group, padded to a bucket by repeating the last pair.

    A repeated pair is harmless in a gather; in a scatter the *data* must repeat too.
    """

    group: int
    src: IntArray  # int64[bucket]
    dst: IntArray  # int64[bucket]
    pairs: int  # how many of them are real


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least ``count``."""
    return 1 << max(count - 1, 0).bit_length()


@dataclass(eq=False)
class CopyPlan:
    """What one job moves: pairs of units, group after group.

    Attributes:
        src, dst: the two sides of ``geometry`` (the same one twice for a copy on the device).
        src_units, dst_units: int64[n], units as in :class:`Side`.
        bounds: int64[groups + 1]; group ``g`` owns pairs ``bounds[g]:bounds[g + 1]``.
        geometry: where the units lie.
        buffers: what the lowering writes into; see :meth:`release`.
        settled: no unfinished transfer writes what this one reads. A source in host memory may
            then be read at any time, in no order with the stream's earlier work.
    """

    src: Side
    dst: Side
    src_units: IntArray
    dst_units: IntArray
    bounds: IntArray
    geometry: Geometry
    buffers: BufferPool = field(default_factory=BufferPool)
    settled: bool = False
    _borrowed: list[IntArray] = field(default_factory=list)

    @property
    def src_on_host(self) -> bool:
        """The source is host memory (a load): stable, unlike what a device may still write."""
        return self.src is self.geometry.host

    @property
    def dst_on_host(self) -> bool:
        """The destination is host memory (a store)."""
        return self.dst is self.geometry.host

    @property
    def lane(self) -> Lane:
        """Which way the bytes go."""
        if self.dst_on_host:
            return Lane.STORE
        return Lane.LOAD if self.src_on_host else Lane.COPY

    def resources(self) -> tuple[IntArray, IntArray]:
        """What the job reads and what it writes: see :meth:`Geometry.resources`."""
        sizes = np.diff(self.bounds)
        return (
            self.geometry.resources(self.src, self.src_units, sizes),
            self.geometry.resources(self.dst, self.dst_units, sizes),
        )

    @property
    def most_copies(self) -> int:
        """How many copies it takes at most: one per pair and tensor."""
        return int(np.diff(self.bounds) @ self.geometry.group_tensors)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes the job moves, padding included."""
        return int(np.diff(self.bounds) @ self.geometry.group_bytes)

    def descriptors(self) -> Descriptors:
        """Lower to contiguous copies; adjacent pages are coalesced into one.

        The arrays are read-only, and stay as they are until :meth:`release`.
        """
        parts: list[tuple[_Strand, IntArray, IntArray, IntArray]] = []
        total = 0
        for group, (start, end) in enumerate(itertools.pairwise(self.bounds.tolist())):
            if start == end:
                continue
            src, dst = self.src_units[start:end], self.dst_units[start:end]
            follows = (src[1:] - src[:-1] == 1) & (dst[1:] - dst[:-1] == 1)
            for strand in self.geometry.strands(group, self.src, self.dst):
                starts, lengths = _runs(
                    follows, src, self.src.factor, dst, self.dst.factor, strand.joins
                )
                parts.append((strand, src[starts], dst[starts], lengths))
                total += len(strand.page_bytes) * len(starts)
        buffer = self.buffers.borrow(3 * total)
        self._borrowed.append(buffer)
        out = buffer[: 3 * total].reshape(3, total)
        at = 0
        for strand, src, dst, lengths in parts:
            shape = (len(strand.page_bytes), len(lengths))
            rows = out[:, at : at + shape[0] * shape[1]].reshape(3, *shape)
            np.add(strand.src_base, _offsets(src, self.src.factor, strand.src_step), out=rows[0])
            np.add(strand.dst_base, _offsets(dst, self.dst.factor, strand.dst_step), out=rows[1])
            np.multiply(strand.page_bytes, lengths, out=rows[2])
            at += shape[0] * shape[1]
        out.flags.writeable = False
        return Descriptors(*out.view(np.uint64))

    @property
    def is_lowered(self) -> bool:
        """What :meth:`descriptors` returned is still valid."""
        return bool(self._borrowed)

    def release(self) -> None:
        """The copy is done: what :meth:`descriptors` returned may be overwritten."""
        while self._borrowed:
            self.buffers.give_back(self._borrowed.pop())

    def indices(self, bucket: Callable[[int], int] = power_of_two) -> Iterator[GroupIndices]:
        """Lower to index arrays, one pair per group that moves anything.

        Args:
            bucket: from a number of pairs to the padded length, so that a compiling device sees
                a bounded number of shapes.
        """
        for group, (start, end) in enumerate(itertools.pairwise(self.bounds.tolist())):
            if start == end:
                continue
            take = np.minimum(np.arange(start, start + bucket(end - start)), end - 1)
            yield GroupIndices(group, self.src_units[take], self.dst_units[take], end - start)


def _offsets(units: IntArray, factor: int, step: tuple[IntArray, IntArray]) -> IntArray:
    if factor == 1:
        return units * step[0]
    return (units // factor) * step[0] + (units % factor) * step[1]


def _runs(
    follows: npt.NDArray[np.bool_],
    src: IntArray,
    src_factor: int,
    dst: IntArray,
    dst_factor: int,
    joins: tuple[bool, bool, bool, bool],
) -> tuple[IntArray, IntArray]:
    """First position and length of each run of pairs that is one copy."""
    if not any(joins[:2]) or not any(joins[2:]) or not follows.any():
        return np.arange(len(src)), np.ones(1, dtype=np.int64).repeat(len(src))
    joined = follows
    for units, factor, (within, across) in (
        (src, src_factor, joins[:2]),
        (dst, dst_factor, joins[2:]),
    ):
        if within != across or not within:
            joined = joined & np.where(units[1:] % factor == 0, across, within)
    starts = np.flatnonzero(np.concatenate(([True], ~joined)))
    ends: IntArray = np.append(starts[1:], len(src))
    return starts, ends - starts


def plan_transfer(
    geometry: Geometry,
    src: LoadStoreSpec,
    dst: LoadStoreSpec,
    *,
    null_block: int | None = None,
    buffers: BufferPool | None = None,
) -> CopyPlan:
    """Check the two specs of a transfer and turn them into a plan.

    A store (device → host) fills whole chunks; a chunk with a null block in it is not stored, and
    no chunk id is given for it. A load (host → device) may enter or leave inside a chunk. A copy
    (device → device) takes each block to the one at its position. Loads and copies never touch the
    null block. The ids are read here and not again.

    Args:
        geometry: of the registered caches.
        src, dst: on the device or the host, at least one on the device.
        null_block: the device block that stands for "nothing here", where the engine has one.
        buffers: what the lowering writes into.

    Raises:
        UnroutableError: this pair of spec types does not move between device and host.
        BlockCountError: the sides disagree, or a store does not fill whole chunks.
        BlockRangeError: an id does not exist, or a load or copy names the null block.
        DuplicateBlockError: a destination is named twice, or is a source of the same copy.
    """
    if isinstance(src, DeviceLoadStoreSpec) and isinstance(dst, DeviceLoadStoreSpec):
        return _plan_copy(geometry, src, dst, null_block, buffers or BufferPool())
    if isinstance(src, DeviceLoadStoreSpec) and isinstance(dst, HostLoadStoreSpec):
        device, host, store = src, dst, True
    elif isinstance(src, HostLoadStoreSpec) and isinstance(dst, DeviceLoadStoreSpec):
        device, host, store = dst, src, False
    else:
        raise UnroutableError(f"no copy between {type(src).__name__} and {type(dst).__name__}")
    factor = geometry.block_size_factor
    blocks, sizes, first = device.block_ids, device.group_sizes, device.block_indices
    if len(sizes) != len(geometry.groups):
        raise BlockCountError(
            f"{len(sizes)} group_sizes, but {len(geometry.groups)} groups are registered"
        )
    if store and factor > 1 and ((sizes % factor).any() or (first[sizes > 0] % factor).any()):
        raise BlockCountError(
            f"a store fills whole chunks of {factor} blocks: got {sizes.tolist()} blocks "
            f"from logical index {first.tolist()}"
        )
    if null_block is not None and (blocks == null_block).any():
        if not store:
            raise BlockRangeError(
                f"block {null_block} is the null block; nothing can be loaded there"
            )
        blocks, sizes = _without_null_chunks(blocks, sizes, factor, null_block)
    # A block per chunk is the common case, and cheap: each call of numpy counts here.
    touched = sizes if factor == 1 else chunks_touched(sizes, first, factor)
    if sum(touched.tolist()) != len(host.block_ids):
        raise BlockCountError(
            f"{sizes.tolist()} device blocks entered at {first.tolist()} touch "
            f"{touched.tolist()} chunks of {factor} blocks, but "
            f"{len(host.block_ids)} chunk ids are given"
        )
    _check_ids(geometry, geometry.device, blocks, sizes, destination=not store)
    _check_ids(geometry, geometry.host, host.block_ids, touched, destination=store)

    host_units = host.block_ids
    if factor > 1:
        host_units = chunk_units(host_units, touched, sizes, first, factor)
    pieces = geometry.device.factor
    if pieces > 1:
        blocks = expand_block_ids(blocks, pieces)
        host_units = expand_block_ids(host_units, pieces)
    bounds = _bounds(sizes, pieces)
    buffers = buffers or BufferPool()
    if store:
        return CopyPlan(
            geometry.device, geometry.host, blocks, host_units, bounds, geometry, buffers
        )
    return CopyPlan(geometry.host, geometry.device, host_units, blocks, bounds, geometry, buffers)


def _plan_copy(
    geometry: Geometry,
    src: DeviceLoadStoreSpec,
    dst: DeviceLoadStoreSpec,
    null_block: int | None,
    buffers: BufferPool,
) -> CopyPlan:
    sizes = src.group_sizes
    if len(sizes) != len(geometry.groups) or sizes.tolist() != dst.group_sizes.tolist():
        raise BlockCountError(
            f"a copy takes each block to one of its group: {sizes.tolist()} sources and "
            f"{dst.group_sizes.tolist()} destinations in {len(geometry.groups)} groups"
        )
    for ids in (src.block_ids, dst.block_ids):
        if null_block is not None and (ids == null_block).any():
            raise BlockRangeError(f"block {null_block} is the null block; it cannot be copied")
        _check_ids(geometry, geometry.device, ids, sizes, destination=ids is dst.block_ids)
    pieces = geometry.device.factor
    plan = CopyPlan(
        geometry.device,
        geometry.device,
        expand_block_ids(src.block_ids, pieces),
        expand_block_ids(dst.block_ids, pieces),
        _bounds(sizes, pieces),
        geometry,
        buffers,
    )
    both = np.intersect1d(*plan.resources())
    if len(both):
        # Copies of one job are in no order among each other.
        raise DuplicateBlockError(f"{len(both)} blocks are source and destination of one copy")
    return plan


def _bounds(sizes: IntArray, pieces: int) -> IntArray:
    """Where the pairs of each group begin and end: int64[groups + 1]."""
    return np.array([0, *itertools.accumulate(n * pieces for n in sizes.tolist())], dtype=np.int64)


def _without_null_chunks(
    blocks: IntArray, sizes: IntArray, factor: int, null_block: int
) -> tuple[IntArray, IntArray]:
    """The blocks of whole chunks that hold no null block, and how many each group has left."""
    kept = (blocks.reshape(-1, factor) != null_block).all(axis=1)
    group = np.repeat(np.arange(len(sizes)), sizes // factor)
    left = np.bincount(group[kept], minlength=len(sizes)) * factor
    return blocks.reshape(-1, factor)[kept].reshape(-1), left


def _check_ids(
    geometry: Geometry, side: Side, ids: IntArray, sizes: IntArray, *, destination: bool
) -> None:
    what = "chunk" if side is geometry.host else "device block"
    limits = geometry.blocks(side)
    end = 0
    for group, size in enumerate(sizes.tolist()):
        if not size:
            continue
        mine = ids[end : end + size]
        end += size
        low, high, limit = int(mine.min()), int(mine.max()), int(limits[group])
        if low < 0 or high >= limit:
            raise BlockRangeError(
                f"{what} {low if low < 0 else high} of group {group} does not exist: "
                f"there are {limit} (0 to {limit - 1})"
            )
    if not destination:
        return
    if geometry.num_pools == 1:
        _check_distinct(ids, what)
        return
    # Groups that share no tensors may use the same id: it names different bytes.
    pools = np.repeat(geometry.pool_of_group, sizes)
    for pool in range(geometry.num_pools):
        _check_distinct(ids[pools == pool], what)


def _check_distinct(ids: IntArray, what: str) -> None:
    ordered = np.sort(ids)
    same = ordered[1:] == ordered[:-1]
    if same.any():
        raise DuplicateBlockError(f"{what} {int(ordered[1:][same][0])} is the destination twice")
