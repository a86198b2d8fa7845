"""Fill the marked sections of README.md and docs from the committed results and stamps.

Results come from benchmarks/results/<gpu>/latest.jsonl, those of other suites and of networks from latest-*.jsonl
beside it, verified families from benchmarks/verified. Run as `python -m tools.readme_results`: it makes the files of
newest rows anew from the dated ones, and fills the sections; with `--check` it only reports whether these are current.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from haloconv.families import OWN
from haloconv.report import Network, Row, networks_of
from haloconv.report.networks import LAYER_BAR, MEMORY_BAR, NETWORK_BAR, WHOLE
from tools.result_facts import (
    NO_RESULTS,
    cold_start_section,
    compiled_section,
    costs_section,
    export_section,
    modes_section,
    networks_section,
    rates_section,
    refresh_latest_files,
    result_files,
    sample_section,
    scaling_section,
    suite_cases,
    suite_rows,
    where_from,
)
from tools.result_lines import read_lines
from tools.result_tables import (
    DIRECTIONS,
    FULL_FP32_LEGEND,
    annotated,
    grouped,
    mark,
    number,
    place_of,
    ranges,
    ratio_cell,
    read_rows,
    span,
    spread,
    summary,
    table,
    tally,
    times,
)
from tools.split_errors import splits_section
from tools.stamp_tables import campaigns_line, stamps_line, verified_section
from tools.stamps import ROOT, VERIFIED, pending, read_stamps

MAIN_CASES = ("A", "B", "C")
HEADLINE = (
    ("A", "tf32", "nhwc", "dilated 5x9, 32 to 64 channels, 512x512"),
    ("C", "tf32", "nchw", "3x3, 64 to 128 channels, 512x1024"),
    ("resnet_stem", "tf32", "nchw", "ResNet's 7x7 stem"),
    ("resnext_g32", "fp16", "nchw", "ResNeXt's 3x3 in 32 groups"),
    ("convnext_dw7", "bf16", "nhwc", "ConvNeXt's 7x7 depthwise"),
    ("mobilenet_dw3_s2", "fp32", "nchw", "MobileNet's 3x3 depthwise, stride 2"),
    ("resnet_14", "tf32", "nchw", "ResNet's 3x3 on 14x14 images"),
    ("resnet_7", "fp16", "nchw", "ResNet's 3x3 on 7x7 images"),
    ("resnet_14_one", "fp16", "nhwc", "the same on one 14x14 image"),
    ("C", "fp16", "nchw", "3x3, 64 to 128 channels, 512x1024"),
)
"""The layers that the README shows first, one of every kind and losses among them, whatever their figures are."""
NO_NETWORKS = "No networks are measured yet: `haloconv bench --models` on a GPU machine measures them."


def gpu_results(path: Path, root: Path) -> list[str]:
    rows = annotated(read_rows(path), suite_cases())
    versions = f"PyTorch {span(rows, 'torch')}, cuDNN {span(rows, 'cudnn')}, CUDA {span(rows, 'cuda')}"
    lines = [
        f"**{span(rows, 'gpu')}**, {versions}; {where_from(rows, path, root)}.",
        "",
        "Milliseconds, PyTorch → haloconv (ratio, roofline fraction); bold where haloconv is faster.",
        *([FULL_FP32_LEGEND] if any(mark(row) for row in rows) else []),
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


def results_section(root: Path = ROOT, name: str = "latest.jsonl") -> str:
    """The Markdown between the markers of one suite's layers."""
    return "\n\n".join("\n".join(gpu_results(path, root)) for path in result_files(root, name)) or NO_RESULTS


def headline_section(root: Path = ROOT) -> str:
    """The Markdown between the headline markers: how many times PyTorch's speed, of the first GPU with results."""
    path = next(iter(result_files(root, "latest.jsonl")), None)
    if path is None:
        return NO_RESULTS
    rows = suite_rows(path.parent)
    places = {place_of(row): row for row in rows}
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
        "In brackets: the same against PyTorch in its faster layout.",
        "",
        *table(["layer", "precision", "layout", "output", "input gradient", "weight gradient"], body),
        "",
        f"–: not measured.{note}{f' {FULL_FP32_LEGEND}' if any(mark(row) for row in shown) else ''}",
        f"All layers: {summary(rows)}.",
    ]
    return "\n".join(lines)


def tally_section(root: Path = ROOT) -> str:
    """The Markdown between the tally markers: wins and losses of each family, all suites together, a table a GPU."""
    found = []
    for path in result_files(root, "latest.jsonl"):
        rows = [{**row, "family": family_of(row)} for row in suite_rows(path.parent)]
        found.append("\n".join([f"**{span(rows, 'gpu')}**, {span(rows, 'date')}:", "", *tally(rows)]))
    return "\n\n".join(found) or NO_RESULTS


def family_of(row: dict) -> str:
    """The family that a row is of: rows of `grouped_sm90` carried the names of the families that it was a part of."""
    grouped = row["case"].startswith("resnext") and row["layout"] == "nhwc"
    if grouped and (row["family"], row["precision"]) != ("halo_sm80_wgrad", "tf32"):
        return {"halo_sm80": "grouped_sm90", "halo_sm80_wgrad": "grouped_sm90"}.get(row["family"], row["family"])
    return row["family"]


def family_section(family: str, root: Path = ROOT) -> str:
    """The Markdown between the markers of a family's page: what its rows prove, a line a layer.

    Of the first GPU that has rows of it; those of others are on the page of results. Rows in tf32x3, which are compared
    with PyTorch's full fp32, are a sentence.
    """
    for path in result_files(root, "latest.jsonl"):
        rows = [row for row in suite_rows(path.parent) if family_of(row) == family]
        if not rows:
            continue
        cases = {row["case"] for row in read_rows(path)}
        suite = [row for row in rows if row["case"] in cases and row["precision"] != "tf32x3"]
        terms = [row for row in rows if row["case"] in cases and row["precision"] == "tf32x3"]
        other = [row for row in rows if row["case"] not in cases]
        lines = [
            f"**{span(rows, 'gpu')}**, {span(rows, 'date')}, commit {span(rows, 'commit')}; rows of `{family}` in",
            f"`{path.parent.relative_to(root).as_posix()}/latest*.jsonl`. Times PyTorch's speed in the same layout",
            "(in its faster layout), roofline fraction; least and greatest of the precisions.",
            "",
            *ranges(suite),
            "",
            f"{summary(suite)}.",
        ]
        lines += [f"In [tf32x3](../precision.md#tf32x3): {summary(terms)}."] if terms else []
        return "\n".join([*lines, *([f"Suites of other layers: {summary(other)}."] if other else [])])
    return NO_RESULTS


def models_section(root: Path = ROOT) -> str:
    """The Markdown between the models markers: a line per network, precision and layout."""
    paths = result_files(root, "latest-models.jsonl")
    return "\n\n".join("\n".join(gpu_models(path, root)) for path in paths) or NO_NETWORKS


def gpu_models(path: Path, root: Path) -> list[str]:
    """The networks of one GPU, with the bars that they miss."""
    rows = annotated(read_rows(path), {})
    networks = networks_of([Row.of_record(row) for row in rows])
    body = [
        [network.name, network.precision, network.layout, *whole_cells(network.forward), *whole_cells(network.step),
         *slowest_cells(network)]
        for network in networks
    ]  # fmt: skip
    header = ["network", "precision", "layout", "inference", "memory", "training step", "memory", "layers", "slowest"]
    missed = [sentence for network in networks for sentence in network.missed()]
    bars = f"every layer at {LAYER_BAR:g}×, a network at {NETWORK_BAR:g}×, memory at most {MEMORY_BAR:g}×"
    return [
        f"**{span(rows, 'gpu')}**, PyTorch {span(rows, 'torch')}; {where_from(rows, path, root)}.",
        "",
        "Milliseconds, PyTorch → haloconv (ratio); peak memory over PyTorch's; distinct layers and the slowest.",
        "",
        *table(header, body),
        "",
        *networks_summary(networks, [row for row in rows if not row["case"].endswith(WHOLE)]),
        f"The bars ({bars}): {f'{len(missed)} missed' if missed else 'all met'} by these rows.",
        *(f"- {sentence}" for sentence in missed),
    ]


def networks_summary(networks: list[Network], layers: list[dict]) -> list[str]:
    """Least and greatest ratio of whole networks, and how the rows of their layers compare."""
    lines = []
    wholes = {"Inference": [each.forward for each in networks], "A training step": [each.step for each in networks]}
    for name, found in wholes.items():
        timed = [(row.ratio, row.ratio_best) for row in found if row is not None and row.ratio is not None]
        if timed:
            best = spread((ratio if best is None else best for ratio, best in timed), ".2f")
            lines.append(
                f"{name}, {len(timed)} settings: {spread((ratio for ratio, _ in timed), '.2f')} times PyTorch's speed, "
                f"{best} times its speed in its faster layout."
            )
    return [*lines, f"Their layers: {summary(layers)}."] if layers else lines


def whole_cells(row: Row | None) -> list[str]:
    """Time and memory of one direction of a whole network; in brackets the ratios in the same and the faster layout."""
    if row is None or row.ratio is None:
        return ["–", "–"]
    memory = "–" if row.memory_ratio is None else f"{row.memory_ratio:.2f}×"
    best = "" if row.ratio_best in (None, row.ratio) else f", {row.ratio_best:.2f}×"
    return [f"{number(row.aten_ms)} → {number(row.haloconv_ms)} ({times(row.ratio)}{best})", memory]


def slowest_cells(network: Network) -> list[str]:
    """How many distinct layers were timed, and the smallest ratio with its layer."""
    slowest = network.slowest
    if slowest is None:
        return ["–", "–"]
    where = f"{slowest.case.partition('.')[2] or slowest.case} {slowest.direction}"
    return [str(len({row.case for row in network.layers})), f"{slowest.ratio:.2f}× {where}"]


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "headline": headline_section,
        "networks": networks_section,
        "stamps": lambda: stamps_line(read_stamps(), pending()),
    },
    "docs/results.md": {
        "tally": tally_section,
        "models": models_section,
        "results": results_section,
        "few_images": partial(results_section, name="latest-few_images.jsonl"),
        "pointwise": partial(results_section, name="latest-pointwise.jsonl"),
        "fronts": partial(results_section, name="latest-fronts.jsonl"),
        "rims": partial(results_section, name="latest-rims.jsonl"),
        "scaling": scaling_section,
        "compiled": compiled_section,
        "sample": sample_section,
        "rates": rates_section,
        "costs": costs_section,
        "cold_start": cold_start_section,
        "verified": lambda: verified_section(read_stamps(), pending()),
        "fuzz": lambda: campaigns_line(read_lines([VERIFIED / "fuzz.jsonl"])),
    },
    "docs/export.md": {"export": export_section},
    "docs/precision.md": {"modes": modes_section, "splits": splits_section},
    **{f"docs/kernels/{family}.md": {"rows": partial(family_section, family)} for family in OWN},
}
"""Every page with generated sections, and who writes each section."""


def filled(page: str, text: str) -> str:
    """The text of a page with every section replaced. Raises ValueError if a pair of markers is missing."""
    for name, write in PAGES[page].items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{page} must hold {begin} and {end} exactly once")
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{write()}\n{end}{rest.split(end)[1]}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a section is out of date")
    arguments = parser.parse_args()
    rows = [] if arguments.check else refresh_latest_files()
    before = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
    after = {page: filled(page, text) for page, text in before.items()}
    late = [page for page in PAGES if before[page] != after[page]]
    for page in late:
        if not arguments.check:
            (ROOT / page).write_text(after[page], encoding="utf-8")
    if arguments.check and late:
        print(f"{', '.join(late)}: out of date; run `python -m tools.readme_results`", file=sys.stderr)
        return 1
    print("\n".join(f"{each}: refreshed" for each in [*(path.relative_to(ROOT).as_posix() for path in rows), *late]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
