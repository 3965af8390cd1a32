"""Metrics: the names that vLLM's users know, and two for what failed.

They all begin with ``vllm:``, because vLLM unregisters exactly those when an engine is made anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from kvoffload.integrations.vllm.chunks import HostChunks
from kvoffload.integrations.vllm.options import Options

USAGE = "vllm:kv_offload_cpu_cache_usage_perc"
WRITE_USAGE = "vllm:kv_offload_cpu_cache_write_usage_perc"
READ_USAGE = "vllm:kv_offload_cpu_cache_read_usage_perc"
ALLOCATION = "vllm:kv_offload_cpu_allocation_size"
SKIPPED = "vllm:kv_offload_stores_skipped"
FAILED_LOADS = "vllm:kv_offload_load_failures"
FAILED_STORES = "vllm:kv_offload_store_failures"


@dataclass(frozen=True)
class Metric:
    """One metric, before a version of vLLM makes its own of it.

    Attributes:
        kind: what it does.
        text: for people.
        buckets: of a histogram.
    """

    kind: Literal["counter", "gauge", "histogram"]
    text: str
    buckets: tuple[float, ...] | None = None


def declared(options: Options) -> dict[str, Metric]:
    """All metrics that :func:`emit` may emit, by name."""
    metrics = {
        USAGE: Metric("gauge", "Part of the host chunks that transfers hold now, from 0 to 1."),
        WRITE_USAGE: Metric("gauge", "Part of the host chunks that stores are writing now."),
        READ_USAGE: Metric("gauge", "Part of the host chunks that loads are reading now."),
        ALLOCATION: Metric(
            "histogram",
            "Host chunks that one store asked for.",
            tuple(float(4**power) for power in range(10)),
        ),
        FAILED_LOADS: Metric("counter", "Loads that failed; what they carried was computed."),
        FAILED_STORES: Metric("counter", "Stores that failed; what they carried is not offloaded."),
    }
    if options.store_threshold >= 2:
        metrics[SKIPPED] = Metric(
            "counter", "Chunks not stored because they had not been offered often enough."
        )
    return metrics


class Stats(Protocol):
    """What vLLM collects metrics in."""

    def set_gauge(self, name: str, value: float, /) -> None:
        """This is what it is now."""

    def increase_counter(self, name: str, value: float, /) -> None:
        """So much more."""

    def observe_histogram(self, name: str, value: float, /) -> None:
        """This was seen once."""


def emit(chunks: HostChunks, options: Options, stats: Stats) -> None:
    """Put what happened since the last call into ``stats``."""
    usage, counts = chunks.usage(), chunks.take_counts()
    stats.set_gauge(USAGE, usage.reading + usage.writing)
    stats.set_gauge(READ_USAGE, usage.reading)
    stats.set_gauge(WRITE_USAGE, usage.writing)
    for size in counts.allocations:
        stats.observe_histogram(ALLOCATION, size)
    for name, count in ((FAILED_LOADS, counts.failed_loads), (FAILED_STORES, counts.failed_stores)):
        if count:
            stats.increase_counter(name, count)
    if options.store_threshold >= 2:
        stats.increase_counter(SKIPPED, counts.skipped)
