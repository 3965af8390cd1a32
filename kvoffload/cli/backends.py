"""``kvoffload backends``."""

from __future__ import annotations

import json
from dataclasses import asdict

import rich
from rich.markup import escape
from rich.table import Table

from kvoffload.plugins.registry import ENVIRONMENT, BackendRegistry


def run(as_json: bool) -> int:
    """Print the report of every backend."""
    reports = BackendRegistry().reports()
    if as_json:
        print(json.dumps({"backends": [asdict(report) for report in reports]}, indent=2))
        return 0
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for report in reports:
        table.add_row(
            f"[bold]{escape(report.name)}[/bold]",
            "broken" if report.error else "available" if report.available else "not available",
            escape(report.error or report.reason or ""),
        )
        claimed = ", ".join(
            name if value is True else f"{name}: {value}"
            for name, value in (report.capabilities or {}).items()
            if value not in (False, None)
        )
        table.add_row("", "", f"[dim]{escape(report.distribution)}; {escape(claimed)}[/dim]")
    rich.print(table)
    print(
        f"Chosen: the one named by argument or {ENVIRONMENT}, else the only available "
        "accelerator, else cpu."
    )
    return 0
