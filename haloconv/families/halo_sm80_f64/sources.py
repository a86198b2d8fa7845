"""The kernels of ``halo_sm80_f64`` that CI compiles: every shape of block in both directions and layouts."""

from __future__ import annotations

from itertools import product

import torch

from haloconv.families.halo_sm80_f64 import conv, wgrad
from haloconv.families.halo_sm80_f64.tile import SHAPES, Tiling
from haloconv.jit import KernelSource
from haloconv.layout import Layout
from haloconv.problem import Direction, Problem, dense_request

_NO_DEVICE = torch.device("cpu")  # no source depends on one
_STAGED: tuple[tuple[Direction, Layout, int], ...] = (  # direction, layout, channels
    ("fprop", "nchw", 64),
    ("fprop", "nhwc", 64),
    ("dgrad", "nchw", 64),
    ("dgrad", "nhwc", 63),
)


def sources() -> list[KernelSource]:
    """One source for each shape and kind of staging, none twice."""
    found = []
    for (direction, layout, channels), shape in product(_STAGED, SHAPES):
        problem = Problem(
            direction, n=2, c=channels, h=32, w=32, k=channels, r=3, s=3, padding=(1, 1, 1, 1),
            bias=direction == "fprop", dtype=torch.float64, layout=layout,
        )  # fmt: skip
        tiling = Tiling(conv.layer_of(problem), shape, 1)
        found += [conv.source(dense_request(problem, _NO_DEVICE), tiling), conv.pack_source(problem, tiling)]
    for layout, channels in (("nchw", 64), ("nhwc", 64), ("nhwc", 63)):
        problem = Problem(
            "wgrad", n=2, c=channels, h=32, w=32, k=channels, r=3, s=3, dtype=torch.float64, layout=layout
        )
        found += [wgrad.source(dense_request(problem, _NO_DEVICE), block) for block in wgrad.BLOCKS]
    return list({source.digest: source for source in found}.values())
