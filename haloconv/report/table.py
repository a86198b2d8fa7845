"""Rows as texts, and as one table for the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from haloconv.report.rows import Row

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod
    from rich.table import Table
    from rich.text import Text

UNKNOWN = "–"
WIDEST = 1000
NAME_WIDTH = 44
"""Longer names of layers and files go on in the next line."""

COLUMNS: tuple[tuple[str, JustifyMethod], ...] = (
    ("layer", "left"),
    ("times", "right"),
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
    ("GB/s", "right"),
    ("of the roofline", "right"),
    ("peak memory", "right"),
    ("check", "left"),
)
CASE, COUNT, DIRECTION, FAMILY, PRECISION, LAYOUT, ATEN_MS, RATIO, MEMORY, CHECK = 0, 1, 2, 3, 4, 5, 8, 11, 15, 16
_OTHER_LAYOUT = 9
_TIMED = range(8, CHECK)
_WIDTHS = (0, 5, 9, 18, 9, 6, 8, 8, 8, 8, 8, 7, 7, 6, 8, 6, 6)
"""The most characters of a cell of each column, but for names of layers and of several families."""

USUAL = {COUNT: "1", LAYOUT: "nchw"}


def cells(row: Row) -> list[str]:
    """The row as texts, in the order of ``COLUMNS``."""
    return [
        row.case,
        f"{row.count}",
        row.direction,
        row.family,
        row.precision,
        row.layout,
        error_text(row.error),
        error_text(row.aten_error),
        ms_text(row.aten_ms),
        ms_text(row.aten_best_ms),
        ms_text(row.haloconv_ms),
        ratio_text(row.ratio),
        UNKNOWN if row.tflops is None else f"{row.tflops:.3g}",
        UNKNOWN if row.gbps is None else f"{row.gbps:.3g}" if row.gbps < 1000 else f"{row.gbps:.0f}",
        UNKNOWN if row.roofline_fraction is None else f"{row.roofline_fraction:.0%}",
        ratio_text(row.memory_ratio),
        "passed" if row.passed else "FAILED",
    ]


def telling_columns(rows: Iterable[Row]) -> list[int]:
    """The places in ``COLUMNS`` that are worth showing: something is known there that is not the usual."""
    texts = [cells(row) for row in rows]
    return [i for i in range(len(COLUMNS)) if _tells(i, {line[i] for line in texts})]


def as_table(rows: Iterable[Row], title: str | None = None) -> Table:
    """The rows as one table, without columns that tell nothing; wins green, losses and failures red."""
    from rich import box
    from rich.table import Table

    rows = list(rows)
    shown = telling_columns(rows)
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for i in shown:
        head, justify = COLUMNS[i]
        width = NAME_WIDTH if i == 0 else None
        table.add_column(head.replace(" ", "\n"), justify=justify, no_wrap=i != 0, max_width=width, overflow="fold")
    for row in rows:
        table.add_row(*_styled(row, shown))
    return table


class StreamedTable:
    """The table of rows that come one by one: each is printed at once, in columns of widths that are fixed before.

    ``names`` are the names of layers that will come. ``timed`` adds what is known where there are times, ``counts`` and
    ``layouts`` the columns ``times`` and ``layout``.
    """

    def __init__(
        self,
        console: Console,
        names: Iterable[str],
        *,
        timed: bool = False,
        counts: bool = False,
        layouts: bool = False,
    ) -> None:
        self._console = console
        wanted = {**dict.fromkeys(_TIMED, timed), COUNT: counts, LAYOUT: layouts, _OTHER_LAYOUT: False}
        self._shown = [i for i in range(len(COLUMNS)) if wanted.get(i, True)]
        self._name_width = min(NAME_WIDTH, max(map(len, names)))
        self._headed = False

    def print_row(self, row: Row) -> None:
        """Print the row, the first one with the head of the table above it."""
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        table.show_header = not self._headed
        for i in self._shown:
            head, justify = COLUMNS[i]
            words = head.split()
            width = self._name_width if i == 0 else max(_WIDTHS[i], *map(len, words))
            table.add_column("\n".join(words), justify=justify, width=width, overflow="fold")
        table.add_row(*_styled(row, self._shown))
        print_table(table, self._console)
        self._headed = True


def _styled(row: Row, shown: Iterable[int]) -> list[Text]:
    """The cells of these columns, wins green, losses and failures red."""
    from rich.text import Text

    line = cells(row)
    styles = {CHECK: "green" if row.passed else "bold red", RATIO: ratio_style(row.ratio)}
    return [Text(line[i], style=styles.get(i, "")) for i in shown]


def print_table(table: Table, console: Console) -> None:
    """Print the table as wide as it needs to be: a narrow terminal wraps its lines, no figure is cut off."""
    before = console.width
    console.width = max(before, console.measure(table, options=console.options.update(max_width=WIDEST)).maximum)
    console.print(table, crop=False)
    console.width = before


def _tells(column: int, texts: set[str]) -> bool:
    return not texts or not texts <= {UNKNOWN, USUAL.get(column, UNKNOWN)}


def reason_of(row: Row) -> str:
    """The family and config that ran, and why they were taken."""
    return f"{row.family} ({row.config}): {row.reason}" if row.config else f"{row.family}: {row.reason}"


def error_text(value: float) -> str:
    """Two digits."""
    return f"{value:.1e}"


def ms_text(value: float | None) -> str:
    """Three or four digits; of less than 10 microseconds two, which is what a timer tells."""
    if value is None:
        return UNKNOWN
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 10 else f"{value:.2f}"


def ratio_text(value: float | None) -> str:
    """Two decimals; a dash for None."""
    return UNKNOWN if value is None else f"{value:.2f}x"


def ratio_style(value: float | None) -> str:
    """Green for a win, red for a loss, nothing within 2 %."""
    return "" if value is None else "green" if value > 1.02 else "red" if value < 0.98 else ""
