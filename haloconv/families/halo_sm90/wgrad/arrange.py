"""Host half of families/halo_sm90/wgrad/arrange.cu: images side by side, in a memory order that TMA takes.

Rows of 7 or 14 pixels fill no lines: in 16 bits a step of wgmma has 16 pixels, each line costs instructions, and where
rows begin in the middle of 16 bytes, or dy in fp32 has channels as neighbours, threads store each of them. So small
images are copied once, before they are multiplied: a row of several images is one line, each image in a cell whose
gap is the padding of both neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from haloconv.families.common import ELEMENTS, ceil_div
from haloconv.families.halo_sm90.terms import TERMS
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape, Value
from haloconv.problem import Problem, Request, TensorForm

KERNEL = "halo_sm90/arrange"
_THREADS, _PIXELS, _CHANNEL_BYTES, _PIECE_BYTES = 256, 64, 128, 16
_CELLS = (8, 16, 32)  # pixels
_LINE_PIXELS = 64  # of images side by side, at most
_MOST_BYTES = 64 << 20  # of both copies
# Of the second launch, and elements that all multiprocessors read or write in a cycle: by ten times of copies alone, in
# fp32 and fp16, on an NVIDIA H200, which it gives within 40 %.
_LAUNCH_CYCLES, _ELEMS_OF_CYCLE = 3500, 290


class Arrangement(NamedTuple):
    """Images side by side, pixels of each one's cell, and columns of dy of each; 0 columns: rows stay as they are."""

    images: int
    cell: int
    columns: int

    def __str__(self) -> str:
        return f"images{self.images}"


def arrangements(problem: Problem) -> Iterator[Arrangement]:
    """The arrangements that a layer may have: another memory order if it is 1x1, else one or more images in a row."""
    piece = _PIECE_BYTES // problem.dtype.itemsize
    groups_begin_anywhere = problem.groups > 1 and (problem.c_per_group % piece or problem.k_per_group % piece)
    if problem.stride != (1, 1) or problem.precision in TERMS or groups_begin_anywhere:
        return
    found = [Arrangement(1, problem.w, 0)] if _is_pointwise(problem) else _side_by_side(problem)
    yield from (each for each in found if _bytes(problem, each) <= _MOST_BYTES)


def _side_by_side(problem: Problem) -> list[Arrangement]:
    """The arrangements of as many images as a line has room for, and of half of them.

    None if a row or its padding fits no cell.

    Only the last step of a cell may have pixels that dy lacks, because fragments of others are not masked.
    """
    _, _, left, right = problem.padding
    cell = next((each for each in _CELLS if problem.q <= each), 0)
    step = 32 // problem.dtype.itemsize
    if problem.w + max(left, right) > cell or problem.q <= cell - step:
        return []
    most = min(_LINE_PIXELS // cell, 1 << (problem.n - 1).bit_length())
    return [Arrangement(each, cell, problem.q) for each in (most, most // 2) if each > 0]


def arranged(request: Request, how: Arrangement) -> Request:
    """The request of the copies: their forms, and if images are side by side the problem of such rows."""
    problem = _seen(request.problem, how)
    dy, x = (TensorForm(_copy(problem, *each).strides, True) for each in _operands(problem))
    return replace(request, problem=problem, first=dy, second=x)


def _seen(problem: Problem, how: Arrangement) -> Problem:
    """The problem as it is multiplied."""
    if how.columns == 0:
        return problem
    padding = (*problem.padding[:2], 0, (problem.s - 1) * problem.dilation[1])
    return replace(problem, n=ceil_div(problem.n, how.images), w=how.images * how.cell, padding=padding)


def _operands(problem: Problem) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and channels of dy and of x."""
    return (problem.p, problem.k), (problem.h, problem.c)


class _Copy(NamedTuple):
    """Strides (n, c, h, w) and elements, whole groups of 16 bytes."""

    strides: tuple[int, int, int, int]
    elems: int


def _copy(problem: Problem, rows: int, channels: int) -> _Copy:
    """The copy of an operand, of ``rows`` and ``channels``, of a problem as it is multiplied.

    In 16 bits channels are neighbours. In fp32 pixels are, those of a channel of the whole batch if the layer is 1x1:
    such rows are multiplied end to end.
    """
    plane, piece = rows * problem.w, _PIECE_BYTES // problem.dtype.itemsize
    if problem.dtype.itemsize == 2:
        pitch = ceil_div(channels, piece) * piece
        return _Copy((plane * pitch, 1, problem.w * pitch, pitch), problem.n * plane * pitch)
    if _is_pointwise(problem):
        pitch = ceil_div(problem.n * plane, piece) * piece
        return _Copy((plane, pitch, problem.w, 1), channels * pitch)
    return _Copy((channels * plane, plane, problem.w, 1), problem.n * channels * plane)


def _is_pointwise(problem: Problem) -> bool:
    """Whether rows of pixels may be joined, as wgrad.joined has it."""
    return (problem.r, problem.s) == (1, 1) and not any(problem.padding)


def _elems(problem: Problem, how: Arrangement) -> tuple[int, int]:
    """Elements of the copies of dy and of x."""
    seen = _seen(problem, how)
    dy, x = (_copy(seen, *each).elems for each in _operands(seen))
    return dy, x


def _bytes(problem: Problem, how: Arrangement) -> int:
    return sum(_elems(problem, how)) * problem.dtype.itemsize


def cycles(problem: Problem, how: Arrangement) -> float:
    """Cycles that the copies take, by the cost model."""
    read = sum(problem.n * rows * channels * how.cell for rows, channels in _operands(problem))
    return _LAUNCH_CYCLES + (read + _bytes(problem, how) / problem.dtype.itemsize) / _ELEMS_OF_CYCLE


def source(problem: Problem) -> KernelSource:
    """The specialised source. All extents and strides are run-time values."""
    return kernel_source(KERNEL, "halo_sm90_arrange", {"ELEM": ELEMENTS[problem.dtype]})


class Copies(NamedTuple):
    """``launch(x, dy, x's copy, dy's copy)``, and elements of the copies of x and of dy."""

    launch: Launch
    x_elems: int
    dy_elems: int

    def __call__(self, dy: torch.Tensor, x: torch.Tensor) -> tuple[int, int, torch.Tensor]:
        """Addresses of the copies of x and of dy, and the tensor that they are in."""
        room = x.new_empty(self.x_elems + self.dy_elems)
        x_copy = room.data_ptr()
        dy_copy = x_copy + self.x_elems * x.element_size()
        self.launch(x.data_ptr(), dy.data_ptr(), x_copy, dy_copy)
        return x_copy, dy_copy, room


def bind(request: Request, how: Arrangement) -> Copies:
    """What copies x and dy of a request."""
    problem, copies = request.problem, arranged(request, how)
    dy_elems, x_elems = _elems(problem, how)
    dy, x = _operands(problem)
    left = problem.padding[2] if how.columns else 0
    groups, row = ceil_div(problem.n, how.images), how.images * how.cell
    of_x, x_blocks = _tensor(request.second, copies.second, problem, x, (problem.w, left), row)
    of_dy, dy_blocks = _tensor(request.first, copies.first, problem, dy, (problem.q, 0), row)
    fields: dict[str, Value] = {
        "tensors": [of_x, of_dy],
        **{"images": problem.n, "side_by_side": how.images, "cell": how.cell, "x_blocks": groups * x_blocks},
    }
    shape = LaunchShape(groups * (x_blocks + dy_blocks), _THREADS)
    return Copies(Launch(source(problem), request.device, shape, fields), x_elems, dy_elems)


def _tensor(
    form: TensorForm, copy: TensorForm, problem: Problem, operand: tuple[int, int], columns: tuple[int, int], row: int
) -> tuple[dict[str, Value], int]:
    """The struct of x or dy, whose ``columns`` are how many, and the place of the first in a cell; blocks of a group.

    ``row`` are pixels of a row of a copy.
    """
    (rows, channels), (cols, shift) = operand, columns
    to_group, to_c, _, to_pixel = copy.strides
    channel_blocks = ceil_div(channels * problem.dtype.itemsize, _CHANNEL_BYTES)
    pixel_blocks = ceil_div(rows * row, _PIXELS)
    fields: dict[str, Value] = {
        **dict(zip("nchw", form.strides, strict=True)),
        **{"to_group": to_group, "to_c": to_c, "to_pixel": to_pixel},
        **{"channels": channels, "rows": rows, "cols": cols, "shift": shift},
        **{"channel_blocks": channel_blocks, "pixel_blocks": pixel_blocks},
    }
    return fields, channel_blocks * pixel_blocks
