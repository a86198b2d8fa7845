"""Say which kernels are needed beside each other, by rows that each ran on the same layers: the keep rule.

python -m tools.keep_rule

Rows lie in benchmarks/kernels/results/<gpu>/; `haloconv bench --suite benchmarks/kernels/depthwise.toml --family
depthwise/band` writes those of one kernel. A kernel is needed if it is 5 % ahead of every other one on two rows of one
GPU. Exit code 1 if one that was timed is not.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from haloconv.bench.results import ResultRow, key_of, read_rows

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "kernels" / "results"
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


def rows_ahead(layers: dict[tuple, Times]) -> dict[str, int]:
    """For each kernel, on how many layers it is 5 % ahead of every other that ran there; alone it is ahead of none."""
    ahead = dict.fromkeys(sorted({kernel for times in layers.values() for kernel in times}), 0)
    for times in layers.values():
        for kernel, ms in times.items():
            others = [other for name, other in times.items() if name != kernel]
            ahead[kernel] += bool(others) and min(others) >= AHEAD * ms
    return ahead


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
        for kernel, count in rows_ahead(layers).items():
            print(f"{kernel}: {count} rows 5 % ahead")
            most[kernel] = max(most.get(kernel, 0), count)
    left = [kernel for kernel, count in most.items() if count < FEWEST]
    print(f"not needed by these rows: {', '.join(left) or 'none'}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
