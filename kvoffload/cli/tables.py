"""A table that is shown on a terminal, or written into a Markdown file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table
from rich.text import Text


@dataclass
class Section:
    """A title, a table below it, and lines below that.

    Attributes:
        title: one line.
        headings: of the columns.
        words: how many of the columns, from the left, hold words; the others hold numbers.
        rows: one string for each column.
        notes: whole lines.
    """

    title: str
    headings: Sequence[str]
    words: int
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def for_terminal(self) -> list[Table | str]:
        """What to show."""
        table = Table(box=None)
        for column, heading in enumerate(self.headings):
            table.add_column(heading, justify="left" if column < self.words else "right")
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in row))
        return [self.title, *([table] if self.rows else []), *self.notes, ""]

    def as_markdown(self) -> str:
        """The section with a heading of the second level."""
        rules = ["---" if column < self.words else "---:" for column in range(len(self.headings))]
        lines = [f"## {self.title}", ""]
        if self.rows:
            lines += [_line(row) for row in (self.headings, rules, *self.rows)] + [""]
        for note in self.notes:
            lines += [note, ""]
        return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    escaped = (cell.replace("\\", "\\\\").replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"
