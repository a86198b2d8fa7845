"""Say whether warm calls cost the host more than in another revision: both trees alternate in one run.

python -m tools.host_costs FOLDER [ROUNDS]

FOLDER is a tree of the other revision: `git worktree add FOLDER REVISION`. Each round runs `haloconv bench --host-cost`
in a process of its own in either tree, every other round in the other order. Of each call the median of a tree's rounds
counts, in us and over PyTorch's in the same process, as hosts and their loads differ. Exit code 1 if a call's ratio is
over the other tree's by more than both trees' spreads together: half of what lies between the quartiles of the rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from haloconv.bench.results import ResultRow

HERE = Path(__file__).resolve().parents[1]
ROUNDS = 5


class Cost(NamedTuple):
    """What a warm call costs in a tree: us, us over PyTorch's in the same process, and the spread of that ratio."""

    us: float
    ratio: float
    spread: float


def cost_of(rows: Sequence[ResultRow]) -> Cost:
    """Of one call in one tree, of a row of each round."""
    us = [float(str(row["haloconv_us"])) for row in rows]
    ratios = [float(str(row["haloconv_us"])) / float(str(row["aten_us"])) for row in rows]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return Cost(statistics.median(us), statistics.median(ratios), (quartiles[2] - quartiles[0]) / 2)


def is_worse(here: Cost, other: Cost) -> bool:
    """Whether a call costs more here than the rounds of both trees vary."""
    return here.ratio > other.ratio + here.spread + other.spread


def by_call(rounds: Sequence[Sequence[ResultRow]]) -> dict[str, Cost]:
    """The cost of each call that all rounds of a tree have."""
    calls = [{str(row["what"]): row for row in rows} for rows in rounds]
    return {what: cost_of([each[what] for each in calls]) for what in calls[0] if all(what in each for each in calls)}


def rows_in(tree: Path) -> list[ResultRow]:
    """The rows that `haloconv bench --host-cost` writes in a tree. Raises SystemExit if it wrote none."""
    with tempfile.TemporaryDirectory(prefix="haloconv-") as folder:
        command = [sys.executable, "-m", "haloconv", "bench", "--host-cost", "--results", folder]
        path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        rows = [json.loads(line) for file in Path(folder).rglob("*.jsonl") for line in file.read_text().splitlines()]
        if not rows:
            raise SystemExit(f"{tree}: no rows were written: {done.stdout}{done.stderr}")
        return rows


def main(arguments: Sequence[str]) -> int:
    other, rounds = Path(arguments[0]).resolve(), int(arguments[1]) if len(arguments) > 1 else ROUNDS
    found: dict[Path, list[list[ResultRow]]] = {HERE: [], other: []}
    for number in range(rounds):
        for tree in (HERE, other) if number % 2 else (other, HERE):
            found[tree].append(rows_in(tree))
    here, there = by_call(found[HERE]), by_call(found[other])
    print(f"{'call':32} {'other us':>9} {'here us':>9} {'other ratio':>15} {'here ratio':>15}")
    worse = []
    for what in (each for each in here if each in there):
        ours, theirs = here[what], there[what]
        ratios = [f"{cost.ratio:.2f} +- {cost.spread:.2f}" for cost in (theirs, ours)]
        print(f"{what:32} {theirs.us:9.1f} {ours.us:9.1f} {ratios[0]:>15} {ratios[1]:>15}")
        worse += [what] if is_worse(ours, theirs) else []
    print(f"{rounds} rounds of each. Costlier here: {', '.join(worse) or 'none'}.")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
