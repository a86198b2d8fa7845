"""Padding modes on a GPU: interior and rims are a padded copy's results, on integers to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import haloconv
from tests.cases import Case
from tests.emulated_halo_sm90_edges import CASES, results_of
from tests.families import DIRECT, HALO_SM90, Subject, name_of, over
from tests.gpu.runs import check_every_tiling
from tests.padded import convolved, integers, with_integers

EDGES = [
    (HALO_SM90, one, dtype, result) for one in CASES for result in results_of(one.name) for dtype in HALO_SM90.dtypes
]
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
