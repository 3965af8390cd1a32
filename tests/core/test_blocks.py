"""Block-id arithmetic by itself."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload.core.blocks import expand_block_ids
from kvoffload.core.errors import SpecError


def slow(ids: list[int], factor: int, skip: int) -> list[int]:
    return [block * factor + sub for block in ids for sub in range(factor)][skip:]


def test_each_id_becomes_consecutive_sub_block_ids_S3_3() -> None:
    expanded = expand_block_ids([0, 1, 3], 4)
    assert expanded.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15]


def test_expansion_agrees_with_a_loop_S3_3(rng: np.random.Generator) -> None:
    for factor in range(1, 9):
        for skip in range(factor):
            ids = rng.integers(0, 1 << 20, size=rng.integers(1, 9)).tolist()
            assert expand_block_ids(ids, factor, None, skip).tolist() == slow(ids, factor, skip)


def test_expansion_writes_into_the_output_it_is_given() -> None:
    output = np.empty(7, dtype=np.int64)
    assert expand_block_ids([5, 2], 4, output, 1) is output
    assert output.tolist() == slow([5, 2], 4, 1)


def test_expansion_is_64_bit_whatever_comes_in_C06() -> None:
    ids = np.array([2**31 - 1], dtype=np.int32)
    assert expand_block_ids(ids, 16).tolist() == slow([2**31 - 1], 16, 0)


@pytest.mark.parametrize(
    ("ids", "factor", "output", "skip"),
    [
        ([1], 0, None, 0),
        ([1], 4, None, 4),
        ([1], 4, None, -1),
        ([], 4, None, 1),
        ([1], 4, np.empty(3, dtype=np.int64), 0),
        ([1], 4, np.empty(4, dtype=np.int32), 0),
        ([1.5], 4, None, 0),
        ([[1]], 4, None, 0),
        ([True], 4, None, 0),
        ([2**63], 4, None, 0),
    ],
)
def test_wrong_arguments_are_refused(ids: object, factor: int, output: object, skip: int) -> None:
    with pytest.raises(SpecError):
        expand_block_ids(ids, factor, output, skip)  # type: ignore[arg-type]
