"""Host half of families/depthwise/pairs.cu: fprop and dgrad of depthwise nhwc layers in 16 bits on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from haloconv.env import DeviceFacts, device_facts
from haloconv.families.base import BoundCall
from haloconv.families.common import ELEMENTS, ceil_div, dense_call
from haloconv.families.depthwise.strips import padding, shapes
from haloconv.jit import BoxMap, DataType, KernelSource, Swizzle, kernel_source
from haloconv.jit.launch import PositionalLaunch
from haloconv.layout import strides_of
from haloconv.problem import Problem, TensorForm

_CAPABILITY = (9, 0)
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
_NARROW = 32  # columns, up to which slabs of 64 channels leave room for enough stages
LEAST_COLS = (20, 48)  # of outputs with small and with middling filters: with fewer a march was as fast, or faster
_BARRIER_BYTES = 16  # of a buffer: its two barriers
_RESERVED_BYTES = 1024  # beside the filters, which are static
_PARAMS_FORMAT = "4Q7q18i"
_X_POINTER, _Y_POINTER = 0, 3


@dataclass(frozen=True)
class Config:
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
        """Of a slab."""
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
        """That multiply."""
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


def why_not(problem: Problem, x: TensorForm, result_layout: str, facts: DeviceFacts) -> str | None:
    """None if the kernel takes the problem with ``x`` (dy in dgrad) on the device, else why not."""
    if facts.capability != _CAPABILITY:
        return "the device is no Hopper GPU (compute capability 9.0)"
    if problem.dtype not in _KINDS or problem.direction == "wgrad" or result_layout != "nhwc":
        return "this is for fprop and dgrad in 16 bits and nhwc"
    if problem.stride != (1, 1) or problem.dilation != (1, 1) or problem.k_per_group > 1:
        return "the layer is strided or dilated, or a channel has several filters"
    if max(problem.r, problem.s) > _MOST_TAPS:
        return f"the filter has more than {_MOST_TAPS} rows or columns"
    if problem.c % _CHUNK or not _has_boxes(x):
        return f"channels are no neighbours in groups of {_CHUNK} at multiples of {_CHUNK_BYTES} bytes"
    if not configs(problem):
        return "no slab of so many channels was measured as faster than a march"
    return None


def _has_boxes(x: TensorForm) -> bool:
    steps = (x.strides[0], *x.strides[2:])
    whole = min(steps) > 0 and not any(step % _CHUNK for step in steps)  # 0: one image seen as several
    return x.aligned and x.strides[1] == 1 and whole


def configs(problem: Problem) -> list[Config]:
    """Those that fit, of the kinds that were ahead of the march on an NVIDIA H200 (2026-11-22), best first.

    They depend on filter, channels and the class of the width.
    """
    taps, cols, channels = problem.r * problem.s, shapes(problem)[1][3], problem.c
    found: list[tuple[int, int, int]] = []
    if taps > _TAPS[1]:
        found = [(4, 2, 240)] if channels % 32 == 0 else []
    elif taps > _TAPS[0] and cols >= LEAST_COLS[1]:
        found = [(4, 2, 240)] if channels % 32 == 0 else [(6, 2, 160)] if channels % 48 == 0 else []
    elif taps <= _TAPS[0] and cols >= LEAST_COLS[0] and channels % 32 == 0:
        found = [(8, 4, 0)] if channels % 64 == 0 and cols <= _NARROW else [(4, 4, 0)]
        found.append((4, 2, 240))  # for filters whose taps do not fit the registers of fewer warps
    tiles = _tiles(cols, patch(problem))
    every = (Config(chunks, pairs, tiles, registers) for chunks, pairs, registers in found)
    return [config for config in every if _fits(problem, config)][:1]


def _tiles(cols: int, one: Patch) -> int:
    """Products for a row of so many columns; more columns are strips."""
    return next((tiles for tiles in (1, 2) if cols <= tiles * 8 * one.cols), 2 if one.cols == 4 else 4)


def _fits(problem: Problem, config: Config) -> bool:
    """Whether the taps and the sums of a warp fit its registers."""
    one = patch(problem)
    products = ceil_div((one.rows + problem.r - 1) * one.groups, 2)
    needed = _CHUNK_PAIRS * config.pairs * (products + config.tiles * one.live) + _OTHER_REGISTERS
    of_scheduler = ceil_div(config.threads, _SCHEDULERS * 32) * 32
    return needed <= (config.registers or min(_MOST_REGISTERS, _SCHEDULER_REGISTERS // of_scheduler // 8 * 8))


def source(problem: Problem, config: Config) -> KernelSource:
    """The specialised text of the kernel. No extent of the image takes part, but for the class of its width."""
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[problem.dtype],
        "R": problem.r,
        "S": problem.s,
        "PATCH_ROWS": patch(problem).rows,
        "CHUNKS": config.chunks,
        "SWIZZLE": config.swizzle,
        "PAIRS": config.pairs,
        "TILES": config.tiles,
        "BAND": config.band,
        "REGISTERS": config.registers,
        "HAS_BIAS": int(problem.bias),
    }
    return kernel_source("depthwise/pairs", "depthwise_pairs", constants)


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


def _cut(problem: Problem, config: Config, facts: DeviceFacts) -> _Cut:
    cols, one = shapes(problem)[1][3], patch(problem)
    strips = ceil_div(cols, config.tiles * 8 * one.cols)
    strip_cols = ceil_div(ceil_div(cols, strips), one.cols) * one.cols
    x_cols = strip_cols - one.cols + 4 * one.groups
    if config.swizzle:
        x_cols = ceil_div(x_cols, _ROW_COLS) * _ROW_COLS
    y_cols = ceil_div(strip_cols, _ROW_COLS) * _ROW_COLS
    x_bytes, y_bytes = (
        ceil_div(config.band * each * config.pixel_bytes, _ALIGNMENT) * _ALIGNMENT for each in (x_cols, y_cols)
    )
    filters = config.channels * problem.r * problem.s * _ELEM_BYTES
    room = facts.max_smem_bytes - filters - _RESERVED_BYTES - _Y_BUFFERS * (y_bytes + _BARRIER_BYTES)
    stages = min(_MOST_STAGES, room // (x_bytes + _BARRIER_BYTES))
    steps = config.band // one.rows
    lead = -(one.live - 1) % steps * one.rows
    return _Cut(strips, strip_cols, x_cols, y_cols, lead, x_bytes, y_bytes, stages)


def bind(
    problem: Problem,
    x: TensorForm,
    w: TensorForm,
    result_layout: str,
    device: torch.device,
    config: Config | None = None,
) -> BoundCall:
    """fprop(x, w, b) -> y or dgrad(dy, w) -> dx; without a config with the best."""
    config = config or configs(problem)[0]
    facts = device_facts(device.index)
    cut = _cut(problem, config, facts)
    x_shape, y_shape = shapes(problem)
    y_strides = strides_of(y_shape, result_layout)
    images, channels, rows, cols = x_shape
    slabs, bands = ceil_div(channels, config.channels), ceil_div(y_shape[2], config.band)
    units = images * cut.strips * bands
    parts = max(1, min(units, facts.sm_count // slabs))
    fields = (
        *_filter_fields(problem, w),
        *(x.strides[0], *x.strides[2:], slabs, images, cut.strips, bands, *divmod(units, parts)),
        *(channels, rows, cols, *padding(problem), cut.lead, cut.strip_cols, cut.x_cols, cut.y_cols),
        *(cut.stages, cut.x_bytes, cut.y_bytes),
    )
    maps = (
        _boxes(problem, config, x_shape, x.strides, (cut.x_cols, config.band), _X_POINTER),
        _boxes(problem, config, y_shape, y_strides, (cut.strip_cols, 1), _Y_POINTER),
    )
    text, grid = source(problem, config), slabs * parts
    launch = PositionalLaunch(text, device, grid, config.threads, cut.smem_bytes, _PARAMS_FORMAT, fields, maps)
    return dense_call(launch, problem, y_shape, y_strides)


def _boxes(
    problem: Problem,
    config: Config,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, int],
    pointer: int,
) -> BoxMap:
    """Boxes of a slab of a tensor, ``box`` columns and rows."""
    n, c, h, w = shape
    steps = (strides[3] * _ELEM_BYTES, strides[2] * _ELEM_BYTES, strides[0] * _ELEM_BYTES)
    extents, whole = (c, w, h, n), (config.channels, *box, 1)
    return BoxMap(_KINDS[problem.dtype], extents, steps, whole, _SWIZZLES[config.swizzle], pointer)


def _filter_fields(problem: Problem, w: TensorForm) -> tuple[int, ...]:
    """The first tap's place, and the strides of Params in depthwise_pairs.cu; dgrad turns the filter round."""
    w_c, _, w_r, w_s = w.strides
    if problem.direction == "fprop":
        return (0, w_c, w_r, w_s)
    return ((problem.r - 1) * w_r + (problem.s - 1) * w_s, w_c, -w_r, -w_s)
