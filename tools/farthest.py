"""List the layers that rules give to our kernels and that are furthest from any measured one: what to time next.

python -m tools.farthest [GPU] [--draws 8000] [--seed 1] [--count 200] > FILE
haloconv bench --sample FILE     # on that GPU; its rows are kept as <date>-chosen.jsonl

A rule is read off a few layers and holds for many. Of random draws some two thirds stay with PyTorch, and most others
are like layers that were measured; so few of them find where a rule is wrong. Here a draw's distance to what was
measured decides: rows of suites and samples, chosen ones and shipped records, of the same rule, kernel, layout, class
of precision and direction. Layers are picked greedily, each the one that brings most draws nearer to a measured one,
as in k-center clustering (Gonzalez 1985), and draws whose nearest rows are slow count for more.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from math import log2
from pathlib import Path
from typing import NamedTuple

import torch

from haloconv.bench.sample import Drawn, sample
from haloconv.choose.buckets import read_layer
from haloconv.choose.records import read_records, shipped_path
from haloconv.choose.rules import by_rule
from haloconv.device import gpu_stem
from haloconv.families import FAMILIES
from haloconv.problem import Problem, dense_request
from tools.measured import CPU, ROOT, facts_of, gpus, rows_of, stood_in
from tools.readme_results import family_of

_FAR, _NEAR = 9.0, 1.5  # where nothing was measured, and what counts as measured
_NEIGHBOURS = 3  # rows whose least ratio says how much is at stake
_ODD = 1.5  # for each side whose rows, or pixels, are no multiple of 16 bytes
_STRIDE = 2.0

Kind = tuple[str, str, str, str, str]
"""The rule, the kernel, the layout, the class of precision, and the direction."""


class Measured(NamedTuple):
    """A measured layer: its place among others, and its ratio to PyTorch's speed."""

    place: tuple[float, ...]
    ratio: float


def kind_of(problem: Problem) -> tuple[str, Kind] | None:
    """The family that a rule gives the problem to, and its kind; None if it stays with PyTorch."""
    ruling = by_rule(problem, CPU)
    if ruling.family == "aten":
        return None
    kernel = FAMILIES[ruling.family].configs(dense_request(problem, CPU))[0].kernel
    precision = "16 bits" if problem.dtype.itemsize == 2 else problem.precision_label
    return ruling.family, (ruling.rule, kernel, problem.layout, precision, problem.direction)


def place_of(problem: Problem) -> tuple[float, ...]:
    """The place of a problem among those of its kind, mostly in powers of two: a distance of 1 is a factor of two.

    What is written, what each result sums, a row's and all images' results, channels of a group, taps, stride,
    dilation, and how many of both sides lie at multiples of 16 bytes.
    """
    pixels, taps = problem.n * problem.p * problem.q, problem.r * problem.s
    written, summed = {
        "fprop": (pixels * problem.k, problem.c_per_group * taps),
        "dgrad": (problem.n * problem.c * problem.h * problem.w, problem.k_per_group * taps),
        "wgrad": (problem.k * problem.c_per_group * taps, pixels),
    }[problem.direction]
    piece = 16 // problem.dtype.itemsize
    sides = (problem.w, problem.q) if problem.layout == "nchw" else (problem.c, problem.k)
    scaled = (written, summed, problem.q, pixels, problem.c_per_group, problem.k_per_group, taps)
    return (
        *(log2(max(1, each)) for each in scaled),
        _STRIDE * log2(max(problem.stride)),
        log2(max(problem.dilation)),
        _ODD * sum(side % piece == 0 for side in sides),
    )


def measured(gpu: dict, root: Path = ROOT) -> dict[Kind, list[Measured]]:
    """What was measured on a GPU model, of what today's rules would run by the same kernel."""
    found: defaultdict[Kind, list[Measured]] = defaultdict(list)
    for row, case in rows_of(root, gpu_stem(gpu["name"])):
        problem = case.problem(row["direction"], row["precision"], row["layout"])
        named = kind_of(problem)
        if named is not None and named[0] == family_of(row) and row.get("kernel") in (None, "", named[1][1]):
            found[named[1]].append(Measured(place_of(problem), row["ratio"]))
    for record in read_records(shipped_path(gpu["name"])):
        problem = read_layer(record.layer, record.size)
        named = kind_of(problem)
        if named is not None and record.own == named[1][1] and record.ratio is not None:
            found[named[1]].append(Measured(place_of(problem), record.ratio))
    return found


class _Draws:
    """The draws of a kind: which are picked next, and how far the others are from what is measured by then."""

    def __init__(self, drawn: Sequence[Drawn], known: Sequence[Measured]) -> None:
        self.drawn = drawn
        places = torch.tensor([place_of(each.problem) for each in drawn], dtype=torch.float64)
        self._apart = torch.cdist(places, places)
        self._distance = torch.full((len(drawn),), _FAR, dtype=torch.float64)
        self._stakes = torch.ones_like(self._distance)
        if known:
            to_known = torch.cdist(places, torch.tensor([each.place for each in known], dtype=torch.float64))
            near = to_known.topk(min(_NEIGHBOURS, len(known)), largest=False)
            ratios = torch.tensor([each.ratio for each in known], dtype=torch.float64)[near.indices]
            self._distance = near.values[:, 0].clamp(max=_FAR)
            self._stakes = 1 / ratios.amin(1).clamp(min=1.0)

    def best(self) -> tuple[float, int]:
        """How much nearer all draws come to a measured one by the draw that does most, and which that is."""
        gains = (self._distance[:, None] - self._apart.clamp(min=_NEAR)).clamp(min=0).mul(self._stakes[:, None]).sum(0)
        index = int(gains.argmax())
        return float(gains[index]), index

    def pick(self, index: int) -> Drawn:
        """The draw, which counts as measured from now on."""
        self._distance = torch.minimum(self._distance, self._apart[:, index])
        return self.drawn[index]


def farthest(drawn: Iterable[Drawn], known: Mapping[Kind, Sequence[Measured]], count: int) -> Iterator[Drawn]:
    """At most ``count`` of the draws, those first that say most; fewer if the others are near to what is measured."""
    kinds: defaultdict[Kind, list[Drawn]] = defaultdict(list)
    for each in drawn:
        named = kind_of(each.problem)
        if named is not None:
            kinds[named[1]].append(each)
    draws = list(starmap(_Draws, ((members, known.get(kind, ())) for kind, members in kinds.items())))
    best = [each.best() for each in draws]
    for _ in range(count if draws else 0):
        place = max(range(len(draws)), key=lambda i: best[i][0])
        gain, index = best[place]
        if gain <= 0:
            return
        yield draws[place].pick(index)
        best[place] = draws[place].best()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpu", nargs="?", default="NVIDIA H200", help="a name as in benchmarks/gpus.json")
    parser.add_argument("--draws", type=int, default=8000, help="of how many random layers")
    parser.add_argument("--seed", type=int, default=1, help="of these draws")
    parser.add_argument("--count", type=int, default=200, help="how many to list at most")
    asked = parser.parse_args()
    found = [gpu for gpu in gpus() if gpu["name"] == asked.gpu]
    if not found:
        parser.error(f"{asked.gpu} has no results; there are {', '.join(gpu['name'] for gpu in gpus())}")
    with stood_in(facts_of(found[0])):
        chosen = farthest(sample(asked.draws, asked.seed), measured(found[0]), asked.count)
        sys.stdout.writelines(f"{each}\n" for each in chosen)


if __name__ == "__main__":
    main()
