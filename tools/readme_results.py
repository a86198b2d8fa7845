"""Fill the tables of README.md from the committed results and stamps; `--check` only reports whether they are current.

Results come from benchmarks/results/<gpu>/latest.jsonl, those of networks from latest-models.jsonl beside it, verified
families from benchmarks/verified. Run as `python -m tools.readme_results`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from haloconv.report import Network, Row, networks_of
from haloconv.report.networks import LAYER_BAR, MEMORY_BAR, NETWORK_BAR
from tools.stamps import ROOT, VERIFIED, pending

DIRECTIONS = ("fprop", "dgrad", "wgrad", "step")
MAIN_CASES = ("A", "B", "C")
HEADLINE = (
    ("A", "tf32", "nhwc", "dilated 5x9, 32 to 64 channels, 512x512"),
    ("C", "tf32", "nchw", "3x3, 64 to 128 channels, 512x1024"),
    ("resnet_stem", "tf32", "nchw", "ResNet's 7x7 stem"),
    ("resnext_g32", "fp16", "nchw", "ResNeXt's 3x3 in 32 groups"),
    ("convnext_dw7", "bf16", "nhwc", "ConvNeXt's 7x7 depthwise"),
    ("mobilenet_dw3_s2", "fp32", "nchw", "MobileNet's 3x3 depthwise, stride 2"),
    ("resnet_14", "tf32", "nchw", "ResNet's 3x3 on 14x14 images"),
)
"""The layers that the README shows first, one of every kind and a loss among them, whatever their figures are."""
NO_RESULTS = "No measurements are committed yet: `make bench` on a GPU machine writes them."
NO_NETWORKS = "No networks are measured yet: `haloconv bench --models` on a GPU machine measures them."
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
    """Wins, ties (within 2 %, as reports count them) and losses in one sentence."""
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    if not ratios:
        return f"{len(rows)} measurements, none with PyTorch's time"
    wins, losses = sum(ratio > 1.02 for ratio in ratios), sum(ratio < 0.98 for ratio in ratios)
    ties, middle = len(ratios) - wins - losses, statistics.median(ratios)
    counts = f"haloconv faster in {wins}, within 2 % in {ties}, slower in {losses}"
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


def headline_section(root: Path = ROOT) -> str:
    """The Markdown between the headline markers: how many times PyTorch's speed, of the first GPU with results."""
    path = next((path for path in sorted(root.glob("benchmarks/results/*/latest.jsonl")) if read_rows(path)), None)
    if path is None:
        return NO_RESULTS
    rows = read_rows(path)
    places = {(row["case"], row["precision"], row["layout"], row["direction"]): row for row in rows}
    body = [
        [
            about,
            precision,
            layout,
            *(ratio_cell(places.get((case, precision, layout, each))) for each in DIRECTIONS[:3]),
        ]
        for case, precision, layout, about in HEADLINE
    ]
    shown = [row for row in rows if (row["case"], row["precision"], row["layout"]) in {case[:3] for case in HEADLINE}]
    lost = any(row["ratio"] is not None and row["ratio"] < 1 and row.get("reason") == "asked for" for row in shown)
    note = " Losses here asked for a family by name; by itself haloconv leaves such layers to PyTorch." if lost else ""
    lines = [
        f"Times PyTorch's speed (cuDNN with its search on, same precision and layout): {span(rows, 'gpu')}.",
        "",
        *table(["layer", "precision", "layout", "output", "input gradient", "weight gradient"], body),
        "",
        f"–: not measured.{note} All layers: {summary(rows)}.",
    ]
    return "\n".join(lines)


def ratio_cell(row: dict | None) -> str:
    """A ratio, bold where ours is faster; a dash where there is none."""
    if row is None or row["ratio"] is None:
        return "–"
    return f"**{row['ratio']:.2f}×**" if round(row["ratio"], 2) > 1 else f"{row['ratio']:.2f}×"


def models_section(root: Path = ROOT) -> str:
    """The Markdown between the models markers: a line per network, precision and layout."""
    paths = [path for path in sorted(root.glob("benchmarks/results/*/latest-models.jsonl")) if read_rows(path)]
    return "\n\n".join("\n".join(gpu_models(path, root)) for path in paths) or NO_NETWORKS


def gpu_models(path: Path, root: Path) -> list[str]:
    """The networks of one GPU, with the bars that they miss."""
    rows = read_rows(path)
    networks = networks_of([Row.of_record(row) for row in rows])
    body = [
        [network.name, network.precision, network.layout, *whole_cells(network.forward), *whole_cells(network.step),
         *slowest_cells(network)]
        for network in networks
    ]  # fmt: skip
    header = ["network", "precision", "layout", "inference", "memory", "training step", "memory", "layers", "slowest"]
    missed = [sentence for network in networks for sentence in network.missed()]
    bars = f"every layer at {LAYER_BAR:g}×, a network at {NETWORK_BAR:g}×, memory at most {MEMORY_BAR:g}×"
    source = f"commit {span(rows, 'commit')}, {span(rows, 'date')}; rows from `{path.relative_to(root).as_posix()}`"
    return [
        f"**{span(rows, 'gpu')}**, PyTorch {span(rows, 'torch')}; {source}.",
        "",
        "Milliseconds, PyTorch → haloconv (ratio); peak memory over PyTorch's; distinct layers and the slowest.",
        "",
        *table(header, body),
        "",
        f"The bars ({bars}): {f'{len(missed)} missed' if missed else 'all met'} by these rows.",
        *(f"- {sentence}" for sentence in missed),
    ]


def whole_cells(row: Row | None) -> list[str]:
    """Time and memory of one direction of a whole network."""
    if row is None or row.ratio is None:
        return ["–", "–"]
    ratio = f"**{row.ratio:.2f}×**" if round(row.ratio, 2) > 1 else f"{row.ratio:.2f}×"
    memory = "–" if row.memory_ratio is None else f"{row.memory_ratio:.2f}×"
    return [f"{number(row.aten_ms)} → {number(row.haloconv_ms)} ({ratio})", memory]


def slowest_cells(network: Network) -> list[str]:
    """How many distinct layers were timed, and the smallest ratio with its layer."""
    slowest = network.slowest
    if slowest is None:
        return ["–", "–"]
    where = f"{slowest.case.partition('.')[2] or slowest.case} {slowest.direction}"
    return [str(len({row.case for row in network.layers})), f"{slowest.ratio:.2f}× {where}"]


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
    """The README's text with every section replaced. Raises ValueError if a pair of markers is missing."""
    sections = {
        "headline": headline_section(),
        "models": models_section(),
        "results": results_section(),
        "verified": verified_section(read_stamps(), pending()),
    }
    for name, text in sections.items():
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
