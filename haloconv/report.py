"""What was measured, as rows; and the rows as a table for the terminal, as JSON and as one self-contained page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

TEMPLATES = Path(__file__).resolve().parent / "templates"
UNKNOWN = "–"
WIDEST = 1000


@dataclass(frozen=True)
class Row:
    """One comparison of haloconv with PyTorch at equal precision. Times are medians in ms, errors relative norms.

    ``direction`` is fprop, dgrad, wgrad, bgrad, forward (a whole model) or step (forward and backward). Both times are
    None if nothing was timed. ``flops`` and ``limit_ms`` are None where they are not defined. ``aten_best_ms`` is
    PyTorch's time in the better of both layouts. ``difference`` is the norm of haloconv minus PyTorch. ``complaint`` is
    None exactly if every check passed. ``config`` is the measured one, empty for the family's own choice.
    """

    case: str
    direction: str
    precision: str
    layout: str
    family: str
    reason: str
    error: float
    aten_error: float
    error_limit: float
    difference: float
    aten_ms: float | None
    haloconv_ms: float | None
    spread: float
    runs: int
    flops: int | None = None
    limit_ms: float | None = None
    aten_best_ms: float | None = None
    complaint: str | None = None
    config: str = ""

    @property
    def passed(self) -> bool:
        return self.complaint is None

    @property
    def ratio(self) -> float | None:
        """How many times faster than PyTorch; below 1 is a loss."""
        if self.aten_ms is None or self.haloconv_ms is None:
            return None
        return self.aten_ms / self.haloconv_ms if self.haloconv_ms else math.nan

    @property
    def share(self) -> float | None:
        """The share of the limit that is reached, 1 being the limit."""
        return self.limit_ms / self.haloconv_ms if self.limit_ms is not None and self.haloconv_ms else None

    @property
    def tflops(self) -> float | None:
        """TFLOP/s of the dense definition."""
        return self.flops / self.haloconv_ms * 1e-9 if self.flops is not None and self.haloconv_ms else None

    def record(self, environment: Mapping[str, str]) -> dict[str, object]:
        """The row as the record that result files hold, stamped with the environment."""
        return {
            "case": self.case,
            "direction": self.direction,
            "precision": self.precision,
            "layout": self.layout,
            "aten_ms": _number(self.aten_ms),
            "haloconv_ms": _number(self.haloconv_ms),
            "ratio": _number(self.ratio),
            "spread": _number(self.spread),
            "limit_ms": _number(self.limit_ms),
            "share": _number(self.share),
            "error": _number(self.error),
            "aten_error": _number(self.aten_error),
            "family": self.family,
            "gpu": environment.get("gpu", "none"),
            "torch": environment.get("torch", "none"),
            "cudnn": environment.get("cudnn", "none"),
            "cuda": environment.get("cuda_runtime", "none"),
            "commit": environment.get("commit", "none"),
            "date": environment.get("date", "none"),
            "reason": self.reason,
            "error_limit": _number(self.error_limit),
            "difference": _number(self.difference),
            "aten_best_ms": _number(self.aten_best_ms),
            "tflops": _number(self.tflops),
            "runs": self.runs,
            "passed": self.passed,
            "complaint": self.complaint,
            "config": self.config,
        }


@dataclass
class Report:
    """Rows with the environment they were measured in, and sentences that a reader must know.

    ``launches`` are records of emulated launches (haloconv.tune.traffic).
    """

    title: str
    environment: Mapping[str, str]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    launches: list[Mapping[str, object]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if there are rows and every check of every row passed."""
        return bool(self.rows) and all(row.passed for row in self.rows)

    def complaints(self) -> list[str]:
        """One sentence per row that failed."""
        return [f"{row.case} {row.direction}: {row.complaint}" for row in self.rows if not row.passed]

    def reasons(self) -> list[str]:
        """Why each family and config was taken, one sentence per reason, with the rows that it holds for."""
        places: dict[tuple[str, str], dict[str, list[str]]] = {}
        for row in self.rows:
            if row.reason:
                chosen = f"{row.family} ({row.config})" if row.config else row.family
                places.setdefault((chosen, row.reason), {}).setdefault(row.case, []).append(row.direction)
        return [
            f"{chosen}: {reason} (" + "; ".join(f"{case} {', '.join(steps)}" for case, steps in cases.items()) + ")"
            for (chosen, reason), cases in places.items()
        ]

    def to_json(self) -> str:
        """One JSON object with the keys ``title passed environment notes rows``, and ``launches`` if there are any."""
        content = {
            "title": self.title,
            "passed": self.passed,
            "environment": dict(self.environment),
            "notes": self.notes,
            "rows": [row.record(self.environment) for row in self.rows],
            **({"launches": [dict(launch) for launch in self.launches]} if self.launches else {}),
        }
        return json.dumps(content, indent=2, allow_nan=False) + "\n"

    def to_html(self) -> str:
        """One page without outside references, readable on a phone, light or dark as the reader's device asks."""
        loader = jinja2.FileSystemLoader(TEMPLATES)
        page = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
        timed = [row for row in self.rows if row.ratio is not None]
        slowest = max((max(row.aten_ms, row.haloconv_ms) for row in timed), default=0.0)
        shown = telling_columns(self.rows)
        return page.get_template("report.html.j2").render(
            report=self,
            heads=[COLUMNS[i][0] for i in shown],
            cells=lambda row: [cells(row)[i] for i in shown],
            timed=timed,
            slowest=slowest or 1.0,
        )


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


def _number(value: float | None) -> float | None:
    """The value as JSON can hold it: six significant digits, None for NaN and infinity."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
