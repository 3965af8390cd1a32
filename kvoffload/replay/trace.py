"""Request traces in the JSONL format of the Mooncake project.

One JSON object a line: ``timestamp`` (milliseconds) and ``hash_ids``, one integer per 512-token
block of the prompt; equal ids are reusable prefixes. Other fields are ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvoffload.core.errors import ConfigurationError

TOKENS_PER_BLOCK = 512


@dataclass(frozen=True)
class Request:
    """One prompt.

    Attributes:
        timestamp: arrival, in milliseconds.
        hash_ids: its blocks, head first, each once. A partial last block counts as whole.
        source: where it comes from, for messages.
    """

    timestamp: float
    hash_ids: Sequence[int]
    source: str


def read_trace(path: Path, limit: int | None = None) -> list[Request]:
    """The requests of a trace in the order of their timestamps.

    Args:
        path: of the JSONL file.
        limit: at most so many, the earliest.

    Raises:
        ConfigurationError: the file cannot be read, has no request, or has a malformed line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError(f"--trace {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"--trace {path}: not a text file: {error}") from error
    requests = [
        _parse(line, f"{path}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not requests:
        raise ConfigurationError(f"--trace {path}: the trace holds no request")
    requests.sort(key=lambda request: request.timestamp)
    return requests[:limit]


def _parse(line: str, source: str) -> Request:
    def malformed(why: str) -> ConfigurationError:
        return ConfigurationError(f"--trace {source}: malformed line: {why}")

    try:
        fields = json.loads(line)
    except ValueError as error:
        raise malformed(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise malformed("not a JSON object")
    timestamp, ids = fields.get("timestamp"), fields.get("hash_ids")
    if (
        isinstance(timestamp, bool)
        or not isinstance(timestamp, int | float)
        or not math.isfinite(timestamp)
    ):
        raise malformed(f"'timestamp' must be a number of milliseconds, not {timestamp!r}")
    if not isinstance(ids, list) or not ids:
        raise malformed("'hash_ids' must be a list of block ids, at least one")
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
            raise malformed(f"'hash_ids' must hold integers from 0 to 2**63 - 1, not {value!r}")
    if len(set(ids)) < len(ids):
        raise malformed("'hash_ids' names a block twice")
    return Request(float(timestamp), ids, source)
