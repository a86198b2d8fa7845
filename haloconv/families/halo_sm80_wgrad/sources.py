"""The kernels of ``halo_sm80_wgrad`` that CI compiles: every type, layout, width of loads and split of a block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from haloconv.families.halo_sm80_wgrad.blocks import ranked_blocks
from haloconv.families.halo_sm80_wgrad.layer import layer_of
from haloconv.families.halo_sm80_wgrad.wgrad import source
from haloconv.jit import KernelSource
from haloconv.layout import Layout, strides_of
from haloconv.precision import Precision
from haloconv.problem import Problem, Request, TensorForm

_SMEM_BYTES = 99 << 10  # of the architectures that have least
_NO_DEVICE = torch.device("cpu")  # no source depends on one


def sources() -> list[KernelSource]:
    """One source for each representative layer with its best block, none twice."""
    found = {}
    for problem, aligned in _representative():
        shapes = (problem.y_shape, problem.x_shape)
        dy, x = (TensorForm(strides_of(shape, problem.layout), aligned) for shape in shapes)
        layer = layer_of(problem, dy, x)
        block = ranked_blocks(problem, layer, _SMEM_BYTES)[0]
        one = source(Request(problem, dy, x, problem.layout, _NO_DEVICE), layer, block)
        found[one.digest] = one
    return list(found.values())


def _representative() -> Iterator[tuple[Problem, bool]]:
    """A stem, layers of 8 and of 24 channels per group; and whether their tensors are aligned."""
    stem = Problem("wgrad", n=64, c=3, h=224, w=224, k=64, r=7, s=7, stride=(2, 2), padding=(3, 3, 3, 3))
    thin = Problem("wgrad", n=64, c=256, h=28, w=28, k=256, r=3, s=3, padding=(1, 1, 1, 1), groups=32)
    wide = Problem("wgrad", n=64, c=144, h=28, w=28, k=144, r=3, s=3, padding=(1, 1, 1, 1), groups=6)
    layers: tuple[tuple[Problem, torch.dtype, Layout, bool], ...] = (
        (stem, torch.float32, "nchw", True),
        (stem, torch.float16, "nchw", True),
        (stem, torch.bfloat16, "nhwc", True),
        (thin, torch.float32, "nchw", True),
        (thin, torch.float16, "nchw", True),
        (thin, torch.float16, "nchw", False),
        (thin, torch.bfloat16, "nhwc", True),
        (thin, torch.float32, "nhwc", True),
        (wide, torch.float32, "nchw", True),
        (replace(wide, stride=(2, 2)), torch.float16, "nhwc", True),
    )
    for layer, dtype, layout, aligned in layers:
        precision: Precision = "tf32" if dtype == torch.float32 else "ieee"
        yield replace(layer, dtype=dtype, layout=layout, precision=precision), aligned
