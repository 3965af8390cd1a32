"""``kvoffload backends``."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from kvoffload.cli import EXIT_OK
from kvoffload.cli.interrupt import current
from kvoffload.cli.output import print_json, show, stdout_to_stderr
from kvoffload.plugins.registry import ENVIRONMENT, BackendRegistry


def run(as_json: bool) -> int:
    """Print the report of every backend."""
    current().check()
    with stdout_to_stderr():
        reports = BackendRegistry().reports()
    current().check()
    if as_json:
        print_json({"backends": [asdict(report) for report in reports]})
        return EXIT_OK
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for report in reports:
        table.add_row(
            Text(report.name, style="bold"),
            "broken" if report.error else "available" if report.available else "not available",
            Text(report.error or report.reason or ""),
        )
        claimed = ", ".join(
            name if value is True else f"{name}: {value}"
            for name, value in (report.capabilities or {}).items()
            if value not in (False, None)
        )
        known = f"{report.distribution}; {claimed}" if claimed else report.distribution
        table.add_row("", "", Text(known, style="dim"))
    show(
        table,
        f"Chosen: the one named by argument or {ENVIRONMENT}, else the only available "
        "accelerator, else cpu.",
    )
    return EXIT_OK
