"""Rows as texts, and as one table for the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from haloconv.report.rows import Row

UNKNOWN = "–"
WIDEST = 1000

COLUMNS = (
    ("layer", "left"),
    ("direction", "left"),
    ("family", "left"),
    ("precision", "left"),
    ("layout", "left"),
    ("haloconv error", "right"),
    ("PyTorch error", "right"),
    ("PyTorch ms", "right"),
    ("better layout ms", "right"),
    ("haloconv ms", "right"),
    ("ratio", "right"),
    ("TFLOP/s", "right"),
    ("of the limit", "right"),
    ("check", "left"),
)
LAYOUT, RATIO, CHECK = 4, 10, 13


def cells(row: Row) -> list[str]:
    """The row as texts, in the order of ``COLUMNS``."""
    return [
        row.case,
        row.direction,
        row.family,
        row.precision,
        row.layout,
        f"{row.error:.1e}",
        f"{row.aten_error:.1e}",
        _ms(row.aten_ms),
        _ms(row.aten_best_ms),
        _ms(row.haloconv_ms),
        UNKNOWN if row.ratio is None else f"{row.ratio:.2f}x",
        UNKNOWN if row.tflops is None else f"{row.tflops:.3g}",
        UNKNOWN if row.share is None else f"{row.share:.0%}",
        "passed" if row.passed else "FAILED",
    ]


def telling_columns(rows: Iterable[Row]) -> list[int]:
    """The places in ``COLUMNS`` that are worth showing: something is known there, and a layout is not the usual one."""
    texts = [cells(row) for row in rows]
    return [i for i in range(len(COLUMNS)) if _tells(i, {line[i] for line in texts})]


def as_table(rows: Iterable[Row], title: str | None = None) -> Table:
    """The rows as one table, without columns that tell nothing; wins green, losses and failures red."""
    rows = list(rows)
    shown = telling_columns(rows)
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for i in shown:
        head, justify = COLUMNS[i]
        table.add_column(head.replace(" ", "\n"), justify=justify, no_wrap=True)
    for row in rows:
        line = cells(row)
        styles = {CHECK: "green" if row.passed else "bold red"}
        styles[RATIO] = "" if row.ratio is None else "green" if row.ratio > 1.02 else "red" if row.ratio < 0.98 else ""
        table.add_row(*(Text(line[i], style=styles.get(i, "")) for i in shown))
    return table


def print_table(table: Table, console: Console) -> None:
    """Print the table as wide as it needs to be: a narrow terminal wraps its lines, no figure is cut off."""
    before = console.width
    console.width = max(before, console.measure(table, options=console.options.update(max_width=WIDEST)).maximum)
    console.print(table, crop=False)
    console.width = before


def _tells(column: int, texts: set[str]) -> bool:
    return not texts or not texts <= {UNKNOWN, "nchw" if column == LAYOUT else UNKNOWN}


def _ms(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}" if value < 10 else f"{value:.2f}"
