"""Block expansion as the runtime wants it: how many copies one call may hold."""

from __future__ import annotations

import os

from kvoffload.core.errors import ConfigurationError

MAX_BATCH = 8192
"""Copies of one call: more of them fault on some devices (seen by others on an MI350X)."""
ENVIRONMENT = "KVOFFLOAD_ROCM_MAX_BATCH"
"""The variable that sets another number."""


def max_batch() -> int:
    """Most copies of one call.

    Raises:
        ConfigurationError: the variable is no positive number.
    """
    text = os.environ.get(ENVIRONMENT)
    if not text:
        return MAX_BATCH
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ConfigurationError(
            f"{ENVIRONMENT}: {text!r} is not a whole number of at least 1; unset it for {MAX_BATCH}"
        )
    return int(text)
