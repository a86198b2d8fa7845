"""What ``haloconv.accelerate`` did, as a table. It is loaded when it is shown: layers run without it."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

_WIDTH = 160  # columns of the table as a str
_HEADS = ("layer", "of", "state", "family, or why not")


def change_table(summary: str, lines: Iterable[tuple[str, ...]]) -> Group:
    """The summary, and below it a row a layer: name, extents, state, reason."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for head in _HEADS:
        table.add_column(head, overflow="fold")
    for line in lines:
        table.add_row(*(Text(cell) for cell in line))
    return Group(Text(summary), *([table] if table.row_count else []))


def as_text(table: Group) -> str:
    """The table as lines of text."""
    written = io.StringIO()
    Console(file=written, width=_WIDTH, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())
