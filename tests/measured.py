"""A convolution whose results are measured as they are stored: how tests run it, and judge mean and variance."""

from __future__ import annotations

import torch

from haloconv import moments
from tests.cases import Case, Tensors


def run_measured(t: Tensors, one: Case) -> torch.Tensor:
    """y, of which mean and variance are right."""
    assert moments.is_measured(t.x, t.w, one.spec), f"no kernel of {one.spec.family} measures {one.name}"
    y, variance, mean = moments.fprop(t.x, t.w, one.spec)
    check_moments(y, mean, variance)
    return y


def check_moments(y: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> None:
    """Assert that these (1, K, 1, 1) are those of y (N, K, P, Q), within fp32's rounding where they are finite."""
    found = [each.double().cpu() for each in torch.var_mean(y.double(), (0, 2, 3), correction=0, keepdim=True)]
    finite = found[0].isfinite()
    assert not (variance.cpu().isfinite() & mean.cpu().isfinite())[~finite].any(), "moments hide what is not finite"
    of_variance, of_mean = (
        (got.double().cpu() - want)[finite].abs() for got, want in zip((variance, mean), found, strict=True)
    )
    want_variance, want_mean = (each[finite] for each in found)
    scale = want_variance.sqrt() + want_mean.abs()
    assert (of_mean <= 1e-6 * scale).all(), f"a mean is off by {(of_mean / scale).max():.1e}"
    assert (of_variance <= 1e-5 * want_variance + 1e-12 * scale.square()).all(), "a variance is off"
