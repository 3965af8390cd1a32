"""Reading traces, and the built-in workload."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvoffload.core.errors import ConfigurationError
from kvoffload.replay.trace import Request, read_trace
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
        ('{"timestamp": -Infinity, "hash_ids": [1]}', "'timestamp'"),
        ('{"timestamp": 1e300, "hash_ids": [1]}', "'timestamp'"),
        ('{"timestamp": 9223372036854775808, "hash_ids": [1]}', "'timestamp'"),
        ('{"timestamp": 0, "hash_ids": [1]} \r {"timestamp": 0, "hash_ids": [2]}', "not JSON"),
        ("\u2028", "not JSON"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(ConfigurationError, match=rf"--trace .*t\.jsonl:2: malformed.*{says}"):
        read_trace(trace)


@pytest.mark.parametrize(
    "line",
    [
        '{"timestamp": %s, "hash_ids": [1]}' % ("9" * 400),
        '{"timestamp": %s, "hash_ids": [1]}' % ("9" * 5000),
        '{"timestamp": 0, "hash_ids": [%s]}' % ("9" * 400),
        '{"timestamp": 0, "hash_ids": [%s]}' % ("9" * 5000),
        '{"timestamp": 0, "hash_ids": ["%s"]}' % ("9" * 5000),
        '{"timestamp": "%s", "hash_ids": [1]}' % ("9" * 5000),
        '{"timestamp": 0, "hash_ids": ' + "[" * 100_000 + "]" * 100_000 + "}",
        "[" * 100_000,
    ],
    ids=["t 400", "t 5000", "id 400", "id 5000", "text id", "text t", "deep", "deep and open"],
)
def test_an_absurd_line_is_named_and_not_repeated(tmp_path: Path, line: str) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(line)
    with pytest.raises(ConfigurationError, match=r"t\.jsonl:1: malformed line: ") as caught:
        read_trace(trace)
    said = str(caught.value).replace(str(trace), "")
    assert len(said) < 250


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    line = '{"timestamp": 0, "hash_ids": [1], "note": "\u2028\u0085\x7f"}'
    trace.write_bytes(f"{line}\r\n\r\n{line}\n \t\n{line}".encode())
    assert [r.source for r in read_trace(trace)] == [f"{trace}:{n}" for n in (1, 3, 5)]


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_bytes(b'\xef\xbb\xbf{"timestamp": 0, "hash_ids": [1]}\n')
    assert len(read_trace(trace)) == 1


def test_timestamps_are_compared_exactly(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    stamps = [2**53 + 1, 2**53, 2**62 + 1, 2**62]
    trace.write_text(
        "\n".join(f'{{"timestamp": {t}, "hash_ids": [{n}]}}' for n, t in enumerate(stamps))
    )
    assert [r.timestamp for r in read_trace(trace)] == sorted(stamps)


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


def test_fewer_requests_are_the_beginning_of_more() -> None:
    longest = chat(3, 3000)
    for requests in (1, 2, 17, 400, 2999):
        assert chat(3, requests) == longest[:requests]


def test_the_work_grows_as_the_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    def count(*fields: Any) -> Request:
        nonlocal made
        made += 1
        return Request(*fields)

    monkeypatch.setattr("kvoffload.replay.workload.Request", count)
    # Those of sessions that have begun and not ended come on top, however many are wanted.
    for requests in (1, 1000, 10_000):
        made = 0
        chat(0, requests)
        assert requests <= made <= requests + 4000


def test_more_requests_than_memory_holds_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--limit 1000001: .*1,000,000"):
        chat(0, 1_000_001)


def test_a_turn_begins_with_the_full_blocks_of_the_turn_before() -> None:
    by_session: dict[str, list[list[int]]] = {}
    for request in chat(0, 400):
        by_session.setdefault(request.source.split(",")[0], []).append(list(request.hash_ids))
        assert len(set(request.hash_ids)) == len(request.hash_ids)
    assert max(len(turns) for turns in by_session.values()) > 3
    for turns in by_session.values():
        for before, after in pairwise(turns):
            assert after[: len(before) - 1] == before[:-1]
