"""Grouped layers and stems in channels_last on a GPU: the emulator's runs of them, and layers of real size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests import oracle
from tests.cases import Case, case, make
from tests.emulated import Run, module_runs
from tests.families import GROUPED_SM90, HALO_SM80, HALO_SM80_WGRAD, Subject, name_of, over
from tests.gpu.runs import check_integers, check_run
from tests.launches import launched

SUBJECTS = (HALO_SM80, HALO_SM80_WGRAD, GROUPED_SM90)
RUNS = tuple((subject, run) for subject in SUBJECTS for run in module_runs(subject.name) if "nhwc" in run.case.name
             or subject is GROUPED_SM90 or "stem" in run.case.name or run.result in oracle.EPILOGUES)  # fmt: skip
RESULTS = [
    (subject, dtype, result) for subject in SUBJECTS for dtype in subject.dtypes for result in subject.results
    if subject is not GROUPED_SM90 or result != "wgrad" or dtype != torch.float32
]  # fmt: skip
LAST = "channels_last"
GROUPED = (
    case("eights", "ResNeXt, several blocks on each multiprocessor", (32, 256, 28, 28), (256, 3, 3), padding=1,
         groups=32, storage=LAST, w_storage=LAST),
    case("sixteens", "RegNet, odd extents", (8, 208, 27, 45), (208, 3, 3), padding=1, groups=13, storage=LAST),
)  # fmt: skip
STEMS = (
    case("alexnet", "planes as boxes, padding on all sides", (16, 3, 224, 224), (96, 11, 11), padding=2, stride=4),
    case("alexnet_nhwc", "channels folded into rows", (16, 3, 224, 224), (96, 11, 11), padding=2, stride=4,
         storage=LAST, w_storage=LAST),
)  # fmt: skip
LAYERS = [
    (subject, dtype, result, one) for subject, dtype, result in RESULTS
    for one in (GROUPED if subject is GROUPED_SM90 else (*GROUPED, *STEMS))
]  # fmt: skip


@pytest.mark.parametrize(("subject", "run"), over(*RUNS), ids=str)
def test_run(subject: Subject, run: Run, record: Callable) -> None:
    """What the emulator runs, with the same tiles."""
    check_run(subject, run, record)


@pytest.mark.parametrize(("subject", "dtype", "result", "one"), over(*LAYERS), ids=name_of)
def test_layer(subject: Subject, dtype: torch.dtype, result: str, one: Case, record: Callable) -> None:
    """Right, and the same bits every time: a stage that is filled again too early shows once in a while."""
    special, t = subject.on(one, dtype), make(one, dtype, "cuda")
    with oracle.RedZones("cuda") as zones, launched() as names:
        first, *others = (oracle.run(result, t, special) for _ in range(8))
    error = oracle.check(result, first, t, special.spec)
    assert all(oracle.same_bits(first, other) for other in others)
    zones.check()
    record(names, result, subject.label(dtype), error.norm)
    check_integers(subject, result, special, dtype, record)
