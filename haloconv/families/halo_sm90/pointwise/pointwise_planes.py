"""Host half of pointwise_planes.cu: fprop and dgrad of 1x1 layers in nchw, whole planes or bands.

For small planes that are no multiple of 16 bytes, so that TMA has no boxes of them, and for layers with a stride. fp32
tensors are multiplied in TF32, fp16 and bf16 in their own type; sums are fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from haloconv.families.base import MOST_CONFIGS, BoundCall, Config, config_key
from haloconv.families.common import ELEMENTS, as_the_result, divisor, epilogue_constants, few_apart
from haloconv.families.halo_sm90.pointwise import pointwise
from haloconv.families.halo_sm90.pointwise.planes_tile import Planes, Side, Tile, planes_of, tiles
from haloconv.families.halo_sm90.pointwise.tile import SPAN, why_no_product
from haloconv.jit import BoxMap, DataType, KernelSource, Swizzle, kernel_source
from haloconv.jit.launch import Launch, LaunchShape, Value
from haloconv.problem import Request

__all__ = ["DIRECTIONS", "KERNEL", "bind", "configs", "sources", "all_tiles", "why_not"]

KERNEL = "halo_sm90/pointwise_planes"
DIRECTIONS = ("fprop", "dgrad")
_SHIPPED_SMEM_BYTES, _SHIPPED_SM_COUNT = 227 << 10, 132  # of a block; of an NVIDIA H200
_THREADS = 384
_FLAG_BYTES = 128  # before packed filters, which keep their alignment
_X_POINTER, _W_POINTER, _Y_POINTER = 0, 1, 2  # of a launch


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
    if request.problem.bias and not one.y.dense:
        return "pixels that no output meets become zeros here, to which no bias is added"
    if not request.first.aligned or not (one.whole(one.x.image) and one.whole(one.y.image)):
        return "images are not at multiples of 16 bytes"
    if not all_tiles(request):
        return "no tile fits: images are large and neither are rows at multiples of 16 bytes, or have too few pixels"
    return None


def all_tiles(request: Request) -> tuple[Tile, ...]:
    """Every tile that the request may have, best first."""
    one = planes_of(request)
    return () if one is None else tiles(one, request.facts.max_smem_bytes, request.facts.sm_count)


def configs(request: Request) -> list[Config]:
    """The best tiles by the cost model, best first; none for a request that the kernel does not take."""
    if why_not(request) is not None:
        return []
    found = few_apart(all_tiles(request), lambda tile: (tile.images, tile.band, tile.filters), MOST_CONFIGS)
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
        "Y_BUFFERS": tile.buffers,
        "X_PLANE": tile.x(one).plane * one.size,
        "Y_PLANE": tile.y(one).plane * one.size,
        "BOXES": f"hc::planes::{'BOXES_OF_BOTH' if tile.y_boxes else 'BOXES_OF_X' if tile.x_cols else 'NO_BOXES'}",
        "X_PAIRS": f"hc::planes::{tile.x_pairs(one)}",
        "HAS_GAPS": int(not one.y.dense),
        **epilogue_constants(problem.bias, problem.epilogue),
    }
    return kernel_source(KERNEL, "halo_sm90_pointwise_planes", constants)


def bind(request: Request, config: Config) -> BoundCall:
    """fprop(x, w, b) -> y, or with a residual fprop(x, w, b, residual) -> y, or dgrad(dy, w) -> dx."""
    one, tile = planes_of(request), config.derived
    assert one is not None  # or no config would have been offered
    pack = pointwise.pack_launch(request, one.product, tile) if one.product.packs else None
    multiply = _multiply_launch(request, one, tile)
    shape, strides = request.result_shape, request.result_strides
    packed_bytes = _FLAG_BYTES + one.product.packed_bytes(tile.spans(one.product))

    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, *residual: torch.Tensor) -> torch.Tensor:
        others: tuple[int, ...] = ()
        if residual:
            ordered = as_the_result(residual[0], strides)
            others = (ordered.data_ptr(),)
        y, filters = x.new_empty_strided(shape, strides), w.data_ptr()
        b = b if b is None or b.is_contiguous() else b.contiguous()
        if pack is not None:
            packed = torch.empty(packed_bytes, dtype=torch.uint8, device=x.device)
            filters = packed.data_ptr() + _FLAG_BYTES
            pack(w.data_ptr(), filters, packed.data_ptr())
        multiply(x.data_ptr(), filters, y.data_ptr(), 0 if b is None else b.data_ptr(), *others)
        return y

    return run


def _multiply_launch(request: Request, one: Planes, tile: Tile) -> Launch:
    """``launch(x, w, y, bias)``, and a residual if there is one; ``w`` is packed where filters are."""
    product = one.product
    maps = {} if product.packs else {"w_map": _w_map(one, tile)}
    if tile.x_cols:
        maps["x_map"] = _x_map(one, tile)
    if tile.y_boxes:
        maps["y_map"] = _y_map(one, tile)
    order = tile.order(one)
    x_band, y_band = _band_steps(one, tile, one.x), _band_steps(one, tile, one.y)
    fields: dict[str, Value] = {
        **{"x_image": one.x.image, "y_image": one.y.image, "blocks": divisor(tile.blocks(product))},
        **{"bands": divisor(tile.bands(one)), "cols": divisor(one.cols), "pixels": tile.pixels(one)},
        **{"image_rows": divisor(tile.image_rows(one)), "lane_rows": order.lane, "lanes_rows": order.lanes},
        **{"warp_rows": order.warp, "half_rows": order.half},
        **{"x_row": tile.x(one).row, "x_col": one.x.across, "y_row": tile.y(one).row, "y_col": one.y.across},
        **{"x_band_col": x_band[0], "x_band_row": x_band[1], "y_band_col": y_band[0], "y_band_row": y_band[1]},
        **{"images": tile.images, "stage_bytes": tile.stage_bytes(one), "tiles": tile.count(one)},
        **{"all_images": product.problem.n, "channels": product.channels, "filters": product.filters},
        "chunks": tile.chunks(one),
        **({"y_plane": one.y.plane} if product.problem.epilogue.residual else {}),
    }
    shape = LaunchShape(min(tile.count(one), request.facts.sm_count), _THREADS, tile.smem_bytes(one))
    return Launch(source(one, tile), request.device, shape, fields, maps, pdl=product.packs)


def _band_steps(one: Planes, tile: Tile, side: Side) -> tuple[int, int]:
    """Columns and rows of a tensor map from a band's box to the next: dense planes are one row there."""
    if side.dense:
        return tile.pixels(one), 0
    return 0, tile.band if side is one.x else tile.band * side.down


def _x_map(one: Planes, tile: Tile) -> BoxMap:
    """Boxes of a band by a chunk of channels; of rows those that are multiplied."""
    side, channels, images = one.x, one.product.channels, one.product.problem.n
    if side.dense:
        axes, row = (side.plane, 1), side.plane
    else:
        axes, row = (side.width, one.rows), side.down * side.width
    box = (tile.x_cols, tile.x_rows, tile.chunk(one), 1)
    return _planes_map(one, side, (*axes, channels, images), row, box, _X_POINTER)


def _y_map(one: Planes, tile: Tile) -> BoxMap:
    """Boxes of a band by a slab of filters."""
    side, filters, images = one.y, one.product.filters, one.product.problem.n
    if side.dense:
        axes, row, box = (side.plane, 1), side.plane, (tile.pixels(one), 1)
    else:
        axes, row, box = (side.width, side.height), side.width, (one.pitch(side), tile.band * side.down)
    return _planes_map(one, side, (*axes, filters, images), row, (*box, tile.slab, 1), _Y_POINTER)


def _planes_map(one: Planes, side: Side, axes: tuple[int, ...], row: int, box: tuple[int, ...], pointer: int) -> BoxMap:
    """A map over pixels of a row, rows, channels or filters, and images. fp32 is rounded to TF32 by who reads it."""
    kind = DataType.FLOAT32 if one.size == 4 else pointwise.LOADED[one.product.problem.dtype]
    strides = tuple(step * one.size for step in (row, side.plane, side.image))
    return BoxMap(kind, axes, strides, box, Swizzle.NONE, pointer)


def _w_map(one: Planes, tile: Tile) -> BoxMap:
    product = one.product
    if product.w_loads == "W_COLUMNS":
        axes, step, box = (product.filters, product.channels), product.w_channel, (SPAN, tile.chunk(one))
        swizzle = Swizzle.B128
    else:
        filters = tile.filters if tile.filters <= 256 else tile.filters // 2
        axes, step, box = (product.channels, product.filters), product.w_filter, (tile.chunk(one), filters)
        swizzle = {128: Swizzle.B128, 64: Swizzle.B64, 32: Swizzle.B32}[tile.chunk_bytes]
    return BoxMap(pointwise.LOADED[product.problem.dtype], axes, (step * one.size,), box, swizzle, _W_POINTER)


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
