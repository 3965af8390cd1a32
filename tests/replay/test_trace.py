"""Reading traces, and the built-in workload."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from kvoffload.core.errors import ConfigurationError
from kvoffload.replay.trace import read_trace
from kvoffload.replay.workload import chat


def test_requests_come_in_the_order_of_their_timestamps(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        '{"timestamp": 5, "hash_ids": [1, 2], "input_length": 700}\n\n'
        '{"timestamp": 2.5, "hash_ids": [3]}\n'
        '{"timestamp": 5, "hash_ids": [4]}\n'
    )
    assert [list(r.hash_ids) for r in read_trace(trace)] == [[3], [1, 2], [4]]
    assert [list(r.hash_ids) for r in read_trace(trace, limit=1)] == [[3]]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nonsense", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"hash_ids": [1]}', "'timestamp'"),
        ('{"timestamp": true, "hash_ids": [1]}', "'timestamp'"),
        ('{"timestamp": 0}', "'hash_ids'"),
        ('{"timestamp": 0, "hash_ids": []}', "at least one"),
        ('{"timestamp": 0, "hash_ids": ["a"]}', "'a'"),
        ('{"timestamp": 0, "hash_ids": [-1]}', "-1"),
        ('{"timestamp": 0, "hash_ids": [9223372036854775808]}', "9223372036854775808"),
        ('{"timestamp": 0, "hash_ids": [1, 1]}', "twice"),
        ('{"timestamp": NaN, "hash_ids": [1]}', "'timestamp'"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(ConfigurationError, match=rf"--trace .*t\.jsonl:2: malformed.*{says}"):
        read_trace(trace)


def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path, says in ((tmp_path / "missing", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigurationError, match=rf"--trace .*{says}"):
            read_trace(path)
    empty = tmp_path / "empty"
    empty.write_text("\n\n")
    with pytest.raises(ConfigurationError, match="holds no request"):
        read_trace(empty)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="not a text file"):
        read_trace(binary)


def test_the_chat_workload_is_the_same_for_the_same_seed() -> None:
    assert chat(3, 200) == chat(3, 200)
    assert chat(3, 200) != chat(4, 200)
    assert len(chat(3, 200)) == 200


def test_a_turn_begins_with_the_full_blocks_of_the_turn_before() -> None:
    by_session: dict[str, list[list[int]]] = {}
    for request in chat(0, 400):
        by_session.setdefault(request.source.split(",")[0], []).append(list(request.hash_ids))
        assert len(set(request.hash_ids)) == len(request.hash_ids)
    assert max(len(turns) for turns in by_session.values()) > 3
    for turns in by_session.values():
        for before, after in pairwise(turns):
            assert after[: len(before) - 1] == before[:-1]
