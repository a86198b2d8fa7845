"""Rows of committed results as Markdown: cells, tables, and sentences that count. readme_results.py is made of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from haloconv.bench.suite import Case
from haloconv.report.rows import computed_precision
from haloconv.roofline import limit_ms, limit_of

DIRECTIONS = ("fprop", "dgrad", "wgrad", "step")
TIE = 0.02
"""Ratios that are no further than this from 1 count as ties, as in reports."""
FULL_FP32_MARK = " †"
FULL_FP32_LEGEND = "†: TF32 was allowed, and PyTorch's error says that it computed full fp32."


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def place_of(row: dict) -> tuple[str, str, str, str]:
    return row["case"], row["precision"], row["layout"], row["direction"]


def annotated(rows: list[dict], cases: Mapping[str, Case]) -> list[dict]:
    """The rows with what other rows, the suites and today's ceilings say of them.

    - ``aten_best_ms``: PyTorch's time in its faster layout, where a row of the other layout tells it;
    - ``aten_precision``: the precision that PyTorch computed in, by its error;
    - ``counted_ms``: the time of ours that is set against PyTorch's. Where that computed full fp32 though TF32 was
      allowed it is the time of a result of ours that is accurate to fp32, of this row or of the fp32 row beside it.
      None if there is none, or if the row failed its checks;
    - ``limit_ms`` and ``share``: by the ceilings of today. ``cases`` are the suites' by name.
    """
    best: dict[tuple, float] = {}
    for row in rows:
        times = [time for time in (row["aten_ms"], row.get("aten_best_ms")) if time is not None]
        key = (row["case"], row["precision"], row["direction"])
        if times:
            best[key] = min([*times, best.get(key, times[0])])
    accurate = {(row["case"], row["layout"], row["direction"]): row for row in rows if row["precision"] == "fp32"}
    found = []
    for row in rows:
        limit = _limit_today(row, cases)
        found.append({
            **row,
            "aten_best_ms": best.get((row["case"], row["precision"], row["direction"])),
            "aten_precision": computed_precision(row["precision"], row.get("aten_error")),
            "counted_ms": _counted_ms(row, accurate.get((row["case"], row["layout"], row["direction"]))),
            "limit_ms": limit,
            "share": row.get("share") if limit == row.get("limit_ms") else limit / row["haloconv_ms"],
        })  # fmt: skip
    return found


def _counted_ms(row: dict, accurate: dict | None) -> float | None:
    if not row.get("passed", True):
        return None
    theirs, ours = (computed_precision(row["precision"], row.get(name)) for name in ("aten_error", "error"))
    if ours == "fp32" or theirs == ours:
        return row["haloconv_ms"]
    return accurate["haloconv_ms"] if accurate is not None and accurate.get("passed", True) else None


def _limit_today(row: dict, cases: Mapping[str, Case]) -> float | None:
    if row.get("limit_ms") is None:
        return None
    case, gpu, flops = cases.get(row["case"]), row["gpu"], row.get("tflops")
    if case is not None:
        directions: Iterable[Any] = DIRECTIONS[:3] if row["direction"] == "step" else (row["direction"],)
        problems = [case.problem(each, row["precision"], row["layout"]) for each in directions]
        limits = [limit_ms(problem, gpu) for problem in problems]
        known = [each for each in limits if each is not None]
        return sum(known) if len(known) == len(limits) else row["limit_ms"]
    if flops is None or row.get("bytes") is None:
        return row["limit_ms"]
    return limit_of(gpu, row["precision"], round(flops * row["haloconv_ms"] * 1e9), row["bytes"]) or row["limit_ms"]


def is_own(row: dict) -> bool:
    """Whether the time that counts is that of the row itself."""
    return row.get("counted_ms", row["haloconv_ms"]) == row["haloconv_ms"]


def ratios_of(row: dict) -> tuple[float, float] | None:
    """PyTorch's time in the same and in its faster layout over ours, as they count; None for a row that does not."""
    if row["ratio"] is None or row.get("counted_ms", row["haloconv_ms"]) is None:
        return None
    same = row["ratio"] if is_own(row) else row["aten_ms"] / row["counted_ms"]
    best = row.get("aten_best_ms")
    return same, same if best is None or best >= row["aten_ms"] else same * best / row["aten_ms"]


def ratio_to_best(row: dict) -> float | None:
    """PyTorch's time in its faster layout over the row's own; None where PyTorch has no time."""
    if row["ratio"] is None:
        return None
    best = row.get("aten_best_ms")
    return row["ratio"] if best is None or best >= row["aten_ms"] else best / row["haloconv_ms"]


def mark(row: dict) -> str:
    """A dagger where TF32 was allowed and PyTorch computed full fp32."""
    return FULL_FP32_MARK if row.get("aten_precision", row["precision"]) != row["precision"] else ""


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
    if not row.get("passed", True):
        return "FAILED"
    text = f"{number(row['aten_ms'])} → {number(row['haloconv_ms'])}"
    ratio, fraction = row["ratio"], row["share"]
    if ratio is not None:
        text += f" ({times(ratio)}"
        if ratio_to_best(row) != ratio:
            text += f", {ratio_to_best(row):.2f}× of its better layout"
        text += f", {100 * fraction:.0f} %)" if fraction is not None else ")"
    return text + mark(row)


def ratio_cell(row: dict | None) -> str:
    """A ratio, behind it the one to PyTorch's faster layout where that is another; a dash where there is none."""
    if row is None or row["ratio"] is None or not row.get("passed", True):
        return "–"
    best = ratio_to_best(row)
    return times(row["ratio"]) + (f" ({best:.2f}×)" if best != row["ratio"] else "") + mark(row)


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
    """A line per case and layout, all precisions together: least and greatest ratio and roofline fraction.

    In brackets the ratios to PyTorch's faster layout where that is another. Rows that do not count are left out, and
    the fraction where the GPU's rates are not known.
    """
    cells: dict[tuple, list[dict]] = {}
    for row in rows:
        cells.setdefault((row["case"], row["layout"]), []).append(row)
    directions = [direction for direction in DIRECTIONS if any(row["direction"] == direction for row in rows)]
    body = []
    for (case, layout), found in cells.items():
        line = [case, layout, ", ".join(sorted({row["precision"] for row in found}))]
        for direction in directions:
            here = [row for row in found if row["direction"] == direction and ratios_of(row) and is_own(row)]
            line.append(_range(here) if here else "–")
        body.append(line)
    return table(["layer", "layout", "precisions", *directions], body)


def _range(rows: list[dict]) -> str:
    same, best = zip(*map(ratios_of, rows), strict=True)
    text = f"{spread(same, '.2f')}×" + (f" ({spread(best, '.2f')}×)" if best != same else "")
    fractions = [row["share"] for row in rows if row["share"] is not None]
    return f"{text}, {spread((100 * each for each in fractions), '.0f')} %" if fractions else text


def counts(ratios: list[float]) -> tuple[int, int, int]:
    """How many are faster, as fast and slower, by the rule that reports have."""
    wins, losses = sum(ratio > 1 + TIE for ratio in ratios), sum(ratio < 1 - TIE for ratio in ratios)
    return wins, len(ratios) - wins - losses, losses


def summary(rows: list[dict]) -> str:
    """Wins, ties and losses in one sentence; behind it those against PyTorch's faster layout, where some rows tell.

    Where PyTorch computed full fp32 though TF32 was allowed, an fp32-accurate result of ours counts against it.
    """
    timed = [row for row in rows if row["ratio"] is not None]
    if not timed:
        return f"{len(rows)} measurements, none with PyTorch's time"
    pairs = [ratios for row in timed if (ratios := ratios_of(row)) is not None]
    failed = sum(not row.get("passed", True) for row in timed)
    replaced = sum(not is_own(row) and ratios_of(row) is not None for row in timed)
    left = len(timed) - len(pairs) - failed
    text = f"{len(timed)} measurements, {_counted([same for same, _ in pairs])}"
    if any(best != same for same, best in pairs):
        text += f". Against PyTorch in its faster layout: {_counted([best for _, best in pairs])}"
    if replaced or left:
        text += (
            f". In {replaced + left} PyTorch computed full fp32 and haloconv TF32: its fp32 row counts in {replaced}"
        )
        text += f", {left} have none and are not counted"
    return f"{text}. {failed} failed their checks" if failed else text


def _counted(ratios: list[float]) -> str:
    if not ratios:
        return "none counted"
    wins, ties, losses = counts(ratios)
    median = statistics.median(ratios)
    return f"haloconv faster in {wins}, within 2 % in {ties}, slower in {losses}; median ratio {median:.2f}×"


def tally(rows: list[dict]) -> list[str]:
    """A line per family: wins beside losses, best row beside worst.

    Not counted are rows that failed, and those in TF32 where PyTorch computed full fp32 and the family did not.
    """
    header = ["family", "measured", "faster", "within 2 %", "slower", "not counted", "median", "best", "worst",
              "median to its faster layout", "slower than that"]  # fmt: skip
    body = []
    for family in sorted({row["family"] for row in rows}):
        measured = [row for row in rows if row["family"] == family and row["ratio"]]
        found = sorted((row for row in measured if ratios_of(row) and is_own(row)), key=lambda row: row["ratio"])
        if found:
            same, best = (list(each) for each in zip(*map(ratios_of, found), strict=True))
            ends = [f"{row['ratio']:.2f}× {' '.join(place_of(row))}" for row in (found[-1], found[0])]
            numbers = [len(measured), *counts(same), len(measured) - len(found), f"{statistics.median(same):.2f}×",
                       *ends, f"{statistics.median(best):.2f}×", counts(best)[2]]  # fmt: skip
            body.append([f"`{family}`", *map(str, numbers)])
    return table(header, body)


def span(rows: list[dict], key: str) -> str:
    """The different values of ``key``; of dates, the first and the last day."""
    if key == "date":
        days = sorted({row["date"][:10] for row in rows})
        return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return ", ".join(sorted({row[key] for row in rows}))
