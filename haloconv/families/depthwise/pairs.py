"""Host half of families/depthwise/pairs.cu: fprop and dgrad of depthwise nhwc layers in 16 bits on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from haloconv.families.base import BoundCall, Config
from haloconv.families.common import ELEMENTS, ceil_div, named
from haloconv.families.depthwise import finish
from haloconv.families.depthwise.layer import NO_HOPPER, Extents, in_boxes, is_hopper, padding, shapes
from haloconv.families.depthwise.one_config import OneConfig
from haloconv.jit import BoxMap, DataType, KernelSource, Swizzle, kernel_source
from haloconv.jit.launch import Launch, LaunchShape
from haloconv.problem import Problem, Request

KERNEL = "depthwise/pairs"
_KINDS = {torch.float16: DataType.FLOAT16, torch.bfloat16: DataType.BFLOAT16}
_SWIZZLES = {0: Swizzle.NONE, 64: Swizzle.B64, 128: Swizzle.B128}
_CHUNK, _CHUNK_BYTES, _CHUNK_PAIRS, _ELEM_BYTES = 8, 16, 4, 2
_MOST_TAPS = 7  # of an axis: longer filters do not fit registers
_ROW_COLS = 8  # rows in shared memory are multiples of so many columns, for the swizzle and for stores
_Y_BUFFERS, _MOST_STAGES = 3, 8
_ALIGNMENT = 1024  # of a buffer, bytes: the period of the widest swizzle
_SCHEDULERS, _SCHEDULER_REGISTERS, _MOST_REGISTERS = 4, 1 << 14, 255  # of a multiprocessor, of each, of a thread
_OTHER_REGISTERS = 64  # of a thread, beside taps and sums
_TAPS = (9, 25)  # of small and of middling filters
LEAST_COLS = (20, 48)  # of outputs with small and with middling filters: with fewer a march was as fast, or faster
_BARRIER_BYTES = 16  # of a buffer: its two barriers
_RESERVED_BYTES = 1024  # beside the filters, which are static
_X_POINTER, _Y_POINTER = 0, 3


@dataclass(frozen=True)
class Tiling:
    """``chunks`` of 8 channels in a slab, of which a warp has ``pairs`` pairs and ``tiles`` times 8 patches of a row.

    ``registers`` of threads that multiply, which take them from the others; 0: as the compiler says. ``band`` rows come
    at a time.
    """

    chunks: int
    pairs: int
    tiles: int
    registers: int = 0
    band: int = 4

    @property
    def channels(self) -> int:
        """Channels of a slab."""
        return self.chunks * _CHUNK

    @property
    def pixel_bytes(self) -> int:
        return self.chunks * _CHUNK_BYTES

    @property
    def swizzle(self) -> int:
        """Bytes; 0: none."""
        return self.pixel_bytes if self.pixel_bytes in _SWIZZLES else 0

    @property
    def warps(self) -> int:
        """Warps that multiply."""
        return self.chunks * _CHUNK_PAIRS // self.pairs

    @property
    def threads(self) -> int:
        return 32 * (self.warps + (4 if self.registers else 2))


class Patch(NamedTuple):
    """Eight pixels; ``groups`` of 4 columns in a row of its window; rows of patches whose windows a row lies in."""

    rows: int
    cols: int
    groups: int
    live: int


def patch(problem: Problem) -> Patch:
    """The patch whose window takes the fewest products, or else the taller one: it writes without bank conflicts."""

    def of(rows: int) -> Patch:
        cols = 8 // rows
        return Patch(rows, cols, ceil_div(cols + problem.s - 1, 4), ceil_div(rows + problem.r - 1, rows))

    return min(map(of, (4, 2)), key=lambda one: (one.rows + problem.r - 1) * one.groups)


def _refused(request: Request) -> str | None:
    """Why the kernel does not take the request, if not for want of room; else None."""
    problem = request.problem
    if not is_hopper(request):
        return NO_HOPPER
    if problem.dtype not in _KINDS or problem.direction == "wgrad" or request.result_layout != "nhwc":
        return "this is for fprop and dgrad in 16 bits and nhwc"
    if problem.stride != (1, 1) or problem.dilation != (1, 1) or problem.k_per_group > 1:
        return "the layer is strided or dilated, or a channel has several filters"
    if max(problem.r, problem.s) > _MOST_TAPS:
        return f"the filter has more than {_MOST_TAPS} rows or columns"
    if problem.c % _CHUNK or not in_boxes(request, 1, _CHUNK):
        return f"channels are no neighbours in groups of {_CHUNK} at multiples of {_CHUNK_BYTES} bytes"
    return None


def best_tiling(problem: Problem) -> Tiling | None:
    """The first that fits, of the kinds that were ahead of the march on an NVIDIA H200 (2026-11-22).

    It depends on filter, channels and the class of the width. None: no kind fits.
    """
    taps, cols, channels = problem.r * problem.s, shapes(problem)[1][3], problem.c
    found: list[tuple[int, int, int]] = []
    if taps > _TAPS[1]:
        found = [(4, 2, 240)] if channels % 32 == 0 else []
    elif taps > _TAPS[0] and cols >= LEAST_COLS[1]:
        found = [(4, 2, 240)] if channels % 32 == 0 else [(6, 2, 160)] if channels % 48 == 0 else []
    elif taps <= _TAPS[0] and cols >= LEAST_COLS[0] and channels % 32 == 0:
        found = (
            [(8, 4, 0)] if channels % 64 == 0 and cols <= 32 else [(4, 4, 0)]
        )  # wider ones leave room for few stages
        found.append((4, 2, 240))  # for filters whose taps do not fit the registers of fewer warps
    tiles = _tiles(cols, patch(problem))
    every = (Tiling(chunks, pairs, tiles, registers) for chunks, pairs, registers in found)
    return next((tiling for tiling in every if _fits(problem, tiling)), None)


def _tiles(cols: int, one: Patch) -> int:
    """Products for a row of so many columns; more columns are strips."""
    return next((tiles for tiles in (1, 2) if cols <= tiles * 8 * one.cols), 2 if one.cols == 4 else 4)


def _fits(problem: Problem, tiling: Tiling) -> bool:
    """Whether the taps and the sums of a warp fit its registers."""
    one = patch(problem)
    products = ceil_div((one.rows + problem.r - 1) * one.groups, 2)
    needed = _CHUNK_PAIRS * tiling.pairs * (products + tiling.tiles * one.live) + _OTHER_REGISTERS
    of_scheduler = ceil_div(tiling.threads, _SCHEDULERS * 32) * 32
    return needed <= (tiling.registers or min(_MOST_REGISTERS, _SCHEDULER_REGISTERS // of_scheduler // 8 * 8))


def source(problem: Problem, tiling: Tiling) -> KernelSource:
    """The specialised source of the kernel. No extent of the image takes part, but for the class of its width."""
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[problem.dtype],
        "R": problem.r,
        "S": problem.s,
        "PATCH_ROWS": patch(problem).rows,
        "CHUNKS": tiling.chunks,
        "SWIZZLE": tiling.swizzle,
        "PAIRS": tiling.pairs,
        "TILES": tiling.tiles,
        "BAND": tiling.band,
        "REGISTERS": tiling.registers,
        "HAS_BIAS": int(problem.bias),
        **finish.constants(problem),
    }
    return kernel_source(KERNEL, "depthwise_pairs", constants)


class _Cut(NamedTuple):
    """Strips of the output and columns of one, columns of rows in shared memory, rows of warm-up, bytes, stages."""

    strips: int
    strip_cols: int
    x_cols: int
    y_cols: int
    lead: int
    x_bytes: int
    y_bytes: int
    stages: int

    @property
    def smem_bytes(self) -> int:
        return self.stages * (self.x_bytes + _BARRIER_BYTES) + _Y_BUFFERS * (self.y_bytes + _BARRIER_BYTES)


def _cut(request: Request, tiling: Tiling) -> _Cut:
    problem = request.problem
    cols, one = shapes(problem)[1][3], patch(problem)
    strips = ceil_div(cols, tiling.tiles * 8 * one.cols)
    strip_cols = ceil_div(ceil_div(cols, strips), one.cols) * one.cols
    x_cols = strip_cols - one.cols + 4 * one.groups
    if tiling.swizzle:
        x_cols = ceil_div(x_cols, _ROW_COLS) * _ROW_COLS
    y_cols = ceil_div(strip_cols, _ROW_COLS) * _ROW_COLS
    x_bytes, y_bytes = (
        ceil_div(tiling.band * each * tiling.pixel_bytes, _ALIGNMENT) * _ALIGNMENT for each in (x_cols, y_cols)
    )
    filters = tiling.channels * problem.r * problem.s * _ELEM_BYTES
    room = request.facts.max_smem_bytes - filters - _RESERVED_BYTES - _Y_BUFFERS * (y_bytes + _BARRIER_BYTES)
    stages = min(_MOST_STAGES, room // (x_bytes + _BARRIER_BYTES))
    steps = tiling.band // one.rows
    lead = -(one.live - 1) % steps * one.rows
    return _Cut(strips, strip_cols, x_cols, y_cols, lead, x_bytes, y_bytes, stages)


_ONE = OneConfig(KERNEL, _refused, best_tiling, _cut, "no slab of so many channels was measured as faster than a march")


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, else a sentence that says why not."""
    return _ONE.why_not(request)


def configs(request: Request) -> list[Config]:
    """The config of a request that the kernel takes; empty if it does not."""
    return _ONE.configs(request)


def bind(request: Request, config: Config) -> BoundCall:
    """fprop(x, w, b) -> y, with an epilogue, or dgrad(dy, w) -> dx, with a bias: ``finish.call``."""
    problem, x, (tiling, cut) = request.problem, request.first, config.derived
    x_shape, y_shape = shapes(problem)
    images, channels, rows, cols = x_shape
    slabs, bands = ceil_div(channels, tiling.channels), ceil_div(y_shape[2], tiling.band)
    units = images * cut.strips * bands
    parts = max(1, min(units, request.facts.sm_count // slabs))
    per_block, longer = divmod(units, parts)
    top, left = padding(problem)
    fields = {
        **_filter_fields(request),
        **named("x", "n.hw", x.strides),
        "cut": {
            **{"slabs": slabs, "images": images, "strips": cut.strips, "bands": bands},
            **{"per_block": per_block, "longer": longer},
        },
        **{"channels": channels, "rows": rows, "cols": cols, "top": top, "left": left, "lead": cut.lead},
        **{"strip_cols": cut.strip_cols, "x_cols": cut.x_cols, "y_cols": cut.y_cols},
        **{"stages": cut.stages, "x_bytes": cut.x_bytes, "y_bytes": cut.y_bytes},
        **({"y_rows": y_shape[2], "y_width": y_shape[3]} if problem.epilogue.residual else {}),
    }
    maps = {
        "x_map": _box_map(problem, tiling, (x_shape, x.strides), (cut.x_cols, tiling.band), _X_POINTER),
        "y_map": _box_map(problem, tiling, (y_shape, request.result_strides), (cut.strip_cols, 1), _Y_POINTER),
    }
    shape = LaunchShape(slabs * parts, tiling.threads, cut.smem_bytes)
    launch = Launch(source(problem, tiling), request.device, shape, fields, maps)
    return finish.call(launch, request)


def _box_map(
    problem: Problem, tiling: Tiling, tensor: tuple[Extents, tuple[int, ...]], box: tuple[int, int], pointer: int
) -> BoxMap:
    """Boxes of a slab of a tensor of a shape and strides, ``box`` columns and rows."""
    (n, c, h, w), strides = tensor
    steps = (strides[3] * _ELEM_BYTES, strides[2] * _ELEM_BYTES, strides[0] * _ELEM_BYTES)
    kind, whole = _KINDS[problem.dtype], (tiling.channels, *box, 1)
    return BoxMap(kind, (c, w, h, n), steps, whole, _SWIZZLES[tiling.swizzle], pointer)


def _filter_fields(request: Request) -> dict[str, int]:
    """The first tap's place, and the strides; dgrad flips the filter."""
    problem, strides = request.problem, request.second.strides
    if problem.direction == "fprop":
        return {"w_first": 0, **named("w", "c.rs", strides)}
    w_c, _, w_r, w_s = strides
    return {"w_first": (problem.r - 1) * w_r + (problem.s - 1) * w_s, "w_c": w_c, "w_r": -w_r, "w_s": -w_s}
