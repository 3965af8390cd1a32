"""Request traces in the JSONL format of the Mooncake project.

One JSON object a line: ``timestamp`` (milliseconds) and ``hash_ids``, one integer per 512-token
block of the prompt; equal ids are reusable prefixes. Other fields are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvoffload.core.errors import ConfigurationError
from kvoffload.core.sizes import shortened, shown

TOKENS_PER_BLOCK = 512
_TOO_LARGE = 1 << 63
_BLANK = " \t\r\n"  # of JSON; what else Unicode calls blank is not left out


@dataclass(frozen=True)
class Request:
    """One prompt.

    Attributes:
        timestamp: arrival, in milliseconds; an integer where the trace has one, so that requests
            are compared exactly.
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
        # A line ends with a line feed and with nothing else that Unicode counts as one.
        with path.open(encoding="utf-8-sig", newline="\n") as lines:
            requests = [
                _parse(line, f"{path}:{number}")
                for number, line in enumerate(lines, start=1)
                if line.strip(_BLANK)
            ]
    except OSError as error:
        raise ConfigurationError(
            f"--trace {shortened(str(path))}: {error.strerror or error}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"--trace {path}: not a text file: {error}") from error
    if not requests:
        raise ConfigurationError(f"--trace {path}: the trace holds no request")
    requests.sort(key=lambda request: request.timestamp)
    return requests[:limit]


def _parse(line: str, source: str) -> Request:
    def malformed(why: str) -> ConfigurationError:
        return ConfigurationError(f"--trace {source}: malformed line: {why}")

    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise malformed(f"not JSON: {error}") from error
    except ValueError as error:
        raise malformed("a number has too many digits") from error
    except RecursionError as error:
        raise malformed("nested too deeply") from error
    if not isinstance(fields, dict):
        raise malformed("not a JSON object")
    timestamp, ids = fields.get("timestamp"), fields.get("hash_ids")
    if (
        isinstance(timestamp, bool)
        or not isinstance(timestamp, int | float)
        or not -_TOO_LARGE < timestamp < _TOO_LARGE  # nor not-a-number
    ):
        raise malformed(f"'timestamp' must be a number of milliseconds, not {shown(timestamp)}")
    if not isinstance(ids, list) or not ids:
        raise malformed("'hash_ids' must be a list of block ids, at least one")
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _TOO_LARGE:
            raise malformed(
                f"'hash_ids' must hold integers from 0 to 2**63 - 1, not {shown(value)}"
            )
    if len(set(ids)) < len(ids):
        raise malformed("'hash_ids' names a block twice")
    return Request(timestamp, ids, source)
