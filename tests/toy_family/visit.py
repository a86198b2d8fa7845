"""Run in a process that finds a haloconv with the toy family: everything that must know of it is asked. Prints JSON."""

from __future__ import annotations

import json
import sys
import warnings

import torch

import haloconv
from haloconv.bench.suite import Case
from haloconv.bench.trial import Budget, try_step
from haloconv.choose.choice import choose
from haloconv.emulator import emulated_device
from haloconv.families import FAMILIES, OWN
from haloconv.families.closure import kernels, source_of, stamped_files
from haloconv.jit import compile_source
from haloconv.problem import Problem
from tests.fuzz.check import check
from tests.fuzz.draw import SUBJECTS, Draw

CPU = torch.device("cpu")
ONE_PIXEL = Problem("fprop", 2, 5, 4, 7, 6, 1, 1)


def fuzzed() -> list[str]:
    """Kernels launched by problems drawn for the family, in several storages; a failure's sentence instead."""
    found = []
    for first, result in (("contiguous", "nchw"), ("channels_last", "nhwc"), ("sliced", "nchw")):
        draw = Draw("toy", "fprop", "fp32", (2, 5, 4, 7), (6, 1, 1), bias=first != "sliced", first=first, layout=result)
        outcome = check(draw, "cpu")
        found += [str(outcome)] if not isinstance(outcome, list) else [*{k for one in outcome for k in one.kernels}]
    return found


def main() -> None:
    with emulated_device():
        chosen = choose(ONE_PIXEL, CPU).family
        refused = choose(Problem("fprop", 2, 5, 4, 7, 6, 3, 3), CPU, "toy").reason
        other = choose(Problem("fprop", 2, 5, 4, 7, 6, 3, 3), CPU).family
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer = haloconv.Conv2d(5, 6, 1, family="toy")
            layer(torch.zeros(1, 5, 3, 3))
        row = try_step(Case("one", (2, 5, 4, 7), 6, (1, 1)).layer("fp32", "nchw", "toy", CPU), "fprop", Budget(0, 0))
    found = {
        "registered": "toy" in FAMILIES and "toy" in OWN and "toy" in SUBJECTS,
        "kernels": [kernel for kernel in kernels() if kernel.startswith("toy/")],
        "stamped": [file.name for file in stamped_files("toy/pointwise")],
        "row": [row.passed, row.family, row.kernel, row.config, row.source == source_of("toy/pointwise")],
        "chosen": chosen,
        "other": other,
        "refused": refused,
        "repr": repr(layer),
        "fuzzed": fuzzed(),
        "compiled": [compile_source(source, "sm_90a").entry for source in FAMILIES["toy"].sources()],
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
