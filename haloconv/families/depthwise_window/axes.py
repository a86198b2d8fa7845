"""The image axes of depthwise_window: classes of results without a dilation, and what of them is stored."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from math import gcd

from haloconv.families.common import ceil_div
from haloconv.problem import Problem

_MOST_STEPS = 96  # each takes at least 256 bytes of a plane; a block of the smallest GPUs has 48 KiB


@dataclass(frozen=True)
class Axis:
    """One image axis of a direction (``Line`` in families/depthwise_window/line.cuh).

    ``results`` and ``extent`` are pixels of the result and of the source; ``taps`` and ``class_results`` those of the
    largest class; ``steps`` is the stride inside a class. ``joined_classes`` classes together are all results, next to
    each other, that read next to each other: if there are more than one, a block may do them side by side.
    Tap j of a class's result a stands at position ``origin`` + (a + j) * ``spacing`` of the source or at most
    ``spread`` behind, unless there are steps; ``origin`` is None where classes differ by more.
    """

    filter_taps: int
    stride: int
    dil: int
    pad: int
    results: int
    extent: int
    classes: int
    taps: int
    class_results: int
    steps: int
    joined_classes: int = 1
    origin: int | None = None
    spacing: int = 1
    spread: int = 0


@cache
def stored_lines(axis: Axis, tile: int, chunk: int) -> int:
    """Rows of a block's window that stand in shared memory: those inside the source, and one of zeros.

    All of them with a stride inside a class. Otherwise the most of any block.
    """
    lines = tile - 1 + ceil_div(chunk, axis.steps)
    if axis.steps > 1:
        return lines
    inside = min(lines, ceil_div(axis.extent, axis.spacing))
    if axis.origin is None:
        return inside + 1
    most = 0
    for result, tap in product(range(0, axis.class_results, tile), range(0, axis.taps, chunk)):
        first = axis.origin + (result + tap) * axis.spacing
        end = min(first + axis.spread + lines * axis.spacing, axis.extent)
        most = max(most, ceil_div(end - max(first, 0), axis.spacing))
    return min(inside, most) + 1


@cache
def met_fraction(axis: Axis, rows: int) -> float:
    """The fraction of the rows met by tiles of ``rows`` results that lies in the source."""
    if axis.steps > 1 or axis.origin is None:
        return 1.0
    lines, tiles, met = axis.taps + rows - 1, range(0, axis.class_results, rows), 0
    for result in tiles:
        first = axis.origin + result * axis.spacing
        end = min(first + lines * axis.spacing, axis.extent)
        met += max(0, ceil_div(end - max(first, 0), axis.spacing))
    return met / (lines * len(tiles))


def why_too_many_steps(axes: tuple[Axis, Axis]) -> str | None:
    """None if the residues of the stride fit shared memory, else a sentence that says so."""
    rows, cols = axes
    if rows.steps * cols.steps <= _MOST_STEPS:
        return None
    return f"{rows.steps} x {cols.steps} residues of the stride do not fit shared memory"


def axes(problem: Problem) -> tuple[Axis, Axis]:
    """The vertical and the horizontal axis of fprop or dgrad."""
    sides = (
        (problem.r, problem.h, problem.p, problem.padding[0]),
        (problem.s, problem.w, problem.q, problem.padding[2]),
    )
    make = _input_axis if problem.direction == "dgrad" else output_axis
    found = [make(*side, *moves) for side, *moves in zip(sides, problem.stride, problem.dilation, strict=True)]
    return found[0], found[1]


def output_axis(taps: int, extent: int, results: int, pad: int, stride: int, dil: int) -> Axis:
    """An axis on which result a meets, at tap j, position a * stride + j * dil - pad of the source."""
    common = gcd(stride, dil)
    classes, steps = dil // common, stride // common
    largest = ceil_div(results, classes)
    joined = classes if steps == 1 else 1
    origin = (-pad, dil, (classes - 1) * stride)
    return Axis(taps, stride, dil, pad, results, extent, classes, taps, largest, steps, joined, *origin)


def _input_axis(taps: int, results: int, extent: int, pad: int, stride: int, dil: int) -> Axis:
    common = gcd(stride, dil)
    classes = min(stride, results) * (dil // common)
    largest = ceil_div(ceil_div(results, stride), dil // common)
    most_taps, joined = ceil_div(taps, stride // common), classes if stride == 1 else 1
    origin = (pad - (taps - 1) * dil, dil, classes - 1) if stride == 1 else (None,)
    return Axis(taps, stride, dil, pad, results, extent, classes, most_taps, largest, 1, joined, *origin)
