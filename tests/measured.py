"""A convolution whose results are measured as they are stored: how tests run it, and judge mean and variance."""

from __future__ import annotations

from typing import Any

import torch

from haloconv import moments
from haloconv.problem import ConvSpec

MOMENTS, MOMENTS_RESIDUAL, MOMENTS_IMAGES = "moments", "moments_residual", "moments_images"
"""Results of tests.oracle. Mean and variance of each filter are attributes of the tensor: of fprop without a bias, of
one with bias and residual, and of each image of the latter."""
MEASURED = (MOMENTS, MOMENTS_RESIDUAL, MOMENTS_IMAGES)
BOX_PIXELS, FP32 = 64, torch.finfo(torch.float32)


def run_measured(
    result: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, residual: torch.Tensor, spec: ConvSpec
) -> torch.Tensor:
    """y, which has its moments with it."""
    bias, more = (None, None) if result == MOMENTS else (b, residual)
    adds = {"has_bias": bias is not None, "has_residual": more is not None}
    per_image = result == MOMENTS_IMAGES
    assert moments.has_moments(x, w, spec, **adds, per_image=per_image), f"no kernel of {spec.family} measures this"
    y, variance, mean = moments.fprop(x, w, bias, more, spec, per_image)
    return with_moments(y, mean, variance)


def with_moments(y: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """y (N, K, P, Q) with what was measured of it, K values each, or N K."""
    kept: Any = y
    kept.moments = (mean.view(-1), variance.view(-1))
    return y


def on_cpu(y: torch.Tensor) -> torch.Tensor:
    """A copy of y on the CPU, with its moments if it has any."""
    return with_moments(y.cpu(), *y.moments) if hasattr(y, "moments") else y.cpu()


def check_measured(result: str, y: Any) -> None:
    """Assert that what was measured of y, if anything was to be, is right within fp32's rounding, or not finite.

    Not finite where y is not, and where it may be: squares of the differences in a box of pixels are summed in fp32.
    """
    if result not in MEASURED:
        return
    values, dims = y.detach().double(), (2, 3) if result == MOMENTS_IMAGES else (0, 2, 3)
    want_variance, want_mean = (each.flatten().cpu() for each in torch.var_mean(values, dims, correction=0))
    mean, variance = (each.double().cpu() for each in y.moments)
    squares = values.square().sum(dims).flatten().cpu()
    may_overflow = ~(4 * BOX_PIXELS * squares < FP32.max) | want_variance.isnan()
    overflown = may_overflow & ~(variance.isfinite() & mean.isfinite())
    scale = want_variance.sqrt() + want_mean.abs()
    of_mean, of_variance = (mean - want_mean).abs(), (variance - want_variance).abs()
    within = 1e-6 * scale + FP32.tiny
    assert (overflown | (of_mean <= within)).all(), f"a mean is off by {(of_mean / within).max():.1e} of what it may be"
    within = 1e-5 * want_variance + 1e-12 * scale.square() + FP32.tiny
    assert (overflown | (of_variance <= within)).all(), (
        f"a variance is off by {(of_variance / within).max():.1e} of what it may be"
    )
