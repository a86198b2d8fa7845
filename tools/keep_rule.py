"""Say which kernels are needed beside each other, by rows that each ran on the same layers: the keep rule.

python -m tools.keep_rule

Rows lie in benchmarks/kernels/results/<gpu>/; `haloconv bench --suite benchmarks/kernels/depthwise.toml --family
depthwise/band` writes those of one kernel. A kernel is needed if it is 5 % ahead of every other one on two rows of one
GPU. An older architecture runs fewer kernels: among those that it runs one is needed as well if it is 5 % ahead of the
others, or the only one, on two rows; their times on the measured GPU stand in for those of the older one. Exit code 1
if a kernel that was timed is not needed.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

import torch

from haloconv.bench.results import ResultRow, key_of, read_rows
from haloconv.bench.suite import load_suite
from haloconv.emulator import emulated_device
from haloconv.problem import dense_request

KERNELS = Path(__file__).resolve().parents[1] / "benchmarks" / "kernels"
FOLDER, SUITE = KERNELS / "results", KERNELS / "depthwise.toml"
OLDER = ("sm_80", "sm_75")  # tensor cores and asynchronous copies, but no TMA; neither
CPU = torch.device("cpu")
AHEAD = 1.05
FEWEST = 2

Times = dict[str, float]
"""Of each kernel its time, in ms."""


def times_by_layer(rows: Iterable[ResultRow]) -> dict[tuple, Times]:
    """The newest passed row of each kernel for each case, direction, precision and layout."""
    found: defaultdict[tuple, Times] = defaultdict(dict)
    for row in sorted(rows, key=lambda row: str(row["date"])):
        if row["passed"] and row["haloconv_ms"] is not None:
            found[key_of(row)][str(row["kernel"])] = float(str(row["haloconv_ms"]))
    return {key: found[key] for key in sorted(found)}


def rows_ahead(layers: dict[tuple, Times], runs: Callable[[str, tuple], bool] | None = None) -> dict[str, int]:
    """For each kernel, on how many layers it is 5 % ahead of every other that ran there; alone it is ahead of none.

    With ``runs``, which says whether an older architecture runs a kernel on a layer: ahead of those that it runs, or
    the only one of several.
    """
    ahead = dict.fromkeys(sorted({kernel for times in layers.values() for kernel in times}), 0)
    for key, times in layers.items():
        taken = times if runs is None else {kernel: ms for kernel, ms in times.items() if runs(kernel, key)}
        for kernel, ms in taken.items():
            others = [other for name, other in taken.items() if name != kernel]
            ahead[kernel] += min(others) >= AHEAD * ms if others else len(times) > 1
    return ahead


def runs_on(arch: str) -> Callable[[str, tuple], bool]:
    """Whether a GPU of the architecture runs a kernel on a layer of the suite, a key of ``times_by_layer``."""
    cases = {case.name: case for case in load_suite(SUITE)}

    def runs(kernel: str, key: tuple) -> bool:
        name, direction, precision, layout = key
        host = import_module(f"haloconv.families.{kernel.replace('/', '.')}")
        with emulated_device(arch=arch):
            return bool(host.configs(dense_request(cases[name].problem(direction, precision, layout), CPU)))

    return runs


def table(layers: dict[tuple, Times]) -> list[str]:
    """A line a layer: each kernel's time over the shortest, shortest first."""
    lines = []
    for key, times in layers.items():
        best = min(times.values())
        ordered = sorted(times.items(), key=lambda item: item[1])
        of_kernels = ", ".join(f"{kernel.partition('/')[2]} {ms / best:.2f}" for kernel, ms in ordered)
        lines.append(f"{' '.join(map(str, key))}: {1000 * best:.1f} us, {of_kernels}")
    return lines


def main() -> int:
    most: dict[str, int] = {}
    for gpu in sorted(FOLDER.iterdir()):
        layers = times_by_layer(row for path in sorted(gpu.glob("????-??-??-*.jsonl")) for row in read_rows(path))
        print(f"{gpu.name}: times as long as the fastest", *table(layers), sep="\n  ")
        ahead = {"": rows_ahead(layers)}
        ahead |= {arch: rows_ahead(layers, runs_on(arch)) for arch in OLDER}
        for kernel in ahead[""]:
            counts = {arch: rows[kernel] for arch, rows in ahead.items()}
            older = ", ".join(f"{counts[arch]} on {arch}" for arch in OLDER)
            print(f"{kernel}: {counts['']} rows 5 % ahead; {older}")
            most[kernel] = max(most.get(kernel, 0), *counts.values())
    left = [kernel for kernel, count in most.items() if count < FEWEST]
    print(f"not needed by these rows: {', '.join(left) or 'none'}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
