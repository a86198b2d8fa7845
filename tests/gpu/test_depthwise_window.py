"""Depthwise layers on a GPU: the emulator's runs of depthwise_window, and layers of real size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests import oracle
from tests.cases import Case, case, make
from tests.emulated import Run, module_runs
from tests.emulated_depthwise_window import RESULTS
from tests.families import DEPTHWISE_WINDOW, Subject, each_dtype, name_of, over
from tests.gpu.runs import check_integers, check_run
from tests.launches import launched

RUNS = tuple(module_runs("depthwise_window"))
LAYERS = tuple(
    case(f"{name}_{storage}", reason, x, filters, storage=storage, padding=padding, groups=groups, **more)
    for storage in ("contiguous", "channels_last")
    for name, reason, x, filters, padding, groups, more in (
        ("replk_31", "RepLKNet, first stage", (4, 32, 56, 56), (32, 31, 31), 15, 32, {}),
        ("replk_13", "RepLKNet, last stage", (4, 64, 7, 7), (64, 13, 13), 6, 64, {}),
        ("63x63", "a filter that is cut", (1, 4, 56, 56), (4, 63, 63), 31, 4, {}),
        ("70x70", "sums that are promoted", (1, 2, 80, 80), (2, 70, 70), 35, 2, {}),
        ("dilated", "far taps", (4, 32, 64, 64), (32, 3, 3), 8, 32, {"dilation": 8}),
        ("strided", "far stride", (4, 32, 96, 96), (64, 7, 7), 3, 32, {"stride": 4}),
    )
)  # fmt: skip


@pytest.mark.parametrize(("subject", "run"), over(*((DEPTHWISE_WINDOW, run) for run in RUNS)), ids=str)
def test_run(subject: Subject, run: Run, record: Callable) -> None:
    """What the emulator runs, with the same cuts."""
    check_run(subject, run, record)


@pytest.mark.parametrize(("subject", "dtype"), each_dtype((DEPTHWISE_WINDOW,)), ids=name_of)
@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("one", LAYERS, ids=lambda one: one.name)
def test_layer(subject: Subject, dtype: torch.dtype, one: Case, result: str, record: Callable) -> None:
    """Right, and the same bits twice."""
    special, t = subject.on(one, dtype), make(one, dtype, "cuda")
    with oracle.RedZones("cuda") as zones, launched() as names:
        got, again = (oracle.run(result, t, special) for _ in range(2))
    error = oracle.check(result, got, t, special.spec)
    assert oracle.same_bits(got, again)
    zones.check()
    record(names, result, oracle.DTYPE_NAMES[dtype], error.norm)
    check_integers(subject, result, special, dtype, record)
