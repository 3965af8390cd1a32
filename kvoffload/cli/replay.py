"""``kvoffload replay``."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import rich
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvoffload.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from kvoffload.core.errors import CapacityError, ConfigurationError
from kvoffload.core.sizes import format_bytes
from kvoffload.plugins.registry import BackendRegistry
from kvoffload.replay.replay import Replay, Report, Settings, check
from kvoffload.replay.trace import read_trace
from kvoffload.replay.workload import chat
from kvoffload.rig import rig_for


def run(
    settings: Settings,
    *,
    trace: Path | None,
    backend_name: str | None,
    limit: int | None,
    seed: int,
    as_json: bool,
) -> int:
    """Replay, and print what happened. Returns the exit code."""
    if trace is not None:
        requests = read_trace(trace, limit)
    else:
        requests = chat(seed) if limit is None else chat(seed, limit)
    check(requests, settings)
    registry = BackendRegistry()
    name, backend = registry.choose(backend_name)
    with rig_for(backend) as rig, _interruptible() as interrupted:
        try:
            replay = Replay(backend, name, rig, settings)
        except CapacityError as error:
            raise ConfigurationError(
                f"{error} (--host-bytes {settings.host_bytes}, --device-blocks "
                f"{settings.device_blocks}, --layers {settings.layers}, --page-bytes "
                f"{settings.page_bytes}, --block-size-factor {settings.block_size_factor})"
            ) from error
        try:
            with _progress(len(requests)) as advance:
                report = replay.run(requests, progress=advance, stop=interrupted.is_set)
        finally:
            replay.close()
    if as_json:
        print(json.dumps(asdict(report), indent=2))
    else:
        _summarise(report, settings, len(requests), trace, seed)
    if report.interrupted:
        print(
            f"kvoffload: interrupted after {report.requests} of {len(requests)} requests",
            file=sys.stderr,
        )
        return EXIT_INTERRUPTED
    return EXIT_OK if report.ok else EXIT_FAILED


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """The first Ctrl-C asks to stop after the request at hand; the second stops at once."""
    interrupted = threading.Event()

    def ask(_signal: int, _frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _progress(total: int):  # type: ignore[no-untyped-def]
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (
        TextColumn("replaying"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("replaying", total=total)
        yield lambda served: progress.update(task, completed=served)


def _summarise(
    report: Report, settings: Settings, requests: int, trace: Path | None, seed: int
) -> None:
    blocks = max(report.blocks, 1)

    def share(part: int) -> str:
        return f"{part:,} ({part / blocks:.1%})"

    workload = str(trace) if trace else f"built-in chat, seed {seed}"
    rows = {
        "workload": f"{report.requests:,} of {requests:,} requests, {workload}",
        "backend": report.backend,
        "device pool": f"{settings.device_blocks:,} blocks of {settings.layers} × "
        f"{format_bytes(settings.page_bytes)}",
        "host memory": f"{report.host_chunks:,} chunks; {format_bytes(report.host_bytes_resident)} "
        f"in use of the {format_bytes(settings.host_bytes)} allowed",
        "": "",
        "prompt blocks": f"{report.blocks:,}",
        "  found on the device": share(report.device_hit_blocks),
        "  loaded from host memory": share(report.host_hit_blocks),
        "  computed": share(report.computed_blocks),
        "moved to host memory": f"{report.stored_chunks:,} chunks, "
        f"{format_bytes(report.bytes_stored)}; {report.evicted_chunks:,} evicted later",
        "moved back": format_bytes(report.bytes_loaded),
        "corrupt blocks": f"{report.corrupt_blocks:,}",
        "failed transfers": f"{report.failed_jobs:,}",
        "time": f"{report.seconds:.1f} s",
    }
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, value)
    rich.print(table)
    without = report.device_hit_blocks / blocks
    print()
    if not report.ok:
        print("FAILED: some bytes were wrong, or some transfers failed.")
    else:
        print(
            f"Without offloading, {without:.1%} of the blocks would have been reused; with it "
            f"{report.hit_rate:.1%} were, and every byte was as it should be."
        )
