"""The matrix product that pointwise.cu and implicit_gemm.cu form, and which tensors TMA reaches for it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from haloconv.families.common import ceil_div
from haloconv.layout import Layout, strides_of
from haloconv.problem import Pair, Problem

CHUNK_BYTES, SPAN = 128, 64  # of channels of a stage; filters of a span
ARCH = "sm_90a"
LEAST_CHANNELS = 8  # and filters: of fewer most of a product would be zeros
TMA_BYTES = 16
LONGEST_ROW = 1 << 30  # pixels: places of boxes are 32-bit sums of two terms


class Side(NamedTuple):
    """A tensor's multiplied pixels: columns, rows, images, and elements from one of each, and channel, to the next."""

    cols: int
    rows: int
    images: int
    col_step: int
    row_step: int
    image_step: int
    channel_step: int


class Boxes(NamedTuple):
    """Columns and rows of a box of pixels; boxes of a row, and rows of boxes of an image."""

    cols: int
    rows: int
    across: int
    down: int


class Taps(NamedTuple):
    """The taps of a filter that is not 1x1, each a product.

    Output i of an axis, of ``outputs`` (rows, columns), meets x at i * ``stride`` + tap * ``dil`` - ``pad``.
    ``flipped``: tap 0 is the filter's last one. ``w_r`` and ``w_s`` are elements of w from tap to tap.
    """

    r: int
    s: int
    outputs: Pair
    stride: Pair
    dil: Pair
    pad: Pair
    flipped: bool
    w_r: int
    w_s: int

    @property
    def total(self) -> int:
        return self.r * self.s

    def met(self, axis: int, extent: int, first: int, last: int) -> int:
        """Taps of an axis that meet x from outputs ``first`` to ``last``; 1 at least."""
        taps, stride, dil, pad = (self.r, self.s)[axis], self.stride[axis], self.dil[axis], self.pad[axis]
        least = max(ceil_div(pad - last * stride, dil), 0)
        most = min((extent - 1 + pad - first * stride) // dil, taps - 1)
        return max(most - least + 1, 1)


@dataclass(frozen=True)
class Product:
    """The product of a request: ``y[filter, pixel]`` sums ``w[filter, channel] x[channel, pixel]`` over channels.

    Of dgrad x is dy, y the pixels of dx that outputs meet, and channels are the layer's filters. ``x_inner`` and
    ``y_inner``: neighbours are channels (filters), not pixels. ``w_loads`` is that of pointwise.cu. ``partials`` is the
    dense result that split-K has for each range of channels. With ``taps`` there is a product for each, and ``x`` has
    all pixels of its images, of a copy of x if that is ``copied``.
    """

    problem: Problem
    filters: int
    channels: int
    x: Side
    y: Side
    partials: Side
    x_inner: bool
    y_inner: bool
    w_filter: int
    w_channel: int
    w_loads: str
    taps: Taps | None = None
    copied: bool = False

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return self.problem.dtype.itemsize

    @property
    def pixels_m(self) -> bool:
        """Whether pixels are the rows of M."""
        return self.y_inner or (self.size == 4 and not self.x_inner)

    @property
    def transposes(self) -> bool:
        """Whether sums are transposed before they are stored."""
        return self.pixels_m and not self.y_inner

    @property
    def packs(self) -> bool:
        """Whether filters are packed before every launch."""
        return self.w_loads == "W_PACKED"

    @property
    def has_gaps(self) -> bool:
        """Whether the result has pixels that no output meets."""
        return self.problem.direction == "dgrad" and self.problem.stride != (1, 1)

    @property
    def clears_gaps(self) -> bool:
        """Whether the kernel writes zeros there. With a bias they are none."""
        return self.has_gaps and not self.problem.bias

    @property
    def chunks(self) -> int:
        """Chunks of all channels."""
        return ceil_div(self.channels * self.size, CHUNK_BYTES)

    @property
    def outputs(self) -> int:
        """Elements that are computed."""
        return self.filters * self.y.cols * self.y.rows * self.y.images

    @property
    def gaps(self) -> int:
        """Elements of the result that are none of these."""
        return prod(self.problem.x_shape) - self.outputs if self.has_gaps else 0

    @property
    def box_px(self) -> int:
        """Places of a box."""
        return 32 if self.size == 4 and not (self.x_inner and self.y_inner) else 64

    @property
    def tap_count(self) -> int:
        return self.taps.total if self.taps else 1

    def packed_bytes(self, spans: int) -> int:
        """Bytes of so many packed spans of filters, 0 where they are not packed."""
        return spans * self.chunks * self.tap_count * SPAN * CHUNK_BYTES if self.packs else 0

    def most_taps(self, pixels: int) -> int:
        """Taps that are multiplied for a tile of so many pixels, of one row or whole images; of others some more."""
        if self.taps is None:
            return 1
        rows, cols = self.taps.outputs
        whole = pixels >= rows * cols  # a tile has pixels of all rows
        of_rows = self.taps.met(0, self.x.rows, 0, rows - 1)
        if not whole:
            of_rows = max(self.taps.met(0, self.x.rows, row, row) for row in range(rows))
        return of_rows * self.taps.met(1, self.x.cols, 0, cols - 1)

    @property
    def pixels(self) -> int:
        """Pixels of the result."""
        return self.y.cols * self.y.rows * self.y.images

    @property
    def by_lanes(self) -> bool:
        """Whether lanes store the result: tiles of several taps are outputs across ends of planes."""
        return self.taps is not None and not self.y_inner

    @property
    def boxes(self) -> Boxes:
        if self.taps is not None:
            return Boxes(self.box_px, 1, ceil_div(self.pixels, self.box_px), 1)
        one = self.y
        if not (self.x_inner and self.y_inner):
            return Boxes(self.box_px, 1, ceil_div(one.cols, self.box_px), one.rows)
        across = ceil_div(one.cols, self.box_px)
        cols = self.box_px if one.rows == 1 else ceil_div(one.cols, across)
        rows = min(one.rows, self.box_px // cols)
        return Boxes(cols, rows, across, ceil_div(one.rows, rows))

    @property
    def box_bytes(self) -> int:
        """Bytes of a box of x that TMA brings."""
        return (self.boxes.cols * self.boxes.rows if self.x_inner else self.box_px) * CHUNK_BYTES

    @property
    def all_boxes(self) -> int:
        """Boxes of all images."""
        return self.boxes.across * self.boxes.down * (self.y.images if self.taps is None else 1)


def is_reached(product: Product, side: Side, inner: bool) -> bool:
    """Whether TMA takes boxes of the tensor. It writes whole 16 bytes, so those are all that a row of y has."""
    channels = product.channels if side is product.x else product.filters
    row = (channels if inner else side.cols) * product.size
    if side is product.y and row % TMA_BYTES:
        return False
    steps = [(side.rows, side.row_step), (side.images, side.image_step)]
    steps.append((side.cols, side.col_step) if inner else (channels, side.channel_step))
    neighbours = (side.channel_step if inner else side.col_step) == 1
    whole = all(step > 0 and step * product.size % TMA_BYTES == 0 for extent, step in steps if extent > 1)
    return neighbours and whole and side.cols < LONGEST_ROW


def w_loads_of(dtype: torch.dtype, extents: tuple[int, int], steps: tuple[int, int], aligned: bool) -> str:
    """How filters come: ``W_LOADS`` of pointwise.cu; ``extents`` and ``steps`` are of filters and of channels."""
    size = dtype.itemsize

    def spaced(axis: int) -> bool:
        return aligned and steps[axis] * size % TMA_BYTES == 0 and steps[axis] >= extents[1 - axis]

    if steps[1] == 1 and spaced(0):
        return "W_ROWS"
    if steps[0] == 1 and spaced(1) and size == 2:
        return "W_COLUMNS"
    return "W_PACKED"


def joined(
    extents: tuple[int, int, int], x: tuple[int, int, int, int], y: tuple[int, int, int, int]
) -> tuple[Side, Side]:
    """Rows as one where they follow one another in both tensors, and images too; steps are as those of ``Side``.

    What is left over moves up: images whose pixels are one row count as rows.
    """
    axes = [(1, 0, 0)]
    for extent, x_step, y_step in zip(extents, x, y, strict=False):
        last, x_last, y_last = axes[-1]
        if extent == 1:
            continue
        if last == 1:
            axes[-1] = (extent, x_step, y_step)
        elif (x_step, y_step) == (last * x_last, last * y_last) and last * extent < LONGEST_ROW:
            axes[-1] = (last * extent, x_last, y_last)
        else:
            axes.append((extent, x_step, y_step))
    cols, rows, images = axes + [(1, 0, 0)] * (3 - len(axes))
    one, other = (
        Side(cols[0], rows[0], images[0], cols[side], rows[side], images[side], channel_step)
        for side, channel_step in ((1, x[3]), (2, y[3]))
    )
    return one, other


def dense(extents: tuple[int, int, int], filters: int, layout: Layout) -> Side:
    """The pixels of a dense tensor of these columns, rows and images, with so many filters."""
    cols, rows, images = extents
    image, channel, row, col = strides_of((images, filters, rows, cols), layout)
    return Side(cols, rows, images, col, row, image, channel)
