"""``kvoffload bench``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from rich.table import Table

from kvoffload.bench import naive, ordering, plan
from kvoffload.cli import EXIT_FAILED, EXIT_OK
from kvoffload.cli.choose import choose_on
from kvoffload.cli.interrupt import current
from kvoffload.cli.output import print_json, say, show
from kvoffload.core.backend import Backend
from kvoffload.core.errors import ConfigurationError, TransferError
from kvoffload.core.sizes import format_bytes, parse_bytes
from kvoffload.plugins.registry import BackendRegistry

MOST_COPIES = 20_000_000
"""Of one plan: what a machine has memory and patience for."""


def run_plan(*, layers: int, blocks: int, seed: int, as_json: bool) -> int:
    """Print what planning costs."""
    _check_copies(layers, blocks)
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


def run_naive(
    name: str | None,
    *,
    on: str | None,
    pages: str,
    layers: int,
    blocks: int,
    seed: int,
    as_json: bool,
) -> int:
    """Print what staging and asynchrony are worth."""
    sizes = [parse_bytes(page, "--pages") for page in pages.split(",")]
    _check_copies(layers, blocks)
    make = _maker(name, on)
    with current().at_once():
        try:
            rows = naive.run(make, pages=sizes, layers=layers, blocks=blocks, seed=seed)
        except TransferError as error:
            say(f"error: {error}")
            return EXIT_FAILED
    if as_json:
        print_json({"rows": [asdict(row) for row in rows]})
        return EXIT_OK
    table = Table(
        title=f"{layers} layers × {blocks} blocks, median GB/s; ratio: kvoffload's to the naive "
        "path's",
        title_justify="left",
        box=None,
    )
    for heading in ("page", "direction", "kvoffload", "naive", "ratio"):
        table.add_column(heading, justify="left" if heading == "direction" else "right")
    for row in rows:
        table.add_row(
            format_bytes(row.page_bytes),
            row.direction,
            f"{row.ours / 1e9:.2f}",
            f"{row.naive / 1e9:.2f}",
            f"{row.ratio:.1f}",
        )
    show(table)
    return EXIT_OK


def _check_copies(layers: int, blocks: int) -> None:
    if layers * blocks > MOST_COPIES:
        raise ConfigurationError(
            f"--layers {layers}, --blocks {blocks}: {layers * blocks} copies are more than the "
            f"{MOST_COPIES:,} that are measured"
        )


def _maker(name: str | None, on: str | None) -> Callable[[], Backend]:
    """What makes the backend to measure, of an accelerator that torch knows."""
    chosen, variant, found = choose_on(name, on)
    if found.device is None or found.device.type == "cpu":
        raise ConfigurationError(
            f"{chosen} serves no accelerator that torch knows; there is nothing to compare"
        )
    if variant is not None:
        from kvoffload.testing.fake_device.make import maker

        return maker(chosen, variant)
    registry = BackendRegistry()
    return lambda: registry.create(chosen)
