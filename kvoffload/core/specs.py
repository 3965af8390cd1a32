"""What one side of a transfer names: :class:`LoadStoreSpec` and its kinds.

A transfer is a pair of specs, source and destination. The types of the two specs decide which
handler moves the bytes, so a new medium is a new spec class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.core.errors import BlockCountError, SpecError

IntArray: TypeAlias = npt.NDArray[np.int64]
BlockIds: TypeAlias = Sequence[int] | npt.NDArray[Any]


def as_ids(values: BlockIds, what: str) -> IntArray:
    """Own, read-only int64 copy of a one-dimensional sequence of integers.

    Raises:
        SpecError: the values are not integers, or not one-dimensional.
    """
    try:
        array = np.array(values)  # a copy, whatever it was
    except ValueError as error:
        raise SpecError(
            f"{what} must be a one-dimensional sequence of integers: {error}"
        ) from error
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise SpecError(
            f"{what} must be a one-dimensional sequence of integers, "
            f"not {array.ndim} dimensions of {array.dtype}"
        )
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise SpecError(f"{what} must fit in 63 bits, not {int(array.max())}")
    own = array if array.dtype == np.int64 else array.astype(np.int64)
    own.flags.writeable = False
    return own


class LoadStoreSpec(ABC):
    """One side of a transfer: which blocks, on which medium."""

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """Short name of where the blocks live, for results and statistics."""


class BlockIDsLoadStoreSpec(LoadStoreSpec):
    """Blocks named by integer ids.

    Args:
        block_ids: ids, each in ``[0, number of blocks on this medium)``. They are copied: the
            caller may reuse or change its own array at once.
    """

    def __init__(self, block_ids: BlockIds) -> None:
        self.block_ids: IntArray = as_ids(block_ids, "block_ids")
        """int64[n], read-only."""

    def __len__(self) -> int:
        return len(self.block_ids)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.block_ids.tolist()})"


class DeviceLoadStoreSpec(BlockIDsLoadStoreSpec):
    """Blocks on the device, group after group.

    Args:
        block_ids: the device blocks of all groups, those of group 0 first.
        group_sizes: number of ids of each group, in the order of
            ``CanonicalKVCaches.group_data_refs``; they add up to ``len(block_ids)``. By default
            all ids belong to one group.
        block_indices: for each group the logical index, within its request, of the group's first
            block. The first chunk of the group is entered at ``block_indices[g] % factor``. By
            default 0.
    """

    def __init__(
        self,
        block_ids: BlockIds,
        group_sizes: BlockIds | None = None,
        block_indices: BlockIds | None = None,
    ) -> None:
        super().__init__(block_ids)
        sizes = [len(self.block_ids)] if group_sizes is None else group_sizes
        self.group_sizes: IntArray = as_ids(sizes, "group_sizes")
        """int64[groups], read-only."""
        indices = [0] * len(self.group_sizes) if block_indices is None else block_indices
        self.block_indices: IntArray = as_ids(indices, "block_indices")
        """int64[groups], read-only."""
        # There are few groups: lists are cheaper than calls of numpy, and do not wrap.
        listed, entered = self.group_sizes.tolist(), self.block_indices.tolist()
        if min(listed, default=0) < 0:
            raise BlockCountError(f"group_sizes must not be negative: {listed}")
        if min(entered, default=0) < 0:
            raise BlockCountError(f"block_indices must not be negative: {entered}")
        if sum(listed) != len(self.block_ids):
            raise BlockCountError(
                f"group_sizes {listed} add up to {sum(listed)}, "
                f"but there are {len(self.block_ids)} block_ids"
            )
        if len(self.block_indices) != len(self.group_sizes):
            raise BlockCountError(
                f"{len(self.block_indices)} block_indices for {len(self.group_sizes)} group_sizes"
            )

    @staticmethod
    def medium() -> str:
        return "device"


class HostLoadStoreSpec(BlockIDsLoadStoreSpec):
    """Chunks in host memory: ``block_ids`` are chunk ids, laid out group after group."""

    @staticmethod
    def medium() -> str:
        return "host"


class TransferSpec(NamedTuple):
    """Source and destination of a transfer; any pair of specs serves in its place."""

    src: LoadStoreSpec
    dst: LoadStoreSpec

    @classmethod
    def of(cls, pair: Sequence[LoadStoreSpec]) -> TransferSpec:
        """``pair`` under its names.

        Raises:
            SpecError: it is not a pair of specs.
        """
        if (
            not isinstance(pair, Sequence)
            or len(pair) != 2
            or not all(isinstance(side, LoadStoreSpec) for side in pair)
        ):
            raise SpecError(
                f"a transfer takes a pair of specs, source and destination, not {pair!r}"
            )
        return cls(*pair)
