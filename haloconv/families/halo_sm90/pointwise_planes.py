"""Host half of families/halo_sm90/pointwise_planes.cu: fprop and dgrad of 1x1 layers on small nchw images.

For planes that TMA does not reach as boxes, because they are no multiple of 16 bytes, or because of a stride. fp32
tensors are multiplied in TF32, fp16 and bf16 in their own type; sums are fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product as combinations

import torch

from haloconv.families.base import MOST_CONFIGS, BoundCall, Config, config_key
from haloconv.families.common import ELEMENTS, ceil_div, divisor, few_apart
from haloconv.families.halo_sm90 import pointwise
from haloconv.families.halo_sm90.pointwise_tile import CHUNK_BYTES, SPAN, Product, product_of, why_no_product
from haloconv.jit import BoxMap, KernelSource, Swizzle, kernel_source
from haloconv.jit.launch import Launch, LaunchShape, Value
from haloconv.problem import Request

__all__ = ["DIRECTIONS", "KERNEL", "bind", "configs", "sources", "ways", "why_not"]

KERNEL = "halo_sm90/pointwise_planes"
DIRECTIONS = ("fprop", "dgrad")
_SHIPPED_SMEM_BYTES, _SHIPPED_SM_COUNT = 227 << 10, 132  # of a block; of an NVIDIA H200
_THREADS, _CONSUMERS = 384, 2
_FLAG_BYTES = 128  # before packed filters, which keep their alignment
_COPY_BYTES = 16  # bulk copies are multiples of it
_MOST_PIXELS, _MOST_IMAGES = 256, 8  # of an image, of those that are multiplied; of a tile
_MOST_SUMS = 256  # N of wgmma times blocks of M: 128 registers
_STAGES = (8, 3)  # at most, at least
_SLABS = (32, 16, 8)
_MOST_BUFFER_BYTES = 32 << 10
_ALIGNMENT = 1024  # of a stage, for swizzled filters
# The cost model, of an NVIDIA H200, for a multiprocessor: bytes in a cycle from the L2 and from memory; cycles of a
# warp's instruction while tensor cores multiply, to begin a tile, and to begin at all. Not fitted to times of this one.
_L2_BYTES, _MEMORY_BYTES = 40, 20
_ISSUE_CYCLES, _TILE_CYCLES, _BEGIN_CYCLES = 2, 500, 2000


@dataclass(frozen=True)
class Planes:
    """The product of a request on whole planes.

    ``rows`` and ``cols`` are those that are multiplied. ``x_steps`` and ``y_steps`` are elements from one of these
    pixels to the next below and to the right, ``x_plane`` and ``y_plane`` those of a plane, ``x_image`` and ``y_image``
    those from image to image.
    """

    product: Product
    rows: int
    cols: int
    x_steps: tuple[int, int]
    y_steps: tuple[int, int]
    x_plane: int
    y_plane: int
    x_image: int
    y_image: int

    @property
    def pixels(self) -> int:
        """Of an image, that are multiplied."""
        return self.rows * self.cols

    def pairs(self, steps: tuple[int, int]) -> bool:
        """Whether two pixels from an even one on are an aligned word."""
        return self.product.size == 2 and self.pixels % 2 == 0 and steps == (self.cols, 1)


@dataclass(frozen=True)
class Tile:
    """Images and filters of a tile, and how a block of threads multiplies it.

    ``n`` is that of wgmma. With ``split_n`` the consumers share columns of N, else rows of M, of which a consumer has
    ``m_blocks`` of 64. ``slab``: filters whose sums leave at a time.
    """

    images: int
    filters: int
    n: int
    split_n: bool
    m_blocks: int
    chunk_bytes: int
    slab: int
    stages: int

    def blocks(self, product: Product) -> int:
        """Of filters of the layer."""
        return ceil_div(product.filters, self.filters)

    def spans(self, product: Product) -> int:
        """Of filters of all blocks."""
        return self.blocks(product) * ceil_div(self.filters, SPAN)

    def chunk(self, one: Planes) -> int:
        """Channels of a stage."""
        return self.chunk_bytes // one.product.size

    def chunks(self, one: Planes) -> int:
        """Of all channels."""
        return ceil_div(one.product.channels, self.chunk(one))

    def count(self, one: Planes) -> int:
        """Tiles of the layer."""
        return ceil_div(one.product.problem.n, self.images) * self.blocks(one.product)

    def stage_bytes(self, one: Planes) -> int:
        """Filters of a chunk, and planes of each image."""
        filters = self.filters if one.product.w_loads == "W_ROWS" else ceil_div(self.filters, SPAN) * SPAN
        planes = self.images * self.chunk(one) * one.x_plane * one.product.size
        return ceil_div(filters * self.chunk_bytes + planes, _ALIGNMENT) * _ALIGNMENT

    def buffer_bytes(self, one: Planes) -> int:
        """Planes of a slab."""
        return self.images * self.slab * one.y_plane * one.product.size

    def smem_bytes(self, one: Planes) -> int:
        """Of a block of threads: stages, buffers of sums and barriers."""
        buffers = 2 * (_CONSUMERS if self.split_n else 1) * self.buffer_bytes(one)
        return self.stages * (self.stage_bytes(one) + 16) + buffers

    def cycles(self, one: Planes, sm_count: int) -> float:
        """The model's time, in cycles."""
        product, size = one.product, one.product.size
        instructions = 16 if size == 4 else 8 if one.pairs(one.x_steps) else 12
        multiply = self.m_blocks * self.chunk_bytes // 32 * _CONSUMERS * max(self.n / 2, instructions * _ISSUE_CYCLES)
        stores = self.m_blocks * self.n * _CONSUMERS * (1 if one.pairs(one.y_steps) else 2)
        outputs = self.images * self.filters * one.y_plane * size / _L2_BYTES
        chunk = max(multiply, self.stage_bytes(one) / _L2_BYTES)
        tile = self.chunks(one) * chunk + _TILE_CYCLES + max(stores, outputs)
        planes = product.problem.n * (product.channels * one.x_plane + product.filters * one.y_plane)
        memory = (planes + product.channels * product.filters) * size / (_MEMORY_BYTES * sm_count)
        return _BEGIN_CYCLES + max(ceil_div(self.count(one), sm_count) * tile, memory)


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, else a sentence that says why not."""
    reason = why_no_product(request)
    if reason is not None:
        return reason
    if pointwise.why_not(request) is None:
        return "TMA reaches the pixels: halo_sm90/pointwise takes the layer"
    one = planes_of(request)
    if one is None:
        return "pixels are not neighbours in dense planes, in x and in the result"
    size, product = one.product.size, one.product
    steps = (one.x_image, product.channels * one.x_plane, one.y_image, product.filters * one.y_plane)
    if not request.first.aligned or any(step * size % _COPY_BYTES for step in steps):
        return "images are not at multiples of 16 bytes"
    if not ways(request):
        return "no tile fits: images have too many pixels, or too few to fill rows of a product"
    return None


@lru_cache(maxsize=256)
def planes_of(request: Request) -> Planes | None:
    """The product on whole planes; None where x or the result is not made of dense ones."""
    problem, (down, across) = request.problem, request.problem.stride
    forward = problem.direction == "fprop"
    shapes = (problem.x_shape, problem.y_shape) if forward else (problem.y_shape, problem.x_shape)
    x, y = request.first.strides, request.result_strides
    for shape, strides in zip(shapes, (x, y), strict=True):
        if strides[1:] != (shape[2] * shape[3], shape[3], 1) or strides[0] <= 0:
            return None
    spaced, dense = (down * problem.w, across), (problem.q, 1)
    steps = (spaced, dense) if forward else (dense, spaced)
    return Planes(product_of(request), problem.p, problem.q, *steps, x[1], y[1], x[0], y[0])


def ways(request: Request) -> tuple[Tile, ...]:
    """Every tile that the request may have, best first."""
    one = planes_of(request)
    return () if one is None else tiles(one, request.facts.max_smem_bytes, request.facts.sm_count)


@lru_cache(maxsize=256)
def tiles(one: Planes, max_smem_bytes: int, sm_count: int) -> tuple[Tile, ...]:
    """Every tile that fits, best first by the cost model."""
    found: list[Tile] = []
    product = one.product
    for m_blocks, split_n, n in combinations((1, 2), (False, True), _columns(product)):
        rows, filters = 64 * m_blocks * (1 if split_n else _CONSUMERS), n * (_CONSUMERS if split_n else 1)
        images = min(rows // one.pixels, _MOST_IMAGES, product.problem.n)
        whole_spans = n % SPAN == 0 or (not split_n and filters >= product.filters)
        if m_blocks * n <= _MOST_SUMS and 4 * images * one.pixels >= rows and whole_spans:
            found += _staged(one, (images, filters, n, split_n, m_blocks), max_smem_bytes)
    return tuple(sorted(found, key=lambda tile: tile.cycles(one, sm_count)))


def _columns(product: Product) -> Iterator[int]:
    """N of wgmma: whole spans, and the narrowest that has all filters."""
    yield from (64, 128, 192, 256)
    yield from (n for n in (32, 80, 96, 112, 160, 224) if n - 32 < product.filters <= n)


def _staged(one: Planes, tile: tuple[int, int, int, bool, int], max_smem_bytes: int) -> Iterator[Tile]:
    """The tile with the longest chunks and slabs of which enough stages fit, and with as many stages as do."""
    most, least = _STAGES
    lengths = (CHUNK_BYTES,) if one.product.packs else (CHUNK_BYTES, CHUNK_BYTES // 2, CHUNK_BYTES // 4)
    for chunk_bytes, slab, stages in combinations(lengths, _SLABS, range(most, least - 1, -1)):
        found = Tile(*tile, chunk_bytes, slab, stages)
        fits = found.buffer_bytes(one) <= _MOST_BUFFER_BYTES and found.n % slab == 0
        if fits and found.smem_bytes(one) <= max_smem_bytes:
            yield found
            return


def configs(request: Request) -> list[Config]:
    """The best tiles by the cost model, best first; none for a request that the kernel does not take."""
    if why_not(request) is not None:
        return []
    found = few_apart(ways(request), lambda tile: (tile.images, tile.filters), MOST_CONFIGS)
    return [Config(KERNEL, config_key(tile), tile) for tile in found]


def source(one: Planes, tile: Tile) -> KernelSource:
    """The specialised source. Planes' sizes are constants, so that the address of a load is none to work out."""
    product, problem = one.product, one.product.problem
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[problem.dtype],
        "W_LOADS": f"hc::planes::{product.w_loads}",
        "CHUNK_BYTES": tile.chunk_bytes,
        "M_BLOCKS": tile.m_blocks,
        "COLUMNS": tile.n,
        "SPLIT_N": int(tile.split_n),
        "STAGES": tile.stages,
        "SLAB": tile.slab,
        "X_PLANE": one.x_plane * product.size,
        "Y_PLANE": one.y_plane * product.size,
        "X_PAIRS": int(one.pairs(one.x_steps)),
        "Y_PAIRS": int(one.pairs(one.y_steps)),
        "HAS_BIAS": int(problem.bias),
        "HAS_RELU": int(problem.activation == "relu"),
    }
    return kernel_source(KERNEL, "halo_sm90_pointwise_planes", constants)


def bind(request: Request, config: Config) -> BoundCall:
    """fprop(x, w, b) -> y or dgrad(dy, w) -> dx."""
    one, tile = planes_of(request), config.derived
    assert one is not None  # or no config would have been offered
    pack = pointwise.pack_launch(request, one.product, tile) if one.product.packs else None
    multiply = _multiply_launch(request, one, tile)
    shape, strides = request.result_shape, request.result_strides
    packed_bytes = _FLAG_BYTES + one.product.packed_bytes(tile)

    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        y, filters = x.new_empty_strided(shape, strides), w.data_ptr()
        if pack is not None:
            packed = torch.empty(packed_bytes, dtype=torch.uint8, device=x.device)
            filters = packed.data_ptr() + _FLAG_BYTES
            pack(w.data_ptr(), filters, packed.data_ptr())
        multiply(x.data_ptr(), filters, y.data_ptr(), 0 if b is None else b.data_ptr())
        return y

    def fprop(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        return run(x, w, b if b is None or b.is_contiguous() else b.contiguous())

    def dgrad(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return run(dy, w, None)

    return fprop if request.problem.direction == "fprop" else dgrad


def _multiply_launch(request: Request, one: Planes, tile: Tile) -> Launch:
    """``launch(x, w, y, bias)``; ``w`` is packed where filters are."""
    product = one.product
    maps = {} if product.packs else {"w_map": _w_map(one, tile)}
    fields: dict[str, Value] = {
        **{"x_image": one.x_image, "y_image": one.y_image, "blocks": divisor(tile.blocks(product))},
        **{"pixels": divisor(one.pixels), "cols": divisor(one.cols)},
        **{"x_row": one.x_steps[0], "x_col": one.x_steps[1], "y_row": one.y_steps[0], "y_col": one.y_steps[1]},
        **{
            "images": tile.images,
            "stage_bytes": tile.stage_bytes(one),
            "tiles": tile.count(one),
            "all_images": product.problem.n,
        },
        **{"channels": product.channels, "filters": product.filters, "chunks": tile.chunks(one)},
        "has_gaps": int(one.y_plane > one.pixels),
    }
    shape = LaunchShape(min(tile.count(one), request.facts.sm_count), _THREADS, tile.smem_bytes(one))
    return Launch(source(one, tile), request.device, shape, fields, maps, pdl=product.packs)


def _w_map(one: Planes, tile: Tile) -> BoxMap:
    product, size = one.product, one.product.size
    if product.w_loads == "W_COLUMNS":
        axes, step, box = (product.filters, product.channels), product.w_channel, (SPAN, tile.chunk(one))
        swizzle = Swizzle.B128
    else:
        filters = tile.filters if tile.filters <= 256 else tile.filters // 2
        axes, step, box = (product.channels, product.filters), product.w_filter, (tile.chunk(one), filters)
        swizzle = {128: Swizzle.B128, 64: Swizzle.B64, 32: Swizzle.B32}[tile.chunk_bytes]
    return BoxMap(pointwise.LOADED[product.problem.dtype], axes, (step * size,), box, swizzle, 1)


def sources(request: Request) -> Iterator[KernelSource]:
    """The sources of a tile of each kind that the request may have on an NVIDIA H200, and of its packing."""
    one = planes_of(request)
    if one is None:
        return
    found = tiles(one, _SHIPPED_SMEM_BYTES, _SHIPPED_SM_COUNT)
    for tile in few_apart(found, lambda tile: (tile.m_blocks, tile.split_n), len(found)):
        yield source(one, tile)
        if one.product.packs:
            yield pointwise.pack_source(one.product)
