"""Host half of families/depthwise/nhwc_wgrad_sum.cu: the sum over partial filter gradients in channels_last."""

from __future__ import annotations

from haloconv.families.base import BoundCall
from haloconv.families.common import ELEMENTS, ceil_div, named, summed_call
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape
from haloconv.problem import Problem, Request

KERNEL = "depthwise/nhwc_wgrad_sum"
_PART_WARPS = 8  # that share the parts of a sum


def source(problem: Problem) -> KernelSource:
    """The source for a filter's extents and the result's dtype."""
    constants = {"ELEM": ELEMENTS[problem.dtype], "R": problem.r, "S": problem.s, "PART_WARPS": _PART_WARPS}
    return kernel_source(KERNEL, "depthwise_nhwc_wgrad_sum", constants)


def wgrad_call(launch: Launch, request: Request, channel_blocks: tuple[int, int], parts: int) -> BoundCall:
    """wgrad(dy, x) -> dw of a kernel that takes (x, dy, partial sums): [part][block][R][S][channel of the block].

    ``channel_blocks``: how many blocks, and the channels of each.
    """
    problem, (blocks, block_channels) = request.problem, channel_blocks
    elems = blocks * block_channels * problem.r * problem.s
    fields = {
        **named("dw", "k.rs", request.result_strides),
        **{"elems": elems, "channels": problem.k, "block_channels": block_channels, "parts": parts},
    }
    shape = LaunchShape(ceil_div(elems, 32), 32 * _PART_WARPS)
    sum_parts = Launch(source(problem), request.device, shape, fields)
    return summed_call(launch, sum_parts, parts * elems, request.result_shape, request.result_strides)
