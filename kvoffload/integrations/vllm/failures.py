"""What a failed load leaves behind: which positions of which group, and which prefix is still good.

A block id is a number within its group: two groups may use the same one for different blocks. So a
failure is told by request, group and position, and never by an id alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LoadFailure:
    """Blocks of one group of one request that did not arrive.

    Attributes:
        job_id: of the load.
        group: index of the group.
        first_position: logical index, within the request, of the first of them.
        block_ids: where they should have arrived, by position.
        reason: for people.
    """

    job_id: int
    group: int
    first_position: int
    block_ids: tuple[int, ...]
    reason: str

    @property
    def positions(self) -> range:
        """Logical indices within the request."""
        return range(self.first_position, self.first_position + len(self.block_ids))


def failed_keys(
    failures: Iterable[LoadFailure], keys: Sequence[Sequence[bytes]], blocks_per_chunk: int
) -> list[bytes]:
    """The keys of the chunks that did not arrive.

    Args:
        failures: of one request.
        keys: of that request, for each group by chunk.
        blocks_per_chunk: what turns a position into a chunk.
    """
    found: dict[bytes, None] = {}
    for failure in failures:
        positions = failure.positions
        if positions:
            first, last = positions[0] // blocks_per_chunk, positions[-1] // blocks_per_chunk
            found.update(dict.fromkeys(keys[failure.group][first : last + 1]))
    return list(found)


def usable_prefix(
    failures: Iterable[LoadFailure],
    tokens_per_block: Sequence[int],
    *,
    needs_whole: Collection[int] = (),
) -> int:
    """Tokens at the head of a request that every group still has, if any failed.

    Args:
        failures: of one request, at least one.
        tokens_per_block: of each group.
        needs_whole: groups that keep only the end of a prefix, such as sliding windows and
            recurrent states. Where there is one, no shorter prefix is any good.

    Returns:
        A multiple of every group's block.
    """
    if needs_whole:
        return 0
    first = min(f.first_position * tokens_per_block[f.group] for f in failures)
    boundary = math.lcm(*tokens_per_block)
    return first // boundary * boundary
