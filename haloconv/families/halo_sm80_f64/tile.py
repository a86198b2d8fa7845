"""How halo_sm80_f64 cuts a layer: shapes of blocks, strips of columns, shared memory, and which is best."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import gcd

from haloconv.families.common import ceil_div
from haloconv.problem import TensorForm

OCTET = 8  # channels of an octet, filters of an eight
_PIXEL_BYTES = 8 * OCTET
_REGISTERS = 65536  # of a multiprocessor
WORK_BYTES = 256  # of a block, at most: its Work, which is no part of the dynamic shared memory
_SMEM_RESERVED = 1024  # of a block, by the system
_SM_EXTRA_SMEM = 1024  # that a multiprocessor has beyond what one block may take
_MOST_STRIPS = 64
_LEAST_STRIP = 8  # columns
# The model: cycles of a multiprocessor.
_FMA_RATE = 128  # fp64 multiply-adds of the tensor cores a cycle
_SMEM_RATE = 128  # bytes a cycle
_COPY_RATE = 16  # bytes a cycle from the second-level cache
_ROW_COST_BYTES = 32  # what a row of one channel costs beyond its bytes
_STEP_CYCLES = 60  # a barrier and what surrounds it
_BLOCK_CYCLES = 6000  # the first copies and the stores of a block, less where another block is busy meanwhile


def copy_elems(form: TensorForm, channels: int) -> int:
    """Channels of an asynchronous copy: 2 if pairs of them are whole words of 16 bytes, 0 if neighbours are pixels.

    ``channels`` are those of a group.
    """
    if form.strides[1] != 1 or form.strides[3] == 1:
        return 0
    whole = form.aligned and channels % 2 == 0 and not any(form.strides[axis] % 2 for axis in (0, 2, 3))
    return 2 if whole else 1


@dataclass(frozen=True)
class Shape:
    """A block: fragments of a warp (16 pixels, 8 filters each), warps along pixels and filters, and its steps.

    ``octets`` of channels are a chunk, ``mma_k`` channels an instruction's, ``stages`` steps are staged or under way;
    registers must allow ``min_blocks`` blocks a multiprocessor.
    """

    m_tiles: int
    n_tiles: int
    warps_m: int
    warps_n: int
    octets: int
    mma_k: int
    stages: int
    min_blocks: int

    @property
    def pixels(self) -> int:
        return 16 * self.m_tiles * self.warps_m

    @property
    def filters(self) -> int:
        return 8 * self.n_tiles * self.warps_n

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def channels(self) -> int:
        return OCTET * self.octets

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of a step."""
        return 8 * self.channels * self.filters


# Fragments, warps, octets, k, stages, blocks: none spills a register. Those of 16 k have twice the operands at once.
SHAPES = (
    Shape(4, 4, 2, 2, 2, 8, 3, 2),
    Shape(4, 4, 2, 4, 2, 8, 3, 1),
    Shape(2, 4, 4, 2, 2, 16, 3, 1),
    Shape(2, 4, 2, 2, 2, 8, 3, 3),
    Shape(2, 4, 4, 1, 2, 8, 3, 3),
    Shape(2, 2, 4, 1, 2, 8, 3, 4),
    Shape(2, 1, 4, 1, 2, 8, 3, 4),
    Shape(4, 4, 2, 2, 1, 8, 3, 2),
    Shape(2, 4, 4, 1, 1, 8, 3, 3),
    Shape(2, 2, 4, 1, 1, 8, 3, 4),
    Shape(2, 1, 4, 1, 1, 8, 3, 4),
)


@dataclass(frozen=True)
class Layer:
    """What the tiles of a problem depend on: pixels of its largest class, and how far its taps reach."""

    n: int
    channels: int  # that are summed, of a group
    filters: int
    groups: int
    classes: int
    rows: int
    cols: int
    move_h: int
    move_w: int
    reach_h: int
    reach_w: int
    most_taps: int
    fewest_taps: int


@dataclass(frozen=True)
class Tiling:
    """A layer in blocks of one shape, its columns cut into strips."""

    layer: Layer
    shape: Shape
    strips: int

    def __str__(self) -> str:
        shape = self.shape  # names are those that result rows have: planes for octets
        block = f"pixels{shape.pixels} filters{shape.filters} m_tiles{shape.m_tiles} n_tiles{shape.n_tiles}"
        return f"{block} planes{shape.octets} mma_k{shape.mma_k} strips{self.strips}"

    @property
    def strip_cols(self) -> int:
        return ceil_div(self.layer.cols, self.strips)

    @property
    def pixels(self) -> int:
        """Pixels of a strip, through all images."""
        return self.layer.n * self.layer.rows * self.strip_cols

    @property
    def tiles(self) -> int:
        """Tiles of a strip."""
        return ceil_div(self.pixels, self.shape.pixels)

    @property
    def filter_tiles(self) -> int:
        return ceil_div(self.layer.filters, self.shape.filters)

    @property
    def chunks(self) -> int:
        return ceil_div(self.layer.channels, self.shape.channels)

    @property
    def blocks(self) -> int:
        return self.layer.classes * self.layer.groups * self.strips * self.tiles * self.filter_tiles

    @property
    def staged_cols(self) -> int:
        return (self.strip_cols - 1) * self.layer.move_w + self.layer.reach_w + 1

    @cached_property
    def lines(self) -> int:
        """Rows of outputs of a tile at most: it begins at a multiple of its pixels."""
        pixels, cols = min(self.shape.pixels, self.pixels), self.strip_cols
        lines = (pixels - 1 + cols - gcd(self.shape.pixels, cols)) // cols + 1
        return min(lines, self.layer.n * self.layer.rows)

    def rows_of(self, images: int) -> int:
        """Input rows that the lines of a tile read in so many images."""
        return self.lines * self.layer.move_h + images * (self.layer.reach_h + 1 - self.layer.move_h)

    @property
    def staged_rows(self) -> int:
        """Input rows of a tile at most, which may go on in the next images."""
        most_images = min(self.layer.n, ceil_div(self.lines - 1, self.layer.rows) + 1)
        return max(self.rows_of(1), self.rows_of(most_images))

    @property
    def octet_bytes(self) -> int:
        return self.staged_rows * self.staged_cols * _PIXEL_BYTES

    @property
    def x_bytes(self) -> int:
        """Bytes of x in shared memory of a chunk."""
        return self.shape.octets * self.octet_bytes

    @property
    def x_buffers(self) -> int:
        """Chunks in shared memory: those of the steps that are multiplied and staged at the same time."""
        return min(self.chunks, 1 + ceil_div(self.shape.stages - 1, self.layer.fewest_taps))

    @property
    def smem_bytes(self) -> int:
        return self.x_buffers * self.x_bytes + self.shape.stages * self.shape.weight_bytes

    def fits(self, max_smem_bytes: int) -> bool:
        """Whether a block's shared memory is there, its Work beside what is staged."""
        return self.smem_bytes + WORK_BYTES <= max_smem_bytes

    def resident(self, max_smem_bytes: int) -> int:
        """Blocks of a multiprocessor."""
        by_smem = (max_smem_bytes + _SM_EXTRA_SMEM) // (self.smem_bytes + WORK_BYTES + _SMEM_RESERVED)
        return min(by_smem, self.shape.min_blocks)

    def cycles(self, sm_count: int, max_smem_bytes: int) -> float:
        """How long the layer takes by the model, in cycles: blocks of a multiprocessor add up, and the last wave."""
        shape, resident = self.shape, self.resident(max_smem_bytes)
        products = shape.pixels * shape.filters * shape.channels / _FMA_RATE
        if shape.m_tiles == 4:  # 64 pixels a warp: orders blocks as a probe of an NVIDIA H200 did
            products *= 1.14
        warp_bytes = 8 * shape.channels * (16 * shape.m_tiles + 8 * shape.n_tiles)
        read = shape.warps_m * shape.warps_n * warp_bytes / _SMEM_RATE
        step = max(products, read, shape.weight_bytes / _COPY_RATE) + _STEP_CYCLES / resident
        steps = self.chunks * self.layer.most_taps
        rows = self.rows_of(ceil_div(self.lines, self.layer.rows))  # of most tiles
        copied = shape.channels * rows * (8 * self.staged_cols + _ROW_COST_BYTES)
        block = steps * step + self.chunks * copied / _COPY_RATE / 2 + _BLOCK_CYCLES / resident
        return ceil_div(self.blocks, sm_count * resident) * resident * block


def _strips(cols: int) -> list[int]:
    """Numbers of strips that cut the columns evenly or into a power of two columns, none narrower than it helps."""
    widths = {ceil_div(cols, strips) for strips in range(1, _MOST_STRIPS + 1)} | {1 << bits for bits in range(3, 9)}
    kept = {width for width in widths if width >= min(cols, _LEAST_STRIP)}
    return sorted({ceil_div(cols, width) for width in kept})


def fitting_shapes(layer: Layer) -> list[Shape]:
    """Shapes that leave few filters and channels of a block without work."""

    def padded(shape: Shape) -> int:
        return ceil_div(layer.filters, shape.filters) * shape.filters

    shapes = [each for each in SHAPES if (each.octets == 1) == (layer.channels <= OCTET)]
    least = min(map(padded, shapes))
    return [each for each in shapes if padded(each) <= 1.5 * least]


@lru_cache(maxsize=1024)
def tilings(layer: Layer, sm_count: int, max_smem_bytes: int) -> tuple[Tiling, ...]:
    """The tilings that fit a device, best first by the model; those of whole rows first among equals."""
    found = (Tiling(layer, *each) for each in product(fitting_shapes(layer), _strips(layer.cols)))
    fitting = [each for each in found if each.fits(max_smem_bytes)]
    return tuple(sorted(fitting, key=lambda each: (each.cycles(sm_count, max_smem_bytes), each.strips)))


def fits(layer: Layer, max_smem_bytes: int) -> bool:
    """Whether some tiling fits a device."""
    found = (Tiling(layer, *each) for each in product(fitting_shapes(layer), reversed(_strips(layer.cols))))
    return any(each.fits(max_smem_bytes) for each in found)
