"""What the kernels share whose planes come through shared memory (families/depthwise/strips.cuh): strips and blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from haloconv.env import DeviceFacts
from haloconv.families.base import BoundCall
from haloconv.families.common import ceil_div, dense_call
from haloconv.jit import KernelSource
from haloconv.jit.launch import PositionalLaunch
from haloconv.layout import strides_of
from haloconv.problem import Problem, TensorForm

PIECE_BYTES = 16  # of one copy
FEWEST_THREADS = 128  # of a block
_LEAST_CAPABILITY = (8, 0)
_RESERVED_BYTES = 1024  # of shared memory, for each block
_START_UNITS = 2  # what starting a block costs, in strips
_MOST_WAVES = 8  # of blocks, unless a block may not have as many strips as that leaves it
_NARROW, _FEW_TAPS = 48, 9  # columns, taps of one filter: up to there the marches were measured as fast, or faster


class Staged(NamedTuple):
    """How strips of a tensor's planes lie in shared memory; the fields of the struct in strips.cuh."""

    image: int
    channel: int
    row: int
    extent: int
    pad_top: int
    rows: int
    spare: int
    row_bytes: int
    left: int
    width: int

    @property
    def buffer_bytes(self) -> int:
        return (self.rows + self.spare) * self.row_bytes


class Share(NamedTuple):
    """How the strips of a channel are shared out; the fields of the struct in strips.cuh."""

    channels: int
    units: int
    parts: int
    strips: int
    rows: int
    buffer_bytes: int


STAGED_FORMAT, SHARE_FORMAT = "3q7i4x", "6i"


def shapes(problem: Problem) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """(N, channels, rows, columns) of the input and the output of fprop or dgrad."""
    if problem.direction == "dgrad":
        return problem.y_shape, problem.x_shape
    return problem.x_shape, problem.y_shape


def padding(problem: Problem) -> tuple[int, int]:
    """Top and left padding of the convolution that is computed: dgrad's is that of the filter turned round."""
    top, _, left, _ = problem.padding
    if problem.direction == "dgrad":
        return (problem.r - 1) * problem.dilation[0] - top, (problem.s - 1) * problem.dilation[1] - left
    return top, left


def why_not(problem: Problem, sides: tuple[TensorForm, ...], facts: DeviceFacts) -> str | None:
    """None if planes of these tensors can be copied in pieces on the device, else a sentence that says why not."""
    if facts.capability < _LEAST_CAPABILITY:
        return "the device has no asynchronous copies (compute capability 8.0)"
    if problem.stride != (1, 1) or problem.r * problem.s <= _FEW_TAPS:
        return f"the filter has a stride, or no more than {_FEW_TAPS} taps"
    if any(side.strides[3] != 1 or not side.aligned for side in sides):
        return "columns are no neighbours in memory"
    piece = PIECE_BYTES // problem.dtype.itemsize
    extents = [extent for side in sides for extent in side.strides[:3]]
    if any(extent % piece for extent in (*extents, problem.w, problem.q)) or min(problem.w, problem.q) < _NARROW:
        return f"rows are not of at least {_NARROW} columns in pieces of {piece}"
    if max(problem.w, problem.q) > FEWEST_THREADS * piece:
        return f"a row has more than {FEWEST_THREADS} pieces, one for each thread"
    return None


def staged(
    side: TensorForm,
    shape: tuple[int, int, int, int],
    pad_top: int,
    rows: int,
    left: int,
    width: int,
    read: int,
    elem_bytes: int,
    spare_rows: int = 0,
) -> Staged:
    """Strips of ``rows`` rows of a tensor of ``shape``, with ``left`` pieces of zeros before each row.

    Rows are ``width`` columns wide at least, those outside the image are zeros; warps read up to column ``read``, and
    ``spare_rows`` more rows.
    """
    piece = PIECE_BYTES // elem_bytes
    copied = shape[3] // piece
    pieces = max(left + copied, ceil_div(width, piece)) | 1  # rows below each other begin in different banks
    spare = spare_rows + ceil_div(max(0, ceil_div(read, piece) - pieces), pieces)
    return Staged(*side.strides[:3], shape[2], pad_top, rows, spare, pieces * PIECE_BYTES, left, copied)


def strips(rows: int, most: int, step: int) -> tuple[int, int]:
    """How many strips ``rows`` rows are cut into, and the rows of one, a multiple of ``step`` up to about ``most``."""
    each = ceil_div(ceil_div(rows, ceil_div(rows, max(step, most // step * step))), step) * step
    return ceil_div(rows, each), each


def share(channels: int, images: int, cut: tuple[int, int], buffer_bytes: int, slots: int, most: int = 0) -> Share:
    """Strips of a channel, shared by the blocks that end first: by waves of blocks times strips of a block.

    ``cut`` is what ``strips`` gives, ``slots`` the blocks that run at a time, ``most`` (0: any) the strips of a block.
    """
    units = images * cut[0]
    fewest = ceil_div(units, most or units)
    parts = min(
        range(fewest, max(fewest, min(units, _MOST_WAVES * slots // channels)) + 1),
        key=lambda parts: ceil_div(channels * parts, slots) * (ceil_div(units, parts) + _START_UNITS),
    )
    return Share(channels, units, parts, *cut, buffer_bytes)


def slots(facts: DeviceFacts, smem_bytes: int, min_blocks: int) -> int:
    """Blocks of a device that run at a time; 0 if one needs more shared memory than there is."""
    fit = (facts.max_smem_bytes + _RESERVED_BYTES) // (smem_bytes + _RESERVED_BYTES)
    return facts.sm_count * min(min_blocks, fit)


class Cut(NamedTuple):
    """Strips of the output, how those of the input are staged, bytes of shared memory, blocks that run at a time."""

    strips: tuple[int, int]
    side: Staged
    smem_bytes: int
    slots: int


def bind_strips(
    text: KernelSource,
    threads: int,
    problem: Problem,
    w: TensorForm,
    result_layout: str,
    device: torch.device,
    cut: Cut,
    own: tuple[int, ...],
) -> BoundCall:
    """fprop(x, w, b) -> y or dgrad(dy, w) -> dx of a kernel of ``threads`` a block.

    Its struct has the four pointers, strides of the filter and of the output, Staged, Share, and the kernel's ``own``
    ints.
    """
    out_shape = shapes(problem)[1]
    out_strides = strides_of(out_shape, result_layout)
    shared = share(out_shape[1], out_shape[0], cut.strips, cut.side.buffer_bytes, cut.slots)
    fields = (w.strides[0], *w.strides[2:], *out_strides[:3], *cut.side, *shared, *own)
    params_format = f"4Q6q{STAGED_FORMAT}{SHARE_FORMAT}{len(own)}i"
    grid = shared.channels * shared.parts
    launch = PositionalLaunch(text, device, grid, threads, cut.smem_bytes, params_format, fields)
    return dense_call(launch, problem, out_shape, out_strides)
