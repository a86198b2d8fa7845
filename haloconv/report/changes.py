"""What ``haloconv.accelerate`` did, as a table. It is loaded when it is shown: layers run without it."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group

_HEADS = ("layer", "of", "state", "family, or why not")
_WIDTH, _WIDEST = 160, (44, 60, 24)  # characters of a line of the text, and of its columns but the last


def change_table(summary: str, lines: Iterable[tuple[str, ...]]) -> Group:
    """The summary, and below it a row a layer: name, extents, state, reason. rich asks for it when it prints."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for head in _HEADS:
        table.add_column(head, overflow="fold")
    for line in lines:
        table.add_row(*(Text(cell) for cell in line))
    return Group(Text(summary), *([table] if table.row_count else []))


def as_text(summary: str, lines: Iterable[tuple[str, ...]]) -> str:
    """``summary`` and the table as lines of text, at most 160 characters each, without any other package."""
    rows = list(lines)
    if not rows:
        return summary
    columns = list(zip(_HEADS, *rows, strict=True))[:-1]
    widths = [min(max(map(len, column)), most) for column, most in zip(columns, _WIDEST, strict=True)]
    widths.append(_WIDTH - sum(widths) - len(widths))
    table = [_HEADS, tuple("─" * len(head) for head in _HEADS), *rows]
    return "\n".join([summary, "", *(line for row in table for line in _folded(row, widths))])


def _folded(row: tuple[str, ...], widths: list[int]) -> Iterator[str]:
    """A row of cells as one line or, where a cell is longer than its column, as several."""
    cells = [textwrap.wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
    for line in itertools.zip_longest(*cells, fillvalue=""):
        yield " ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
