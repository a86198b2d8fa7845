"""A report as one self-contained page, readable on a phone, in the dark and in print."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from haloconv.report import plots
from haloconv.report.networks import networks_of, with_faster_layout
from haloconv.report.rows import WHOLE_DIRECTIONS, Row
from haloconv.report.sections import FULL_FP32_MARK, MOST_LOSSES, Cell, Section, Sections, look_of, tally_of
from haloconv.report.summary import SKIPPED, score_lines
from haloconv.report.table import ratio_text
from haloconv.roofline import ceilings_of

if TYPE_CHECKING:
    from rich.table import Table

    from haloconv.report.report import Report

TEMPLATES = Path(__file__).resolve().parent / "templates"
FOLDED_FROM = 100
"""Rows from which on a page shows its sections folded."""


class Shown(NamedTuple):
    """A section with its rooflines, and its speeds in a line: each what it is of, and the span of its ratios."""

    section: Section
    rooflines: list[plots.Plot]
    speeds: list[tuple[str, list[Cell]]]


class NetworkLine(NamedTuple):
    """A network over all its settings: the spans of ratios of inference, then of a training step.

    Three each: to PyTorch in the same layout, to it in its faster one, and of both sides in their faster layouts.
    """

    name: str
    anchor: str
    spans: list[list[Cell]]


def page_of(report: Report) -> str:
    """The page's text, without outside references. Raises ModuleNotFoundError without jinja2 or matplotlib."""
    plots.require()
    import jinja2

    loader = jinja2.FileSystemLoader(TEMPLATES)
    page = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    rows = with_faster_layout(report.rows)
    sections = Sections(rows, networks_of(rows), str(report.environment.get("gpu", "none")))
    shown = [_shown(each, f"r{i}", report) for i, each in enumerate(sections.made())]
    svgs, styles = plots.shared_styles([plot.svg for each in shown for plot in each.rooflines])
    drawn = iter(svgs)
    shown = [each._replace(rooflines=[p._replace(svg=next(drawn)) for p in each.rooflines]) for each in shown]
    losses = sections.losses()
    return page.get_template("report.html.j2").render(
        report=report,
        facts=_facts(report.environment),
        figures=_figures(rows),
        networks=[] if len(report.files) > 1 else _network_lines(sections.names, shown),
        files=[file for file in report.files if file.verdict != SKIPPED] if len(report.files) > 1 else [],
        skipped=[file for file in report.files if file.reason is not None],
        scores=score_lines(report.files) if len(report.files) > 1 else [],
        whole=[table for table in map(sections.whole, WHOLE_DIRECTIONS) if table is not None],
        losses=losses,
        most_losses=MOST_LOSSES,
        tally=tally_of(row.ratio for row in rows),
        sections=shown,
        styles=styles,
        folded=len(rows) >= FOLDED_FROM,
        full_fp32=FULL_FP32_MARK if any(row.aten_precision != row.precision for row in rows) else "",
        why_no_roofline=None if any(each.rooflines for each in shown) else _why_no_roofline(report),
        environment={name: _version(name, value) for name, value in report.environment.items()},
        ratio_text=ratio_text,
        look_of=look_of,
        tables=[_plain(table) for table in report.tables],
    )


def _shown(section: Section, name: str, report: Report) -> Shown:
    speeds = []
    for what, direction in (("inference", "forward"), ("training step", "step")):
        tally = tally_of(row.ratio for row in section.rows if row.direction == direction)
        if tally is not None:
            speeds.append((what, tally.span))
    if section.tally is not None:
        speeds.append(("layers", section.tally.span))
    return Shown(section, _rooflines(section, name, report), speeds)


def _facts(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """What stands below the title: date, GPU, versions and commit, as far as they are known."""
    names = {
        "date": "", "gpu": "", "torch": "PyTorch", "cudnn": "cuDNN", "cuda": "CUDA", "cuda_runtime": "CUDA",
        "commit": "commit",
    }  # fmt: skip
    known = [(name, environment[name]) for name in names if environment.get(name, "none") != "none"]
    return [(names[name], _version(name, str(value))) for name, value in known]


def _version(name: str, value: str) -> str:
    """cuDNN's number as people write it, a date without its seconds, everything else as it is."""
    if name == "date" and "T" in value:
        return value.replace("T", " ").removesuffix("Z")[:16] + " UTC"
    if name != "cudnn" or not value.isdigit() or len(value) < 4:
        return value
    major, rest = divmod(int(value), 10_000 if len(value) > 4 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _plain(table: Table) -> tuple[str, list[tuple[str, str]], list[list[str]]]:
    """Title, heads with the side that they stand at, and lines of a table that was made for the terminal."""
    heads = [(str(column.header).replace("\n", " "), str(column.justify)) for column in table.columns]
    lines = zip(*(column.cells for column in table.columns), strict=True)
    return str(table.title or ""), heads, [[str(cell) for cell in line] for line in lines]


def _figures(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The figures that stand first: each with what it is."""
    found = [(f"{sum(row.passed for row in rows):,} of {len(rows):,}", "checks passed")]
    for direction, what in (("forward", "inference"), ("step", "training step")):
        tally = tally_of(row.ratio for row in rows if row.direction == direction)
        if tally is not None and tally.total == 1:
            found.append((ratio_text(tally.median), f"{what}, PyTorch = 1x"))
        elif tally is not None:
            found.append((ratio_text(tally.median), f"{what}, PyTorch = 1x: median of {tally.total}"))
    tally = tally_of(row.ratio for row in rows if row.direction not in ("forward", "step"))
    if tally is not None:
        found.append((ratio_text(tally.median), f"layers, PyTorch = 1x: median of {tally.total:,}"))
        found.append((f"{tally.faster:,} / {tally.within:,} / {tally.slower:,}", "layers faster / within 2 % / slower"))
    return found


def _network_lines(names: Collection[str], shown: Iterable[Shown]) -> list[NetworkLine]:
    """A line for each network; none for one network in one setting, which the figures tell."""
    lines = []
    for section in (each.section for each in shown if each.section.name in names):
        spans = []
        for direction in ("forward", "step"):
            rows = [row for row in section.rows if row.direction == direction]
            compared = (
                [row.ratio for row in rows],
                [row.ratio_best for row in rows],
                _both_in_their_faster_layout(rows),
            )
            spans += [tally.span if (tally := tally_of(ratios)) is not None else [] for ratios in compared]
        lines.append(NetworkLine(section.name, section.anchor, spans))
    return lines if any(len(span) > 1 for line in lines for span in line.spans) or len(lines) > 1 else []


def _both_in_their_faster_layout(rows: Sequence[Row]) -> list[float]:
    """PyTorch's time in its faster layout over haloconv's in its own, for each precision in which both were timed."""
    found = []
    for precision in dict.fromkeys(row.precision for row in rows):
        timed = [row for row in rows if row.precision == precision and row.aten_ms and row.haloconv_ms]
        if len({row.layout for row in timed}) > 1:
            found.append(min(row.aten_ms or 0 for row in timed) / min(row.haloconv_ms or 0 for row in timed))
    return found


def _rooflines(section: Section, name: str, report: Report) -> list[plots.Plot]:
    ceilings = ceilings_of(str(report.environment.get("gpu", "none")))
    if ceilings is None:
        return []
    prefix = f"{section.name}."
    rows = [replace(row, case=row.case.removeprefix(prefix)) for row in section.rows]
    precisions = dict.fromkeys(row.precision for row in rows)
    found = (
        plots.roofline(rows, ceilings, precision, f"{name}{chr(97 + i)}") for i, precision in enumerate(precisions)
    )
    return [plot for plot in found if plot is not None]


def _why_no_roofline(report: Report) -> str:
    gpu = report.environment.get("gpu", "none")
    if gpu == "none":
        return "There is no roofline: nothing was measured on a GPU."
    if ceilings_of(str(gpu)) is None:
        return f"There is no roofline: nobody has measured the ceilings of {gpu} (haloconv/roofline.py)."
    return "There is no roofline: no row has both FLOP and bytes."
