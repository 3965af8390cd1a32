"""From an engine's tensors, of every layout, to :class:`CanonicalKVCaches`.

Everything is decided from addresses and extents, never from a dtype or a name, and the cache is
never copied. A tensor is read like this:

1. *Which dimension counts blocks?* The first one that is large enough; what lies before it are
   separate parts (keys and values, heads). Where that cannot be told, it is an error that says what
   to declare.
2. *How many of its rows make one block?* One, unless the engine's kernels use smaller blocks; spare
   rows at the end stay where they are.
3. *What is contiguous in one row?* The dimensions of the smallest strides, as far as they are
   dense. Whatever is left repeats this as further parts.

A part is a set of equally spaced pages. Equal parts are one tensor, moved once; disjoint ones are
moved apart; parts that overlap otherwise are an error that names both layers.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from kvoffload.core.errors import (
    AmbiguousLayoutError,
    LayoutError,
    OverlapError,
    UnsupportedStateError,
)
from kvoffload.core.kv_caches import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)

logger = logging.getLogger(__name__)

MAX_PARTS = 256
"""Most parts of one tensor. A block in more pieces than this is not a paged cache."""


@dataclass(frozen=True, eq=False)
class LayerCache:
    """What an engine registers for one layer.

    Attributes:
        tensors: one tensor, or several (a tuple of keys and values, a list of states), each with
            one dimension that counts blocks. Any dtype, any strides.
        kind: of state; ``"attention"`` finds the block dimension, ``"state"`` has it first.
            Others can be added with :func:`register_state_kind`.
        block_dim: the dimension that counts blocks, where it cannot be told.
        rows_per_block: how many rows of that dimension make one block, where it cannot be told.
        page_bytes: real bytes of one block over all tensors, padding excluded; by default what the
            tensors hold.
        padded_page_bytes: bytes that one block occupies over all tensors; by default what the
            tensors hold.
    """

    tensors: torch.Tensor | Sequence[torch.Tensor]
    kind: str = "attention"
    block_dim: int | None = None
    rows_per_block: int | None = None
    page_bytes: int | None = None
    padded_page_bytes: int | None = None


@dataclass(frozen=True, eq=False)
class CacheRegistration:
    """All that an engine says about its cache.

    Attributes:
        num_blocks: blocks of the engine's configuration; a tensor may have more rows.
        layers: by name.
        groups: the names of the layers that share block ids, group after group.
        slots: names that the engine puts into the same memory. They must agree in address, stride
            and count; the first one present tells the padded page. Names that do not exist here
            are memory reserved for others, and are skipped.
    """

    num_blocks: int
    layers: Mapping[str, LayerCache]
    groups: Sequence[Sequence[str]]
    slots: Sequence[Sequence[str]] = field(default_factory=tuple)


@dataclass(frozen=True)
class Part:
    """Equally spaced pages: page ``i`` is ``page_bytes`` at ``address + i * stride``.

    Attributes:
        address: of page 0.
        stride: bytes from page to page.
        page_bytes: bytes of a page that are moved.
        real_bytes: those of them that are not padding.
        source: index of the layer's tensor whose storage holds the pages.
    """

    address: int
    stride: int
    page_bytes: int
    real_bytes: int
    source: int


StateKind = Callable[[LayerCache, int], list[Part]]
"""From a layer and the number of blocks to its parts."""

_KINDS: dict[str, StateKind] = {}


def register_state_kind(name: str, kind: StateKind) -> None:
    """Teach :func:`canonicalize` another kind of state.

    Args:
        name: what layers say as their ``kind``.
        kind: finds the parts of such a layer; :func:`parts_of` does that for one tensor.

    Raises:
        LayoutError: the name is taken by another kind.
    """
    if _KINDS.setdefault(name, kind) is not kind:
        raise LayoutError(f"the kind of state {name!r} is registered already")


def canonicalize(registration: CacheRegistration) -> CanonicalKVCaches:
    """The canonical form of an engine's cache; views of it, never copies.

    Raises:
        LayoutError: a layer cannot be read as blocks; the message names it.
        AmbiguousLayoutError: it can be read in several ways; the message says what to declare.
        OverlapError: two layers share a part of their bytes but not all.
        UnsupportedStateError: a layer's kind is not registered.
    """
    blocks = registration.num_blocks
    if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 1:
        raise LayoutError(f"num_blocks must be at least 1, not {blocks!r}")
    if not registration.layers:
        logger.warning("no layers to register: there is nothing to offload")
        return CanonicalKVCaches([], [])
    _check_groups(registration)
    parts = {
        name: _parts_of_layer(name, layer, blocks) for name, layer in registration.layers.items()
    }
    for slot in registration.slots:
        _unify_slot([name for name in slot if name in parts], parts)
    if blocks == 1:
        # One page has no stride; any that keeps it apart from itself will do.
        parts = {n: [replace(p, stride=p.page_bytes) for p in ps] for n, ps in parts.items()}

    index: dict[tuple[int, int, int], int] = {}
    tensors: list[CanonicalKVCacheTensor] = []
    owners: list[tuple[str, Part]] = []
    refs: list[list[CanonicalKVCacheRef]] = []
    for group in registration.groups:
        refs.append([])
        for name in group:
            for part in parts[name]:
                place = (part.address, part.stride, part.page_bytes)
                if place not in index:
                    index[place] = len(tensors)
                    owners.append((name, part))
                    tensors.append(_view(name, registration.layers[name], part, blocks))
                refs[-1].append(CanonicalKVCacheRef(index[place], part.real_bytes, name))
    _check_apart(owners, blocks)
    return CanonicalKVCaches(tensors, refs)


def _check_groups(registration: CacheRegistration) -> None:
    if any(isinstance(group, str) for group in registration.groups):
        raise LayoutError("a group is a list of names, not a name")
    named = [name for group in registration.groups for name in group]
    unknown = sorted(set(named) - registration.layers.keys())
    if unknown:
        raise LayoutError(f"the groups name layers that are not registered: {unknown}")
    missing = sorted(registration.layers.keys() - set(named))
    if missing:
        raise LayoutError(f"layers in no group: {missing}; they would not move")
    twice = sorted({name for name in named if named.count(name) > 1})
    if twice:
        raise LayoutError(f"layers in more than one group: {twice}")


def _parts_of_layer(name: str, layer: LayerCache, blocks: int) -> list[Part]:
    if not isinstance(layer, LayerCache):
        raise LayoutError(f"layer {name!r}: expected a LayerCache, found {type(layer).__name__}")
    for what in ("block_dim", "rows_per_block", "page_bytes", "padded_page_bytes"):
        value = getattr(layer, what)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise LayoutError(f"layer {name!r}: {what} must be a whole number, not {value!r}")
    kind = _KINDS.get(layer.kind)
    if kind is None:
        raise UnsupportedStateError(
            f"layer {name!r}: state of kind {layer.kind!r} is not supported (supported: "
            f"{', '.join(sorted(_KINDS))}); add it with register_state_kind"
        )
    try:
        parts = kind(layer, blocks)
    except LayoutError as error:
        raise type(error)(f"layer {name!r}: {error}") from error
    if not parts:
        raise LayoutError(f"layer {name!r}: nothing to move was found in its {layer.kind} state")
    return parts


def _tensors(layer: LayerCache) -> list[torch.Tensor]:
    if not isinstance(layer.tensors, torch.Tensor | Sequence):
        raise LayoutError(f"expected tensors, found {type(layer.tensors).__name__}")
    listed = [layer.tensors] if isinstance(layer.tensors, torch.Tensor) else list(layer.tensors)
    for tensor in listed:
        if not isinstance(tensor, torch.Tensor):
            raise LayoutError(f"expected tensors, found {type(tensor).__name__}")
        if tensor.device.type == "meta":
            raise LayoutError("a tensor on the meta device has no memory to move")
    return listed


def _attention(layer: LayerCache, blocks: int) -> list[Part]:
    return _parts_of_tensors(layer, blocks)


def _state(layer: LayerCache, blocks: int) -> list[Part]:
    # A slot of state is one row: kernels do not divide it.
    return _parts_of_tensors(
        replace(layer, block_dim=layer.block_dim or 0, rows_per_block=layer.rows_per_block or 1),
        blocks,
    )


def _parts_of_tensors(layer: LayerCache, blocks: int) -> list[Part]:
    tensors = _tensors(layer)
    real, padded = layer.page_bytes, layer.padded_page_bytes
    rows = layer.rows_per_block
    alone = len(tensors) == 1
    if not alone and rows is None and real is not None:
        # What is known of them together: each has as many rows per block.
        of_a_row = sum(
            part.page_bytes
            for tensor in tensors
            for part in parts_of(tensor, blocks, block_dim=layer.block_dim, rows_per_block=1)
        )
        rows = real // of_a_row if of_a_row and real % of_a_row == 0 else None
    parts = [
        replace(part, source=source)
        for source, tensor in enumerate(tensors)
        for part in parts_of(
            tensor,
            blocks,
            block_dim=layer.block_dim,
            rows_per_block=rows,
            block_bytes=real if alone else None,
            padded_bytes=padded if alone else None,
        )
    ]
    held = sum(part.page_bytes for part in parts)
    if real is not None and (real > held or (real < held and len(parts) > 1)) and parts:
        raise LayoutError(
            f"page_bytes {real} is declared, but a block holds {held} bytes in {len(parts)} parts"
        )
    if len(parts) == 1 and real is not None:
        parts = [replace(parts[0], real_bytes=real)]
    if parts and padded is not None:
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        parts = _pad(parts, padded, real, blocks, len(storages) == 1)
    return parts


register_state_kind("attention", _attention)
register_state_kind("state", _state)


def parts_of(
    tensor: torch.Tensor,
    blocks: int,
    *,
    block_dim: int | None = None,
    rows_per_block: int | None = None,
    block_bytes: int | None = None,
    padded_bytes: int | None = None,
) -> list[Part]:
    """The parts of one tensor.

    Args:
        tensor: any dtype and strides; one dimension counts blocks.
        blocks: of the engine's configuration.
        block_dim: that dimension, where it cannot be told.
        rows_per_block: how many of its rows make one block, where it cannot be told.
        block_bytes: real bytes of one block in this tensor, where they are known.
        padded_bytes: bytes that one block occupies in it, where they are known.

    Raises:
        LayoutError: there is no such dimension, or a block is in too many pieces.
        AmbiguousLayoutError: a declaration is needed.
    """
    if tensor.numel() == 0:
        raise LayoutError(f"a tensor of shape {tuple(tensor.shape)} holds nothing")
    shape = tuple(tensor.shape)
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    dim = _block_dim(shape, strides, blocks, block_dim, rows_per_block)
    row_stride = strides[dim]

    others = sorted((strides[d], shape[d]) for d in range(len(shape)) if d != dim and shape[d] > 1)
    if any(stride == 0 for stride, _ in others) or (row_stride == 0 and shape[dim] > 1):
        raise LayoutError(f"shape {shape} with strides {tensor.stride()} repeats the same memory")
    run = size
    while others and others[0][0] == run:
        run *= others.pop(0)[1]
    repeats = math.prod(count for _, count in others)
    if block_bytes is None and padded_bytes is not None and rows_per_block is None:
        # A row occupies its stride, once for each part that lies further out.
        occupied = row_stride * math.prod(count for stride, count in others if stride > row_stride)
        rows_per_block = padded_bytes // occupied if occupied <= padded_bytes else None
    rows = _rows_per_block(shape, dim, blocks, rows_per_block, block_bytes, run * repeats)
    adjacent = row_stride == run or rows == 1
    pieces = repeats if adjacent else repeats * rows
    if pieces > MAX_PARTS:
        raise LayoutError(
            f"one block of shape {shape} with strides {tensor.stride()} is in {pieces} pieces of "
            f"{run} bytes; more than {MAX_PARTS} are not supported"
        )
    offsets = [
        sum(i * stride for i, (stride, _) in zip(at, others, strict=True))
        for at in itertools.product(*(range(count) for _, count in others))
    ]
    stride = row_stride * rows
    if adjacent:
        page = run * rows
        return [Part(tensor.data_ptr() + at, stride, page, page, 0) for at in sorted(offsets)]
    return [
        Part(tensor.data_ptr() + at + row * row_stride, stride, run, run, 0)
        for at in sorted(offsets)
        for row in range(rows)
    ]


def _block_dim(
    shape: tuple[int, ...],
    strides: Sequence[int],
    blocks: int,
    declared: int | None,
    rows_per_block: int | None,
) -> int:
    needed = blocks * (rows_per_block or 1)
    if declared is not None:
        if not -len(shape) <= declared < len(shape) or shape[declared] < needed:
            raise LayoutError(
                f"dimension {declared} of shape {shape} does not count {needed} rows of blocks"
            )
        return declared % len(shape)
    # Rows of single elements are no pages, unless the tensor has nothing else.
    wide = [d for d in range(len(shape)) if shape[d] > 1]
    innermost = min(wide, key=lambda d: strides[d]) if len(wide) > 1 else None
    fits = [d for d in range(len(shape)) if shape[d] >= needed and d != innermost]
    if not fits:
        raise LayoutError(
            f"no dimension of shape {shape} counts {needed} rows of blocks; declare block_dim"
        )
    exact = [d for d in fits if shape[d] == needed]
    if needed == 1 and exact:
        return exact[0]
    # One that has exactly as many rows is meant, unless one before it could be, too; so could any
    # behind a leading 2, which may be keys and values just as well as two blocks.
    plausible = [d for d in fits if _counts(shape[d], needed)] or fits
    if len(exact) == 1 and exact[0] == plausible[0] and not (exact[0] == 0 and shape[0] == 2):
        return exact[0]
    if len(plausible) > 1:
        first, second = plausible[:2]
        raise AmbiguousLayoutError(
            f"shape {shape} can have its {blocks} blocks in dimension {first} or {second}; "
            f"declare block_dim={first} or block_dim={second}"
        )
    return plausible[0]


def _counts(rows: int, needed: int) -> bool:
    """So many rows are blocks, with some to spare, or blocks of several rows."""
    return rows < 2 * needed or rows % needed == 0


def _rows_per_block(
    shape: tuple[int, ...],
    dim: int,
    blocks: int,
    declared: int | None,
    block_bytes: int | None,
    row_bytes: int,
) -> int:
    rows = shape[dim]
    if declared is not None:
        if declared < 1 or declared * blocks > rows:
            raise LayoutError(
                f"dimension {dim} of shape {shape} has {rows} rows, not {blocks} blocks of "
                f"{declared}"
            )
        return declared
    if block_bytes is not None and block_bytes % row_bytes == 0:
        if block_bytes // row_bytes * blocks <= rows:
            return block_bytes // row_bytes
        raise LayoutError(
            f"dimension {dim} of shape {shape} has {rows} rows of {row_bytes} bytes, which are "
            f"not {blocks} blocks of {block_bytes} bytes"
        )
    if rows < 2 * blocks:
        return 1
    if rows % blocks == 0 and blocks > 1:
        return rows // blocks
    raise AmbiguousLayoutError(
        f"dimension {dim} of shape {shape} has {rows} rows for {blocks} blocks: how many make one "
        f"block, and how many are spare? Declare rows_per_block"
    )


def _pad(
    parts: list[Part], padded: int, real: int | None, blocks: int, one_storage: bool
) -> list[Part]:
    """Extend the parts of one layer to the bytes that its blocks occupy."""
    held = sum(part.page_bytes for part in parts)
    first = min(parts, key=lambda part: part.address)
    end = max(part.address + part.page_bytes for part in parts)
    room = [padded if blocks == 1 else part.stride for part in parts]
    if one_storage and min(room) == max(room) >= padded >= end - first.address:
        # All parts of a block lie in one window: move the window, gaps and padding included.
        return [replace(first, page_bytes=padded, real_bytes=real or held)]
    each, left = divmod(padded, len(parts))
    if held != padded and (
        left or any(not part.page_bytes <= each <= r for part, r in zip(parts, room, strict=True))
    ):
        raise LayoutError(
            f"padded_page_bytes {padded} cannot be laid over parts of "
            f"{[part.page_bytes for part in parts]} bytes at strides "
            f"{[part.stride for part in parts]}"
        )
    return parts if held == padded else [replace(part, page_bytes=each) for part in parts]


def _unify_slot(names: list[str], parts: dict[str, list[Part]]) -> None:
    if not names:
        return
    first = parts[names[0]]
    for name in names[1:]:
        mine = parts[name]
        if [(p.address, p.stride) for p in mine] != [(p.address, p.stride) for p in first]:
            raise LayoutError(
                f"layers {names[0]!r} and {name!r} share a slot, but not its memory: "
                f"{[(p.address, p.stride) for p in first]} and "
                f"{[(p.address, p.stride) for p in mine]} (address, stride)"
            )
        for theirs, part in zip(first, mine, strict=True):
            if part.real_bytes > theirs.page_bytes:
                raise LayoutError(
                    f"layer {name!r} has pages of {part.real_bytes} bytes in a slot of "
                    f"{theirs.page_bytes}, which {names[0]!r} gives"
                )
        parts[name] = [
            replace(part, page_bytes=theirs.page_bytes)
            for theirs, part in zip(first, mine, strict=True)
        ]


def _view(name: str, layer: LayerCache, part: Part, blocks: int) -> CanonicalKVCacheTensor:
    """An int8 ``(blocks, page)`` tensor over the storage of one of the layer's tensors."""
    owner = _tensors(layer)[part.source]
    storage = owner.untyped_storage()
    offset = part.address - storage.data_ptr()
    last = offset + (blocks - 1) * part.stride + part.page_bytes
    if offset < 0 or last > storage.nbytes():
        raise LayoutError(
            f"layer {name!r}: {blocks} pages of {part.page_bytes} bytes at stride {part.stride} "
            f"from offset {offset} reach {last}, past the end of a storage of "
            f"{storage.nbytes()} bytes"
        )
    view = torch.empty(0, dtype=torch.int8, device=owner.device)
    view.set_(storage, offset, (blocks, part.page_bytes), (part.stride, 1))
    return CanonicalKVCacheTensor(view, part.page_bytes)


def _check_apart(owners: Sequence[tuple[str, Part]], blocks: int) -> None:
    """No byte belongs to two parts. Equal parts were merged before."""

    def end(part: Part) -> int:
        return part.address + (blocks - 1) * part.stride + part.page_bytes

    ordered = sorted(owners, key=lambda owner: owner[1].address)
    reach: list[tuple[str, Part]] = []  # those whose extents reach the one at hand
    for name, part in ordered:
        if part.stride < part.page_bytes and blocks > 1:
            raise OverlapError(
                f"layer {name!r}: pages of {part.page_bytes} bytes overlap at a stride of "
                f"{part.stride}"
            )
        reach = [(n, p) for n, p in reach if end(p) > part.address]
        other = next((n for n, p in reach if _overlap(p, part, blocks)), None)
        if other is not None:
            raise OverlapError(
                f"layers {other!r} and {name!r} share some of their bytes, but not all of them; "
                f"layers that share memory must agree in address, stride and padded_page_bytes"
            )
        reach.append((name, part))


def _overlap(a: Part, b: Part, blocks: int) -> bool:
    """Two parts, ``a`` beginning first, with overlapping extents, have a byte in common."""
    if a.stride == b.stride:
        # Page j of b lies `distance` after page j of a, that is `behind` after page j + shift.
        shift, behind = divmod(b.address - a.address, a.stride)
        return (shift < blocks and behind < a.page_bytes) or (
            shift + 1 < blocks and behind + b.page_bytes > a.stride
        )
    starts_a, starts_b = (p.address + np.arange(blocks) * p.stride for p in (a, b))
    # For each page of b, the last page of a that begins at or before its end.
    at = np.searchsorted(starts_a, starts_b + b.page_bytes, side="left") - 1
    return bool((starts_a[at[at >= 0]] + a.page_bytes > starts_b[at >= 0]).any())
