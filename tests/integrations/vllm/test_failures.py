"""A failure is known by group and position, never by a block id alone."""

from __future__ import annotations

from kvoffload.integrations.vllm.chunks import HostChunks
from kvoffload.integrations.vllm.failures import LoadFailure, failed_keys, usable_prefix
from kvoffload.scheduler.manager import KeyState
from kvoffload.scheduler.policy import LRUPolicy

TOKENS = (16, 8)
"""Tokens of one block in either group."""


def test_a_block_that_fails_in_one_group_blames_no_other_H18() -> None:
    """Group 0 uses the ids 11 and 12 for 32 tokens, group 1 the ids 9 to 12 for the same."""
    keys = [
        [b"%d" % place + group.to_bytes(4, "big") for place in range(32 // TOKENS[group])]
        for group in (0, 1)
    ]
    chunks = HostChunks(6, [0, 1], LRUPolicy)
    everything = keys[0] + keys[1]
    assert chunks.prepare_store(everything, "a") is not None
    chunks.complete_store(everything, "a")
    chunks.prepare_load(everything, "b")

    # Id 11 of group 1 is its block at position 2: tokens 16 to 23.
    failure = LoadFailure(7, group=1, first_position=2, block_ids=(11,), reason="")
    bad = failed_keys([failure], keys, blocks_per_chunk=1)
    assert bad == [keys[1][2]]
    assert usable_prefix([failure], TOKENS) == 16

    chunks.distrust(bad, "b", is_store=False)
    chunks.complete_load(everything, "b")
    assert [chunks.state(key) for key in keys[0]] == [KeyState.READY] * 2
    assert [chunks.state(key) is KeyState.READY for key in keys[1]] == [True, True, False, True]


def test_the_usable_prefix_ends_where_all_groups_have_a_block_boundary() -> None:
    at_1 = [LoadFailure(1, 1, position, (3,), "") for position in range(5)]
    assert [usable_prefix([failure], TOKENS) for failure in at_1] == [0, 0, 16, 16, 32]
    at_0 = LoadFailure(1, 0, 1, (3,), "")
    assert usable_prefix([at_0, at_1[4]], TOKENS) == 16


def test_a_group_that_keeps_only_the_end_of_a_prefix_leaves_nothing_usable() -> None:
    failure = LoadFailure(1, 0, 5, (3,), "")
    assert usable_prefix([failure], TOKENS, needs_whole=[1]) == 0


def test_a_block_that_fails_takes_its_whole_chunk() -> None:
    keys = [[b"a", b"b", b"c"]]
    failure = LoadFailure(1, 0, 3, (8, 9, 10), "")
    assert failed_keys([failure], keys, blocks_per_chunk=4) == [b"a", b"b"]
    assert failed_keys([LoadFailure(1, 0, 3, (), "")], keys, blocks_per_chunk=4) == []
