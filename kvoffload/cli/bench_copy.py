"""``kvoffload bench copy``."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table

from kvoffload.bench import copy
from kvoffload.cli import EXIT_FAILED, EXIT_OK
from kvoffload.cli.choose import choose_on
from kvoffload.cli.measuring import check_blocks, measuring, named, parse_pages
from kvoffload.cli.output import print_json, say, show, stdout_to_stderr
from kvoffload.core.errors import TransferError
from kvoffload.core.sizes import format_bytes


def run(
    *,
    backend_name: str | None,
    on: str | None,
    pages: str,
    blocks: int,
    rounds: int,
    seed: int,
    as_json: bool,
) -> int:
    """Print how fast blocks are copied. Returns the exit code."""
    sizes = parse_pages(pages)
    check_blocks(blocks)
    with stdout_to_stderr():
        name, variant, backend = choose_on(backend_name, on)
    try:
        with measuring(backend, "measuring") as (rig, step):
            rows = copy.run(
                backend, rig, pages=sizes, blocks=blocks, rounds=rounds, seed=seed, step=step
            )
    except TransferError as error:
        say(f"error: {error}")
        return EXIT_FAILED
    if as_json:
        print_json(
            {
                "backend": name,
                "device": str(backend.device),
                "fake": variant,
                "rows": [asdict(row) for row in rows],
            }
        )
        return EXIT_OK
    title = named(
        f"{name} on {backend.device}: random blocks, cold, medians in GB/s; ratio: to one "
        "contiguous copy",
        fake=variant is not None,
    )
    table = Table(box=None)
    for heading in ("page", "direction", "blocks", "GB/s", "one copy", "threads", "ratio"):
        table.add_column(heading, justify="left" if heading == "direction" else "right")
    for row in rows:
        table.add_row(
            format_bytes(row.page_bytes),
            row.direction,
            f"{row.blocks:,}",
            f"{row.gbps:.2f}",
            f"{row.memcpy_gbps:.2f}",
            str(row.threads),
            f"{row.ratio:.2f}",
        )
    notes = {row.page_bytes: row.note for row in rows if row.note is not None}
    show(title, table, *(f"{format_bytes(page)}: {note}" for page, note in notes.items()))
    return EXIT_OK
