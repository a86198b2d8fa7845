"""What pointwise_planes.cu multiplies for a request, how it cuts that into tiles, and their cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations
from itertools import product as combinations
from typing import NamedTuple

from haloconv.families.common import ceil_div
from haloconv.families.halo_sm90.pointwise import costs
from haloconv.families.halo_sm90.pointwise.product import CHUNK_BYTES, SPAN, Product
from haloconv.families.halo_sm90.pointwise.tile import product_of
from haloconv.problem import Request

CONSUMERS = 2
_COPY_BYTES = 16  # bulk copies, and rows of boxes, are multiples of it
_MOST_IMAGES, _LONGEST_BOX = 8, 256  # images of a tile; elements of an axis of a box
_MOST_SUMS = 256  # N of wgmma times blocks of M: 128 registers
_MOST_STAGES = 8
_BUFFERS = ((4, 4), (2, 3))  # of slabs; the fewest stages beside them
_SLABS = (32, 16, 8)
_MOST_BUFFER_BYTES = 32 << 10
_ALIGNMENT = 1024  # of a stage, for swizzled filters
_BLOCK_ROWS, _BANKS, _WORD_BYTES = 64, 32, 4
_MORE_UNITS = 4  # of 16 bytes that a box may have in a row, one less
# The cost model beside costs.py: cycles to read shared memory once for a warp, that TMA takes for a row of a box of x,
# and of a tile besides.
_ROUND_CYCLES, _ROW_CYCLES, _TILE_CYCLES = 1.6, 3.9, 1500


class Side(NamedTuple):
    """Planes of x or of y: extents, the stride of the pixels that are multiplied, elements from image to image."""

    width: int
    height: int
    down: int
    across: int
    image: int

    @property
    def plane(self) -> int:
        """Elements."""
        return self.width * self.height

    @property
    def dense(self) -> bool:
        """Whether all pixels are multiplied."""
        return (self.down, self.across) == (1, 1)


class Layout(NamedTuple):
    """A plane, or a band of one, in shared memory: elements, and from a multiplied pixel to the next below."""

    plane: int
    row: int


class RowOrder(NamedTuple):
    """Which of 64 rows of M are a lane's: each field is how many rows on the next one is.

    ``lane`` of four neighbours among the eight lanes that load other pixels, ``lanes`` of their two fours, ``warp`` of
    the four warps, ``half`` of a lane's two rows.
    """

    lane: int
    lanes: int
    warp: int
    half: int


def _orders() -> Iterator[RowOrder]:
    """All that give each of 64 rows to one lane: fields of a row's six bits, in every order."""
    for fields in permutations(((0, 4), (1, 2), (2, 4), (3, 2))):
        steps, step = [0] * 4, 1
        for place, count in fields:
            steps[place], step = step, step * count
        yield RowOrder(*steps)


ORDERS = tuple(_orders())


class Access(NamedTuple):
    """A warp's access to pixels in shared memory: distances in bytes.

    From row to row, from column to column, and between the four lanes that have the same pixel of other channels.
    """

    pixels: int
    cols: int
    row: int
    col: int
    lane: int


def _rounds(access: Access, order: RowOrder) -> int:
    """How often banks are read, or written, for the first pixels of a warp."""
    words = set()
    for lane in range(8):
        row = lane % 4 * order.lane + lane // 4 * order.lanes
        pixel = row if row < access.pixels else 0
        at = pixel // access.cols * access.row + pixel % access.cols * access.col
        words |= {(at + other * access.lane) // _WORD_BYTES for other in range(4)}
    return max(Counter(word % _BANKS for word in words).values())


@lru_cache(maxsize=1024)
def _best_order(x: Access, y: Access, paired: bool) -> RowOrder:
    """The order of rows with the fewest bank conflicts: in loads of x, which are more, then in stores of y.

    With ``paired`` a lane's two rows follow one another.
    """
    orders = (order for order in ORDERS if order.half == 1 or not paired)
    return min(orders, key=lambda order: (_rounds(x, order), _rounds(y, order), order))


@dataclass(frozen=True)
class Planes:
    """The product of a request on planes, of which ``rows`` by ``cols`` pixels are multiplied."""

    product: Product
    rows: int
    cols: int
    x: Side
    y: Side

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return self.product.size

    def whole(self, elems: int) -> bool:
        """Whether so many elements are whole copies."""
        return elems * self.size % _COPY_BYTES == 0

    def pitch(self, side: Side) -> int:
        """Columns of a box of rows."""
        unit = _COPY_BYTES // self.size
        return ceil_div(side.width, unit) * unit

    def reached(self, side: Side) -> bool:
        """Whether TMA takes boxes of the planes."""
        step = side.plane if side.dense else side.width * (side.down if side is self.x else 1)
        return self.whole(side.plane) and self.whole(step) and (side.dense or self.pitch(side) <= _LONGEST_BOX)


@dataclass(frozen=True)
class Tile:
    """Images and filters of a tile, and how a block of threads multiplies it.

    ``band`` are rows of an image's multiplied pixels, fewer than all only if ``images`` is 1. ``n`` is that of wgmma.
    With ``split_n`` each consumer has half of the columns of N, else of the rows of M: ``m_blocks`` of 64.
    ``x_cols`` by ``x_rows`` are boxes of x, which may have more than the band so that its planes lie in other banks; 0:
    bulk copies. ``y_boxes``: TMA boxes take the result. Sums of ``slab`` filters leave at a time, through ``buffers``.
    """

    images: int
    band: int
    filters: int
    n: int
    split_n: bool
    m_blocks: int
    x_cols: int
    x_rows: int
    y_boxes: bool
    chunk_bytes: int = CHUNK_BYTES
    slab: int = _SLABS[0]
    buffers: int = 0
    stages: int = 0

    def pixels(self, one: Planes) -> int:
        """Multiplied pixels of an image of a tile."""
        return self.band * one.cols

    def bands(self, one: Planes) -> int:
        """Bands of an image."""
        return ceil_div(one.rows, self.band)

    def blocks(self, product: Product) -> int:
        """Blocks of filters of the layer."""
        return ceil_div(product.filters, self.filters)

    def spans(self, product: Product) -> int:
        """Spans of filters of all blocks."""
        return self.blocks(product) * ceil_div(self.filters, SPAN)

    def chunk(self, one: Planes) -> int:
        """Channels of a stage."""
        return self.chunk_bytes // one.size

    def chunks(self, one: Planes) -> int:
        """Chunks of all channels."""
        return ceil_div(one.product.channels, self.chunk(one))

    def count(self, one: Planes) -> int:
        """Tiles of the layer."""
        return ceil_div(one.product.problem.n, self.images) * self.bands(one) * self.blocks(one.product)

    def x(self, one: Planes) -> Layout:
        """In a stage: boxes have none of the rows between those that are multiplied."""
        if not self.x_cols:
            return Layout(one.x.plane, one.x.down * one.x.width)
        return Layout(self.x_cols * self.x_rows, one.cols if one.x.dense else self.x_cols)

    def y(self, one: Planes) -> Layout:
        """In a buffer: boxes have all rows, since those that no output meets are zeros."""
        if not self.y_boxes:
            return Layout(one.y.plane, one.y.down * one.y.width)
        row = one.y.down * (one.cols if one.y.dense else one.pitch(one.y))
        return Layout(row * self.band, row)

    def image_rows(self, one: Planes) -> int:
        """Rows of M from image to image: those of many pixels begin with a block, in which rows have an order."""
        pixels = self.pixels(one)
        return pixels if 2 * pixels <= _BLOCK_ROWS else ceil_div(pixels, _BLOCK_ROWS) * _BLOCK_ROWS

    def x_pairs(self, one: Planes) -> str:
        """Whether two pixels from an even one on are an aligned word: X_PAIRS of the kernel."""
        if one.size != 2 or not one.x.dense or self.image_rows(one) % 2:
            return "NO_PAIRS"
        return "ALL_PAIRS" if self.x(one).plane % 2 == 0 else "EVEN_PAIRS"

    def y_pairs(self, one: Planes) -> bool:
        """Whether they are one in y; only where they are in x, whose loads are more than the stores."""
        return one.y.dense and self.x_pairs(one) == "ALL_PAIRS" and self.y(one).plane % 2 == 0

    def order(self, one: Planes) -> RowOrder:
        """The order of rows in which the lanes of a load, and of a store, meet the fewest banks twice."""
        return _best_order(*self._accesses(one), self.x_pairs(one) != "NO_PAIRS")

    def x_rounds(self, one: Planes) -> int:
        """How often shared memory is read for a load of a warp."""
        return _rounds(self._accesses(one)[0], self.order(one))

    def _accesses(self, one: Planes) -> tuple[Access, Access]:
        x, y, size, pixels = self.x(one), self.y(one), one.size, self.pixels(one)
        return (
            Access(pixels, one.cols, x.row * size, one.x.across * size, 4 * x.plane),
            Access(pixels, one.cols, y.row * size, one.y.across * size, 2 * y.plane * size),
        )

    def filter_bytes(self, one: Planes) -> int:
        """Bytes of the filters in a stage, which has one chunk of channels."""
        filters = self.filters if one.product.w_loads == "W_ROWS" else ceil_div(self.filters, SPAN) * SPAN
        return filters * self.chunk_bytes

    def stage_bytes(self, one: Planes) -> int:
        """Filters of a chunk, and planes of each image."""
        planes = self.images * self.chunk(one) * self.x(one).plane * one.size
        return ceil_div(self.filter_bytes(one) + planes, _ALIGNMENT) * _ALIGNMENT

    def buffer_bytes(self, one: Planes) -> int:
        """Planes of a slab."""
        return self.images * self.slab * self.y(one).plane * one.size

    def smem_bytes(self, one: Planes) -> int:
        """Shared memory of a block of threads: stages, buffers of sums and barriers."""
        buffers = self.buffers * (CONSUMERS if self.split_n else 1) * self.buffer_bytes(one)
        return self.stages * (self.stage_bytes(one) + 16) + buffers

    def cycles(self, one: Planes, sm_count: int) -> float:
        """The model's time, in cycles."""
        product, size = one.product, one.size
        loads = {"ALL_PAIRS": 4, "EVEN_PAIRS": 6, "NO_PAIRS": 8}[self.x_pairs(one)] if size == 2 else 4
        rounds = loads * 4 * self.x_rounds(one) * _ROUND_CYCLES
        multiply = self.m_blocks * self.chunk_bytes // 32 * CONSUMERS * max(self.n / 2, rounds)
        x_rows = self.images * self.chunk(one) * self.x_rows if self.x_cols else 0
        filters, stage = self.filter_bytes(one), self.stage_bytes(one)
        loaded = filters / costs.L2_BYTES + max((stage - filters) / costs.L2_BYTES, x_rows * _ROW_CYCLES)
        loaded = max(loaded, costs.LATENCY_CYCLES / self.stages)
        outputs = self.images * self.filters * self.y(one).plane * size / costs.L2_BYTES
        tile = self.chunks(one) * costs.overlapped(multiply, loaded) + _TILE_CYCLES + outputs
        x_plane = self.x(one).plane * self.bands(one)
        planes = product.problem.n * (product.channels * x_plane + product.filters * one.y.plane)
        memory = (planes + product.channels * product.filters) * size / (costs.MEMORY_BYTES * sm_count)
        return costs.BEGIN_CYCLES + costs.overlapped(ceil_div(self.count(one), sm_count) * tile, memory)


@lru_cache(maxsize=256)
def planes_of(request: Request) -> Planes | None:
    """The product on planes; None where x or the result is not made of dense ones."""
    problem, forward = request.problem, request.problem.direction == "fprop"
    shapes = (problem.x_shape, problem.y_shape) if forward else (problem.y_shape, problem.x_shape)
    spaced = [forward, not forward]
    sides = []
    for shape, strides, has_stride in zip(shapes, (request.first.strides, request.result_strides), spaced, strict=True):
        if strides[1:] != (shape[2] * shape[3], shape[3], 1) or strides[0] <= 0:
            return None
        sides.append(Side(shape[3], shape[2], *(problem.stride if has_stride else (1, 1)), strides[0]))
    return Planes(product_of(request), problem.p, problem.q, *sides)


def _spills(one: Planes, tile: Tile) -> bool:
    """Whether a residual's addresses and those of single pixels leave no room beside 128 registers of sums."""
    single = one.size == 2 and tile.x_pairs(one) == "NO_PAIRS"
    return one.product.problem.epilogue.residual and single and tile.m_blocks * tile.n == _MOST_SUMS


@lru_cache(maxsize=256)
def tiles(one: Planes, max_smem_bytes: int, sm_count: int) -> tuple[Tile, ...]:
    """Every tile that fits, best first by the cost model."""
    found: list[Tile] = []
    product = one.product
    for m_blocks, split_n, n in combinations((1, 2), (False, True), _columns(product)):
        rows, filters = 64 * m_blocks * (1 if split_n else CONSUMERS), n * (CONSUMERS if split_n else 1)
        whole_spans = n % SPAN == 0 or (not split_n and filters >= product.filters)
        if m_blocks * n > _MOST_SUMS or not whole_spans:
            continue
        for images, band, (x_cols, x_rows), y_boxes in _cuts(one, rows):
            if 4 * images * band * one.cols >= rows:
                tile = Tile(images, band, filters, n, split_n, m_blocks, x_cols, x_rows, y_boxes)
                found += () if _spills(one, tile) else _staged(one, tile, max_smem_bytes)
    return tuple(sorted(found, key=lambda tile: tile.cycles(one, sm_count)))


def _cuts(one: Planes, rows: int) -> Iterator[tuple[int, int, tuple[int, int], bool]]:
    """Images, a band, boxes of x (0 by 0: copies), and whether boxes take y: of tiles of so many rows of M."""
    product, x_reached, y_reached = one.product, one.reached(one.x), one.reached(one.y)
    pixels = one.rows * one.cols
    if pixels <= rows:
        each = pixels if 2 * pixels <= _BLOCK_ROWS else ceil_div(pixels, _BLOCK_ROWS) * _BLOCK_ROWS
        images = min(rows // each, _MOST_IMAGES, product.problem.n)
        if one.whole(product.filters * one.y.plane):
            if one.whole(product.channels * one.x.plane):
                yield images, one.rows, (0, 0), False
            if x_reached and not one.x.dense:  # fewer rows than a copy of whole planes, but TMA takes them one by one
                yield images, one.rows, _x_box(one, one.rows), False
    elif x_reached and y_reached and one.cols <= rows:
        most = rows // one.cols
        band = ceil_div(one.rows, ceil_div(one.rows, most))
        fitting = (each for each in range(band, 0, -1) if one.whole(each * one.cols))
        band = next(fitting, 0)
        if band and band * one.y.down <= _LONGEST_BOX:
            yield 1, band, _x_box(one, band), True


@lru_cache(maxsize=256)
def _x_box(one: Planes, band: int) -> tuple[int, int]:
    """Columns and rows of boxes of a band of x, some more than it has where that spares loads rounds."""
    unit = _COPY_BYTES // one.size
    if one.x.dense:
        boxes = [(band * one.cols + more * unit, 1) for more in range(_MORE_UNITS)]
    else:
        boxes = [(one.pitch(one.x) + more * unit, band + row) for more in range(_MORE_UNITS) for row in (0, 1)]
    orders = [order for order in ORDERS if order.half == 1 or not one.x.dense or one.size == 4]

    def cost(box: tuple[int, int]) -> tuple[int, int]:
        row, plane = one.cols if one.x.dense else box[0], box[0] * box[1]
        access = Access(band * one.cols, one.cols, row * one.size, one.x.across * one.size, 4 * plane)
        return min(_rounds(access, order) for order in orders), plane

    return min((box for box in boxes if max(box) <= _LONGEST_BOX), key=cost)


def _columns(product: Product) -> Iterator[int]:
    """N of wgmma: whole spans, and the narrowest that has all filters."""
    yield from (64, 128, 192, 256)
    yield from (n for n in (32, 80, 96, 112, 160, 224) if n - 32 < product.filters <= n)


def _staged(one: Planes, tile: Tile, max_smem_bytes: int) -> Iterator[Tile]:
    """The tile with the longest chunks and slabs of which enough stages fit, and with as many stages as do."""
    lengths = (CHUNK_BYTES,) if one.product.packs else (CHUNK_BYTES, CHUNK_BYTES // 2, CHUNK_BYTES // 4)
    for chunk_bytes, slab, (buffers, least) in combinations(lengths, _SLABS, _BUFFERS):
        found = replace(tile, chunk_bytes=chunk_bytes, slab=slab, buffers=buffers)
        if found.buffer_bytes(one) > _MOST_BUFFER_BYTES or found.n % slab:
            continue
        fixed, stage = found.smem_bytes(one), replace(found, stages=1).smem_bytes(one)
        stages = min((max_smem_bytes - fixed) // (stage - fixed), _MOST_STAGES)
        if stages >= least:
            yield replace(found, stages=stages)
            return
