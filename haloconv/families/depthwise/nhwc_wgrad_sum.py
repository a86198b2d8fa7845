"""Host half of families/depthwise/nhwc_wgrad_sum.cu: the sum over partial filter gradients in channels_last."""

from __future__ import annotations

import torch

from haloconv.families.common import ELEMENTS, ceil_div
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, PositionalLaunch
from haloconv.problem import Problem

_PARAMS_FORMAT = "2Q3q4i"
_PART_WARPS = 8  # that share the parts of a sum


def source(problem: Problem) -> KernelSource:
    """The text for a filter's extents and the result's dtype."""
    constants = {"ELEM": ELEMENTS[problem.dtype], "R": problem.r, "S": problem.s, "PART_WARPS": _PART_WARPS}
    return kernel_source("depthwise/nhwc_wgrad_sum", "depthwise_nhwc_wgrad_sum", constants)


def bind(
    problem: Problem, strides: tuple[int, ...], blocks: int, block_channels: int, parts: int, device: torch.device
) -> Launch:
    """``run(dw_pointer, partials_pointer)`` for partial sums [part][block][R][S][channel of the block].

    ``strides`` (elements) are those of dw.
    """
    elems = blocks * block_channels * problem.r * problem.s
    fields = (strides[0], *strides[2:], elems, problem.k, block_channels, parts)
    return PositionalLaunch(source(problem), device, ceil_div(elems, 32), 32 * _PART_WARPS, 0, _PARAMS_FORMAT, fields)
