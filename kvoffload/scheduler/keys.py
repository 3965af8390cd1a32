"""What a chunk is known by."""

from __future__ import annotations

from typing import NamedTuple


class OffloadKey(NamedTuple):
    """Identity of a chunk: never shortened, never reinterpreted.

    Attributes:
        block_hash: opaque bytes from the engine, covering everything that the chunk's content
            depends on.
        group: index of the group of layers.
    """

    block_hash: bytes
    group: int = 0
