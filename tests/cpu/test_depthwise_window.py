"""depthwise_window: rows outside of the image are left out only where a zero times a tap is a zero."""

from __future__ import annotations

import pytest
import torch

from haloconv import emulator
from tests import oracle
from tests.emulated import BY_NAME, Run, execute

MISSING = emulator.available()


@pytest.mark.skipif(MISSING is not None, reason=f"no emulator: {MISSING}")
@pytest.mark.usefixtures("emulator_cache")
@pytest.mark.parametrize("value", (float("inf"), float("nan")))
def test_filters_that_are_not_finite(value: float) -> None:
    """The first row of taps meets nothing but padding in the upper half of the output."""
    run = Run("depthwise_window", BY_NAME["window_tall"], torch.float32, "fprop", "the same rows of planes")
    w = run.tensors.w.clone()
    w[0, 0, 0, 1] = value
    t = run.tensors._replace(w=w)
    got = execute(run, t, seed=0)
    assert got[:, :, :10].isnan().all()
    oracle.check("fprop", got, t, run.forced.spec)
