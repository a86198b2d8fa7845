"""Rows of committed results as Markdown: cells, tables, and sentences that count. readme_results.py is made of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path

DIRECTIONS = ("fprop", "dgrad", "wgrad", "step")
TIE = 0.02
"""Ratios that are no further than this from 1 count as ties, as in reports."""


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def place_of(row: dict) -> tuple[str, str, str, str]:
    return row["case"], row["precision"], row["layout"], row["direction"]


def with_faster_layout(rows: list[dict]) -> list[dict]:
    """The rows with `aten_best_ms`: PyTorch's time in its faster layout, where a row of the other layout tells it."""
    best: dict[tuple, float] = {}
    for row in rows:
        times = [time for time in (row["aten_ms"], row.get("aten_best_ms")) if time is not None]
        key = (row["case"], row["precision"], row["direction"])
        if times:
            best[key] = min([*times, best.get(key, times[0])])
    return [{**row, "aten_best_ms": best.get((row["case"], row["precision"], row["direction"]))} for row in rows]


def ratio_to_best(row: dict) -> float | None:
    """PyTorch's time in its faster layout over ours; None where PyTorch has no time."""
    if row["ratio"] is None:
        return None
    best = row.get("aten_best_ms")
    return row["ratio"] if best is None or best >= row["aten_ms"] else best / row["haloconv_ms"]


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """A Markdown table, first column left, the others right."""
    names = list(header)
    lines = ["| " + " | ".join(names) + " |", "| --- |" + " ---: |" * (len(names) - 1)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def number(value: float | None) -> str:
    """Three significant digits without an exponent for the sizes that times have; a dash for None."""
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}" if value >= 0.001 else f"{value:.1e}"


def times(ratio: float) -> str:
    """A ratio, bold where ours is faster."""
    return f"**{ratio:.2f}×**" if round(ratio, 2) > 1 else f"{ratio:.2f}×"


def cell(row: dict | None) -> str:
    """One measurement: PyTorch's time, ours, the ratio in bold where ours is faster, the roofline fraction.

    A second ratio follows where PyTorch is faster in the other layout.
    """
    if row is None:
        return "–"
    text = f"{number(row['aten_ms'])} → {number(row['haloconv_ms'])}"
    ratio, fraction = row["ratio"], row["share"]
    if ratio is not None:
        text += f" ({times(ratio)}"
        if ratio_to_best(row) != ratio:
            text += f", {ratio_to_best(row):.2f}× of its better layout"
        text += f", {100 * fraction:.0f} %)" if fraction is not None else ")"
    return text


def ratio_cell(row: dict | None) -> str:
    """A ratio, behind it the one to PyTorch's faster layout where that is another; a dash where there is none."""
    if row is None or row["ratio"] is None:
        return "–"
    best = ratio_to_best(row)
    return times(row["ratio"]) + (f" ({best:.2f}×)" if best != row["ratio"] else "")


def grouped(rows: list[dict]) -> list[str]:
    """The rows as one table: a line per case, precision and layout; a column per measured direction."""
    cells: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        cells.setdefault((row["case"], row["precision"], row["layout"]), {})[row["direction"]] = row
    directions = [direction for direction in DIRECTIONS if any(direction in found for found in cells.values())]
    body = []
    for (case, precision, layout), found in cells.items():
        families = ", ".join(sorted({row["family"] for row in found.values()}))
        body.append([case, precision, layout, families, *(cell(found.get(direction)) for direction in directions)])
    return table(["case", "precision", "layout", "family", *directions], body)


def spread(values: Iterable[float], form: str) -> str:
    """The least and the greatest value, or one where they print alike; ``form`` is that of a number."""
    ends = [format(value, form) for value in sorted(values)]
    return ends[0] if ends[0] == ends[-1] else f"{ends[0]} to {ends[-1]}"


def ranges(rows: list[dict]) -> list[str]:
    """A line per case and layout, all precisions together: least and greatest ratio and roofline fraction."""
    cells: dict[tuple, list[dict]] = {}
    for row in rows:
        cells.setdefault((row["case"], row["layout"]), []).append(row)
    directions = [direction for direction in DIRECTIONS if any(row["direction"] == direction for row in rows)]
    body = []
    for (case, layout), found in cells.items():
        line = [case, layout, ", ".join(sorted({row["precision"] for row in found}))]
        for direction in directions:
            here = [row for row in found if row["direction"] == direction and row["ratio"] is not None]
            fractions = spread((100 * row["share"] for row in here), ".0f") if here else ""
            line.append(f"{spread((row['ratio'] for row in here), '.2f')}×, {fractions} %" if here else "–")
        body.append(line)
    return table(["layer", "layout", "precisions", *directions], body)


def counts(ratios: list[float]) -> tuple[int, int, int]:
    """How many are faster, as fast and slower, by the rule that reports have."""
    wins, losses = sum(ratio > 1 + TIE for ratio in ratios), sum(ratio < 1 - TIE for ratio in ratios)
    return wins, len(ratios) - wins - losses, losses


def summary(rows: list[dict]) -> str:
    """Wins, ties and losses in one sentence; those against PyTorch's faster layout behind it, where some rows tell."""
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    if not ratios:
        return f"{len(rows)} measurements, none with PyTorch's time"
    wins, ties, losses = counts(ratios)
    text = f"{len(ratios)} measurements, haloconv faster in {wins}, within 2 % in {ties}, slower in {losses}"
    text += f"; median ratio {statistics.median(ratios):.2f}×"
    bests = [ratio for row in rows if (ratio := ratio_to_best(row)) is not None]
    if bests != ratios:
        wins, ties, losses = counts(bests)
        text += f". Against PyTorch in its faster layout: faster in {wins}, within 2 % in {ties}, slower in {losses}"
        text += f"; median ratio {statistics.median(bests):.2f}×"
    return text


def tally(rows: list[dict]) -> list[str]:
    """A line per family: wins beside losses, best row beside worst."""
    header = ["family", "measured", "faster", "within 2 %", "slower", "median", "best", "worst",
              "slower than its faster layout"]  # fmt: skip
    body = []
    for family in sorted({row["family"] for row in rows}):
        found = sorted((row for row in rows if row["family"] == family and row["ratio"]), key=lambda row: row["ratio"])
        if found:
            ratios = [row["ratio"] for row in found]
            ends = [f"{row['ratio']:.2f}× {' '.join(place_of(row))}" for row in (found[-1], found[0])]
            behind = counts([ratio_to_best(row) for row in found])[2]
            numbers = [len(found), *counts(ratios), f"{statistics.median(ratios):.2f}×", *ends, behind]
            body.append([f"`{family}`", *map(str, numbers)])
    return table(header, body)


def span(rows: list[dict], key: str) -> str:
    """The different values of ``key``; of dates, the first and the last day."""
    if key == "date":
        days = sorted({row["date"][:10] for row in rows})
        return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return ", ".join(sorted({row[key] for row in rows}))
