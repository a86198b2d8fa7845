"""Run in a process that finds a haloconv with the toy family: everything that must know of it is asked. Prints JSON."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch

import haloconv
from haloconv.bench.suite import Case
from haloconv.bench.trial import Budget, try_step
from haloconv.choose.choice import choose
from haloconv.choose.records import forget_shelves, make_record, read_records, records_path, shelf_of
from haloconv.emulator import emulated_device
from haloconv.families import FAMILIES, OWN
from haloconv.families.closure import kernels, source_of, stamped_files
from haloconv.families.files import device_hash
from haloconv.jit import compile_source
from haloconv.layout import Layout
from haloconv.problem import Problem, dense_request
from tests.fuzz.check import check
from tests.fuzz.draw import SUBJECTS, Draw
from tests.tuned import FACTS, fake_gpu, only

CPU = torch.device("cpu")
ONE_PIXEL = Problem("fprop", 2, 5, 4, 7, 6, 1, 1)


def fuzzed() -> list[str]:
    """Kernels launched by problems drawn for the family, in several storages; a failure's sentence instead."""
    found = []
    storages: tuple[tuple[str, Layout], ...] = (("contiguous", "nchw"), ("channels_last", "nhwc"), ("sliced", "nchw"))
    for first, result in storages:
        draw = Draw("toy", "fprop", "fp32", (2, 5, 4, 7), (6, 1, 1), bias=first != "sliced", first=first, layout=result)
        outcome = check(draw, "cpu")
        found += [str(outcome)] if not isinstance(outcome, list) else [*{k for one in outcome for k in one.kernels}]
    return found


def recorded() -> list[object]:
    """What auto takes for a problem of which a record names the family, and the record as its file has it."""
    times = {"ms": 0.5, "aten_ms": 1.0, "own_ms": 0.5, "spread": 0.01, "runs": 10}
    errors = {"error": 1e-7, "aten_error": 1e-7, "error_limit": 1e-5, "difference": 1e-7}
    toy = FAMILIES["toy"]
    with tempfile.TemporaryDirectory() as name, fake_gpu(Path(name)), only(FAMILIES["direct"], toy):
        request = dense_request(ONE_PIXEL, CPU)
        config = toy.configs(request)[1]
        shelf_of(FACTS).keep([make_record(request, "toy", config, config, **times, **errors)])
        forget_shelves()
        (kept,) = read_records(records_path(FACTS.name))
        chosen = choose(ONE_PIXEL, CPU)
    return [kept.family, kept.kernel, kept.config == config.key, kept.source == device_hash(config.kernel),
            chosen.family, chosen.kernel, chosen.config == config.key, chosen.reason]  # fmt: skip


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
        "recorded": recorded(),
        "compiled": [compile_source(source, "sm_90a").entry for source in FAMILIES["toy"].sources()],
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
