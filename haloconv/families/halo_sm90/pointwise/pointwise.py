"""Host half of families/halo_sm90/pointwise/pointwise.cu: fprop and dgrad of 1x1 layers, as one matrix product.

fp32 tensors are multiplied in TF32, fp16 and bf16 in their own type; sums are fp32. TMA must reach the pixels: channels
or pixels are neighbours in memory, everything else is a multiple of 16 bytes apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch

from haloconv.families.base import MOST_CONFIGS, BoundCall, Config, config_key
from haloconv.families.common import ELEMENTS, as_the_result, ceil_div, divisor, epilogue_constants, few_apart
from haloconv.families.halo_sm90.pointwise.product import CHUNK_BYTES, SPAN, Product
from haloconv.families.halo_sm90.pointwise.tile import Tile, product_of, shipped_tiles, tiles, why_not
from haloconv.families.reduce.partials import Axis, Partials, bind_sum, followed
from haloconv.jit import BoxMap, DataType, KernelSource, Pixels, Swizzle, kernel_source
from haloconv.jit.launch import Launch, LaunchShape, Value
from haloconv.problem import Request

__all__ = ["DIRECTIONS", "KERNEL", "bind", "configs", "sources", "all_tiles", "why_not"]

KERNEL = "halo_sm90/pointwise"
DIRECTIONS = ("fprop", "dgrad")
_THREADS, _PACK_THREADS = 384, 256  # of a block that multiplies, that packs
_SLAB_ROWS = 64  # of M
_TMA_BYTES = 16  # a residual begins at a multiple of it
_FLAG_BYTES = 128  # before packed filters, which keep their alignment
_X_POINTER, _W_POINTER, _Y_POINTER, _RESIDUAL_POINTER = 0, 1, 2, 4  # of a launch
Copied = Callable[[torch.Tensor], torch.Tensor]
_Axes = tuple[int, ...]  # innermost first
LOADED = {  # TMA rounds fp32 to TF32
    torch.float32: DataType.TFLOAT32,
    torch.float16: DataType.FLOAT16,
    torch.bfloat16: DataType.BFLOAT16,
}


def configs(request: Request) -> list[Config]:
    """The best tiles by the cost model, best first; none for a request that the kernel does not take."""
    if why_not(request) is not None:
        return []
    found = few_apart(all_tiles(request), lambda tile: (tile.pixels, tile.filters, tile.splits), MOST_CONFIGS)
    return [Config(KERNEL, config_key(tile), tile) for tile in found]


def all_tiles(request: Request) -> tuple[Tile, ...]:
    """Every tile that the request may have, best first."""
    return tiles(product_of(request), request.facts.max_smem_bytes, request.facts.sm_count)


def source(product: Product, tile: Tile) -> KernelSource:
    """The specialised source: of the layer's own extents none takes part but through the tile."""
    return kernel_source(KERNEL, "halo_sm90_pointwise", constants(product, tile))


def constants(product: Product, tile: Tile) -> dict[str, int | str]:
    """The constants of a source."""
    problem = product.problem
    whole = tile.parts == 1
    return {
        "ELEM": ELEMENTS[problem.dtype],
        "Y_ELEM": ELEMENTS[problem.dtype] if whole else "float",
        "X_INNER": int(product.x_inner),
        "Y_INNER": int(product.y_inner),
        "W_LOADS": f"hc::pointwise::{product.w_loads}",
        "KEEPS_W": int(tile.keeps_w),
        "M_BLOCKS": tile.m_blocks,
        "COLUMNS": tile.n,
        "SPLIT_N": int(tile.split_n),
        "STAGES": tile.stages,
        "Y_BUFFERS": tile.buffers,
        **({"HAS_GAPS": 1} if product.clears_gaps else {}),
        **(epilogue_constants(problem.bias, problem.epilogue) if whole else epilogue_constants(False)),
    }


def pack_source(product: Product) -> KernelSource:
    """The source that packs filters which TMA does not reach as they lie."""
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[product.problem.dtype],
        "BLOCK_M": SPAN,
        "CHUNK_BYTES": CHUNK_BYTES,
        "OPERAND_TERMS": 1,
        "PLANES": 1,
        "SPREAD": 0,
    }
    return kernel_source("halo_sm90/pack", "halo_sm90_pack", constants)


class _Launches(NamedTuple):
    pack: Launch | None
    multiply: Launch
    add: Launch | None


def bind(request: Request, config: Config) -> BoundCall:
    """fprop(x, w, b) -> y, or with a residual fprop(x, w, b, residual) -> y, or dgrad(dy, w) -> dx."""
    product, tile = product_of(request), config.derived
    return bound(request, product, tile, source(product, tile))


def bound(
    request: Request, product: Product, tile: Tile, multiplying: KernelSource, copy: Copied | None = None
) -> BoundCall:
    """What ``bind`` gives for a product that this source multiplies, of a copy of x if there is one."""
    launches = _Launches(
        pack_launch(request, product, tile) if product.packs else None,
        multiply_launch(request, product, tile, multiplying),
        bind_sum(_sums(product, tile), request.device) if tile.parts > 1 else None,
    )
    return _call(launches, request, product, tile, copy)


def _call(launches: _Launches, request: Request, product: Product, tile: Tile, copy: Copied | None = None) -> BoundCall:
    shape, strides, clears = request.result_shape, request.result_strides, product.clears_gaps
    fills = product.has_gaps and not clears
    packed_bytes = product.packed_bytes(tile.spans(product))
    partials = tile.parts * product.outputs
    pack, multiply, add = launches

    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, *residual: torch.Tensor) -> torch.Tensor:
        y = x.new_empty_strided(shape, strides)
        b = b if b is None or b.is_contiguous() else b.contiguous()
        others: tuple[int, ...] = ()
        if residual:
            ordered = as_the_result(residual[0], strides, _TMA_BYTES)
            others = (ordered.data_ptr(),)
        if fills and b is not None:
            y.copy_(b.view(-1, 1, 1))  # pixels that no output meets
        cleared = (y.data_ptr(),) if clears else ()
        x = x if copy is None else copy(x)
        bias, filters = 0 if b is None else b.data_ptr(), w.data_ptr()
        if pack is not None:
            packed, filters = packed_filters(pack, w, packed_bytes)
        if add is None:
            multiply(x.data_ptr(), filters, y.data_ptr(), bias, *others, *cleared)
        else:
            sums = torch.empty(partials, dtype=torch.float32, device=x.device)
            multiply(x.data_ptr(), filters, sums.data_ptr(), 0, *cleared)
            add(y.data_ptr(), sums.data_ptr(), bias, *others)
        return y

    return run


def packed_filters(pack: Launch, w: torch.Tensor, packed_bytes: int) -> tuple[torch.Tensor, int]:
    """The memory of packed filters, and where they begin in it."""
    packed = torch.empty(_FLAG_BYTES + packed_bytes, dtype=torch.uint8, device=w.device)
    filters = packed.data_ptr() + _FLAG_BYTES
    pack(w.data_ptr(), filters, packed.data_ptr())
    return packed, filters


def multiply_launch(
    request: Request, product: Product, tile: Tile, multiplying: KernelSource, more: Mapping[str, Value] | None = None
) -> Launch:
    """``launch(x, w, y, bias)``, and a residual if there is one, and the result where the kernel clears its gaps.

    ``more`` are fields that another kernel has beside these. ``w`` is packed where filters are, ``y`` is fp32 partial
    sums in split-K, whose residual the sum adds.
    """
    maps = {"x_map": _pixel_map(product, tile) if product.taps else _x_map(product)}
    if not product.by_lanes:
        maps["y_map"] = _y_map(product, tile)
    if not product.packs:
        maps["w_map"] = _w_map(product, tile)
    if _adds_residual(product, tile):
        maps["residual_map"] = replace(maps["y_map"], pointer=_RESIDUAL_POINTER)
    shape = LaunchShape(tile.grid(product, request.facts.sm_count), _THREADS, tile.smem_bytes(product), tile.cluster)
    fields = {**_fields(product, tile), **(more or {})}
    return Launch(multiplying, request.device, shape, fields, maps, pdl=product.packs and not tile.in_cluster)


def _fields(product: Product, tile: Tile) -> dict[str, Value]:
    """The scalars of ``Params`` in families/halo_sm90/pointwise/tile.cuh."""
    boxes = product.boxes
    return {
        **_residual_fields(product, tile),
        **_gap_fields(product),
        **_tap_fields(product, tile),
        "blocks": divisor(tile.blocks(product)),
        "splits": divisor(tile.parts),
        "across": divisor(boxes.across),
        "down": divisor(boxes.down),
        **{"box_cols": boxes.cols, "box_rows": boxes.rows, "box_bytes": product.box_bytes},
        **{"tiles": tile.count(product), "filters": product.filters},
        **{"chunks": product.chunks, "range_chunks": tile.range_chunks(product)},
    }


def _adds_residual(product: Product, tile: Tile) -> bool:
    """Whether the kernel itself adds a residual: the sums of split-K do not get one."""
    return product.problem.epilogue.residual and tile.parts == 1


def _residual_fields(product: Product, tile: Tile) -> dict[str, Value]:
    """What TMA brings of it for a slab: the boxes that the slab leaves in."""
    if not _adds_residual(product, tile):
        return {}
    boxes = _SLAB_ROWS // product.box_px if product.pixels_m else 1
    return {"residual_bytes": boxes * prod(_y_map(product, tile).box) * product.size}


def _gap_fields(product: Product) -> dict[str, Value]:
    """Where the result has pixels that become zeros: in lines, which are neighbours in memory."""
    if not product.clears_gaps:
        return {}
    one = product.problem
    lines, pixel = (one.n * one.h, one.c) if product.y_inner else (one.n * one.c * one.h, 1)
    pixel_bytes = pixel * product.size
    return {
        **{"all_lines": lines, "line_bytes": one.w * pixel_bytes, "pixel_bytes": pixel_bytes},
        **{"height": one.h, "width": one.w, "y_down": one.stride[0], "y_across": one.stride[1]},
    }


def _tap_fields(product: Product, tile: Tile) -> dict[str, Value]:
    """Where taps meet x, and which of w they are."""
    taps, one = product.taps, product.x
    if taps is None:
        return {}
    flipped = taps.flipped and not product.packs  # packed filters lie in the order of taps
    rows, cols = taps.outputs
    return {
        **{"image_px": divisor(rows * cols), "row_px": divisor(cols), "all_px": product.pixels},
        **{"dil_h": divisor(taps.dil[0]), "dil_w": divisor(taps.dil[1]), "taps_r": taps.r, "taps_s": taps.s},
        **{"stride_h": taps.stride[0], "stride_w": taps.stride[1], "pad_h": taps.pad[0], "pad_w": taps.pad[1]},
        **{"x_rows": one.rows, "x_cols": one.cols},
        **_plane_fields(product, tile),
        **{"first_tap": taps.total - 1 if flipped else 0, "tap_step": -1 if flipped else 1, "taps": taps.total},
    }


def _plane_fields(product: Product, tile: Tile) -> dict[str, Value]:
    """Where lanes store: the result, or the partial sums, whose parts are that many elements apart."""
    if not product.by_lanes:
        return {}
    one = product.partials if tile.parts > 1 else product.y
    return {"y_image": one.image_step, "y_plane": one.channel_step, "y_part": product.outputs}


def _x_map(product: Product) -> BoxMap:
    one, size, boxes = product.x, product.size, product.boxes
    chunk = CHUNK_BYTES // size
    axes: _Axes = (product.channels, one.cols, one.rows, one.images)
    steps: _Axes = (one.channel_step, one.col_step, one.row_step, one.image_step)
    box: _Axes = (chunk, boxes.cols, boxes.rows, 1)
    if not product.x_inner:
        axes, steps, box = _swapped(axes), _swapped(steps), _swapped(box)
    return BoxMap(LOADED[product.problem.dtype], axes, _strides(axes, steps, size), box, Swizzle.B128, _X_POINTER)


def _pixel_map(product: Product, tile: Tile) -> BoxMap:
    """The pixels of a tile that a tap meets, of a chunk of channels."""
    one, size, taps = product.x, product.size, product.taps
    assert taps is not None
    axes: _Axes = (product.channels, one.cols, one.rows, one.images)
    steps: _Axes = (one.channel_step, one.col_step, one.row_step, one.image_step)
    (pad_h, pad_w), (stride_h, stride_w), (rows, cols) = taps.pad, taps.stride, taps.outputs
    last = ((cols - 1) * stride_w - pad_w, (rows - 1) * stride_h - pad_h)  # where tap 0 is at the last output
    upper = (last[0] - (one.cols - 1), last[1] - (one.rows - 1))
    pixels = Pixels((-pad_w, -pad_h), upper, (stride_w, stride_h))
    kind, box = LOADED[product.problem.dtype], (CHUNK_BYTES // size, tile.pixels)
    return BoxMap(kind, axes, _strides(axes, steps, size), box, Swizzle.B128, _X_POINTER, pixels=pixels)


def _swapped(axes: _Axes) -> _Axes:
    """Pixels of a row before channels."""
    return (axes[1], axes[0], *axes[2:])


def _strides(axes: _Axes, steps: _Axes, size: int) -> _Axes:
    """Bytes from step to step of every axis but the first; of an axis of one element any that TMA takes."""
    return tuple(step * size if axis > 1 else 16 for axis, step in zip(axes[1:], steps[1:], strict=True))


def _w_map(product: Product, tile: Tile) -> BoxMap:
    size, kind = product.size, LOADED[product.problem.dtype]
    chunk = CHUNK_BYTES // size
    axes: _Axes = (product.channels, product.filters)
    steps: _Axes = (product.w_channel, product.w_filter)
    box: _Axes = (chunk, tile.filters if tile.filters <= 256 else tile.filters // 2)
    if product.w_loads == "W_COLUMNS":
        axes, steps, box = _swapped(axes), _swapped(steps), (SPAN, chunk)
    if product.taps:  # the second axis
        axes, steps, box = (
            (one[0], of_taps, one[1])
            for one, of_taps in ((axes, product.taps.total), (steps, product.taps.w_s), (box, 1))
        )
    return BoxMap(kind, axes, _strides(axes, steps, size), box, Swizzle.B128, _W_POINTER)


def _y_map(product: Product, tile: Tile) -> BoxMap:
    """Boxes of slabs of sums: 64 rows of M by 128 bytes of N, or of what they are transposed to."""
    boxes, whole = product.boxes, tile.parts == 1
    size = product.size if whole else 4
    one = product.y if whole else product.partials
    kind = LOADED[product.problem.dtype] if size == 2 else DataType.FLOAT32
    slab = CHUNK_BYTES // size
    axes: _Axes = (product.filters, one.cols, one.rows, one.images, tile.parts)
    steps: _Axes = (one.channel_step, one.col_step, one.row_step, one.image_step, product.outputs)
    box: _Axes = (slab, boxes.cols, boxes.rows, 1, 1)
    if not product.y_inner:
        box = (slab if product.pixels_m else 64, slab, 1, 1, 1)
        axes, steps, box = _swapped(axes), _swapped(steps), _swapped(box)
    return BoxMap(kind, axes, _strides(axes, steps, size), box, Swizzle.B128, _Y_POINTER)


def pack_launch(request: Request, product: Product, tile: Tile) -> Launch:
    """``launch(w, packed, not_finite)``: families/halo_sm90/pack.cu, with spans of filters for its blocks."""
    taps, r, s, w_r, w_s, step, first_r, first_s = product.taps, 1, 1, 0, 0, 0, 0, 0
    if taps is not None:
        r, s, w_r, w_s, step = taps.r, taps.s, taps.w_r, taps.w_s, 1
    if taps is not None and taps.flipped:
        step, first_r, first_s = -1, r - 1, s - 1
    pieces, spans = product.chunks * r * s * SPAN * CHUNK_BYTES // 16, tile.spans(product)
    fields: dict[str, Value] = {
        **{"w_filter": product.w_filter, "w_channel": product.w_channel, "w_r": w_r, "w_s": w_s, "w_group": 0},
        **{"filters": product.filters, "channels": product.channels, "blocks": spans, "chunks": product.chunks},
        **{"taps_r": r, "taps_s": s, "pack_h": 1, "pack_w": 1, "pack_filters": SPAN, "pieces_per_block": pieces},
        **{"first_r": first_r, "step_r": step, "count_r": r, "shift_r": 0},
        **{"first_s": first_s, "step_s": step, "count_s": s, "shift_s": 0},
    }
    shape = LaunchShape(spans * ceil_div(pieces, _PACK_THREADS), _PACK_THREADS)
    return Launch(pack_source(product), request.device, shape, fields)


def _sums(product: Product, tile: Tile) -> Partials:
    """The partial sums of split-K: a dense result each, one behind the other."""
    problem, one = product.problem, product.y
    pixels = (Axis(one.images, one.image_step), Axis(one.rows, one.row_step), Axis(one.cols, one.col_step))
    filters = Axis(product.filters, one.channel_step, counts=1)
    axes = (*pixels, filters) if product.y_inner else (pixels[0], filters, *pixels[1:])
    return followed(Partials(problem.dtype, axes, tile.parts), problem)


def sources(request: Request) -> Iterator[KernelSource]:
    """The sources of a tile of each kind that the request may have on an NVIDIA H200, and of its packing."""
    product = product_of(request)
    found = shipped_tiles(product)

    def kind(tile: Tile) -> tuple[bool | int, ...]:
        return () if tile.splits > 1 else (tile.m_blocks, tile.split_n, tile.keeps_w)

    for tile in few_apart(found, kind, len(found)):
        yield source(product, tile)
        if product.packs:
            yield pack_source(product)
