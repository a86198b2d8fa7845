"""The first calls of layers in a process, timed: ``python -m haloconv.bench.costs.first_use`` in a process of its own.

Reads ``{"family": ..., "cases": [...]}`` from standard input and writes a JSON list of first uses.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass

import torch

from haloconv import jit
from haloconv.bench.layer import Layer, Step
from haloconv.bench.suite import Case, case_of
from haloconv.problem import DIRECTIONS
from haloconv.tune.timing import synchronize

STARTER = Case("first kernel of a process", input=(1, 1, 8, 8), filters=1, filter=(1, 1))


@dataclass(frozen=True)
class FirstUse:
    """The wall ms of a first call until the device was done, how many kernels it got, and how many it compiled."""

    what: str
    ms: float
    kernels: int
    compiles: int


def first_use(layer: Layer, step: Step, what: str) -> FirstUse:
    """Time the first call of one direction.

    Raises RuntimeError if it got no new kernel, because then it is no first use.
    """
    call = layer.ours(step)
    synchronize(layer.x.device)
    before, start = jit.statistics(), time.perf_counter()
    call()
    synchronize(layer.x.device)
    ms, after = (time.perf_counter() - start) * 1e3, jit.statistics()
    compiles = after.compiles - before.compiles
    kernels = compiles + after.disk_hits - before.disk_hits
    if not kernels:
        raise RuntimeError(f"{what} needed no new kernel")
    return FirstUse(what, ms, kernels, compiles)


def main() -> None:
    order = json.load(sys.stdin)
    device = torch.device("cuda", torch.cuda.current_device())
    uses = [first_use(STARTER.layer("fp32", "nchw", order["family"], device), "fprop", STARTER.name)]
    for entry in order["cases"]:
        case = case_of(entry)
        layer = case.layer("fp32", "nchw", order["family"], device)
        uses += [first_use(layer, direction, f"{case.name} {direction}") for direction in DIRECTIONS]
    json.dump([asdict(use) for use in uses], sys.stdout)


if __name__ == "__main__":
    main()
