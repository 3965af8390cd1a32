"""``kvoffload bench``."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table

from kvoffload.bench import ordering, plan
from kvoffload.cli import EXIT_OK
from kvoffload.cli.interrupt import current
from kvoffload.cli.output import print_json, show
from kvoffload.core.errors import ConfigurationError

MOST_COPIES = 20_000_000
"""Of one plan: what a machine has memory and patience for."""


def run_plan(*, layers: int, blocks: int, seed: int, as_json: bool) -> int:
    """Print what planning costs."""
    if layers * blocks > MOST_COPIES:
        raise ConfigurationError(
            f"--layers {layers}, --blocks {blocks}: {layers * blocks} copies are more than the "
            f"{MOST_COPIES:,} that are measured"
        )
    with current().at_once():
        rows = plan.run(layers=layers, blocks=blocks, seed=seed)
    if as_json:
        print_json({"rows": [asdict(row) for row in rows]})
        return EXIT_OK
    table = Table(
        title=f"{layers} layers × {blocks} blocks, medians in µs; "
        "ratio: lowering to numpy's own outer sums",
        title_justify="left",
        box=None,
    )
    for heading in ("ids", "host order", "factor", "copies", "plan", "lowering", "floor", "ratio"):
        table.add_column(heading, justify="left" if heading in ("ids", "host order") else "right")
    for row in rows:
        table.add_row(
            row.ids,
            row.order,
            str(row.factor),
            f"{row.descriptors:,}",
            *(f"{value:.0f}" for value in (row.plan_us, row.lowering_us, row.floor_us)),
            f"{row.ratio:.2f}",
        )
    show(table)
    return EXIT_OK


def run_ordering(*, blocks: int, seed: int, as_json: bool) -> int:
    """Print what ordering costs."""
    if blocks > ordering.POOL:
        raise ConfigurationError(f"--blocks {blocks}: at most {ordering.POOL:,} are measured")
    with current().at_once():
        rows = ordering.run(blocks=blocks, seed=seed)
    if as_json:
        print_json({"rows": [asdict(row) for row in rows]})
        return EXIT_OK
    table = Table(
        title=f"ordering a job of {blocks} blocks, medians in µs; ratio: to the first row",
        title_justify="left",
        box=None,
    )
    for heading in ("jobs finished before", "ordering", "ratio"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(f"{row.finished:,}", f"{row.ordering_us:.1f}", f"{row.ratio:.2f}")
    show(table)
    return EXIT_OK
