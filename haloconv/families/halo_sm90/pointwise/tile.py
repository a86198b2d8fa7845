"""What pointwise.cu multiplies for a request, how it cuts that into tiles, and what tiles cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product as combinations
from math import prod
from typing import NamedTuple

import torch

from haloconv import support
from haloconv.families.common import ceil_div
from haloconv.families.halo_sm90.pointwise import costs
from haloconv.families.reduce.partials import applies
from haloconv.layout import Layout, strides_of
from haloconv.problem import Problem, Request

CHUNK_BYTES, SPAN = 128, 64  # of channels of a stage; filters of a span
_ARCH = "sm_90a"
_LEAST_CHANNELS = 8  # and filters: of fewer most of a product would be zeros
_LONGEST_ROW = 1 << 30  # pixels: places of boxes are 32-bit sums of two terms
_TMA_BYTES = 16
_CONSUMERS, _SLAB_BYTES = 2, 64 * CHUNK_BYTES
_BUFFERS = ((4, 4), (2, 3))  # of a consumer; the fewest stages beside them
_MOST_STAGES, _MOST_KEPT = 8, 32
_MOST_SUMS = 256  # N of wgmma times blocks of M: 128 registers
_MOST_PARTIAL_BYTES = 64 << 20
_SPLITS = (2, 3, 4, 6, 8, 12, 16)
# The cost model beside costs.py: bytes in a cycle that wgmma reads; cycles of a tile, of a slab, of the sum of split-K.
_OPERAND_BYTES = 128
_TILE_CYCLES, _SLAB_CYCLES, _SUM_CYCLES = 100, 200, 10000


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


@dataclass(frozen=True)
class Product:
    """The product of a request: ``y[filter, pixel]`` sums ``w[filter, channel] x[channel, pixel]`` over channels.

    Of dgrad x is dy, y the pixels of dx that outputs meet, and channels are the layer's filters. ``x_inner`` and
    ``y_inner``: neighbours are channels (filters), not pixels. ``w_loads`` is that of pointwise.cu. ``partials`` is the
    dense result that split-K has for each range of channels.
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
    def boxes(self) -> Boxes:
        one = self.x
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
        return self.boxes.across * self.boxes.down * self.x.images

    def packed_bytes(self, tile: Tile) -> int:
        """Bytes of the packed filters, 0 where they are not packed."""
        return tile.spans(self) * self.chunks * SPAN * CHUNK_BYTES if self.packs else 0


@dataclass(frozen=True)
class Tile:
    """Pixels and filters of a tile, and how a block of threads multiplies it.

    ``n`` is that of wgmma. With ``split_n`` each consumer has half of the columns of N, else of the rows of M.
    ``keeps_w``: filters stay in shared memory for all tiles of a block of threads. ``splits`` are ranges of the
    channels, ``buffers`` those of a consumer's sums.
    """

    pixels: int
    filters: int
    n: int
    split_n: bool
    keeps_w: bool
    splits: int
    stages: int = 0
    buffers: int = 0

    @property
    def m_blocks(self) -> int:
        """Blocks of 64 rows of M of a consumer."""
        return self.pixels * self.filters // (64 * _CONSUMERS * self.n)

    def blocks(self, product: Product) -> int:
        """Blocks of filters of the layer."""
        return ceil_div(product.filters, self.filters)

    def spans(self, product: Product) -> int:
        """Spans of filters of all blocks."""
        return self.blocks(product) * ceil_div(self.filters, SPAN)

    def range_chunks(self, product: Product) -> int:
        """Chunks of a range of channels."""
        return ceil_div(product.chunks, self.splits)

    def count(self, product: Product) -> int:
        """Tiles of the layer."""
        return ceil_div(product.all_boxes, self.pixels // product.box_px) * self.blocks(product) * self.splits

    def grid(self, product: Product, sm_count: int) -> int:
        """Blocks of threads. Where filters stay, each has one block of filters and one range: 0 if that cannot be."""
        alike = self.blocks(product) * self.splits if self.keeps_w else 1
        return min(self.count(product), sm_count // alike * alike)

    def w_bytes(self, product: Product) -> int:
        """Bytes of a chunk of channels of a tile's filters."""
        filters = self.filters if product.w_loads == "W_ROWS" else ceil_div(self.filters, SPAN) * SPAN
        return filters * CHUNK_BYTES

    def smem_bytes(self, product: Product) -> int:
        """Shared memory of a block of threads: kept filters, stages, buffers of sums and barriers."""
        kept = self.range_chunks(product) * self.w_bytes(product) if self.keeps_w else 0
        stage = self.pixels * CHUNK_BYTES + (0 if self.keeps_w else self.w_bytes(product))
        residual = _CONSUMERS * self.buffers if product.problem.epilogue.residual else 0
        barriers = 8 * (2 * self.stages + (_MOST_KEPT if self.keeps_w else 0) + residual)
        return kept + self.stages * stage + _CONSUMERS * self.buffers * _SLAB_BYTES + barriers

    def cycles(self, product: Product, sm_count: int) -> float:
        """The model's time, in cycles."""
        chunks, size = self.range_chunks(product), product.size
        y_size = size if self.splits == 1 else 4
        operands = 32 * (self.n + (0 if product.size == 4 and not product.x_inner else 64))
        wgmma = max(self.n / 2, operands / _OPERAND_BYTES)
        multiply = chunks * 4 * self.m_blocks * _CONSUMERS * wgmma
        write = self.m_blocks * ceil_div(self.n * y_size, CHUNK_BYTES) * _SLAB_CYCLES
        stage = self.pixels * CHUNK_BYTES + (0 if self.keeps_w else self.w_bytes(product))
        loaded = chunks * max(stage / costs.L2_BYTES, costs.LATENCY_CYCLES / self.stages)
        moved = loaded + self.pixels * self.filters * y_size / costs.L2_BYTES
        most = ceil_div(self.count(product), self.grid(product, sm_count))
        kept = chunks * self.w_bytes(product) / costs.L2_BYTES if self.keeps_w else 0
        blocks = most * costs.overlapped(_TILE_CYCLES + multiply + write, moved) + kept
        pixels = product.x.cols * product.x.rows * product.x.images
        traffic = size * product.channels * (pixels + product.filters) + y_size * self.splits * product.outputs
        traffic += size * product.gaps
        memory = traffic / (costs.MEMORY_BYTES * sm_count)
        adding = (
            _SUM_CYCLES + self.splits * product.outputs * 4 / (costs.MEMORY_BYTES * sm_count) if self.splits > 1 else 0
        )
        return costs.BEGIN_CYCLES + costs.overlapped(blocks, memory) + adding


def why_no_product(request: Request) -> str | None:
    """None if the request is one matrix product that tensor cores form, else a sentence that says why not."""
    problem = request.problem
    reason = support.why_no_tensor_cores(problem)
    if reason is not None:
        return reason
    if request.facts.arch != _ARCH:
        return "the device is no Hopper GPU (compute capability 9.0)"
    if (problem.r, problem.s) != (1, 1) or any(problem.padding):
        return "the filter is not 1x1, or the layer is padded"
    if problem.groups > 1 or min(problem.c, problem.k) < _LEAST_CHANNELS:
        return f"the layer has groups, or fewer than {_LEAST_CHANNELS} channels or filters"
    return None


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, else a sentence that says why not."""
    reason = why_no_product(request)
    if reason is not None:
        return reason
    one = product_of(request)
    if not request.first.aligned or not (_reached(one, one.x, one.x_inner) and _reached(one, one.y, one.y_inner)):
        return "pixels are not at multiples of 16 bytes, or channels where they are neighbours"
    pixels, boxes = one.x.cols * one.x.rows * one.x.images, one.all_boxes
    if boxes > 1 and 2 * pixels < boxes * one.box_px:
        return f"rows of {one.x.cols} pixels that do not follow one another leave most of a tile empty"
    return None


def _reached(product: Product, side: Side, inner: bool) -> bool:
    """Whether TMA takes boxes of the tensor. It writes whole 16 bytes, so those are all that a row of y has."""
    channels = product.channels if side is product.x else product.filters
    row = (channels if inner else side.cols) * product.size
    if side is product.y and row % _TMA_BYTES:
        return False
    steps = [(side.rows, side.row_step), (side.images, side.image_step)]
    steps.append((side.cols, side.col_step) if inner else (channels, side.channel_step))
    neighbours = (side.channel_step if inner else side.col_step) == 1
    whole = all(step > 0 and step * product.size % _TMA_BYTES == 0 for extent, step in steps if extent > 1)
    return neighbours and whole and side.cols < _LONGEST_ROW


@lru_cache(maxsize=256)
def product_of(request: Request) -> Product:
    """The product of a 1x1 layer without padding."""
    problem, forward = request.problem, request.problem.direction == "fprop"
    x, y, (down, across) = request.first.strides, request.result_strides, problem.stride
    x_steps, y_steps = (x[3], x[2], x[0], x[1]), (y[3], y[2], y[0], y[1])
    if forward:
        x_steps = (x_steps[0] * across, x_steps[1] * down, *x_steps[2:])
    else:
        y_steps = (y_steps[0] * across, y_steps[1] * down, *y_steps[2:])
    filters, channels = (problem.k, problem.c) if forward else (problem.c, problem.k)
    w_k, w_c = request.second.strides[:2]
    w_filter, w_channel = (w_k, w_c) if forward else (w_c, w_k)
    one, other = _joined((problem.q, problem.p, problem.n), x_steps, y_steps)
    extents = (one.cols, one.rows, one.images)
    y_inner = y[1] == 1
    layout: Layout = "nhwc" if y_inner else "nchw"
    w_loads = _w_loads(problem.dtype, (filters, channels), (w_filter, w_channel), request.second.aligned)
    return Product(
        problem, filters, channels, one, other, _dense(extents, filters, layout),
        x[1] == 1, y_inner, w_filter, w_channel, w_loads,
    )  # fmt: skip


def _w_loads(dtype: torch.dtype, extents: tuple[int, int], steps: tuple[int, int], aligned: bool) -> str:
    """How filters come: ``W_LOADS`` of pointwise.cu; ``extents`` and ``steps`` are of filters and of channels."""
    size = dtype.itemsize

    def spaced(axis: int) -> bool:
        return aligned and steps[axis] * size % _TMA_BYTES == 0 and steps[axis] >= extents[1 - axis]

    if steps[1] == 1 and spaced(0):
        return "W_ROWS"
    if steps[0] == 1 and spaced(1) and size == 2:
        return "W_COLUMNS"
    return "W_PACKED"


def _joined(
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
        elif (x_step, y_step) == (last * x_last, last * y_last) and last * extent < _LONGEST_ROW:
            axes[-1] = (last * extent, x_last, y_last)
        else:
            axes.append((extent, x_step, y_step))
    cols, rows, images = axes + [(1, 0, 0)] * (3 - len(axes))
    one, other = (
        Side(cols[0], rows[0], images[0], cols[side], rows[side], images[side], channel_step)
        for side, channel_step in ((1, x[3]), (2, y[3]))
    )
    return one, other


def _dense(extents: tuple[int, int, int], filters: int, layout: Layout) -> Side:
    cols, rows, images = extents
    image, channel, row, col = strides_of((images, filters, rows, cols), layout)
    return Side(cols, rows, images, col, row, image, channel)


@lru_cache(maxsize=256)
def tiles(product: Product, max_smem_bytes: int, sm_count: int) -> tuple[Tile, ...]:
    """Every tile that fits, best first by the cost model."""
    found: list[Tile] = []
    for m_blocks, split_n, n in combinations((1, 2), (False, True), _columns(product)):
        rows, columns = 64 * m_blocks * (1 if split_n else _CONSUMERS), n * (_CONSUMERS if split_n else 1)
        pixels, filters = (rows, columns) if product.pixels_m else (columns, rows)
        whole = Tile(pixels, filters, n, split_n, False, 1)
        if m_blocks * n > _MOST_SUMS or not _fits_filters(product, whole):
            continue
        for splits, keeps in combinations(_splits(product, whole, sm_count), (False, True)):
            found += _staged(product, Tile(pixels, filters, n, split_n, keeps, splits), max_smem_bytes, sm_count)
    return tuple(sorted(found, key=lambda tile: tile.cycles(product, sm_count)))


def _columns(product: Product) -> Iterator[int]:
    """N of wgmma: whole slabs of sums; where filters are N, also the narrowest that has all of them."""
    yield from (64, 128, 256)
    if product.pixels_m:
        narrow = (32, 96, 160, 224) if product.size == 4 else ()
        yield from (192, *(n for n in narrow if n - 32 < product.filters <= n))


def _fits_filters(product: Product, tile: Tile) -> bool:
    """Whether blocks of filters begin where slabs of sums and spans of filters do."""
    several = tile.blocks(product) > 1 or tile.split_n
    return not (product.pixels_m and several and tile.n % SPAN)


def _splits(product: Product, tile: Tile, sm_count: int) -> Iterator[int]:
    """Ranges of channels that are worth a thought: one, or more where there are too few tiles."""
    yield 1
    if not applies(product.problem.epilogue):
        return
    seen = {1}
    for splits in _SPLITS:
        each = ceil_div(product.chunks, splits)
        ranges = ceil_div(product.chunks, each)  # none is empty
        few = tile.count(product) * ranges <= 2 * sm_count
        if ranges not in seen and each > 1 and few and 4 * ranges * product.outputs <= _MOST_PARTIAL_BYTES:
            seen.add(ranges)
            yield ranges


def _staged(product: Product, tile: Tile, max_smem_bytes: int, sm_count: int) -> Iterator[Tile]:
    """The tile with as many buffers and stages as fit, if enough do."""
    if tile.keeps_w and (tile.range_chunks(product) > _MOST_KEPT or tile.grid(product, sm_count) == 0):
        return
    for buffers, fewest in _BUFFERS:
        for stages in range(_MOST_STAGES, fewest - 1, -1):
            one = replace(tile, stages=stages, buffers=buffers)
            if one.smem_bytes(product) <= max_smem_bytes:
                yield one
                return
