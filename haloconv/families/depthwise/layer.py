"""What the host halves share about a layer: extents and padding, how its tensors lie in memory, fields of launches."""

from __future__ import annotations

from haloconv.families.reduce.partials import Axis, Partials
from haloconv.problem import Problem, Request, TensorForm

Extents = tuple[int, int, int, int]
NO_HOPPER = "the device is no Hopper GPU (compute capability 9.0)"
HOPPER = (9, 0)
_BEYOND_L2_BYTES = 96 << 20  # of input and output


def shapes(problem: Problem) -> tuple[Extents, Extents]:
    """(N, channels, rows, columns) of the input and the output; in wgrad of x and dy."""
    if problem.direction == "dgrad":
        return problem.y_shape, problem.x_shape
    return problem.x_shape, problem.y_shape


def padding(problem: Problem) -> tuple[int, int]:
    """Top and left padding of the convolution that is computed: dgrad's is that of the flipped filter."""
    top, _, left, _ = problem.padding
    if problem.direction == "dgrad":
        return (problem.r - 1) * problem.dilation[0] - top, (problem.s - 1) * problem.dilation[1] - left
    return top, left


def lead(problem: Problem, piece: int) -> int:
    """Columns of the first ``piece`` columns of a window before the first one that the filter meets."""
    return -padding(problem)[1] % piece


def beyond_l2(problem: Problem) -> bool:
    """Whether input and output are far larger than the L2 of an H200."""
    elems = problem.n * (problem.c * problem.h * problem.w + problem.k * problem.p * problem.q)
    return elems * problem.dtype.itemsize >= _BEYOND_L2_BYTES


def is_hopper(request: Request) -> bool:
    """Whether the device has TMA and wgmma."""
    return request.facts.capability == HOPPER


def activations(request: Request) -> tuple[tuple[TensorForm, Extents], ...]:
    """What is read beside the filter, with shapes: x in fprop, dy in dgrad, dy and x in wgrad."""
    problem = request.problem
    if problem.direction == "wgrad":
        return (request.first, problem.y_shape), (request.second, problem.x_shape)
    return ((request.first, shapes(problem)[0]),)


def in_pieces(request: Request, axis: int, elems: int) -> bool:
    """Whether activations have neighbours along an axis, in lines that begin at multiples of ``elems``, 16 bytes."""
    return all(_in_pieces(side, axis, elems) for side, _ in activations(request))


def _in_pieces(side: TensorForm, axis: int, elems: int) -> bool:
    others = (stride for at, stride in enumerate(side.strides) if at != axis)
    return side.aligned and side.strides[axis] == 1 and not any(stride % elems for stride in others)


def in_boxes(request: Request, axis: int, elems: int) -> bool:
    """Whether TMA copies boxes of such activations: no stride is 0, as of one image that is seen as several."""
    return in_pieces(request, axis, elems) and all(min(side.strides) > 0 for side, _ in activations(request))


def by_channel_blocks(request: Request, blocks: int, block_channels: int, parts: int) -> Partials:
    """The partial sums [part][block][R][S][channel of the block] of a filter gradient.

    Channels behind the last one are padding.
    """
    problem, (dw_k, _, dw_r, dw_s) = request.problem, request.result_strides
    axes = (
        Axis(blocks, block_channels * dw_k, block_channels),
        Axis(problem.r, dw_r),
        Axis(problem.s, dw_s),
        Axis(block_channels, dw_k, 1),
    )
    return Partials(problem.dtype, axes, parts, limit=problem.k)
