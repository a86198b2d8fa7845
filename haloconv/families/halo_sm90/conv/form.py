"""What a launch of halo_sm90 computes: fprop and dgrad as one form.

Output pixel ``i`` of an axis gathers input pixel ``i * stride + j * dil - pad`` at tap ``j``. dgrad is of that form
with flipped taps. With a stride ``s`` one launch computes all residue classes of dx: a filter ``r`` taps from the pixel
of dy that it is multiplied with adds to dx pixel ``p * s + r * dil - pad``. So counted from the padded image's first
pixel on, dx pixel ``i * s + a`` of class ``a`` meets the taps with ``r * dil = q * s + a``, each at dy pixel ``i - q``.
All classes of ``i`` gather the same neighbours of dy: they are further filters, and a tap that a class has not is zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from haloconv.families.common import ceil_div
from haloconv.problem import Problem


@dataclass(frozen=True)
class Axis:
    """One image axis of a launch, whose extents and distances are pixels.

    Class ``a`` of ``classes`` of place ``i`` is output pixel ``i * out_step + a - out_before``. Its tap ``j`` is filter
    index ``(filter_first + j * filter_step + a) / filter_dil`` where that is one of the ``filter_taps``, else zero.
    Output pixels are counted from ``out_first`` on.
    """

    taps: int
    stride: int
    dil: int
    pad: int
    in_extent: int
    out_extent: int
    out_step: int = 1
    out_before: int = 0
    classes: int = 1
    filter_first: int = 0
    filter_step: int = 1
    filter_dil: int = 1
    filter_taps: int = 0
    out_first: int = 0

    @property
    def places(self) -> int:
        """Places, whose pixels of all classes are the output."""
        return ceil_div(self.out_extent + self.out_before, self.out_step)

    @property
    def has_gaps(self) -> bool:
        """Whether the output has pixels of none of the classes."""
        first = range(min(self.out_step, self.out_extent))
        return any((pixel + self.out_before) % self.out_step >= self.classes for pixel in first)

    @property
    def zero_taps(self) -> int:
        """Taps of all classes that are zero, because the filter has none there."""
        return self.taps * self.classes - self.filter_taps


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
        """The launch of split-K for a layer of one group: its channels are cut into so many ranges, each a group."""
        return replace(self, groups=splits, channels=self.channels // splits, splits=splits)

    def cut(self, cols: int) -> tuple[Form, Form]:
        """The launch of the first ``cols`` columns of all outputs, and that of the others; without residue classes."""
        axis = self.horizontal
        left = replace(axis, out_extent=axis.out_extent - cols, pad=axis.pad - cols * axis.stride, out_first=cols)
        return replace(self, horizontal=replace(axis, out_extent=cols)), replace(self, horizontal=left)

    @property
    def classes(self) -> int:
        """Residue classes of the output, 1 without a stride of it."""
        return self.vertical.classes * self.horizontal.classes

    @property
    def interleaves(self) -> bool:
        """Whether the rows of M are those of residue classes of the output."""
        return max(self.vertical.out_step, self.horizontal.out_step) > 1

    @property
    def has_gaps(self) -> bool:
        """Whether no tap reaches some residue classes of the output."""
        return self.vertical.has_gaps or self.horizontal.has_gaps

    @property
    def has_zero_taps(self) -> bool:
        return self.vertical.zero_taps + self.horizontal.zero_taps > 0


def form_of(problem: Problem) -> Form:
    """The launch of an fprop or dgrad problem."""
    top, _, left, _ = problem.padding
    (stride_h, stride_w), (dil_h, dil_w) = problem.stride, problem.dilation
    if problem.direction == "fprop":
        vertical = _fprop_axis(problem.r, stride_h, dil_h, top, problem.h, problem.p)
        horizontal = _fprop_axis(problem.s, stride_w, dil_w, left, problem.w, problem.q)
        return Form(vertical, horizontal, problem.n, problem.groups, problem.c_per_group, problem.k_per_group)
    vertical = _dgrad_axis(problem.r, stride_h, dil_h, top, problem.p, problem.h)
    horizontal = _dgrad_axis(problem.s, stride_w, dil_w, left, problem.q, problem.w)
    return Form(vertical, horizontal, problem.n, problem.groups, problem.k_per_group, problem.c_per_group)


def _dil(taps: int, dil: int) -> int:
    return dil if taps > 1 else 1


def _fprop_axis(taps: int, stride: int, dil: int, pad: int, x_extent: int, y_extent: int) -> Axis:
    return Axis(taps, stride, _dil(taps, dil), pad, x_extent, y_extent, filter_taps=taps)


def _dgrad_axis(taps: int, stride: int, dil: int, pad: int, dy_extent: int, dx_extent: int) -> Axis:
    """The axis of dgrad. With a stride it has all residue classes up to the last one that a tap reaches.

    ``out_before`` is free, since the first pixel may be of any class: it is the one with the fewest taps of all classes
    together, and of those the smallest.
    """
    if stride == 1:
        pad, reach = (taps - 1) * dil - pad, _dil(taps, dil)
        return Axis(taps, 1, reach, pad, dy_extent, dx_extent, filter_first=taps - 1, filter_step=-1, filter_taps=taps)
    found = (_class_axis(taps, stride, dil, pad, (dy_extent, dx_extent), before) for before in range(stride))
    return min(found, key=lambda axis: (axis.taps * axis.classes, axis.out_before))


def _class_axis(taps: int, stride: int, dil: int, pad: int, extents: tuple[int, int], before: int) -> Axis:
    reached = [divmod(tap * dil - pad + before, stride) for tap in range(taps)]  # pixels of dy before the place, class
    first, last = reached[0][0], reached[-1][0]
    step = gcd(*(behind - first for behind, _ in reached)) or 1
    return Axis(
        (last - first) // step + 1,
        1,
        step,
        last,
        *extents,
        stride,
        before,
        1 + max(residue for _, residue in reached),
        filter_first=last * stride + pad - before,
        filter_step=-step * stride,
        filter_dil=dil,
        filter_taps=taps,
    )
