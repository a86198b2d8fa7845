"""Host half of the ``halo_sm90`` family (device half: kernels/halo_sm90.cu): fprop and dgrad on Hopper's tensor cores.

fp32 tensors are multiplied in TF32, fp16 and bf16 in their own type; sums are fp32. NCHW and channels_last, in and out,
are native. Filters are packed by a small kernel before every launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch

from haloconv import support
from haloconv.env import device_facts
from haloconv.families.base import BoundCall, TensorForm, strides_of
from haloconv.families.halo_sm90_form import Form, forms
from haloconv.families.halo_sm90_tile import Config, Tiling, ceil_div, tile
from haloconv.families.launch import Launch
from haloconv.jit import KernelSource, kernel_source
from haloconv.problem import Conv2dProblem

_ELEMENTS = {torch.float32: "float", torch.float16: "hc::fp16", torch.bfloat16: "hc::bf16"}
_PARAMS_FORMAT = "5Q9q22i iIi iIi 2i iIi 14i".replace(" ", "")
_PACK_FORMAT = "3Q5q18i"
_REPAIR_FORMAT = "5Q15q19i"
_REPAIR_BLOCKS = 1024
_FLAG_BYTES = 128  # before the packed weights, which keep their alignment
_PACK_THREADS = 256
_CANDIDATES = 8
_ARCH = "sm_90a"


class Storage(NamedTuple):
    """How a launch's tensors lie in memory, as far as it decides how tiles are best cut.

    ``x_inner`` and ``y_inner``: neighbours are channels, not pixels. ``x_whole``: they come in aligned groups, 16 bytes
    of channels or four pixels.
    """

    elem_bytes: int
    x_inner: bool
    x_whole: bool
    y_inner: bool


@lru_cache(maxsize=4096)
def configs(form: Form, storage: Storage, sm_count: int) -> tuple[Tiling, ...]:
    """At most eight tilings of a launch, best first by the cost model."""
    found = [tile(form, config, storage.elem_bytes, storage.y_inner) for config in all_configs(form, storage)]
    fitting = [each for each in found if isinstance(each, Tiling)]
    return tuple(sorted(fitting, key=lambda each: cost(each, storage, sm_count)))[:_CANDIDATES]


def all_configs(form: Form, storage: Storage) -> list[Config]:
    """Every tile shape, with the ways to fill M, to cut rows and to cut columns that make sense for the form."""
    channel_bytes = form.channels * storage.elem_bytes
    chunk_bytes = next((size for size in (32, 64) if channel_bytes <= size), 128)
    packs = [(1, 1), (1, 2), (2, 1)] if form.filters <= 32 else [(1, 1)]
    sizes = (1, 2) if form.filters > 64 else (1,)
    readings = (True, False) if storage.x_whole and not storage.x_inner else (False,)
    result = []
    for (pack_h, pack_w), quads in product(packs, readings):
        cols = ceil_div(form.horizontal.out_extent, pack_w)
        strip_cols = ceil_div(ceil_div(cols, ceil_div(cols, 128)), 4) * 4
        for (run, runs), consumers_m in product(((128, 2), (256, 1), (128, 1), (64, 1)), sizes):
            shape = (run, runs, consumers_m, chunk_bytes, pack_h, pack_w)
            strips = ((False, 0), (True, 0), (False, run)) + (((True, strip_cols),) if cols > 128 else ())
            result += [Config(flat, *shape, strip_cols=columns, quads=quads) for flat, columns in strips]
    return result


def cost(tiling: Tiling, storage: Storage, sm_count: int) -> float:
    """Cycles of a multiprocessor for its share of the launch: the slowest of multiplying, streaming and staging.

    The rates are measured on an H200: wgmma near its peak, packed weights from the L2 at 20 bytes a cycle, the time
    that a warp takes for a unit of pixels, and what of writing a tile is not hidden.
    """
    config = tiling.config
    multiply = tiling.taps * tiling.chunks * (config.chunk_bytes // 32) * config.runs * config.run
    reads = 1.1 + 0.3 * (config.run < 128)  # shared-memory reads of narrow runs
    weights = tiling.taps * tiling.chunks * config.stage_bytes / 20
    new_lines = tiling.new_lines if tiling.steps > 1 else tiling.lines
    units = tiling.chunks * new_lines * ceil_div(tiling.slot_px, 32)
    staging = units * _unit_cycles(config, storage) / config.line_warps
    return ceil_div(tiling.total, sm_count) * (max(multiply * reads, weights, staging) + 8 * config.runs * config.run)


def _unit_cycles(config: Config, storage: Storage) -> int:
    """Cycles in which a warp stages 32 pixels while the tensor cores run (halo_sm90/stage.cuh)."""
    if storage.x_inner:
        return (1500 if storage.elem_bytes == 2 else 2800) if storage.x_whole else 8000
    return 3000 if config.quads else 4500


def _storage(problem: Conv2dProblem, x: TensorForm, result_layout: str) -> Storage:
    x_inner = x.strides[1] == 1 and x.strides[3] != 1
    channels = problem.c_per_group if problem.direction == "fprop" else problem.k_per_group
    group, axes = (16 // problem.dtype.itemsize, (0, 2, 3)) if x_inner else (4, (0, 1, 2))
    whole = x.aligned and all(x.strides[axis] % group == 0 for axis in axes)
    whole &= channels % group == 0 if x_inner else x.strides[3] == 1
    return Storage(problem.dtype.itemsize, x_inner, whole, result_layout == "nhwc")


class HaloSm90Family:
    """Dense and grouped layers on compute capability 9.0, forward and input gradient."""

    name = "halo_sm90"

    def why_not(self, problem: Conv2dProblem, device: torch.device) -> str | None:
        reason = support.why_not(problem, device) or support.why_no_tensor_cores(problem)
        if reason is not None:
            return reason
        if device_facts(device.index).arch != _ARCH:
            return "the device is no Hopper GPU (compute capability 9.0)"
        sm_count = device_facts(device.index).sm_count
        inner = problem.layout == "nhwc"
        storage = Storage(problem.dtype.itemsize, inner, False, inner)
        if any(form.taps and not configs(form, storage, sm_count) for form in forms(problem)):
            return "no tile of halo_sm90 fits shared memory"
        return None

    def bind(
        self, problem: Conv2dProblem, first: TensorForm, second: TensorForm, result_layout: str, device: torch.device
    ) -> BoundCall:
        bound = Bound(problem, first, second, result_layout, device)
        return bound.fprop if problem.direction == "fprop" else bound.dgrad


@dataclass(frozen=True)
class _Operands:
    """Strides and alignment of the gathered tensor, the filter (as [filter][channel]) and the result."""

    x: TensorForm
    storage: Storage
    w: tuple[int, int, int, int]
    w_group: int
    y: tuple[int, int, int, int]
    y_aligned: bool


class Bound:
    """A problem bound to its launches: pack the filter, then one launch per residue class."""

    def __init__(
        self, problem: Conv2dProblem, first: TensorForm, second: TensorForm, result_layout: str, device: torch.device
    ) -> None:
        sm_count = device_facts(device.index).sm_count
        self._shape = problem.y_shape if problem.direction == "fprop" else problem.x_shape
        self._strides = strides_of(self._shape, result_layout)
        operands = _operands(problem, first, second, self._strides, result_layout)
        self._launches: list[tuple[Launch, Launch, Launch | None, int]] = []
        self._packed_bytes = 0
        self._has_gaps = False
        for form in forms(problem):
            if form.taps == 0:
                self._has_gaps = True
                continue
            tiling = configs(form, operands.storage, sm_count)[0]
            pack = _pack_launch(problem, tiling, operands, device)
            launch = _launch(problem, tiling, operands, device, sm_count)
            repair = repair_launch(problem, form, operands, device) if tiling.config.packs else None
            self._launches.append((pack, launch, repair, self._packed_bytes))
            self._packed_bytes += _FLAG_BYTES + tiling.packed_bytes

    def _run(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        y = x.new_empty_strided(self._shape, self._strides)
        if self._has_gaps:
            y.zero_()  # pixels that no tap reaches
        packed = torch.empty(self._packed_bytes, dtype=torch.uint8, device=x.device)
        bias = 0 if b is None else b.data_ptr()
        for pack, launch, repair, offset in self._launches:
            flag = packed.data_ptr() + offset
            place = flag + _FLAG_BYTES
            pack(w.data_ptr(), place, flag)
            launch(x.data_ptr(), place, y.data_ptr(), bias, flag)
            if repair is not None:
                repair(x.data_ptr(), w.data_ptr(), y.data_ptr(), bias, flag)
        return y

    def fprop(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        """y (N, K, P, Q) of x (N, C, H, W), w (K, C/G, R, S) and b (K,) or None."""
        return self._run(x, w, b if b is None or b.is_contiguous() else b.contiguous())

    def dgrad(self, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """dx (N, C, H, W) of dy (N, K, P, Q) and w (K, C/G, R, S)."""
        return self._run(dy, w, None)


def _operands(
    problem: Conv2dProblem, first: TensorForm, second: TensorForm, y: tuple[int, ...], result_layout: str
) -> _Operands:
    w_k, w_c, w_r, w_s = second.strides
    w = (w_k, w_c, w_r, w_s) if problem.direction == "fprop" else (w_c, w_k, w_r, w_s)
    filters = problem.k_per_group if problem.direction == "fprop" else problem.c_per_group
    per_16_bytes = 16 // problem.dtype.itemsize
    aligned = filters % per_16_bytes == 0 and all(stride % per_16_bytes == 0 for stride in (y[0], y[2], y[3]))
    return _Operands(first, _storage(problem, first, result_layout), w, problem.k_per_group * w_k, y, aligned)


def _pack_launch(problem: Conv2dProblem, tiling: Tiling, operands: _Operands, device: torch.device) -> Launch:
    config, form, vertical = tiling.config, tiling.form, tiling.vertical
    pieces = tiling.chunks * tiling.taps * config.stage_bytes // 16
    fields = (
        *(operands.w[0], operands.w[1], operands.w[2], operands.w[3], operands.w_group),
        *(form.filters, form.channels, tiling.blocks, tiling.chunks, vertical.taps, tiling.taps_s),
        *(form.vertical.filter_first, form.vertical.filter_step, form.vertical.taps, vertical.shift, config.pack_h),
        *(form.horizontal.filter_first, form.horizontal.filter_step, form.horizontal.taps, tiling.shift_s),
        *(config.pack_w, config.block_m // (config.pack_h * config.pack_w), pieces),
    )
    grid = form.groups * tiling.blocks * ceil_div(pieces, _PACK_THREADS)
    return Launch(pack_source(problem, config), device, grid, _PACK_THREADS, 0, _PACK_FORMAT, fields)


def repair_launch(problem: Conv2dProblem, form: Form, operands: _Operands, device: torch.device) -> Launch:
    """The launch after a packed one (kernels/halo_sm90_repair.cu); it ends at once if every sum was finite."""
    rows, cols = form.vertical, form.horizontal
    outputs = form.n * form.groups * form.filters * rows.out_extent * cols.out_extent
    fields = (
        *operands.x.strides,
        *(*operands.w, operands.w_group),
        *_output_strides(form, operands),
        outputs,
        *(rows.in_extent, cols.in_extent, form.channels, form.filters, form.groups),
        *(rows.out_extent, cols.out_extent, rows.pad, cols.pad, rows.stride, cols.stride, rows.dil, cols.dil),
        *(rows.taps, rows.filter_first, rows.filter_step, cols.taps, cols.filter_first, cols.filter_step),
    )
    grid = min(_REPAIR_BLOCKS, ceil_div(outputs, _PACK_THREADS))
    return Launch(repair_source(problem), device, grid, _PACK_THREADS, 0, _REPAIR_FORMAT, fields)


def repair_source(problem: Conv2dProblem) -> KernelSource:
    """The text of the repairing kernel."""
    constants = {"ELEM": _ELEMENTS[problem.dtype], "HAS_BIAS": int(problem.bias)}
    return kernel_source("halo_sm90_repair", "halo_sm90_repair", constants)


def _output_strides(form: Form, operands: _Operands) -> tuple[int, int, int, int, int]:
    """Strides of image, filter, output row and column of the launch, and its first element."""
    rows, cols = form.vertical, form.horizontal
    y_n, y_k, y_h, y_w = operands.y
    return (y_n, y_k, y_h * rows.out_step, y_w * cols.out_step, y_h * rows.out_first + y_w * cols.out_first)


def pack_source(problem: Conv2dProblem, config: Config) -> KernelSource:
    """The text of the packing kernel for one block height, chunk and type."""
    constants = {"ELEM": _ELEMENTS[problem.dtype], "BLOCK_M": config.block_m, "CHUNK_BYTES": config.chunk_bytes}
    return kernel_source("halo_sm90_pack", "halo_sm90_pack", constants)


def source(problem: Conv2dProblem, config: Config, operands: _Operands) -> KernelSource:
    """The text of the kernel for one tile shape, type and layout: image and filter extents are run-time values."""
    storage = operands.storage
    y_inner = operands.y[1] == 1 and operands.y[3] != 1
    element = _ELEMENTS[problem.dtype]
    constants = {
        "ELEM": element,
        "MULTIPLY": "hc::tf32" if problem.dtype == torch.float32 else element,
        "RUN": config.run,
        "RUNS": config.runs,
        "CONSUMERS_M": config.consumers_m,
        "FLAT": int(config.flat),
        "CHUNK_BYTES": config.chunk_bytes,
        "LINE_WARPS": config.line_warps,
        "X_CHANNELS_INNER": int(storage.x_inner),
        "X_VECTOR": int(storage.x_whole if storage.x_inner else config.quads),
        "Y_CHANNELS_INNER": int(y_inner),
        "Y_VECTOR": int(y_inner and operands.y_aligned),
        "PACKS": int(config.packs),
        "HAS_BIAS": int(problem.bias),
    }
    return kernel_source("halo_sm90", "halo_sm90", constants)


def sources(
    problem: Conv2dProblem, first: TensorForm, second: TensorForm, result_layout: str
) -> Iterator[KernelSource]:
    """The texts of every tile shape that the problem's launches choose from, and of their packing."""
    shape = problem.y_shape if problem.direction == "fprop" else problem.x_shape
    operands = _operands(problem, first, second, strides_of(shape, result_layout), result_layout)
    for form in forms(problem):
        for config in all_configs(form, operands.storage):
            yield pack_source(problem, config)
            yield source(problem, config, operands)
            if config.packs:
                yield repair_source(problem)


def divisor(value: int) -> tuple[int, int, int]:
    """The ``Divisor`` of halo_sm90/tile.cuh: value, magic, shift. Exact for dividends below 2^31."""
    bits = 31 + (value - 1).bit_length()
    return (value, 0, 0) if value == 1 else (value, ceil_div(1 << bits, value), bits - 32)


def _launch(problem: Conv2dProblem, tiling: Tiling, operands: _Operands, device: torch.device, sm_count: int) -> Launch:
    text = source(problem, tiling.config, operands)
    grid = min(sm_count, tiling.total)
    fields = _fields(tiling, operands)
    return Launch(text, device, grid, tiling.config.threads, tiling.smem_bytes, _PARAMS_FORMAT, fields)


def _fields(tiling: Tiling, operands: _Operands) -> tuple[int, ...]:
    """The scalars of ``HaloParams`` (halo_sm90/tile.cuh), in its order."""
    form, config, vertical = tiling.form, tiling.config, tiling.vertical
    rows, cols = form.vertical, form.horizontal
    return (
        *operands.x.strides,
        *_output_strides(form, operands),
        *(form.n, rows.in_extent, cols.in_extent, form.channels),
        *(rows.out_extent, cols.out_extent, form.filters),
        *(rows.pad, tiling.pad_left, tiling.first_tap_px),
        *(vertical.stride, tiling.stride_w),
        *(vertical.taps, tiling.taps_s, vertical.dil, tiling.dil_w),
        *(vertical.classes, vertical.class_move, vertical.line_move),
        *(config.pack_h, config.pack_w, config.block_m // (config.pack_h * config.pack_w)),
        *divisor(tiling.pitch),
        *divisor(tiling.segment_rows),
        *(tiling.strips, tiling.strip_cols),
        *divisor(tiling.plane_px),
        *(tiling.planes_w, tiling.slot_px),
        *(tiling.tiles, tiling.tile_step),
        *(tiling.steps, tiling.lines, tiling.new_lines),
        *(tiling.blocks, tiling.chunks),
        *(tiling.slots, tiling.slot_bytes, tiling.stages),
        tiling.lead,
        tiling.total,
    )
