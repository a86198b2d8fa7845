"""A report as one self-contained page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from haloconv.report.table import COLUMNS, cells, telling_columns

if TYPE_CHECKING:
    from haloconv.report.report import Report

TEMPLATES = Path(__file__).resolve().parent / "templates"


def page_of(report: Report) -> str:
    """One page without outside references, readable on a phone, light or dark as the reader's device asks."""
    loader = jinja2.FileSystemLoader(TEMPLATES)
    page = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    timed = [row for row in report.rows if row.ratio is not None]
    slowest = max((max(row.aten_ms, row.haloconv_ms) for row in timed), default=0.0)
    shown = telling_columns(report.rows)
    return page.get_template("report.html.j2").render(
        report=report,
        heads=[COLUMNS[i][0] for i in shown],
        cells=lambda row: [cells(row)[i] for i in shown],
        timed=timed,
        slowest=slowest or 1.0,
    )
