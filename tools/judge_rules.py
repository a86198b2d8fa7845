"""Judge the rules by draws of `haloconv bench --sample`: what they were drawn from, and what they never saw.

python -m tools.judge_rules [GPU ...]     # by default every folder of benchmarks/results
python -m tools.judge_rules --left        # what rules give up: rows of suites and draws that were ahead

A hash of the problem puts each draw into one of two halves. Rules are drawn from the one, whose slowest rows are
listed; of the other only the verdict is printed, by rule. Rows that today's rules would not run so are left out. What
``tools.farthest`` chose has a verdict of its own: it says where rules are wrong, not how often.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from haloconv.bench.results import newest_rows
from haloconv.bench.sample import BEHIND, read_case, verdict
from haloconv.choose.rules import by_rule
from haloconv.device import gpu_stem
from haloconv.families import FAMILIES
from haloconv.problem import Problem, dense_request
from tools.measured import ROOT, facts_of, gpus, rows_of, stood_in
from tools.readme_results import family_of

DRAWN_FROM, JUDGED_ON = "drawn from", "judged on"
_LISTED = 20
_CPU = torch.device("cpu")


class Draw(NamedTuple):
    """A row of a sample that today's rules would run so: ``name`` says the problem, ``rule`` who decided."""

    name: str
    rule: str
    ratio: float


def half_of(name: str) -> str:
    """The half that a problem is in, whatever is drawn beside it: the lowest bit of the SHA-256 of its name."""
    return (DRAWN_FROM, JUDGED_ON)[hashlib.sha256(name.encode()).digest()[-1] & 1]


def draws(gpu: dict, root: Path = ROOT, what: str = "sample") -> tuple[list[Draw], int]:
    """The draws of a GPU model, and how many rows were left out, as today another kernel would run them.

    ``what`` is ``"sample"``, or ``"chosen"``.
    """
    found, others = [], 0
    with stood_in(facts_of(gpu)):
        rows: list[dict[str, Any]] = newest_rows(root / "benchmarks" / "results" / gpu_stem(gpu["name"]), what)
        for row in rows:
            if row["ratio"] is None:
                continue
            problem = read_case(row["case"]).problem(row["direction"], row["precision"], row["layout"])
            ruling = by_rule(problem, _CPU)
            if ruling.family != family_of(row) or not _runs_so(ruling.family, row, problem):
                others += 1
                continue
            name = " ".join(str(row[key]) for key in ("case", "direction", "precision", "layout"))
            found.append(Draw(name, ruling.rule or "aten", row["ratio"]))
    return found, others


def _runs_so(family: str, row: dict[str, Any], problem: Problem) -> bool:
    """Whether the family would run the problem by the row's kernel; rows of before kernels had names count as such."""
    kernel = row.get("kernel")
    return family == "aten" or not kernel or FAMILIES[family].configs(dense_request(problem, _CPU))[0].kernel == kernel


def judgment(found: Iterable[Draw]) -> Iterator[str]:
    """The lines of a report: by half the verdict of all and of each rule; the slowest rows of the first half alone."""
    halves: dict[str, list[Draw]] = {DRAWN_FROM: [], JUDGED_ON: []}
    for draw in found:
        halves[half_of(draw.name)].append(draw)
    for half, members in halves.items():
        yield f"{half}: {verdict(draw.ratio for draw in members)}"
        rules: defaultdict[str, list[float]] = defaultdict(list)
        for draw in members:
            rules[draw.rule].append(draw.ratio)
        for rule, ratios in sorted(rules.items()):
            yield f"  {rule}: {verdict(ratios)}, median {median(ratios):.2f}"
    slow = sorted((draw for draw in halves[DRAWN_FROM] if draw.ratio < BEHIND), key=lambda draw: draw.ratio)
    for draw in slow[:_LISTED]:
        yield f"  {draw.ratio:.2f} {draw.name} ({draw.rule})"


def left(gpu: dict, root: Path = ROOT) -> Iterator[Draw]:
    """Rows of a kernel of ours on which PyTorch runs today by rule, the fastest first: what a rule was narrowed by."""
    found = []
    with stood_in(facts_of(gpu)):
        for row, case in rows_of(root, gpu_stem(gpu["name"])):
            problem = case.problem(row["direction"], row["precision"], row["layout"])
            if family_of(row) != "aten" and by_rule(problem, _CPU).family == "aten":
                name = " ".join(str(row[key]) for key in ("case", "direction", "precision", "layout"))
                found.append(Draw(name, row.get("kernel") or family_of(row), row["ratio"]))
    yield from sorted(found, key=lambda draw: -draw.ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpu", nargs="*", help="names as in benchmarks/gpus.json")
    parser.add_argument("--left", action="store_true", help=f"the {_LISTED} fastest rows that rules leave to PyTorch")
    asked = parser.parse_args()
    for gpu in gpus():
        if asked.gpu and gpu["name"] not in asked.gpu:
            continue
        if asked.left:
            sys.stdout.write(f"{gpu['name']}:\n")
            sys.stdout.writelines(
                f"  {each.ratio:.2f} {each.name} ({each.rule})\n" for each in islice(left(gpu), _LISTED)
            )
        else:
            found, others = draws(gpu)
            sys.stdout.write(f"{gpu['name']}: {len(found)} draws; {others} rows are of other choices than today's\n")
            sys.stdout.writelines(f"{line}\n" for line in judgment(found))
            chosen, _ = draws(gpu, what="chosen")
            sys.stdout.write(f"chosen: {verdict(draw.ratio for draw in chosen)}\n")


if __name__ == "__main__":
    main()
