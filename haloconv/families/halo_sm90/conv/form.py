"""What one launch of halo_sm90 computes: fprop, and every residue class of dgrad, as one form.

Output pixel ``i`` of an axis gathers input pixel ``i * stride + j * dil - pad`` at tap ``j``. dgrad is of that form
with flipped taps; with a stride, the output pixels of one residue form a dense problem of their own that meets only
some of the taps (as in geometry.cuh), so nothing is multiplied by inserted zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import gcd

from haloconv.problem import Problem


@dataclass(frozen=True)
class Axis:
    """One image axis of a launch.

    Output pixel ``i`` stands at ``out_first + i * out_step`` of the output; tap ``j`` is filter index
    ``filter_first + j * filter_step``. Extents and distances are pixels.
    """

    taps: int
    stride: int
    dil: int
    pad: int
    in_extent: int
    out_extent: int
    out_first: int = 0
    out_step: int = 1
    filter_first: int = 0
    filter_step: int = 1


@dataclass(frozen=True)
class Form:
    """One launch: two axes, images, groups, and the channels and filters of a group.

    In split-K each of ``splits`` ranges of the channels is a group, whose filters are all of them: then the results are
    partial sums.
    """

    vertical: Axis
    horizontal: Axis
    n: int
    groups: int
    channels: int
    filters: int
    splits: int = 1

    def split(self, splits: int) -> Form:
        """The same layer of one group with its channels in so many ranges."""
        return replace(self, groups=splits, channels=self.channels // splits, splits=splits)

    def cut(self, cols: int) -> tuple[Form, Form]:
        """The launch of the first ``cols`` columns of outputs, and that of those that are left."""
        axis = self.horizontal
        left = replace(
            axis, out_extent=axis.out_extent - cols, pad=axis.pad - cols * axis.stride,
            out_first=axis.out_first + cols * axis.out_step,
        )  # fmt: skip
        return replace(self, horizontal=replace(axis, out_extent=cols)), replace(self, horizontal=left)

    @property
    def taps(self) -> int:
        return self.vertical.taps * self.horizontal.taps


def forms(problem: Problem) -> list[Form]:
    """The launches of an fprop or dgrad problem; a residue of dgrad that no tap reaches has 0 taps."""
    top, _, left, _ = problem.padding
    if problem.direction == "fprop":
        vertical = Axis(problem.r, problem.stride[0], _dil(problem.r, problem.dilation[0]), top, problem.h, problem.p)
        horizontal = Axis(
            problem.s, problem.stride[1], _dil(problem.s, problem.dilation[1]), left, problem.w, problem.q
        )
        return [Form(vertical, horizontal, problem.n, problem.groups, problem.c_per_group, problem.k_per_group)]
    rows = _dgrad_axes(problem.r, problem.stride[0], problem.dilation[0], top, problem.p, problem.h)
    cols = _dgrad_axes(problem.s, problem.stride[1], problem.dilation[1], left, problem.q, problem.w)
    channels, filters = problem.k_per_group, problem.c_per_group
    return [Form(row, col, problem.n, problem.groups, channels, filters) for row, col in product(rows, cols)]


def _dil(taps: int, dil: int) -> int:
    return dil if taps > 1 else 1


def _dgrad_axes(taps: int, stride: int, dil: int, pad: int, dy_extent: int, dx_extent: int) -> list[Axis]:
    """One axis per residue of the input pixel modulo the stride, without residues that have no pixel."""
    step = stride // gcd(stride, dil)  # between filter taps that reach one residue
    axes = []
    for residue in range(min(stride, dx_extent)):
        reached = [tap for tap in range(taps) if (residue + pad - tap * dil) % stride == 0]
        move = step * dil // stride  # output pixels from one of these taps to the next
        extent = -(-(dx_extent - residue) // stride)
        if not reached:
            axes.append(Axis(0, 1, 1, 0, dy_extent, extent, residue, stride))
            continue
        last_base = (residue + pad - reached[-1] * dil) // stride
        axes.append(
            Axis(
                len(reached),
                1,
                _dil(len(reached), move),
                -last_base,
                dy_extent,
                extent,
                residue,
                stride,
                filter_first=reached[-1],
                filter_step=-step,
            )  # fmt: skip
        )
    return axes
