"""The kernels of ``halo_sm80`` that CI compiles: every warp tile, each kind of staging and of stores.

Each of fprop also with all that an epilogue may have, which takes the most registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from haloconv.families.halo_sm80 import conv
from haloconv.families.halo_sm80.tile import Tiling
from haloconv.families.halo_sm80.tilings import tilings
from haloconv.jit import KernelSource
from haloconv.layout import Layout
from haloconv.problem import Direction, Epilogue, Problem, dense_request

_SM_COUNT, _SMEM_BYTES = 132, 99 * 1024  # what every device of the family has
_NO_DEVICE = torch.device("cpu")  # no source depends on one
_Layer = tuple[Direction, torch.dtype, Layout, int, int, int, int, int, tuple[int, int]]
_LAYERS: tuple[_Layer, ...] = (  # channels and filters, groups, filter and stride, warp tile
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
_FOLLOWED_LAYERS: tuple[_Layer, ...] = (  # with an epilogue alone: stores of four and of two filters in 16 bits
    ("fprop", torch.bfloat16, "nhwc", 48, 48, 2, 3, 1, (2, 4)),
    ("fprop", torch.float16, "nhwc", 20, 20, 2, 3, 1, (4, 2)),
)
_EPILOGUE = Epilogue(True, "silu", True)


def sources() -> list[KernelSource]:
    """One source for each kernel of the representative layers, none twice."""
    found = [
        each
        for problem, tiling in _representatives(_LAYERS)
        for each in (conv.source(problem, tiling), conv.pack_source(problem, tiling))
    ]
    found += [conv.source(problem, tiling) for problem, tiling in _followed()]
    return list({source.digest: source for source in found}.values())


def _followed() -> Iterator[tuple[Problem, Tiling]]:
    """The layers of fprop, and more of them, with an epilogue."""
    for problem, tiling in _representatives((*_LAYERS, *_FOLLOWED_LAYERS)):
        if problem.direction == "fprop":
            yield replace(problem, bias=False, epilogue=_EPILOGUE), tiling


def _representatives(layers: tuple[_Layer, ...]) -> Iterator[tuple[Problem, Tiling]]:
    """Each layer with the best tiling of its warp tile, and where planes come as boxes with the best of those."""
    for direction, dtype, layout, channels, filters, groups, taps, stride, warp_tile in layers:
        problem = Problem(
            direction, n=32, c=channels, h=64, w=64, k=filters, r=taps, s=taps, stride=(stride, stride),
            padding=(1, 1, 1, 1), groups=groups, bias=direction == "fprop", dtype=dtype, layout=layout,
            precision="tf32" if dtype == torch.float32 else "ieee",
        )  # fmt: skip
        layer = conv.layer_of(dense_request(problem, _NO_DEVICE), tma=False)
        ranked = tilings(layer, _SM_COUNT, _SMEM_BYTES)
        yield problem, next(each for each in ranked if (each.tile.m_tiles, each.tile.n_tiles) == warp_tile)
        boxed = tilings(replace(layer, x_boxes=True), _SM_COUNT, _SMEM_BYTES)[0]
        if boxed.boxes:
            yield problem, boxed
