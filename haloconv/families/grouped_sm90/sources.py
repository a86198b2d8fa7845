"""The kernels of ``grouped_sm90`` that CI compiles: strips of 32 columns and of 16, groups of 8 channels and of 16."""

from __future__ import annotations

import torch

from haloconv.families.grouped_sm90 import conv, wgrad
from haloconv.jit import KernelSource
from haloconv.problem import Direction, Problem

_SMEM_BYTES = 227 << 10  # of the devices that have TMA
_DENSE: tuple[tuple[Direction, torch.dtype, int, int], ...] = (  # channels of a group, rows and columns
    ("fprop", torch.float16, 8, 28),
    ("dgrad", torch.bfloat16, 16, 14),
    ("fprop", torch.float32, 8, 28),
    ("dgrad", torch.float32, 16, 14),
)
_WGRAD: tuple[tuple[Direction, torch.dtype, int, int], ...] = (
    ("wgrad", torch.float16, 8, 28),
    ("wgrad", torch.bfloat16, 16, 14),
)


def sources() -> list[KernelSource]:
    """One source for each layer, and one that adds the parts for each weight gradient."""
    found = []
    for problem in (_layer(*each) for each in _DENSE):
        tiling = conv.best_tiling(problem, _SMEM_BYTES)
        assert tiling is not None
        found.append(conv.source(problem, tiling))
    for problem in (_layer(*each) for each in _WGRAD):
        tiling_of_wgrad = wgrad.best_tiling(problem, _SMEM_BYTES)
        assert tiling_of_wgrad is not None
        found.append(wgrad.source(problem, tiling_of_wgrad))
    return found


def _layer(direction: Direction, dtype: torch.dtype, channels: int, extent: int) -> Problem:
    return Problem(
        direction, n=32, c=8 * channels, h=extent, w=extent, k=8 * channels, r=3, s=3, padding=(1, 1, 1, 1), groups=8,
        bias=direction == "fprop", dtype=dtype, layout="nhwc", precision="tf32" if dtype == torch.float32 else "ieee",
    )  # fmt: skip
