"""Epilogues with every activation, as kernels of a forced family apply them, held against PyTorch's in float64."""

from __future__ import annotations

import torch

from haloconv import plan
from haloconv.epilogue import applied, bias_and_scale
from haloconv.problem import Activation, Epilogue
from haloconv.reference import oracle_fprop
from tests.cases import Case, make

SLOPE = 1.13  # of the steepest activation, by which it enlarges an error
_LIMITS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def check_activation(one: Case, dtype: torch.dtype, device: str, activation: Activation | None, parts: int) -> str:
    """Assert that y is right behind an activation, with a scale where bit 0 of ``parts`` is set, and bit 1 a residual.

    Gives the kernel that ran. The family is the case's, and no pass of PyTorch's follows.
    """
    t, has_scale, has_residual = make(one, dtype, device), parts % 2 == 1, parts // 2 % 2 == 1
    epilogue = Epilogue(has_scale, activation, has_residual)
    pairs = bias_and_scale(t.b, torch.linspace(-2, 2, len(t.w), device=device), dtype)
    third, added = pairs if has_scale else t.b, [t.dy] * has_residual
    bound = plan.plan_fprop(t.x, t.w, third, one.spec, epilogue, *added)
    got = bound.run(t.x, t.w, third, *added)
    sums = oracle_fprop(t.x, t.w, None if has_scale else t.b, one.spec).value.double()
    want = applied(sums, pairs.double(), epilogue, *(each.double() for each in added))
    error, limit = (got.double() - want).abs().max(), SLOPE * _LIMITS[dtype] * (1 + want.abs().max())
    assert error <= limit, f"{epilogue}: {error} beyond {limit}"
    return bound.choice.kernel
