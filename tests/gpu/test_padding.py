"""Padding modes on a GPU: interior and rims are a padded copy's results, on integers to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import haloconv
from tests import emulated_halo_sm90_wgrad_edges as wgrad_edges
from tests.cases import Case, case
from tests.emulated import Run
from tests.emulated_halo_sm90_edges import CASES, results_of
from tests.families import DIRECT, HALO_SM90, HALO_SM90_WGRAD, Subject, each_dtype, name_of, over
from tests.gpu.runs import check_every_tiling, check_run, runs_of
from tests.padded import convolved, integers, with_integers

EDGES = [
    (HALO_SM90, one, dtype, result) for one in CASES for result in results_of(one.name) for dtype in HALO_SM90.dtypes
]
RUNS = runs_of("halo_sm90", wgrad_edges)
LAYERS = tuple(
    case(f"{name}_{storage}", reason, *shape, storage=storage, **layer)
    for storage in ("contiguous", "channels_last")
    for name, reason, shape, layer in (
        ("a_same", "case A, smaller images", ((2, 32, 128, 256), (64, 5, 9)), {"padding": (4, 12), "dilation": (2, 3)}),
        ("c_same", "case C, smaller images", ((2, 64, 64, 256), (128, 3, 3)), {"padding": 1}),
        ("c_odd", "rows that are shifted, or of channels", ((2, 64, 64, 255), (128, 3, 3)), {"padding": 1}),
        ("unet", "wide layers", ((2, 128, 64, 64), (96, 3, 3)), {"padding": 1}),
        ("stride", "3x3 of every second pixel", ((8, 64, 56, 56), (96, 3, 3)), {"padding": 1, "stride": 2}),
    )
)  # fmt: skip
MODES = ("circular", ("zeros", "circular"), ("reflect", "replicate"))


@pytest.mark.parametrize(
    ("subject", "modes"), over(*((each, m) for each in (DIRECT, HALO_SM90) for m in MODES)), ids=name_of
)
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("stride", [1, 2])
def test_rims(
    subject: Subject, modes: object, order: torch.memory_format, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision = "tf32" if subject.tensor_cores else "ieee"
    own: dict[str, Any] = {"family": subject.name, "strict": True, "precision": precision, "padding_mode": modes}
    layer = with_integers(haloconv.Conv2d(16, 24, (3, 5), stride, (1, 2), **own).cuda())
    x = integers(2, 16, 30, 44, dtype=torch.float32).cuda().to(memory_format=order).requires_grad_()
    reference, wide = layer.double(), x.detach().double().requires_grad_()
    want = convolved(wide, reference)
    dy = integers(*want.shape).cuda()
    gradients = torch.autograd.grad(want, (wide, *reference.parameters()), dy)
    layer = layer.float()
    monkeypatch.setattr(torch.nn.functional, "pad", None)  # no copy
    y = layer(x)
    found = torch.autograd.grad(y, (x, *layer.parameters()), dy.float())
    for got, expected in zip((y, *found), (want, *gradients), strict=True):
        assert torch.equal(got.double(), expected)


@pytest.mark.parametrize(("subject", "one", "dtype", "result"), over(*EDGES), ids=name_of)
def test_edges_in_every_tiling(
    subject: Subject, one: Case, dtype: torch.dtype, result: str, in_threads: Callable, record: Callable
) -> None:
    """One launch that finds pixels of the image outside it: random values, and integers to the bit."""
    assert check_every_tiling(subject, one, dtype, result, in_threads, record) > 1


@pytest.mark.parametrize(("subject", "run"), over(*((HALO_SM90_WGRAD, run) for run in RUNS)), ids=str)
def test_weight_gradients_in_one_launch(subject: Subject, run: Run, record: Callable) -> None:
    """What the emulator runs, with the same tiles."""
    check_run(subject, run, record)


@pytest.mark.parametrize(("subject", "dtype"), each_dtype((HALO_SM90_WGRAD,)), ids=name_of)
@pytest.mark.parametrize("one", LAYERS, ids=lambda one: one.name)
@pytest.mark.parametrize("result", wgrad_edges.RESULTS)
def test_weight_gradients_of_layers(
    subject: Subject, dtype: torch.dtype, one: Case, result: str, record: Callable
) -> None:
    """Layers of real size, with the tile that the cost model puts first."""
    check_run(subject, Run("halo_sm90", one, dtype, result), record)
