"""What pointwise.cu multiplies for a request, how a product is cut into tiles, and what tiles cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product as combinations

from haloconv import support
from haloconv.families.common import ceil_div
from haloconv.families.halo_sm90.pointwise import costs
from haloconv.families.halo_sm90.pointwise.product import (
    ARCH,
    CHUNK_BYTES,
    LEAST_CHANNELS,
    SPAN,
    Product,
    dense,
    is_reached,
    joined,
    w_loads_of,
)
from haloconv.families.reduce.partials import applies
from haloconv.layout import Layout
from haloconv.problem import Request

_CONSUMERS, _SLAB_BYTES = 2, 64 * CHUNK_BYTES
_BUFFERS = ((4, 4), (2, 3))  # of a consumer; the fewest stages beside them
_MOST_STAGES, _MOST_KEPT = 8, 32
_MOST_SUMS = 256  # N of wgmma times blocks of M: 128 registers
_MOST_PARTIAL_BYTES = 64 << 20
_SPLITS = (2, 3, 4, 6, 8, 12, 16)
_CLUSTER = 2  # blocks: of larger clusters fewer run at a time
# The cost model beside costs.py: bytes in a cycle that wgmma reads; cycles of a tile, of a slab, of the sum of split-K.
_OPERAND_BYTES = 128
_TILE_CYCLES, _SLAB_CYCLES, _SUM_CYCLES = 100, 200, 10000
# Of a cluster: two meetings, and bytes of another block in a cycle, by probes of wgrad_ss on an NVIDIA H200.
_MEETING_CYCLES, _PEER_BYTES = 2000, 11
_SHIPPED_SMEM_BYTES, _SHIPPED_SM_COUNT = 227 << 10, 132  # of a block; of an NVIDIA H200


@dataclass(frozen=True)
class Tile:
    """Pixels and filters of a tile, and how a block of threads multiplies it.

    ``n`` is that of wgmma. With ``split_n`` each consumer has half of the columns of N, else of the rows of M.
    ``keeps_w``: filters stay in shared memory for all tiles of a block of threads. ``splits`` are ranges of the
    channels, ``buffers`` those of a consumer's sums. ``in_cluster``: the blocks of a cluster sum the ranges of a tile.
    """

    pixels: int
    filters: int
    n: int
    split_n: bool
    keeps_w: bool
    splits: int
    stages: int = 0
    buffers: int = 0
    in_cluster: bool = False

    @property
    def m_blocks(self) -> int:
        """Blocks of 64 rows of M of a consumer."""
        return self.pixels * self.filters // (64 * _CONSUMERS * self.n)

    @property
    def parts(self) -> int:
        """Partial results that a launch of its own adds up; 1: there is but the result."""
        return 1 if self.in_cluster else self.splits

    @property
    def cluster(self) -> int:
        """Blocks of threads of a cluster."""
        return self.splits if self.in_cluster else 1

    @property
    def handed_bytes(self) -> int:
        """Sums of a consumer, which a block of a cluster hands over where stages were."""
        return self.m_blocks * self.n * 64 * 4

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
        """Tiles of the layer, of all partial results."""
        return ceil_div(product.all_boxes, self.pixels // product.box_px) * self.blocks(product) * self.parts

    def grid(self, product: Product, sm_count: int) -> int:
        """Blocks of threads. Where filters stay, each has one block of filters and one range: 0 if that cannot be."""
        if self.in_cluster:
            return self.count(product) * self.cluster
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
        chunks, size = self.range_chunks(product) * product.most_taps(self.pixels), product.size
        y_size = size if self.parts == 1 else 4
        operands = 32 * (self.n + (0 if product.size == 4 and not product.x_inner else 64))
        wgmma = max(self.n / 2, operands / _OPERAND_BYTES)
        multiply = chunks * 4 * self.m_blocks * _CONSUMERS * wgmma
        write = self.m_blocks * ceil_div(self.n * y_size, CHUNK_BYTES) * _SLAB_CYCLES
        stage = self.pixels * CHUNK_BYTES + (0 if self.keeps_w else self.w_bytes(product))
        of_taps = (costs.TAPS_DISTURBED,) if product.taps else ()
        l2_bytes = costs.TAPS_L2_BYTES if product.taps else costs.L2_BYTES
        loaded = chunks * max(stage / l2_bytes, costs.LATENCY_CYCLES / self.stages)
        moved = loaded + self.pixels * self.filters * y_size / costs.L2_BYTES
        most = ceil_div(self.count(product), min(self.grid(product, sm_count), sm_count // self.cluster))
        kept = chunks * self.w_bytes(product) / costs.L2_BYTES if self.keeps_w else 0
        blocks = most * costs.overlapped(_TILE_CYCLES + multiply + write, moved, *of_taps) + kept
        pixels = product.x.cols * product.x.rows * product.x.images
        traffic = size * product.channels * (pixels + product.filters * product.tap_count)
        traffic += y_size * self.parts * product.outputs + size * product.gaps
        memory = traffic / (costs.MEMORY_BYTES * sm_count)
        adding = 0.0
        if self.parts > 1:
            adding = _SUM_CYCLES + self.parts * product.outputs * 4 / (costs.MEMORY_BYTES * sm_count)
        if self.in_cluster:
            adding = _MEETING_CYCLES + self.handed_bytes / _PEER_BYTES
        return costs.BEGIN_CYCLES + costs.overlapped(blocks, memory) + adding


def why_no_product(request: Request) -> str | None:
    """None if the request is one matrix product that tensor cores form, else a sentence that says why not."""
    problem = request.problem
    reason = support.why_no_tensor_cores(problem)
    if reason is not None:
        return reason
    if request.facts.arch != ARCH:
        return "the device is no Hopper GPU (compute capability 9.0)"
    if (problem.r, problem.s) != (1, 1) or any(problem.padding):
        return "the filter is not 1x1, or the layer is padded"
    if problem.groups > 1 or min(problem.c, problem.k) < LEAST_CHANNELS:
        return f"the layer has groups, or fewer than {LEAST_CHANNELS} channels or filters"
    return None


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, else a sentence that says why not."""
    reason = why_no_product(request)
    if reason is not None:
        return reason
    one = product_of(request)
    if not request.first.aligned or not (is_reached(one, one.x, one.x_inner) and is_reached(one, one.y, one.y_inner)):
        return "pixels are not at multiples of 16 bytes, or channels where they are neighbours"
    pixels, boxes = one.x.cols * one.x.rows * one.x.images, one.all_boxes
    if boxes > 1 and 2 * pixels < boxes * one.box_px:
        return f"rows of {one.x.cols} pixels that do not follow one another leave most of a tile empty"
    return None


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
    one, other = joined((problem.q, problem.p, problem.n), x_steps, y_steps)
    extents = (one.cols, one.rows, one.images)
    y_inner = y[1] == 1
    layout: Layout = "nhwc" if y_inner else "nchw"
    w_loads = w_loads_of(problem.dtype, (filters, channels), (w_filter, w_channel), request.second.aligned)
    return Product(
        problem, filters, channels, one, other, dense(extents, filters, layout),
        x[1] == 1, y_inner, w_filter, w_channel, w_loads,
    )  # fmt: skip


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
        may_keep = (False,) if product.taps else (False, True)  # filters of all taps would not fit
        for splits, keeps in combinations(_splits(product, whole, sm_count), may_keep):
            found += _staged(product, Tile(pixels, filters, n, split_n, keeps, splits), max_smem_bytes, sm_count)
        if _may_be_a_cluster(product, whole, sm_count):
            found += _staged(product, replace(whole, splits=_CLUSTER, in_cluster=True), max_smem_bytes, sm_count)
    return tuple(sorted(found, key=lambda tile: tile.cycles(product, sm_count)))


def shipped_tiles(product: Product) -> tuple[Tile, ...]:
    """What there is on an NVIDIA H200, best first."""
    return tiles(product, _SHIPPED_SMEM_BYTES, _SHIPPED_SM_COUNT)


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


def _may_be_a_cluster(product: Product, whole: Tile, sm_count: int) -> bool:
    """Whether clusters have a tile each, and all run at a time; residuals are asked for by both consumers."""
    few = whole.count(product) * _CLUSTER <= sm_count and product.chunks >= _CLUSTER
    return product.taps is not None and few and not product.problem.epilogue.residual


def _staged(product: Product, tile: Tile, max_smem_bytes: int, sm_count: int) -> Iterator[Tile]:
    """The tile with as many buffers and stages as fit, if enough do."""
    if tile.keeps_w and (tile.range_chunks(product) > _MOST_KEPT or tile.grid(product, sm_count) == 0):
        return
    for buffers, fewest in _BUFFERS:
        for stages in range(_MOST_STAGES, fewest - 1, -1):
            one = replace(tile, stages=stages, buffers=buffers)
            fits = not one.in_cluster or one.handed_bytes <= stages * (one.pixels * CHUNK_BYTES + one.w_bytes(product))
            if fits and one.smem_bytes(product) <= max_smem_bytes:
                yield one
                return
