"""Gradients of whole models are judged where a limit tells them from zeros."""

from __future__ import annotations

import copy

import pytest
import torch

from haloconv.bench.networks import whole
from haloconv.bench.networks.swapped import Autocast
from haloconv.bench.networks.whole import Contest, try_model
from haloconv.bench.trial import Budget
from haloconv.reference import NORM_LIMITS


class Deep(torch.nn.Module):
    """Layers with ReLU and batch normalisations: of its gradients PyTorch in bf16 has half right."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Conv2d(6, 6, 3, padding=1, bias=False) for _ in range(12))
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(6) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(torch.relu(layer(x)))
        return x


def test_a_gradient_of_zeros_fails_in_bf16() -> None:
    """Every gradient has a limit that tells it from zeros, though the layers together may err by more."""
    torch.manual_seed(0)
    theirs, inputs = Deep(), (torch.randn(2, 6, 9, 9),)
    ours = copy.deepcopy(theirs)
    models = (Autocast(each, torch.bfloat16) for each in (ours, theirs))
    contest = Contest(*models, inputs, "ieee", "bf16", norm_limit=12 * NORM_LIMITS["bf16"])
    (row,), notes = try_model(contest, "deep", Budget(min_runs=0), ("step",))
    assert row.passed and 0 < row.aten_error < 0.15 and row.error_limit < 0.3, (row, notes)
    assert not any("layers" in note for note in notes), "a filter's gradient has a limit above 0.1"
    assert all(each.training for each in (*ours.norms, *theirs.norms))
    for layer in (ours.layers[0], ours.layers[11]):
        hook = layer.weight.register_hook(torch.zeros_like)
        (wrong,), _ = try_model(contest, "deep", Budget(min_runs=0), ("step",))
        hook.remove()
        assert not wrong.passed and "gradient of" in wrong.complaint


def test_gradients_are_those_of_a_smooth_model() -> None:
    """The error of PyTorch's own gradients in bf16 tells: most of it were ReLUs that a rounding switches on or off."""
    torch.manual_seed(0)
    model, x = Autocast(Deep(), torch.bfloat16), torch.randn(2, 6, 9, 9)
    contest = Contest(model, model, (x,), "ieee", "bf16", norm_limit=0.1)
    smooth = whole._draw(contest, 0, gradients=True)
    rough = whole._Draw(whole.values_of(model, (x,), 0), whole.values_of(model, (x,), 0), whole._truth(contest, True))
    name = "gradient of model.layers.0.weight"
    errors = [(d.theirs[name].double() - d.truth[name]).norm() / d.truth[name].norm() for d in (smooth, rough)]
    assert errors[0] < 0.05 < 0.2 < errors[1]


@pytest.mark.parametrize("baseline", [0.0, 0.04, 0.3, 0.7, 0.99])
def test_no_limit_lets_zeros_pass(baseline: float) -> None:
    contest = whole.Contest(torch.nn.Identity(), torch.nn.Identity(), (torch.zeros(1),), "ieee", "bf16", 1.5)
    truth, zeros = {"gradient of w": torch.ones(50)}, {"gradient of w": torch.zeros(50)}
    errors = whole._judge(zeros, {"gradient of w": torch.full((50,), 1 + baseline)}, truth, contest)
    assert errors.complaint is not None and errors.limit < 1
    assert bool(errors.hardly_checked) == (baseline > 0.05)
