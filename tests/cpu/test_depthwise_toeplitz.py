"""depthwise_toeplitz: filters that are not finite, what it refuses and why, and that its tilings fit the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from haloconv import emulator
from haloconv.emulator import emulated_device
from haloconv.families import FAMILIES
from haloconv.families.depthwise_toeplitz import toeplitz, wgrad
from haloconv.families.depthwise_toeplitz.planes import blocks_that_fit
from haloconv.problem import Problem
from tests import oracle
from tests.emulated import BY_NAME, Run, execute

MISSING = emulator.available()
needs_emulator = pytest.mark.skipif(MISSING is not None, reason=f"no emulator: {MISSING}")
LAYER = Problem(
    "fprop", 32, 128, 56, 56, 128, 31, 31, padding=(15,) * 4, groups=128, dtype=torch.float16, precision="ieee"
)
H200_SMEM, LEAST_SMEM = 232_448, 99 << 10


@needs_emulator
@pytest.mark.usefixtures("emulator_cache")
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@pytest.mark.parametrize("result", ("fprop", "dgrad"))
@pytest.mark.parametrize("value", (float("inf"), float("nan")))
def test_filters_that_are_not_finite(value: float, result: str, dtype: torch.dtype) -> None:
    """A tap's products beside the image are left out, but a zero of the padding times an infinity is a NaN."""
    run = Run("depthwise_toeplitz", BY_NAME["toeplitz_channels"], dtype, result)
    w = run.tensors.w.clone()
    w[3, 0, 0, 0] = value
    t = run.tensors._replace(w=w)
    got = execute(run, t, seed=0)
    assert not torch.isfinite(got[:, 3]).all() and torch.isfinite(got[:, 4]).all()
    oracle.check(result, got, t, run.forced.spec)


@needs_emulator
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stride": (2, 2)}, "without stride"),
        ({"dilation": (1, 2)}, "without stride and dilation"),
        ({"r": 3, "s": 3}, "no more than 9 taps"),
        ({"r": 65, "s": 65, "padding": (32,) * 4}, "more than 4096 taps"),
        ({"r": 1, "s": 65}, "more than 64 columns"),
        ({"w": 136}, "more than 128 columns"),
        ({"dtype": torch.float32}, "TF32"),
        ({"groups": 64}, "takes one"),
        ({"direction": "dgrad", "k": 256}, "2 filters"),
        ({"direction": "wgrad", "r": 51, "s": 51, "padding": (25,) * 4}, "sums do not fit"),
        ({}, None),
    ],
)
def test_what_is_refused(changes: dict, reason: str | None) -> None:
    problem = replace(LAYER, **changes)
    with emulated_device():
        found = FAMILIES["depthwise_toeplitz"].why_not(problem, torch.device("cpu"))
    assert found is None if reason is None else found is not None and reason in found


@pytest.mark.parametrize("max_smem", (H200_SMEM, LEAST_SMEM))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@pytest.mark.parametrize("taps", (4, 13, 31, 63))
@pytest.mark.parametrize("extent", (5, 7, 14, 28, 56, 100, 112, 128))
def test_tilings_fit(extent: int, taps: int, dtype: torch.dtype, max_smem: int) -> None:
    """So many blocks as a tiling asks for fit a multiprocessor, with registers for each thread."""
    layer = replace(LAYER, h=extent, w=extent, r=taps, s=taps, padding=(taps // 2,) * 4, dtype=dtype)
    for tiling in toeplitz.tilings(layer, max_smem):
        smem = toeplitz._smem_bytes(layer, tiling)
        assert 1 <= tiling.min_blocks <= blocks_that_fit(smem, max_smem)
        assert 32 * tiling.warps * tiling.min_blocks * toeplitz._registers(layer, tiling) <= 65536
    gradient = layer.toward("wgrad")
    if wgrad._why_no_tiling(gradient, max_smem) is None:
        for tiling in wgrad.tilings(gradient, max_smem):
            smem = wgrad._smem_bytes(gradient, tiling)
            assert 1 <= tiling.min_blocks <= blocks_that_fit(smem, max_smem)
