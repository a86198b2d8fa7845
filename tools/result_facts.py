"""Committed results as files: which there are, and short sections that one file or one look at all rows gives."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from haloconv.bench.networks.compiled import SEARCH
from haloconv.bench.results import MAIN_SUITE, latest_name, newest_rows, refresh_latest
from haloconv.bench.sample import verdict, verdict_of_own
from haloconv.bench.suite import SUITES, Case, load_suite
from tools.result_tables import DIRECTIONS, annotated, number, place_of, read_rows, span, summary, table, times
from tools.stamps import ROOT

NETWORKS, COMPILED, COLD_START = "models", "compiled", "cold-start"
MODE_CASES, MODES = ("A", "C"), ("fp32", "tf32x3", "tf32", "fp16", "bf16")
NO_RESULTS = "No measurements are committed yet: `make bench` on a GPU machine writes them."


def result_files(root: Path, name: str) -> list[Path]:
    """The files of this name that have rows, one a GPU; the GPU with most rows of the suite's layers is first."""
    found = [path for path in sorted(root.glob(f"benchmarks/results/*/{name}")) if read_rows(path)]

    def rows_of_suite(path: Path) -> int:
        main = path.parent / latest_name(MAIN_SUITE)
        return len(read_rows(main)) if main.exists() else 0

    return sorted(found, key=rows_of_suite, reverse=True)


def refresh_latest_files(root: Path = ROOT) -> list[Path]:
    """Make the files of newest rows anew from the dated ones, of every GPU and suite; those that changed."""
    changed = []
    for folder in sorted(root.glob("benchmarks/results/*")):
        for suite in sorted(path.stem for path in SUITES.glob("*.toml")):
            path = folder / latest_name(suite)
            before = read_rows(path) if path.exists() else []
            if newest_rows(folder, suite) != before:
                changed.append(refresh_latest(folder, suite))
    return changed


def suite_rows(folder: Path) -> list[dict]:
    """The newest rows of layers of one GPU, all suites together; those of networks are not among them."""
    whole = {latest_name(each) for each in (NETWORKS, COMPILED, COLD_START)}
    paths = sorted(path for path in folder.glob("latest*.jsonl") if path.name not in whole)
    return annotated([row for path in paths for row in read_rows(path)], suite_cases())


@cache
def suite_cases() -> dict[str, Case]:
    """The layers of all suites of the checkout, by name."""
    suites = sorted(path for path in SUITES.glob("*.toml") if path.stem != NETWORKS)
    return {case.name: case for path in suites for case in load_suite(path)}


def where_from(rows: list[dict], path: Path, root: Path) -> str:
    return f"commit {span(rows, 'commit')}, {span(rows, 'date')}; rows from `{path.relative_to(root).as_posix()}`"


def newest(root: Path, purpose: str) -> list[Path]:
    """The newest dated file of one purpose, of each GPU."""
    folders = sorted(root.glob("benchmarks/results/*"))
    found = (sorted(folder.glob(f"????-??-??-{purpose}.jsonl")) for folder in folders)
    return [files[-1] for files in found if files]


def sample_section(root: Path = ROOT) -> str:
    """The Markdown between the sample markers: what `auto` did on random layers, newest draw."""
    lines = []
    for path in newest(root, "sample"):
        rows = annotated(read_rows(path), {})
        slowest = min((row for row in rows if row["ratio"] is not None), key=lambda row: row["ratio"])
        bars = verdict(row["ratio"] for row in rows if row["ratio"] is not None)
        lines += [
            f"{span(rows, 'gpu')}, {where_from(rows, path, root)}: {summary(rows)}.",
            f"By the bars: {bars}; {verdict_of_own(rows)}.",
            f"The slowest at {slowest['ratio']:.2f}×: {' '.join(place_of(slowest))} on `{slowest['family']}`.",
        ]
    return "\n".join(lines) or NO_RESULTS


def rates_section(root: Path = ROOT) -> str:
    """The Markdown between the rates markers: the fastest row of each precision, beside the rate of its roofline.

    Of GPUs whose rates are known.
    """
    lines = []
    for path in result_files(root, "latest.jsonl"):
        rows = [row for row in suite_rows(path.parent) if row.get("tflops") and row["share"]]
        if not rows:
            continue
        tops = {row["precision"]: row for row in sorted(rows, key=lambda row: row["tflops"])}
        body = [
            [label, *(f"{rate:.0f}" for rate in (row["tflops"], row["tflops"] / row["share"], 100 * row["share"])),
             " ".join(place_of(row)), f"`{row['family']}`"]
            for label, row in sorted(tops.items())
        ]  # fmt: skip
        header = ["precision", "TFLOP/s", "roofline TFLOP/s", "per cent", "row", "family"]
        lines += [f"**{span(rows, 'gpu')}**:", "", *table(header, body)]
    return "\n".join(lines) or NO_RESULTS


def modes_section(root: Path = ROOT) -> str:
    """The Markdown between the modes markers: error and time of each precision on the same layers, in ``nchw``."""
    lines = []
    for path in result_files(root, "latest.jsonl"):
        rows = [row for row in suite_rows(path.parent) if row["case"] in MODE_CASES and row["layout"] == "nchw"]
        rows = [row for row in rows if row["family"] != "aten" and row["aten_ms"] is not None]
        rows.sort(key=lambda row: (row["case"], DIRECTIONS.index(row["direction"]), MODES.index(row["precision"])))
        body = [
            [row["case"], row["direction"], row["precision"], f"`{row['family']}`", f"{row['error']:.1e}",
             f"{row['aten_error']:.1e}", number(row["haloconv_ms"]), number(row["aten_ms"]), times(row["ratio"])]
            for row in rows
        ]  # fmt: skip
        header = ["layer", "direction", "precision", "family", "error", "PyTorch's", "ms", "PyTorch's", "ratio"]
        lines += [f"**{span(rows, 'gpu')}**, {span(rows, 'date')}:", "", *table(header, body)]
    return "\n".join(lines) or NO_RESULTS


def costs_section(root: Path = ROOT) -> str:
    """The Markdown between the costs markers: compile times and the host's time of a call, newest of each."""
    lines = []
    for path in newest(root, "compile-time"):
        for row in {row["what"]: row for row in read_rows(path)}.values():
            what, facts = f"compiling `{row['what']}`", f"{row.get('compile_ms', 0):.0f} ms"
            sources = row.get("sources", row.get("texts"))  # ``texts`` in rows until 2026-11-24
            if sources is not None:
                what = f"compiling the {sources} sources of `{row['what']}`"
                facts = f"median {row['median_ms']:.0f} ms, worst {row['worst_ms']:.0f} ms, {row['jobs']} at a time"
            lines.append([what, facts, row["gpu"], row["commit"]])
    for path in newest(root, "host-cost"):
        for row in {row["what"]: row for row in read_rows(path)}.values():
            facts = f"PyTorch {row['aten_us']:.1f} us, haloconv {row['haloconv_us']:.1f} us"
            lines.append([f"host time of `{row['what']}`", facts, row["gpu"], row["commit"]])
    return "\n".join(table(["what", "time", "machine", "commit"], lines)) if lines else NO_RESULTS


def export_section(root: Path = ROOT) -> str:
    """The Markdown between the export markers: what exported files printed about themselves, newest of each GPU."""
    body = []
    for folder in sorted(root.glob("benchmarks/results/*")):
        files = sorted(folder.glob("????-??-??-export.txt"))
        text = files[-1].read_text(encoding="utf-8") if files else ""
        for name, found in re.findall(r"^== (\w+)\n(.*?)(?=^== |\Z)", text, re.MULTILINE | re.DOTALL):
            line = re.findall(
                r"^(?:forward|forward and backward) +([\d.]+) ms, PyTorch's ([\d.]+) ms \((\w+)\)", found, re.MULTILINE
            )
            cells = [f"{baseline} → {ours} ({times(float(baseline) / float(ours))})" for ours, baseline, _ in line]
            body.append([name, line[0][2], *cells, f"`{files[-1].name}`"])
    header = ["exported", "PyTorch in", "forward, ms", "forward and backward, ms", "file"]
    return "\n".join(table(header, body)) if body else NO_RESULTS


def scaling_section(root: Path = ROOT) -> str:
    """The Markdown between the scaling markers: the newest step of each number of GPUs, and that of one beside it."""
    lines = []
    for folder in sorted(root.glob("benchmarks/results/*")):
        newest: dict[tuple, dict] = {}
        for path in sorted(folder.glob("????-??-??-scaling.jsonl")):
            newest |= {(row["case"], row["precision"], row["ranks"]): row for row in read_rows(path)}
        body = [
            [
                f"`{row['case']}`",
                row["precision"],
                str(row["ranks"]),
                "sharded" if row.get("is_sharded", row["ranks"] > 1) else "plain",
                *_scaled(row, "ms", "efficiency"),
                *_scaled(row, "in_a_row_ms", "in_a_row_efficiency"),
                "–" if row["efficiency_bar"] is None else f"{100 * row['efficiency_bar']:.0f} %",
                f"{row['peak_bytes'] / 1e9:.2f}",
            ]
            for _, row in sorted(newest.items())
        ]
        if body:
            header = ["images a GPU", "precision", "GPUs", "tensors", "ms alone", "of one GPU", "efficiency"]
            header += ["ms in a row", "of one GPU", "efficiency", "bar", "GB a GPU"]
            lines += [
                f"**{span([*newest.values()], 'gpu')}**, {span([*newest.values()], 'date')}:",
                "",
                *table(header, body),
            ]
    return "\n".join(lines) or NO_RESULTS


def _scaled(row: dict, ms: str, efficiency: str) -> list[str]:
    """ms, those of one GPU, and the efficiency; of rows from before they had it, dashes."""
    if ms not in row:
        return ["–", "–", "–"]
    return [f"{row[ms]:.1f}", f"{row[ms] * row[efficiency]:.1f}", f"{100 * row[efficiency]:.1f} %"]


def cold_start_section(root: Path = ROOT) -> str:
    """The Markdown between the cold_start markers: seconds from the start of a process, and the bars beside."""
    found = []
    for path in result_files(root, "latest-cold-start.jsonl"):
        rows = read_rows(path)
        body = [
            [
                *place_of(row)[:3],
                "first output" if row["direction"] == "inference" else "first step",
                f"{row['empty_ms'] / 1e3:.2f}",
                "–" if row["empty_bar_ms"] is None else f"{row['empty_bar_ms'] / 1e3:g}",
                f"{row['warm_ms'] / 1e3:.2f}",
                f"{(row['aten_ms'] + row['warm_bar_ms']) / 1e3:.2f}",
                f"{row['aten_ms'] / 1e3:.2f}",
                str(row["runs"]["empty"]["compiles"]),
                "**missed**" if row["missed"] else "met",
            ]
            for row in rows
        ]
        header = ["network", "precision", "layout", "until"]
        header += ["empty cache, s", "bar", "full cache, s", "bar", "PyTorch, s", "compiled", "bars"]
        found.append("\n".join([f"**{span(rows, 'gpu')}**, {span(rows, 'date')}:", "", *table(header, body)]))
    return "\n\n".join(found) or NO_RESULTS


def compiled_section(root: Path = ROOT) -> str:
    """The Markdown between the compiled markers: networks, each side by the fastest of its variants in the row."""
    found = []
    for path in result_files(root, "latest-compiled.jsonl"):
        rows = read_rows(path)
        body = [[*place_of(row)[:3], row["direction"], *_fastest(row["variants"])] for row in rows]
        header = ["network", "precision", "layout", "call", "PyTorch", "haloconv", "ratio", "memory"]
        lead = f"**{span(rows, 'gpu')}**, {span(rows, 'date')}{_not_searched(rows)}:"
        found.append("\n".join([lead, "", *table(header, body)]))
    return "\n\n".join(found) or NO_RESULTS


def networks_section(root: Path = ROOT) -> str:
    """The Markdown between README's networks markers: the compiled networks of every GPU, in the best of layouts."""
    rows = [row for path in result_files(root, "latest-compiled.jsonl") for row in read_rows(path)]
    if not rows:
        return NO_RESULTS
    networks: dict[tuple[str, str], dict[str, dict[str, dict]]] = {}
    for row in rows:
        of_calls = networks.setdefault((row["case"], row["gpu"].removeprefix("NVIDIA ")), {})
        in_layout = {f"{variant} {row['layout']}": found for variant, found in row["variants"].items()}
        of_calls.setdefault(f"{row['direction']} {row['precision']}", {}).update(in_layout)
    calls = sorted({call for of_calls in networks.values() for call in of_calls})
    body = [
        [*name, *(_in_words(of_calls.get(call, {})) for call in calls)] for name, of_calls in sorted(networks.items())
    ]
    header = ["network", "GPU", *calls]
    how = '[`torch.compile(model, backend="haloconv")`](docs/compile.md)'
    lead = (
        f"Whole networks by {how}: ms on the GPU, PyTorch → haloconv, each side by its fastest setting and layout "
        f"([which](docs/results.md#compiled-networks))"
        f"{_not_searched(rows)}. {_ONE_LAYOUT}: measured in one layout alone."
    )
    return "\n".join([lead, "", *table(header, body)])


_ONE_LAYOUT = "†"


def _in_words(variants: dict[str, dict]) -> str:
    """Both sides' fastest of a network, and PyTorch's ms over ours."""
    theirs, ours, ratio, _ = _fastest(variants)
    if ours == "–":
        return ours
    mark = _ONE_LAYOUT if len({name.rpartition(" ")[2] for name in variants}) == 1 else ""
    ms = " → ".join(side.partition(" ")[0] for side in (theirs, ours))
    return f"{ms} ({f'**{ratio}**' if float(ratio.rstrip('×')) > 1 else ratio}){mark}"


def _not_searched(rows: list[dict]) -> str:
    """Which networks' rows lack a search by Inductor, as the end of a sentence; all, if none has one."""
    lacking = [row for row in rows if not any(SEARCH in each for each in row["variants"])]
    names = sorted({row["case"] for row in lacking})
    which = "" if len(lacking) == len(rows) else f" for {', '.join(names)}"
    return f", without {SEARCH} on either side{which}" if lacking else ""


def _fastest(variants: dict[str, dict]) -> list[str]:
    """Of each side the variant and its ms; PyTorch's ms over ours, our memory over PyTorch's."""
    timed = {name: found for name, found in variants.items() if found.get("ms")}
    name, our = (min((each for each in timed if each.startswith(side)), key=lambda each: timed[each]["ms"], default="")
                 for side in ("PyTorch", "haloconv"))  # fmt: skip
    if not name or not our:
        return ["–"] * 4
    sides = [f"{timed[each]['ms']:.2f} {each.partition(' ')[2]}" for each in (name, our)]
    ratio, memory = timed[name]["ms"] / timed[our]["ms"], timed[our]["peak_bytes"] / timed[name]["peak_bytes"]
    return [*sides, f"{ratio:.2f}×", f"{memory:.2f}×"]
