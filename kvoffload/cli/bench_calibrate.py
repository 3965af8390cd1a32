"""``kvoffload bench calibrate``."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table

from kvoffload.backends.calibration import save
from kvoffload.bench import calibrate
from kvoffload.cli import EXIT_FAILED, EXIT_OK
from kvoffload.cli.choose import choose
from kvoffload.cli.measuring import measuring
from kvoffload.cli.output import plain, print_json, say, show, stdout_to_stderr
from kvoffload.core.errors import ConfigurationError, TransferError
from kvoffload.core.sizes import format_bytes


def run(*, backend_name: str | None, as_json: bool) -> int:
    """Measure both ways of copying, and write down which is faster where."""
    with stdout_to_stderr():
        name, backend = choose(backend_name)
        ways = calibrate.two_ways(backend, name)
    try:
        with measuring(backend, "calibrating") as (rig, step):
            device, driver = ways.calibrated_for()
            rows = calibrate.run(backend, rig, ways=ways, step=step)
    except TransferError as error:
        say(f"error: {error}")
        return EXIT_FAILED
    found = calibrate.crossover(rows)
    try:
        path = save(device, driver, found)
    except OSError as error:
        raise ConfigurationError(
            f"the calibration cannot be written: {error}; XDG_CACHE_HOME names another folder"
        ) from error
    if as_json:
        print_json(
            {
                "backend": name,
                "device": device,
                "driver": driver,
                "crossover": found,
                "file": str(path),
                "rows": [asdict(row) for row in rows],
            }
        )
        return EXIT_OK
    title = plain(f"{device}, driver {driver}: loads of random blocks, medians in GB/s")
    table = Table(box=None)
    for heading in ("page", "blocks", "DMA", "kernel", "kernel to DMA"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            format_bytes(row.page_bytes),
            f"{row.blocks:,}",
            f"{row.dma_gbps:.2f}",
            f"{row.kernel_gbps:.2f}",
            f"{row.ratio:.2f}",
        )
    verdict = (
        "DMA is faster for every page."
        if found is None
        else f"The kernel is faster for pages of up to {format_bytes(found)}."
    )
    show(title, table, "", f"{verdict} Written to {plain(str(path))}.")
    return EXIT_OK
