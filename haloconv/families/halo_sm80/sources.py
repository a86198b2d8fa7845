"""The kernels of ``halo_sm80`` that CI compiles: every warp tile, with every way to stage and to store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from haloconv.families.grouped_sm90 import conv as march
from haloconv.families.halo_sm80 import conv as halo_sm80
from haloconv.families.halo_sm80.configs import configs
from haloconv.families.halo_sm80.tile import Tiling
from haloconv.jit import KernelSource
from haloconv.layout import strides_of
from haloconv.problem import Problem, TensorForm

_SM_COUNT, _SMEM_BYTES = 132, 99 * 1024  # what every device of the family has
_MARCH_SMEM_BYTES = 227 * 1024  # of the devices that march
_LAYERS = (  # direction, dtype, layout, channels and filters, groups, filter and stride, warp tile
    ("fprop", torch.float32, "nchw", 3, 64, 1, 7, 2, (2, 8)),
    ("fprop", torch.float16, "nchw", 3, 64, 1, 7, 2, (2, 8)),
    ("fprop", torch.float16, "nchw", 3, 64, 1, 7, 2, (4, 4)),
    ("fprop", torch.float32, "nchw", 3, 96, 1, 5, 4, (2, 6)),
    ("fprop", torch.float32, "nchw", 3, 96, 1, 11, 4, (4, 6)),
    ("fprop", torch.float32, "nhwc", 64, 64, 1, 3, 1, (1, 8)),
    ("fprop", torch.float32, "nchw", 64, 64, 8, 3, 1, (4, 1)),
    ("dgrad", torch.float32, "nhwc", 64, 64, 4, 3, 1, (4, 2)),
    ("dgrad", torch.bfloat16, "nchw", 64, 64, 8, 3, 2, (4, 1)),
    ("dgrad", torch.float16, "nhwc", 64, 64, 2, 3, 1, (2, 4)),
)


def shipped_sources() -> list[KernelSource]:
    """One source per kernel text of the representative layers."""
    found = {}
    for problem, tiling in _representatives():
        for source in (halo_sm80.source(problem, tiling), halo_sm80.pack_source(problem, tiling)):
            found[source.digest] = source
    marches = (march.source(one, march.configs(one, _MARCH_SMEM_BYTES)[0]) for one in _marching())
    return list(found.values()) + list(marches)


def _marching() -> Iterator[Problem]:
    """Grouped layers in channels_last: strips of 32 columns and of 16, groups of 8 channels and of 16."""
    for direction, dtype, channels, extent in (
        ("fprop", torch.float16, 8, 28),
        ("dgrad", torch.bfloat16, 16, 14),
        ("fprop", torch.float32, 8, 28),
        ("dgrad", torch.float32, 16, 14),
    ):
        yield Problem(
            direction, n=32, c=8 * channels, h=extent, w=extent, k=8 * channels, r=3, s=3, padding=(1, 1, 1, 1),
            groups=8, bias=direction == "fprop", dtype=dtype, layout="nhwc",
            precision="tf32" if dtype == torch.float32 else "ieee",
        )  # fmt: skip


def _representatives() -> Iterator[tuple[Problem, Tiling]]:
    """Each layer with the best tiling of its warp tile, and where planes come as boxes with the best of those."""
    for direction, dtype, layout, channels, filters, groups, taps, stride, warp_tile in _LAYERS:
        extents = {"n": 32, "c": channels, "h": 64, "w": 64, "k": filters, "r": taps, "s": taps}
        problem = Problem(
            direction, **extents, stride=(stride, stride), padding=(1, 1, 1, 1), groups=groups,
            bias=direction == "fprop", dtype=dtype, layout=layout,
            precision="tf32" if dtype == torch.float32 else "ieee",
        )  # fmt: skip
        shape = problem.x_shape if direction == "fprop" else problem.y_shape
        layer = halo_sm80.layer_of(problem, TensorForm(strides_of(shape, layout), True), layout)
        tilings = configs(layer, _SM_COUNT, _SMEM_BYTES)
        yield problem, next(each for each in tilings if (each.config.m_tiles, each.config.n_tiles) == warp_tile)
        boxed = configs(replace(layer, x_boxes=True), _SM_COUNT, _SMEM_BYTES)[0]
        if boxed.boxes:
            yield problem, boxed
