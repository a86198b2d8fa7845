"""What the kernels of small planes share (small_planes.cuh): which tensors are runs of planes, and how they are cut."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from haloconv.families.common import ELEMENTS, ceil_div
from haloconv.families.depthwise.layer import Extents, shapes
from haloconv.layout import strides_of
from haloconv.problem import Problem, Request, TensorForm

NO_COPIES = "the device has no asynchronous copies (compute capability 8.0)"
NO_ROOM = "the planes of a block do not fit shared memory, or its threads"
MOST_COLS, MOST_PIXELS = 20, 400  # of a plane; wider ones are for other kernels
_MOST_WINDOW_ROWS = 64  # rows of a strip's window, each of which is code of its own
_PIECE_BYTES = 16
_LANES = 32  # of a warp: they have the same strip of neighbouring planes
_BEGINS = 8  # every so many planes a run of any dtype begins at 16 bytes
_COPIES = (8, 0)
_THREADS, _MOST_THREADS = 128, 1024  # of a block: wanted, and at most
_RUNNING_THREADS = 512  # of a multiprocessor, with fewer of which memory is waited for
_RUN_BYTES = 52 << 10  # of a block's shared memory, at most, where a unit of planes does not need more
_SHARED_BYTES = 200 << 10  # of a multiprocessor, as Hopper and the A100 have about
_MOST_HELD = 112  # values that a thread has in registers
_REGISTER_FILE, _MOST_REGISTERS, _OTHER_REGISTERS = 65536, 255, 22  # of a multiprocessor, of a thread; addresses


@dataclass(frozen=True)
class Tiling:
    """A thread has ``rows`` rows of an output plane, a block ``planes`` planes.

    ``min_blocks`` blocks must fit a multiprocessor, which caps the registers of a thread.
    """

    rows: int
    planes: int
    min_blocks: int


def why_not_planes(request: Request) -> str | None:
    """None if the planes of the layer are small, in nchw, and the filter meets few of their rows; else a sentence."""
    problem = request.problem
    if request.facts.capability < _COPIES:
        return NO_COPIES
    if request.result_layout != "nchw" and problem.direction != "wgrad":
        return "this is for nchw"
    for _, _, rows, cols in shapes(problem):
        if cols > MOST_COLS or rows * cols > MOST_PIXELS:
            return f"planes have more than {MOST_COLS} columns, or more than {MOST_PIXELS} pixels"
    if any(stride > 1 < dil for stride, dil in zip(problem.stride, problem.dilation, strict=True)):
        return "an axis has both a stride and a dilation"
    if (problem.r - 1) * problem.dilation[0] >= _MOST_WINDOW_ROWS // 2:
        return "the filter reaches over too many rows"
    return None


def is_dense(side: TensorForm, shape: Extents, first_axis: int = 0) -> bool:
    """Whether elements follow one another in nchw, from an axis on. Strides of axes of one element do not count."""
    expected = strides_of(shape, "nchw")
    return all(shape[axis] == 1 or side.strides[axis] == expected[axis] for axis in range(first_axis, 4))


def pitch_bytes(problem: Problem, shape: Extents) -> int:
    """Bytes from plane to plane in shared memory (``Geometry::PITCH``)."""
    plane_bytes = shape[2] * shape[3] * problem.dtype.itemsize
    return plane_bytes if plane_bytes % _PIECE_BYTES else (plane_bytes // _PIECE_BYTES | 1) * _PIECE_BYTES


def unit_planes(problem: Problem) -> int:
    """Planes that a block's are a multiple of: a warp of lanes, and runs that begin at 16 bytes on both sides."""
    return lcm(_BEGINS * problem.k_per_group, _LANES)


def best_tiling(problem: Problem, held: int, plane_bytes: int) -> Tiling | None:
    """The one that ends first by a count of instructions; no GPU has timed it. None if no thread holds a row.

    ``held`` values of a thread are those besides its rows of the output; a block needs ``plane_bytes`` of shared memory
    for each of its planes.
    """
    (_, _, in_rows, in_cols), (_, _, rows, cols) = shapes(problem)
    taps, unit, step = problem.r * problem.s, unit_planes(problem), problem.stride[0]
    scatters = problem.direction == "dgrad"

    def tiling(each: int) -> Tiling:
        wanted = ceil_div(_THREADS, ceil_div(rows, each) * unit)
        planes = unit * max(1, min(wanted, _RUN_BYTES // (plane_bytes * unit)))
        registers = min(ceil_div(held + each * cols + _OTHER_REGISTERS, 8) * 8, _MOST_REGISTERS)
        threads = planes * ceil_div(rows, each)
        fit = (
            _REGISTER_FILE // (threads * registers),
            _SHARED_BYTES // (planes * plane_bytes),
            _MOST_THREADS // threads,
        )
        return Tiling(each, planes, max(1, min(fit)))

    def cost(one: Tiling) -> float:
        strips = ceil_div(rows, one.rows)
        window = ceil_div(one.rows, step) if scatters else one.rows * step
        met = min(window + (problem.r - 1) * problem.dilation[0], in_rows)
        products = one.rows * cols * taps / (step * problem.stride[1] if scatters else 1)
        instructions = products + 3 * one.rows * cols + 2 * met * in_cols + 3 * taps + 30
        running = one.planes * strips * one.min_blocks
        return strips * instructions * max(1.0, _RUNNING_THREADS / running)

    whole = [each for each in range(1, rows + 1) if each == rows or not (scatters and each % step)]
    fit = [tiling(each) for each in whole if each * cols + held <= _MOST_HELD]
    fit = [each for each in fit if each.planes * ceil_div(rows, each.rows) <= _MOST_THREADS]
    return min(fit, key=cost, default=None)


def constants(problem: Problem, tiling: Tiling) -> dict[str, int | str]:
    """What the sources of both kernels are specialised by, the extents of a plane included."""
    (_, _, in_rows, in_cols), (_, _, rows, cols) = shapes(problem)
    steps = [stride if dil == 1 else -dil for stride, dil in zip(problem.stride, problem.dilation, strict=True)]
    return {
        "ELEM": ELEMENTS[problem.dtype],
        **{"IN_H": in_rows, "IN_W": in_cols, "OUT_H": rows, "OUT_W": cols},
        **{"R": problem.r, "S": problem.s, "STEP_H": steps[0], "STEP_W": steps[1]},
        **{"PAD_TOP": problem.padding[0], "PAD_LEFT": problem.padding[2]},
        **{"ROWS": tiling.rows, "PLANES": tiling.planes, "MIN_BLOCKS": tiling.min_blocks},
    }
