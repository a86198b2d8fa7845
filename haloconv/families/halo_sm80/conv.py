"""Host half of halo_sm80/conv.cu: fprop and dgrad of few channels per group on tensor cores.

A small kernel (halo_sm80/pack.cu) packs the filter at every call, unless there is little of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import gcd
from typing import Any, NamedTuple

import torch

from haloconv.device import DeviceFacts
from haloconv.families.base import BoundCall, Config, config_key
from haloconv.families.common import (
    ELEMENTS,
    as_the_result,
    ceil_div,
    epilogue_constants,
    extents_fields,
    few_apart,
    named,
    why_not_direction,
)
from haloconv.families.halo_sm80.fold import fold, folded, has_folds
from haloconv.families.halo_sm80.tile import Layer, Tiling
from haloconv.families.halo_sm80.tilings import fits, tilings
from haloconv.jit import BoxMap, DataType, KernelSource, Swizzle, kernel_source
from haloconv.jit.launch import Launch, LaunchShape, Value
from haloconv.problem import Problem, Request

KERNEL = "halo_sm80/conv"
_X_POINTER = 0
_MAP_TYPES = {
    torch.float32: DataType.TFLOAT32,  # rounds on the way
    torch.float16: DataType.FLOAT16,
    torch.bfloat16: DataType.BFLOAT16,
}
_PACK_THREADS = 256
_NEIGHBOUR_BYTES = 16  # of a residual that a lane reads at once, at most
_LEAST_I64_ELEMS = (1 << 31) - (1 << 24)  # offsets from a tile's first place, which may lie before the tensor
_TMA_CAPABILITY = (9, 0)


class _Derived(NamedTuple):
    """The request as the kernel sees it, folded or not, and the tiling of its layer."""

    request: Request
    tiling: Tiling


def why_not(request: Request) -> str | None:
    """None if some tile takes the request, however its tensors are stored, else a sentence that says why not."""
    reason = why_not_direction(request.problem, "fprop", "dgrad")
    if reason is not None:
        return reason
    layers = (replace(_layer(request.problem, 0, 1, y_inner), i64_offsets=True) for y_inner in (False, True))
    if not all(fits(layer, request.facts.max_smem_bytes) for layer in layers):
        return "no tile of halo_sm80 fits shared memory"
    return None


def configs(request: Request) -> list[Config]:
    """The best tile of each warp tile and number of warps: others that share both are close to it."""
    request = _folded(request)
    found = few_apart(_ranked(request), lambda each: (each.tile.m_tiles, each.tile.n_tiles, each.tile.warps))
    return [Config(KERNEL, config_key(each.tile), _Derived(request, each)) for each in found]


def _ranked(request: Request) -> tuple[Tiling, ...]:
    """The tilings that fit, best first; where wide copies leave no room for one, those that copy element by element."""
    facts = request.facts
    layer = layer_of(request, _has_tma(facts))
    found = tilings(layer, facts.sm_count, facts.max_smem_bytes)
    plain = replace(layer, x_copy=0, x_run=1, x_boxes=False)
    return found or tilings(plain, facts.sm_count, facts.max_smem_bytes)


def bind(request: Request, config: Config) -> BoundCall:
    """fprop(x, w, b) -> y, or with a residual fprop(x, w, b, residual) -> y, or dgrad(dy, w) -> dx."""
    derived: _Derived = config.derived
    one, tiling = derived
    blocks = tiling.blocks(request.facts.sm_count, request.facts.max_smem_bytes)
    grid = tiling.layer.classes * tiling.filter_tiles * tiling.group_tiles * blocks
    shape = LaunchShape(grid, tiling.tile.threads, tiling.smem_bytes)
    maps = {"x_map": _x_map(one, tiling)} if tiling.boxes else {}
    launch = Launch(source(request.problem, tiling), request.device, shape, _fields(one, tiling, blocks), maps)
    return _call(_packing(one, tiling, launch) if tiling.packed else launch, request)


def _call(launch: Callable[..., None], request: Request) -> BoundCall:
    shape, strides = request.result_shape, request.result_strides

    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, *residual: torch.Tensor) -> torch.Tensor:
        y = x.new_empty_strided(shape, strides)
        b = b if b is None or b.is_contiguous() else b.contiguous()
        others: tuple[int, ...] = ()
        if residual:
            ordered = as_the_result(residual[0], strides, _NEIGHBOUR_BYTES)
            others = (ordered.data_ptr(),)
        launch(x.data_ptr(), w.data_ptr(), y.data_ptr(), 0 if b is None else b.data_ptr(), *others)
        return y

    return run


def _packing(request: Request, tiling: Tiling, launch: Launch) -> Callable[..., None]:
    """``run(x, w, y, bias)``, and a residual if there is one, where the filter is packed first."""
    tiles = tiling.layer.classes * tiling.group_tiles * tiling.filter_tiles * tiling.chunks
    packed_bytes, device = tiles * tiling.weight_bytes, request.device
    lanes = packed_bytes // 8
    shape = LaunchShape(ceil_div(lanes, _PACK_THREADS), _PACK_THREADS)
    pack = Launch(pack_source(request.problem, tiling), device, shape, _pack_fields(request, tiling, lanes))

    def run(x: int, w: int, y: int, bias: int, *residual: int) -> None:
        packed = torch.empty(packed_bytes, dtype=torch.uint8, device=device)
        pack(w, packed.data_ptr())
        launch(x, packed.data_ptr(), y, bias, *residual)

    return run


def _has_tma(facts: DeviceFacts) -> bool:
    return facts.capability >= _TMA_CAPABILITY


def _folded(request: Request) -> Request:
    """A channels_last stem as one of a single channel, where its rows can then be copied as they lie in memory."""
    problem, x, w, facts = request.problem, request.first, request.second, request.facts
    words = problem.dtype.itemsize == 4 or problem.stride[1] * problem.c % 2 == 0  # 16 bits: pixels begin at words
    if problem.direction != "fprop" or not words or not has_folds(problem, x, w):
        return request
    one = replace(request, problem=fold(problem), first=folded(x), second=folded(w))
    layer = layer_of(one, _has_tma(facts))
    return one if layer.x_run > 1 and fits(layer, facts.max_smem_bytes) else request


def layer_of(request: Request, tma: bool) -> Layer:
    """The layer of a request; ``tma`` says whether the device has TMA."""
    problem, x = request.problem, request.first
    size = problem.dtype.itemsize
    channels = problem.c_per_group if problem.direction == "fprop" else problem.k_per_group
    x_n, x_c, x_h, x_w = x.strides
    copy = 0
    if x_c == 1 and channels * problem.groups > 1:
        whole = [each for each in (16, 8, 4) if all(step * size % each == 0 for step in (channels, x_n, x_h, x_w))]
        copy = next((each for each in whole if x.aligned or each <= size), 0)
    width = problem.w if problem.direction == "fprop" else problem.q
    steps = (width, x_n, x_c, x_h)
    runs = [px for px in (8, 4, 2) if px * size <= 16 and all(step % px == 0 for step in steps)]
    run = next(iter(runs), 1) if x.aligned and x_w == 1 else 1
    shape = problem.x_shape if problem.direction == "fprop" else problem.y_shape
    span = sum((extent - 1) * stride for extent, stride in zip(shape, x.strides, strict=True))
    planes = x.aligned and x_w == 1 and problem.groups == 1
    planes = planes and min(steps[1:]) > 0 and not any(step * size % 16 for step in steps[1:])
    return _layer(problem, copy, run, request.result_layout == "nhwc", span, planes and tma)


def _layer(problem: Problem, x_copy: int, x_run: int, y_inner: bool, span: int = 0, x_boxes: bool = False) -> Layer:
    elems = max(span, *(n * c * h * w for n, c, h, w in (problem.x_shape, problem.y_shape)))
    common: dict[str, Any] = {
        **{"n": problem.n, "groups": problem.groups, "elem_bytes": problem.dtype.itemsize},
        **{
            "x_copy": x_copy,
            "x_run": x_run,
            "x_boxes": x_boxes,
            "y_inner": y_inner,
            "i64_offsets": elems >= _LEAST_I64_ELEMS,
        },
    }
    if problem.direction == "fprop":
        return Layer(
            channels=problem.c_per_group, filters=problem.k_per_group, rows=problem.p, cols=problem.q,
            taps_r=problem.r, taps_s=problem.s, reach_h=(problem.r - 1) * problem.dilation[0],
            reach_w=(problem.s - 1) * problem.dilation[1], move_h=problem.stride[0], move_w=problem.stride[1],
            pad_w=problem.padding[2], classes=1, **common,
        )  # fmt: skip
    taps_r, reach_h = _most_taps(problem.r, problem.stride[0], problem.dilation[0])
    taps_s, reach_w = _most_taps(problem.s, problem.stride[1], problem.dilation[1])
    return Layer(
        channels=problem.k_per_group, filters=problem.c_per_group, rows=ceil_div(problem.h, problem.stride[0]),
        cols=ceil_div(problem.w, problem.stride[1]), taps_r=taps_r, taps_s=taps_s, reach_h=reach_h, reach_w=reach_w,
        move_h=1, move_w=1, pad_w=0, classes=min(problem.stride[0], problem.h) * min(problem.stride[1], problem.w),
        **common,
    )  # fmt: skip


def _most_taps(taps: int, stride: int, dil: int) -> tuple[int, int]:
    """Taps that reach one residue of dgrad at most, and how far apart their first and last pixel are."""
    step = stride // gcd(stride, dil)
    most = ceil_div(taps, step)
    return most, (most - 1) * (step * dil // stride)


def pack_source(problem: Problem, tiling: Tiling) -> KernelSource:
    """The specialised source of the packing kernel."""
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[problem.dtype],
        "DGRAD": int(problem.direction == "dgrad"),
        "SPLIT": int(tiling.tile.split),
        "FOUR_FILTERS": int(tiling.four_filters),
    }
    return kernel_source("halo_sm80/pack", "halo_sm80_pack", constants)


def source(problem: Problem, tiling: Tiling) -> KernelSource:
    """The specialised source: extents of images and filters are run-time values."""
    tile = tiling.tile
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[problem.dtype],
        "DGRAD": int(problem.direction == "dgrad"),
        "UNIT_BYTES": tile.unit_bytes,
        **({"STAGED_PX": tile.run} if tile.split or tile.copy_bytes == 0 else {"COPY_BYTES": tile.copy_bytes}),
        "BOXES": int(tiling.boxes),
        "M_TILES": tile.m_tiles,
        "N_TILES": tile.n_tiles,
        "WARPS": tile.warps,
        "DEPTH": tile.depth,
        "MIN_BLOCKS": tiling.min_blocks,
        "STORES": 3 if tiling.four_filters else tiling.y_pairs,
        "IN_ROW": int(tile.in_row),
        "MOVE_W": tiling.layer.move_w,
        "PACKED": int(tiling.packed),
        "LATE": int(tiling.late),
        "I64_OFFSETS": int(tiling.layer.i64_offsets),
        **epilogue_constants(problem.bias, problem.epilogue),
    }
    return kernel_source("halo_sm80/conv", "halo_sm80", constants)


def _x_map(request: Request, tiling: Tiling) -> BoxMap:
    """Boxes of one channel: the lines of a tile."""
    problem = request.problem
    size = problem.dtype.itemsize
    n, c, h, w = problem.x_shape if problem.direction == "fprop" else problem.y_shape
    x_n, x_c, x_h, _ = (stride * size for stride in request.first.strides)
    box = (tiling.row_bytes // size, tiling.lines, 1, 1)
    return BoxMap(_MAP_TYPES[problem.dtype], (w, h, c, n), (x_h, x_c, x_n), box, Swizzle.NONE, pointer=_X_POINTER)


def _shared_fields(request: Request, tiling: Tiling) -> dict[str, Value]:
    """The scalars that the structs of halo_sm80/pack.cu and halo_sm80/shape.cuh have in common."""
    problem, layer, tile = request.problem, tiling.layer, tiling.tile
    w_k, w_c, w_r, w_s = request.second.strides
    w_filter, w_channel = (w_k, w_c) if problem.direction == "fprop" else (w_c, w_k)
    return {
        "strides": {"group": problem.k_per_group * w_k, "filter": w_filter, "channel": w_channel, "r": w_r, "s": w_s},
        "extents": extents_fields(request),
        **{"channels": layer.channels, "filters": layer.filters, "groups": layer.groups},
        **{"tile_groups": tile.tile_groups, "group_tiles": tiling.group_tiles, "filter_tiles": tiling.filter_tiles},
        **{"chunk_channels": tile.chunk_channels, "chunks": tiling.chunks, "parts": tiling.parts},
        **{"slices": tiling.slices, "taps_first": int(tiling.taps_first)},
    }


def _pack_fields(request: Request, tiling: Tiling, lanes: int) -> dict[str, Value]:
    """The scalars of ``Params`` in halo_sm80/pack.cu."""
    tile_eights = tiling.tile.n_items * tiling.tile.n_tiles
    return {**_shared_fields(request, tiling), "total": lanes, "tile_eights": tile_eights}


def _divisor(value: int) -> dict[str, int]:
    """The fields of a ``SmallDivisor`` (kernels/small_divisor.cuh)."""
    return {"value": value, "magic": 0 if value == 1 else ceil_div(1 << 32, value)}


def _fields(request: Request, tiling: Tiling, blocks: int) -> dict[str, Value]:
    """The scalars of ``Params`` in halo_sm80/shape.cuh."""
    problem, layer, tile = request.problem, tiling.layer, tiling.tile
    height, width = (problem.h, problem.w) if problem.direction == "fprop" else (problem.p, problem.q)
    divisors = {
        **{"tile_n": tile.tile_n, "tile_p": tile.tile_p, "row_slots": tile.row_slots},
        **{"cols": tiling.runs, "row_parts": tiling.row_parts, "planes": tiling.planes, "pieces": tiling.pieces},
        **{"m_items": tiling.m_items, "n_items": tile.n_items},
    }
    tiles_n, tiles_p, tiles_q = tiling.tiles
    return {
        **named("x", "nchw", request.first.strides),
        **named("y", "nkhw", request.result_strides),
        **_shared_fields(request, tiling),
        **{name: _divisor(value) for name, value in divisors.items()},
        **{"n": problem.n, "h": height, "width": width, "classes": layer.classes},
        **{"tile_filters": tiling.tile_filters, "tile_q": tile.tile_q},
        **{"tiles_n": tiles_n, "tiles_p": tiles_p, "tiles_q": tiles_q, "blocks": blocks},
        **{"columns": tiling.columns, "rows": tiling.lines, "part_rows": tiling.part_rows},
        **{"row_bytes": tiling.row_bytes, "image_bytes": tiling.lines * tiling.row_bytes},
        **{"plane_bytes": tiling.plane_bytes, "row_move": layer.move_h * tiling.row_bytes},
        **{"k_bytes": tiling.k_bytes, "table_bytes": tiling.table_bytes, "weight_bytes": tiling.weight_bytes},
        **{"weight_buffers": tiling.weight_buffers, "x_bytes": tiling.x_bytes},
    }
