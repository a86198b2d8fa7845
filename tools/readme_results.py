"""Fill the tables of README.md from the committed results and stamps; `--check` only reports whether they are current.

Results come from benchmarks/results/<gpu>/latest.jsonl, verified families from benchmarks/verified. Run as
`python -m tools.readme_results`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tools.stamps import ROOT, VERIFIED, pending

DIRECTIONS = ("fprop", "dgrad", "wgrad", "step")
MAIN_CASES = ("A", "B", "C")
NO_RESULTS = "No measurements are committed yet: `make bench` on a GPU machine writes them."
NO_STAMPS = "No family has been verified on a GPU yet: `make gpu` on a GPU machine writes the stamps."


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


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


def cell(row: dict | None) -> str:
    """One measurement: PyTorch's time, ours, the ratio in bold where ours is faster, the share of the limit.

    A second ratio follows where PyTorch is faster in the other layout.
    """
    if row is None:
        return "–"
    text = f"{number(row['aten_ms'])} → {number(row['haloconv_ms'])}"
    ratio, share = row["ratio"], row["share"]
    if ratio is not None:
        text += f" (**{ratio:.2f}×**" if round(ratio, 2) > 1 else f" ({ratio:.2f}×"
        best = row.get("aten_best_ms")
        if best is not None and best < row["aten_ms"]:
            text += f", {best / row['haloconv_ms']:.2f}× of its better layout"
        text += f", {100 * share:.0f} %)" if share is not None else ")"
    return text


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


def summary(rows: list[dict]) -> str:
    """Wins, ties (to two decimals of the ratio) and losses in one sentence."""
    ratios = [round(row["ratio"], 2) for row in rows if row["ratio"] is not None]
    if not ratios:
        return f"{len(rows)} measurements, none with PyTorch's time"
    wins, losses = sum(ratio > 1 for ratio in ratios), sum(ratio < 1 for ratio in ratios)
    ties, middle = len(ratios) - wins - losses, statistics.median(ratios)
    counts = f"haloconv faster in {wins}, equal in {ties}, slower in {losses}"
    return f"{len(ratios)} measurements, {counts}; median ratio {middle:.2f}×"


def span(rows: list[dict], key: str) -> str:
    """The different values of ``key``; of dates, the first and the last day."""
    if key == "date":
        days = sorted({row["date"][:10] for row in rows})
        return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return ", ".join(sorted({row[key] for row in rows}))


def gpu_results(path: Path, root: Path) -> list[str]:
    rows = read_rows(path)
    versions = f"PyTorch {span(rows, 'torch')}, cuDNN {span(rows, 'cudnn')}, CUDA {span(rows, 'cuda')}"
    source = f"commit {span(rows, 'commit')}, {span(rows, 'date')}; rows from `{path.relative_to(root).as_posix()}`"
    lines = [
        f"**{span(rows, 'gpu')}**, {versions}; {source}.",
        "",
        "Milliseconds, PyTorch → haloconv (ratio, share of the limit); bold where haloconv is faster.",
        "",
    ]
    main = [row for row in rows if row["case"] in MAIN_CASES]
    others = [row for row in rows if row["case"] not in MAIN_CASES]
    if main:
        lines += [*grouped(main), ""]
    if others:
        title = f"The other layers: {summary(others)}"
        lines += [f"<details><summary>{title}</summary>", "", *grouped(others), "", "</details>", ""]
    return [*lines, f"All cases: {summary(rows)}."]


def results_section(root: Path = ROOT) -> str:
    """The Markdown between the results markers."""
    paths = [path for path in sorted(root.glob("benchmarks/results/*/latest.jsonl")) if read_rows(path)]
    return "\n\n".join("\n".join(gpu_results(path, root)) for path in paths) or NO_RESULTS


def verified_section(stamps: Mapping[str, dict], waiting: Mapping[str, str]) -> str:
    """The Markdown between the verified markers: one line per family that has a stamp or waits for one.

    ``waiting`` maps a pending family to its date and reason.
    """
    rows = []
    for family in sorted(stamps.keys() | waiting.keys()):
        stamp = stamps.get(family)
        state = f"pending since {waiting[family]}" if family in waiting else "verified"
        if stamp is None:
            rows.append([f"`{family}`", state, "–", "–", "–", "–", "–"])
            continue
        errors = ", ".join(f"{label} {error:.1e}" for label, error in sorted(stamp["worst_errors"].items()))
        place = f"{stamp['gpu']}, PyTorch {stamp['torch']}"
        rows.append([f"`{family}`", state, place, str(stamp["checks"]), errors, stamp["sanitizer"], stamp["date"]])
    header = ["family", "state", "on", "checks passed", "worst norm errors", "compute-sanitizer", "date"]
    return "\n".join(table(header, rows)) if rows else NO_STAMPS


def read_stamps(folder: Path = VERIFIED) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}


def filled(readme: str) -> str:
    """The README's text with both sections replaced. Raises ValueError if a pair of markers is missing."""
    for name, text in (("results", results_section()), ("verified", verified_section(read_stamps(), pending()))):
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if readme.count(begin) != 1 or readme.count(end) != 1:
            raise ValueError(f"README.md must hold {begin} and {end} exactly once")
        head, rest = readme.split(begin)
        readme = f"{head}{begin}\n{text}\n{end}{rest.split(end)[1]}"
    return readme


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the tables are out of date")
    arguments = parser.parse_args()
    path = ROOT / "README.md"
    before = path.read_text(encoding="utf-8")
    after = filled(before)
    if before == after:
        return 0
    if arguments.check:
        print("README.md is out of date: run `python -m tools.readme_results`", file=sys.stderr)
        return 1
    path.write_text(after, encoding="utf-8")
    print("README.md: tables refreshed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
