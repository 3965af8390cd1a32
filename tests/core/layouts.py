"""Caches of every layout, over one storage whose every byte is watched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvoffload.core.canonicalize import CacheRegistration, LayerCache

STRUCTURES = ("one tensor", "K/V tuple", "(2, N, …)", "(N, 2, …)", "list of 3")
PLACEMENTS = ("contiguous", "padded stride", "offset", "interleaved", "shared by 2 names")
DTYPES = (
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float32,
    torch.int64,
)
ODD_PAGES = (8, 16, 512)  # the page is no multiple of this
GROUPS = ("1 group", "2 groups alike", "3 groups unlike")
FACTORS = (1, 2, 3, 16)
GAP = 24  # bytes that belong to nobody, between tensors


@dataclass(frozen=True)
class Case:
    """One point of the matrix."""

    structure: str
    placement: str
    dtype: torch.dtype
    odd_page: int
    groups: str
    factor: int

    @property
    def blocks(self) -> int:
        return 2 * self.factor + 5


@dataclass(frozen=True)
class Layout:
    """A cache.

    Attributes:
        storage: uint8, all memory there is; most of it belongs to layers.
        registration: what an engine would say.
        block_dims: of every tensor of every layer.
    """

    storage: torch.Tensor
    registration: CacheRegistration
    block_dims: dict[str, list[int]]

    def tensors(self, name: str) -> list[torch.Tensor]:
        listed = self.registration.layers[name].tensors
        return [listed] if isinstance(listed, torch.Tensor) else list(listed)

    def block(self, group: int, block: int) -> Iterator[torch.Tensor]:
        """The memory of a block, read with nothing but torch."""
        for name in self.registration.groups[group]:
            for tensor, dim in zip(self.tensors(name), self.block_dims[name], strict=True):
                yield tensor.select(dim, block)


def page_bytes(odd: int, itemsize: int) -> int:
    """A page that holds whole elements and is no multiple of ``odd``, where there is one."""
    candidates = (odd + odd // 2 + step * itemsize for step in range(64))
    return next((n for n in candidates if n % itemsize == 0 and n % odd), 3 * itemsize)


def build(case: Case, device: str = "cpu") -> Layout:
    """The cache of a case; the same whenever it is called, but for where it is."""
    size = case.dtype.itemsize
    base = page_bytes(case.odd_page, size)
    scales = {"1 group": [1], "2 groups alike": [1, 1], "3 groups unlike": [1, 2, 3]}[case.groups]
    # Every strand is one page per block at equal distances; a layer is a few strands.
    strands: list[tuple[str, int]] = []
    groups = []
    for group, scale in enumerate(scales):
        names = [f"g{group}.l{layer}" for layer in range(2)]
        groups.append(names)
        for name in names:
            page = base * scale
            pages = {
                "one tensor": [page],
                "K/V tuple": [page, page + size],
                "(2, N, …)": [page, page],
                "(N, 2, …)": [2 * page],
                "list of 3": [page, 2 * page, size],
            }[case.structure]
            strands += [(name, p) for p in pages]
    places = list(_place(strands, case, size))
    end = max(offset + (case.blocks - 1) * stride + page for offset, stride, page in places)
    storage = torch.zeros(-(-(end + GAP) // 8) * 8, dtype=torch.uint8, device=device)
    typed = storage.view(case.dtype)

    layers: dict[str, LayerCache] = {}
    dims: dict[str, list[int]] = {}
    for name, mine in itertools.groupby(
        zip(strands, places, strict=True), key=lambda both: both[0][0]
    ):
        layers[name], dims[name] = _layer(typed, [place for _, place in mine], case, size)
    if case.placement == "shared by 2 names":
        for names in groups:
            names.append(f"{names[0]} again")
            layers[names[-1]], dims[names[-1]] = layers[names[0]], dims[names[0]]
    return Layout(storage, CacheRegistration(case.blocks, layers, groups), dims)


def _place(
    strands: Sequence[tuple[str, int]], case: Case, size: int
) -> Iterator[tuple[int, int, int]]:
    """Offset, stride and page of every strand, in bytes."""
    row = sum(page for _, page in strands) + GAP
    at = 5 * size if case.placement == "offset" else 0
    for _, page in strands:
        if case.placement == "interleaved":
            yield at, row, page
            at += page
            continue
        stride = page + 3 * size if case.placement == "padded stride" else page
        yield at, stride, page
        at += stride * case.blocks + GAP


def _layer(
    typed: torch.Tensor, places: Sequence[tuple[int, int, int]], case: Case, size: int
) -> tuple[LayerCache, list[int]]:
    """A layer over typed memory, and the block dimension of each of its tensors."""

    def view(shape: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
        return typed.as_strided(shape, [s // size for s in strides], offset // size)

    first, stride, page = places[0]
    n, elements = case.blocks, page // size
    if case.structure == "(2, N, …)":
        apart = places[1][0] - first
        return LayerCache(view((2, n, elements), (apart, stride, size), first)), [1]
    if case.structure == "(N, 2, …)":
        half = elements // 2
        return LayerCache(view((n, 2, half), (stride, half * size, size), first)), [0]
    tensors = [view((n, p // size), (s, size), o) for o, s, p in places]
    if case.structure == "one tensor":
        return LayerCache(tensors[0]), [0]
    return LayerCache(tuple(tensors)), [0] * len(tensors)


def unique_bytes(layout: Layout) -> int:
    """Bytes that belong to some block, each counted once; by writing to all of them."""
    layout.storage.zero_()
    for group in range(len(layout.registration.groups)):
        for block in range(layout.registration.num_blocks):
            for piece in layout.block(group, block):
                piece.view(torch.uint8)[...] = 1
    return int(layout.storage.sum(dtype=torch.int64))
