"""What ``kvoffload bench gpu`` says, on a terminal and in a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from kvoffload.bench.gpu import GpuReport
from kvoffload.bench.machine import Machine
from kvoffload.cli.measuring import ON_FAKE
from kvoffload.cli.output import plain
from kvoffload.cli.tables import Section
from kvoffload.core.sizes import format_bytes


def markdown(lines: Sequence[str], machine: Machine, command: str, parts: Sequence[Section]) -> str:
    """A file for docs/measurements.

    Args:
        lines: as :func:`heading` makes them.
        machine: what it was measured with.
        command: how.
        parts: as :func:`sections` makes them.
    """
    facts = {name.replace("_", " "): value for name, value in asdict(machine).items()}
    top = [f"# {lines[0]}", "", *(f"{line}\n" for line in lines[1:])]
    top += [f"- {name}: {plain(str(value))}" for name, value in facts.items()]
    top += [f"- command: `{plain(command)}`", ""]
    return "\n".join([*top, *(part.as_markdown() for part in parts)]).rstrip("\n") + "\n"


def heading(
    name: str, device: str, machine: Machine, report: GpuReport, *, fake: bool
) -> list[str]:
    """A title, and whole lines for below it.

    Args:
        name: of the backend.
        device: as torch calls it.
    """
    lines = [plain(f"{name} on {machine.card} ({device})")]
    if fake:
        lines.append(ON_FAKE)
    pinned = "" if report.pinned else " Host memory of the blocks could not be pinned."
    lines.append(
        f"Ratios are to one copy of {format_bytes(report.one_copy_bytes)} between the device and "
        f"pinned memory, measured in turn.{pinned}"
    )
    return lines


def sections(report: GpuReport) -> list[Section]:
    """Copies, submits, and products beside copies."""
    copies = Section(
        "Copies of blocks: several jobs in flight, medians in GB/s",
        ["page", "ids", "way", "direction", "blocks", "GB/s", "one copy", "ratio"],
        4,
        [
            [
                format_bytes(row.page_bytes),
                row.ids,
                row.way or "-",
                row.direction,
                f"{row.blocks:,}",
                f"{row.gbps:.2f}",
                f"{row.one_copy_gbps:.2f}",
                f"{row.ratio:.2f}",
            ]
            for row in report.rows
        ],
    )
    notes = {row.page_bytes: row.note for row in report.rows if row.note is not None}
    copies.notes = [f"{format_bytes(page)}: {note}" for page, note in notes.items()]
    submits = Section(
        "A submit without the driver's call: medians in µs of the host",
        ["tensors", "blocks", "copies", "submit", "per 1,000 copies"],
        0,
        [
            [
                str(row.tensors),
                f"{row.blocks:,}",
                f"{row.descriptors:,}",
                f"{row.submit_us:.0f}",
                f"{row.us_per_1000:.1f}",
            ]
            for row in report.submits
        ],
    )
    products = Section(
        "bf16 matrix products beside copies: medians in ms",
        ["way", "direction", "alone", "beside copies", "ratio", "lost"],
        2,
        [
            [
                row.way or "-",
                row.direction,
                f"{row.alone_ms:.2f}",
                f"{row.beside_ms:.2f}",
                f"{row.ratio:.3f}",
                f"{1 - row.ratio:.1%}",
            ]
            for row in report.products
        ],
    )
    if report.products_note is not None:
        products.notes.append(f"Not measured: {report.products_note}")
    return [copies, submits, products]
