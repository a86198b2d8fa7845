"""A report as one self-contained page, readable on a phone, in the dark and in print."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from haloconv.report import plots
from haloconv.report.rows import Row
from haloconv.report.summary import SKIPPED, score_lines
from haloconv.report.table import CHECK, COLUMNS, LAYOUT, PRECISION, RATIO, cells, ratio_text, telling_columns
from haloconv.roofline import ceilings_of

if TYPE_CHECKING:
    from haloconv.report.report import Report

TEMPLATES = Path(__file__).resolve().parent / "templates"
_FIRST = tuple(
    [head for head, _ in COLUMNS].index(name)
    for name in ("layer", "direction", "ratio", "haloconv ms", "PyTorch ms", "of the roofline")
)
_ORDER = ("fprop", "dgrad", "wgrad", "bgrad", "forward", "step")


class Group(NamedTuple):
    """The rows of one precision and layout, with their bars."""

    heading: str
    rows: list[Row]
    bars: list[plots.Plot]


def page_of(report: Report) -> str:
    """The page's text, without outside references. Raises ModuleNotFoundError without jinja2 or matplotlib."""
    plots.require()
    import jinja2

    loader = jinja2.FileSystemLoader(TEMPLATES)
    page = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    groups = _groups(report.rows)
    shown = _columns(report.rows, len(groups) > 1)
    return page.get_template("report.html.j2").render(
        report=report,
        figures=_figures(report.rows),
        files=[file for file in report.files if file.verdict != SKIPPED] if len(report.files) > 1 else [],
        skipped=[file for file in report.files if file.reason is not None],
        scores=score_lines(report.files) if len(report.files) > 1 else [],
        groups=groups,
        rooflines=_rooflines(report),
        why_no_roofline=_why_no_roofline(report),
        columns=[(COLUMNS[i][0], COLUMNS[i][1]) for i in shown],
        cells=lambda row: [(cells(row)[i], *_look(i, row)) for i in shown],
        ratio_text=ratio_text,
    )


def _columns(rows: Sequence[Row], headed: bool) -> list[int]:
    """The places in ``COLUMNS`` to show: what came of it first, for narrow screens; no group's heading again."""
    telling = [i for i in telling_columns(rows) if not headed or i not in (PRECISION, LAYOUT)]
    return sorted(telling, key=lambda i: _FIRST.index(i) if i in _FIRST else len(_FIRST) + i)


def _look(column: int, row: Row) -> tuple[str, str]:
    """How a cell is aligned, and whether it is good or bad."""
    judged = {RATIO: row.ratio is None or 0.98 <= row.ratio <= 1.02, CHECK: False}.get(column, True)
    good = row.passed if column == CHECK else row.ratio is not None and row.ratio > 1
    return COLUMNS[column][1], "" if judged else "good" if good else "bad"


def _figures(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The figures that stand first: each with what it is."""
    ratios = [row.ratio for row in rows if row.ratio]
    found = [(f"{sum(row.passed for row in rows)} of {len(rows)}", "checks passed")]
    if ratios:
        wins, losses = sum(ratio > 1.02 for ratio in ratios), sum(ratio < 0.98 for ratio in ratios)
        found.append((ratio_text(statistics.median(ratios)), "median speed, PyTorch = 1x"))
        found.append((f"{wins} / {len(ratios) - wins - losses} / {losses}", "faster / within 2 % / slower"))
    for row in rows:
        if row.direction in ("forward", "step") and row.ratio and len(rows) < 500:
            found.append((ratio_text(row.ratio), f"{row.case} {row.direction} {row.precision} {row.layout}"))
    return found[:9]


def _groups(rows: Sequence[Row]) -> list[Group]:
    places: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        places.setdefault((row.precision, row.layout), []).append(row)
    groups = []
    for (precision, layout), found in places.items():
        heading = f"{precision}, {layout}"
        cases = list(dict.fromkeys(row.case for row in found))
        ordered = sorted(found, key=lambda row: (cases.index(row.case), _ORDER.index(row.direction)))
        groups.append(Group(heading, ordered, plots.bars(ordered, heading, f"bars-{precision}-{layout}-")))
    return groups


def _rooflines(report: Report) -> list[plots.Plot]:
    ceilings = ceilings_of(str(report.environment.get("gpu", "none")))
    if ceilings is None:
        return []
    precisions = dict.fromkeys(row.precision for row in report.rows)
    found = (plots.roofline(report.rows, ceilings, precision, f"roof-{precision}") for precision in precisions)
    return [plot for plot in found if plot is not None]


def _why_no_roofline(report: Report) -> str:
    gpu = report.environment.get("gpu", "none")
    if gpu == "none":
        return "There is no roofline: nothing was measured on a GPU."
    if ceilings_of(str(gpu)) is None:
        return f"There is no roofline: nobody has measured the ceilings of {gpu} (haloconv/roofline.py)."
    return "There is no roofline: no row has both FLOP and bytes."
