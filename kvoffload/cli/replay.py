"""``kvoffload replay``."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table
from rich.text import Text

from kvoffload.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from kvoffload.cli.choose import choose
from kvoffload.cli.interrupt import current
from kvoffload.cli.output import plain, print_json, say, show, stdout_to_stderr
from kvoffload.cli.progress import progress_bar
from kvoffload.core.backend import Backend
from kvoffload.core.errors import CapacityError, ConfigurationError
from kvoffload.core.sizes import format_bytes
from kvoffload.replay.replay import Replay, Report, Settings, check
from kvoffload.replay.trace import Request, read_trace
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
    with current().at_once():
        if trace is not None:
            requests = read_trace(trace, limit)
        else:
            requests = chat(seed) if limit is None else chat(seed, limit)
        check(requests, settings)
    # A backend that prints must not become a part of the report.
    with stdout_to_stderr():
        report = _replay(requests, settings, *choose(backend_name))
    if report.interrupted:
        done = f" after {report.requests} of {len(requests)} requests" if report.requests else ""
        say(f"interrupted{done}")
    if as_json:
        print_json(asdict(report))
    elif report.requests:
        _summarise(report, settings, len(requests), trace, seed)
    if report.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_OK if report.ok else EXIT_FAILED


def _replay(requests: Sequence[Request], settings: Settings, name: str, backend: Backend) -> Report:
    """One run, with all that it needs; every thread is joined when this returns or raises."""
    interrupt = current()
    interrupt.check()
    stack = contextlib.ExitStack()
    try:
        stack.callback(backend.close)
        rig = stack.enter_context(rig_for(backend))
        try:
            replay = Replay(backend, name, rig, settings)
        except CapacityError as error:
            raise ConfigurationError(
                f"{error} (--host-bytes {settings.host_bytes}, --device-blocks "
                f"{settings.device_blocks}, --layers {settings.layers}, --page-bytes "
                f"{settings.page_bytes}, --block-size-factor {settings.block_size_factor})"
            ) from error
        stack.callback(replay.close)
        try:
            with progress_bar("replaying", len(requests)) as bar:
                replay.run(requests, progress=bar, stop=interrupt.is_set)
        except KeyboardInterrupt:
            replay.report.interrupted = True
    finally:
        # What is left is short, and leaves a thread behind if it is torn.
        interrupt.calm()
        stack.close()
    # Also one that came when all was done: nobody was told yet.
    replay.report.interrupted |= interrupt.is_set()
    return replay.report


def _summarise(
    report: Report, settings: Settings, requests: int, trace: Path | None, seed: int
) -> None:
    blocks = max(report.blocks, 1)

    def share(part: int) -> str:
        return f"{part:,} ({part / blocks:.1%})"

    workload = plain(str(trace)) if trace else f"built-in chat, seed {seed}"
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
    }
    if report.refused_stores:
        rows["stores refused"] = (
            f"{report.refused_stores:,}, as all of host memory was in use just then; "
            "give more with --host-bytes"
        )
    rows |= {
        "corrupt blocks": f"{report.corrupt_blocks:,}",
        "failed transfers": f"{report.failed_jobs:,}",
        "time": f"{report.seconds:.1f} s",
    }
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, Text(value))
    without = report.device_hit_blocks / blocks
    if not report.ok:
        verdict = "FAILED: some bytes were wrong, or some transfers failed."
    elif not report.hit_rate:
        verdict = (
            "No block was reused, with offloading or without: none came again while it was kept. "
            "Every byte was as it should be."
        )
    else:
        verdict = (
            f"Without offloading, {without:.1%} of the blocks would have been reused; with it "
            f"{report.hit_rate:.1%} were, and every byte was as it should be."
        )
    show(table, "", verdict)
