"""The ``direct`` family: every legal problem on CUDA cores.

The family that is always right: fp32, fp16 and bf16 with fp32 sums, fp64 with fp64 sums; any stride, dilation,
four-sided padding, groups and storage. fp32 products are formed in full precision whatever precision was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from haloconv import support
from haloconv.families.base import BoundCall, Config
from haloconv.families.common import ELEMENTS
from haloconv.families.direct import direct
from haloconv.families.reduce import bgrad, partials
from haloconv.jit import KernelSource
from haloconv.layout import Layout
from haloconv.problem import DIRECTIONS, Direction, Problem, Request, dense_request

_LAYOUTS: tuple[Layout, ...] = ("nchw", "nhwc")
_ANY_DEVICE = torch.device("cpu")  # of sources: they do not depend on it


class DirectFamily:
    """CUDA-core kernels for fprop, dgrad and wgrad of every legal problem."""

    name = "direct"
    directions: tuple[Direction, ...] = DIRECTIONS
    dtypes: tuple[torch.dtype, ...] = support.KERNEL_DTYPES
    tensor_cores = False
    has_epilogue = False
    has_padding_modes = False
    depthwise = False
    capability, newer = (7, 0), True

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        return direct.why_not(dense_request(problem, device))

    def configs(self, request: Request) -> list[Config]:
        return direct.configs(request)

    def bind(self, request: Request, config: Config) -> BoundCall:
        return direct.bind(request, config)

    def sources(self) -> list[KernelSource]:
        """Every tile, dtype, layout and direction takes part; and the sums that several families launch."""
        found = (
            direct.source(dense_request(problem, _ANY_DEVICE), tiling)
            for problem in _representative_problems()
            for tiling in direct.tilings(problem)
        )
        return [*{source.digest: source for source in found}.values(), *partials.sources(), *bgrad.sources()]


def _representative_problems() -> Iterator[Problem]:
    """Layers that meet every tile: the flagship's 5x9 filter, a 3x3, a stem, a grouped and a depthwise layer."""
    layers = (
        {"c": 32, "k": 64, "r": 5, "s": 9, "dilation": (2, 3)},
        {"c": 64, "k": 128, "r": 3, "s": 3},
        {"c": 3, "k": 64, "r": 7, "s": 7, "stride": (2, 2)},
        {"c": 96, "k": 48, "r": 3, "s": 3, "groups": 3},
        {"c": 32, "k": 64, "r": 3, "s": 5, "groups": 4},
        {"c": 16, "k": 32, "r": 7, "s": 7, "groups": 16},
    )
    for layer in layers:
        dtypes = ELEMENTS if layer in layers[:1] or layer in layers[-1:] else (torch.float32,)
        for dtype, layout, direction in product(dtypes, _LAYOUTS, DIRECTIONS):
            bias = direction == "fprop"
            yield Problem(direction, n=2, h=64, w=64, bias=bias, dtype=dtype, layout=layout, **layer)
