"""What a user can set in ``kv_connector_extra_config``, checked before anything is built on it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvoffload.core.backend import HostOrder
from kvoffload.core.errors import BackendNotFoundError, ConfigurationError
from kvoffload.core.sizes import parse_bytes, shown
from kvoffload.plugins.registry import BackendRegistry
from kvoffload.scheduler.policy import CachePolicy, LRUPolicy

POLICIES: dict[str, Callable[[], CachePolicy]] = {"lru": LRUPolicy}
"""Orders of eviction, by the name that a user writes."""

TRACKED_KEYS = 64_000
"""How many keys ``store_threshold`` counts, if nothing else is said: as many as vLLM does."""

Reader = Callable[[str, Any], Any]


@dataclass(frozen=True)
class Options:
    """All options, with what holds where nothing was said.

    Attributes:
        cpu_bytes_to_use: host memory of all workers together, in bytes.
        backend: by name; None lets it be found.
        eviction_policy: a name in :data:`POLICIES`.
        blocks_per_chunk, block_size: how much one chunk holds, in blocks or in tokens; vLLM reads
            them, and only one of them can be given.
        store_threshold: a chunk is stored when it has been offered so many times.
        max_tracker_size: keys whose offers are counted.
        offload_prompt_only: blocks of generated tokens are not stored.
        self_describing_kv_events: vLLM adds tokens and hashes to its events.
        job_deadline: seconds after which a transfer counts as stalled; None waits for ever.
        host_order: how chunks lie in host memory; None is what the backend prefers.
        numa_node: where host memory belongs; None is wherever suits the backend.
        spec_name, spec_module_path: how vLLM finds this package.
    """

    cpu_bytes_to_use: int
    backend: str | None = None
    eviction_policy: str = "lru"
    blocks_per_chunk: int | None = None
    block_size: int | None = None
    store_threshold: int = 0
    max_tracker_size: int = TRACKED_KEYS
    offload_prompt_only: bool = True
    self_describing_kv_events: bool = False
    job_deadline: float | None = None
    host_order: HostOrder | None = None
    numa_node: int | None = None
    spec_name: str | None = None
    spec_module_path: str | None = None

    @classmethod
    def read(cls, config: Mapping[str, Any], also: Mapping[str, Reader] | None = None) -> Options:
        """Check every option.

        Args:
            config: ``kv_connector_extra_config``.
            also: options that one version of vLLM reads itself, and how to check each.

        Raises:
            ConfigurationError: one is unknown, missing, malformed or contradicts another.
            BackendNotFoundError: the backend is not installed.
        """
        also = also or {}
        known = [field.name for field in fields(cls)] + list(also)
        for name in config:
            if name not in known:
                raise ConfigurationError(_unknown(name, known))
        for name, check in also.items():
            if config.get(name) is not None:
                check(name, config[name])
        if config.get("cpu_bytes_to_use") is None:
            raise ConfigurationError(
                "cpu_bytes_to_use is missing in kv_connector_extra_config: say how much host "
                "memory to use, as a number of bytes or like '4GiB'"
            )
        options = cls(
            **{
                name: _READERS[name](name, value)
                for name, value in config.items()
                if name not in also and value is not None
            }
        )
        if options.blocks_per_chunk is not None and options.block_size is not None:
            raise ConfigurationError(
                f"blocks_per_chunk ({options.blocks_per_chunk}) and block_size "
                f"({options.block_size}) both say how much a chunk holds; give one of them"
            )
        return options

    @property
    def policy(self) -> Callable[[], CachePolicy]:
        """What makes the order of eviction."""
        return POLICIES[self.eviction_policy]


def _unknown(name: object, known: list[str]) -> str:
    close = difflib.get_close_matches(str(name), known, 1)
    return (
        f"unknown option {shown(name)} in kv_connector_extra_config"
        + (f" (did you mean {close[0]!r}?)" if close else "")
        + f"; the known ones are {', '.join(sorted(known))}"
    )


# ------------------------------------------------------------------------------------- readers
def whole(least: int) -> Reader:
    """A whole number of at least ``least``."""

    def read(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigurationError(
                f"{name} must be a whole number of at least {least}, not {shown(value)}"
            )
        return value

    return read


def _switch(name: str, value: Any) -> bool:
    # The text "false" would be true.
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} must be true or false, not {shown(value)}")
    return value


def _seconds(name: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise ConfigurationError(f"{name} must be a positive number of seconds, not {shown(value)}")
    return float(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{name} must be a name, not {shown(value)}")
    return value


def _one_of(name: str, value: Any, known: list[str]) -> str:
    if value not in known:
        raise ConfigurationError(f"{name} must be one of {', '.join(known)}, not {shown(value)}")
    return str(value)


def _policy(name: str, value: Any) -> str:
    return _one_of(name, value, sorted(POLICIES))


def _host_order(name: str, value: Any) -> HostOrder:
    return HostOrder(_one_of(name, value, [order.value for order in HostOrder]))


def _backend(name: str, value: Any) -> str:
    text = _text(name, value)
    installed = BackendRegistry().names()
    if text not in installed:
        raise BackendNotFoundError(
            f"{name}: no backend named {shown(value)} is installed; installed: "
            f"{', '.join(installed)}"
        )
    return text


_READERS: dict[str, Reader] = {
    "cpu_bytes_to_use": lambda name, value: parse_bytes(value, name),
    "backend": _backend,
    "eviction_policy": _policy,
    "blocks_per_chunk": whole(1),
    "block_size": whole(1),
    "store_threshold": whole(0),
    "max_tracker_size": whole(1),
    "offload_prompt_only": _switch,
    "self_describing_kv_events": _switch,
    "job_deadline": _seconds,
    "host_order": _host_order,
    "numa_node": whole(0),
    "spec_name": _text,
    "spec_module_path": _text,
}
