"""The ``depthwise_window`` family: depthwise layers with filters of any size on CUDA cores.

One input channel per group, any number of filters per channel, stride, dilation and four-sided padding; fp32, fp16 and
bf16 with fp32 sums.
"""

from __future__ import annotations

from itertools import product

import torch

from haloconv import support
from haloconv.families.base import BoundCall, Config
from haloconv.families.depthwise_window import wgrad, window
from haloconv.families.depthwise_window.cut import BLOCKS
from haloconv.jit import KernelSource
from haloconv.problem import DIRECTIONS, Direction, Problem, Request, dense_request

_NO_DEVICE = torch.device("cpu")  # no source depends on one


class DepthwiseWindowFamily:
    """CUDA-core kernels for depthwise layers: planes and filters in shared memory."""

    name = "depthwise_window"
    directions: tuple[Direction, ...] = DIRECTIONS
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    tensor_cores = False
    has_epilogue = False
    has_padding_modes = False
    depthwise = True
    capability, newer = (7, 0), True

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        reason = support.why_not(problem, device)
        if reason is not None:
            return reason
        if problem.dtype not in self.dtypes:
            return f"depthwise_window does not take {problem.dtype}"
        if problem.c_per_group != 1:
            return f"each group has {problem.c_per_group} input channels; depthwise_window takes one"
        request = dense_request(problem, device)
        return wgrad.why_not(request) if problem.direction == "wgrad" else window.why_not(request)

    def configs(self, request: Request) -> list[Config]:
        return wgrad.configs(request) if request.problem.direction == "wgrad" else window.configs(request)

    def bind(self, request: Request, config: Config) -> BoundCall:
        bind = wgrad.bind if request.problem.direction == "wgrad" else window.bind
        return bind(request, config)

    def sources(self) -> list[KernelSource]:
        """Every block: in fprop in fp32 and `nchw`, in dgrad in fp16 and `nhwc`, in wgrad in fp32."""
        sizes = (1, 8, 8, 8, 8, 3, 3)
        layers = (
            Problem("fprop", *sizes, groups=8),
            Problem("dgrad", *sizes, groups=8, dtype=torch.float16, layout="nhwc"),
            Problem("wgrad", *sizes, groups=8),
        )
        found = []
        for layer, block in product(layers, BLOCKS):
            source = wgrad.source if layer.direction == "wgrad" else window.source
            found.append(source(dense_request(layer, _NO_DEVICE), block))
        return found
