"""An engine's KV cache in the one form that the core understands."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from kvoffload.core.errors import LayoutError


@dataclass(frozen=True, eq=False)
class CanonicalKVCacheTensor:
    """One tensor of pages.

    Attributes:
        tensor: int8 or uint8 ``(num_blocks, page_size_bytes)``, on any device. Rows may lie apart
            (``stride(0) >= page_size_bytes``); within a row bytes are adjacent.
        page_size_bytes: bytes of one block in this tensor, padding included. All are moved.
    """

    tensor: torch.Tensor
    page_size_bytes: int

    def __post_init__(self) -> None:
        shape = tuple(self.tensor.shape)
        if self.tensor.element_size() != 1 or len(shape) != 2:
            raise LayoutError(
                f"a canonical tensor has one-byte elements and two dimensions, "
                f"not {self.tensor.dtype} of shape {shape}"
            )
        if shape[1] != self.page_size_bytes or self.page_size_bytes < 1 or shape[0] < 1:
            raise LayoutError(
                f"a canonical tensor is (num_blocks, page_size_bytes): shape {shape} does not "
                f"hold pages of {self.page_size_bytes} bytes"
            )
        row, column = self.tensor.stride()
        if (column != 1 and shape[1] > 1) or (row < shape[1] and shape[0] > 1):
            raise LayoutError(
                f"pages must be contiguous and apart: strides ({row}, {column}) for shape {shape}"
            )


@dataclass(frozen=True)
class CanonicalKVCacheRef:
    """A layer's (or a part's) place in the canonical tensors.

    Attributes:
        tensor_idx: index into ``CanonicalKVCaches.tensors``.
        page_size_bytes: bytes that are real, padding excluded; at most the tensor's page.
        layer: the layer's name, for messages and lists.
    """

    tensor_idx: int
    page_size_bytes: int
    layer: str = ""


@dataclass(frozen=True, eq=False)
class CanonicalKVCaches:
    """All tensors, and for each group of layers the places it owns.

    Attributes:
        tensors: each byte of the cache belongs to one tensor at most.
        group_data_refs: one list of references per group, in the group's layer order. Layers of
            one group share block ids.

    Both may be empty: a rank may hold no layers.
    """

    tensors: Sequence[CanonicalKVCacheTensor]
    group_data_refs: Sequence[Sequence[CanonicalKVCacheRef]]

    def __post_init__(self) -> None:
        devices = {entry.tensor.device for entry in self.tensors}
        if len(devices) > 1:
            raise LayoutError(f"the tensors live on several devices: {sorted(map(str, devices))}")
        unused = set(range(len(self.tensors)))
        for group, refs in enumerate(self.group_data_refs):
            unused -= {ref.tensor_idx for ref in refs}
            if not refs:
                raise LayoutError(f"group {group} has no layers")
            for ref in refs:
                if not 0 <= ref.tensor_idx < len(self.tensors):
                    raise LayoutError(
                        f"group {group} refers to tensor {ref.tensor_idx} of {len(self.tensors)}"
                    )
                page = self.tensors[ref.tensor_idx].page_size_bytes
                if not 0 < ref.page_size_bytes <= page:
                    raise LayoutError(
                        f"group {group} refers to {ref.page_size_bytes} bytes of tensor "
                        f"{ref.tensor_idx}, whose page is {page}"
                    )

        if unused:
            raise LayoutError(f"tensors {sorted(unused)} belong to no group: they would not move")

    @classmethod
    def from_tensors(cls, tensors: Iterable[torch.Tensor]) -> CanonicalKVCaches:
        """One group whose layers are ``tensors``: each ``(num_blocks, …)``, contiguous, any dtype.

        For every other layout see :func:`kvoffload.core.canonicalize.canonicalize`.

        Raises:
            LayoutError: a tensor is not contiguous or holds nothing, or two share memory.
        """
        if isinstance(tensors, torch.Tensor):
            raise LayoutError("expected the tensors of all layers, found a single tensor")
        entries = []
        extents = []
        for index, tensor in enumerate(tensors):
            if tensor.ndim == 0 or tensor.numel() == 0 or not tensor.is_contiguous():
                raise LayoutError(f"tensor {index} is not a contiguous (num_blocks, …) tensor")
            rows = tensor.reshape(tensor.shape[0], -1).view(torch.int8)
            entries.append(CanonicalKVCacheTensor(rows, rows.shape[1]))
            extents.append((rows.data_ptr(), rows.data_ptr() + rows.numel(), index))
        for before, after in itertools.pairwise(sorted(extents)):
            if after[0] < before[1]:
                raise LayoutError(f"tensors {before[2]} and {after[2]} share memory")
        refs = [CanonicalKVCacheRef(i, e.page_size_bytes) for i, e in enumerate(entries)]
        return cls(entries, [refs])

    def describe(self) -> list[str]:
        """One line for each part of each layer: what will be moved."""
        lines = []
        for group, refs in enumerate(self.group_data_refs):
            for ref in refs:
                tensor = self.tensors[ref.tensor_idx]
                padding = tensor.page_size_bytes - ref.page_size_bytes
                lines.append(
                    f"group {group}: {ref.layer or 'layer'}: tensor {ref.tensor_idx}, "
                    f"{tensor.tensor.shape[0]} pages of {tensor.page_size_bytes} bytes"
                    + (f", {padding} of them padding" if padding else "")
                )
        return lines

    @property
    def device(self) -> torch.device:
        """The device that holds every tensor."""
        return self.tensors[0].tensor.device
