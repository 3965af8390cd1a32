"""``kvoffload bench``."""

from __future__ import annotations

import json
from dataclasses import asdict

import rich
from rich.table import Table

from kvoffload.bench import plan


def run_plan(*, layers: int, blocks: int, seed: int, as_json: bool) -> int:
    """Print what planning costs."""
    rows = plan.run(layers=layers, blocks=blocks, seed=seed)
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}, indent=2))
        return 0
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
    rich.print(table)
    return 0
