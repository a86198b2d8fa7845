"""Host half of the ``halo_sm90`` family (device half: conv.cu): fprop and dgrad on Hopper's tensor cores.

fp32 tensors are multiplied in TF32, fp16 and bf16 in their own type; sums are fp32. NCHW and channels_last, in and out,
are native. Filters are packed by a small kernel before every launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch

from haloconv import support
from haloconv.env import device_facts
from haloconv.families.base import MOST_CANDIDATES, BoundCall
from haloconv.families.common import ceil_div
from haloconv.families.halo_sm90.configs import TERMS, configs, split_tilings, storage_of, tilings
from haloconv.families.halo_sm90.constants import pack_source, repair_source, source, sum_source
from haloconv.families.halo_sm90.form import Form, forms
from haloconv.families.halo_sm90.scheduler import DIVISOR, SHARE, divisor
from haloconv.families.halo_sm90.shape import BLOCK_M, UNIT_PX, Config, Storage, joined_planes, threads
from haloconv.families.halo_sm90.tile import Tiling
from haloconv.jit import BoxMap, DataType, KernelSource, Swizzle
from haloconv.jit.launch import Launch, PositionalLaunch
from haloconv.layout import strides_of
from haloconv.problem import Problem, TensorForm

_MAP_TYPES = {  # fp32 is rounded on its way into shared memory
    torch.float32: DataType.TFLOAT32,
    torch.float16: DataType.FLOAT16,
    torch.bfloat16: DataType.BFLOAT16,
}
_SWIZZLES = {32: Swizzle.B32, 64: Swizzle.B64, 128: Swizzle.B128}
_X_POINTER, _Y_POINTER = 0, 2  # of a launch
_PARAMS_FORMAT = f"5Q9q21i{3 * DIVISOR}5i{DIVISOR}10i{SHARE}"
_PACK_FORMAT = "3Q5q18i"
_REPAIR_FORMAT = "5Q15q19i"
_SUM_FORMAT = "3Q2q3i"
_SUM_BLOCKS = 4096
_REPAIR_BLOCKS = 1024
_FLAG_BYTES = 128  # before the packed weights, which keep their alignment
_PACK_THREADS = 256
_ARCH = "sm_90a"


class HaloSm90Family:
    """Dense and grouped layers on compute capability 9.0, forward and input gradient."""

    name = "halo_sm90"
    activations = ("relu",)

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        reason = support.why_not(problem, device)
        if reason is None and problem.precision not in TERMS:
            reason = support.why_no_tensor_cores(problem)
        if reason is not None:
            return reason
        if device_facts(device.index).arch != _ARCH:
            return "the device is no Hopper GPU (compute capability 9.0)"
        sm_count = device_facts(device.index).sm_count
        inner = problem.layout == "nhwc"
        storage = Storage(problem.dtype.itemsize, inner, False, inner, False)
        if any(form.taps and not configs(form, storage, sm_count) for form in forms(problem)):
            return "no tile of halo_sm90 fits shared memory"
        return None

    def candidates(
        self, problem: Problem, first: TensorForm, second: TensorForm, result_layout: str, device: torch.device
    ) -> list[tuple[Config, ...]]:
        """One config for each launch: the best of all launches, the second best of all, and so on."""
        sm_count = device_facts(device.index).sm_count
        shape = problem.y_shape if problem.direction == "fprop" else problem.x_shape
        storage = storage_of(problem, first, strides_of(shape, result_layout), result_layout)
        found = [configs(form, storage, sm_count) for form in forms(problem) if form.taps]
        ranks = range(min(MOST_CANDIDATES, max(map(len, found), default=0)))
        return [tuple(each[min(rank, len(each) - 1)].config for each in found) for rank in ranks]

    def bind(
        self,
        problem: Problem,
        first: TensorForm,
        second: TensorForm,
        result_layout: str,
        device: torch.device,
        config: tuple[Config, ...] | None = None,
    ) -> BoundCall:
        bound = Bound(problem, first, second, result_layout, device, config)
        return bound.fprop if problem.direction == "fprop" else bound.dgrad


@dataclass(frozen=True)
class _Operands:
    """Strides and alignment of the gathered tensor, the filter (as [filter][channel]) and the result."""

    x: TensorForm
    storage: Storage
    w: tuple[int, int, int, int]
    w_group: int
    y: tuple[int, int, int, int]


class Bound:
    """A problem bound to its launches: pack the filter, then one launch per residue class."""

    def __init__(
        self,
        problem: Problem,
        first: TensorForm,
        second: TensorForm,
        result_layout: str,
        device: torch.device,
        wanted: tuple[Config, ...] | None = None,
    ) -> None:
        sm_count = device_facts(device.index).sm_count
        self._shape = problem.y_shape if problem.direction == "fprop" else problem.x_shape
        self._strides = strides_of(self._shape, result_layout)
        operands = _operands(problem, first, second, self._strides, result_layout)
        self._launches: list[tuple[Launch, Launch, Launch | None, Launch | None, int]] = []
        self._packed_bytes, self._partial_bytes = 0, 0
        self._has_gaps = False
        for form in forms(problem):
            if form.taps == 0:
                self._has_gaps = True
                continue
            found = configs(form, operands.storage, sm_count)
            config = found[0].config if wanted is None else wanted[len(self._launches)]
            tiling = next(each for each in found if each.config == config)
            own = operands if form.splits == tiling.form.splits else _partial(tiling, operands, result_layout)
            pack = _pack_launch(problem, tiling, own, device)
            launch = _launch(problem, tiling, own, device, sm_count)
            repair = repair_launch(problem, form, operands, device) if tiling.config.repaired else None
            add = _sum_launch(problem, tiling, device) if tiling.form.splits > 1 else None
            self._launches.append((pack, launch, repair, add, self._packed_bytes))
            self._packed_bytes += _FLAG_BYTES + tiling.packed_bytes
            self._partial_bytes = 4 * tiling.form.splits * prod(self._shape) if add else 0

    def _run(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        y = x.new_empty_strided(self._shape, self._strides)
        if self._has_gaps:
            y.zero_()  # pixels that no tap reaches
        packed = torch.empty(self._packed_bytes, dtype=torch.uint8, device=x.device)
        bias = 0 if b is None else b.data_ptr()
        for pack, launch, repair, add, offset in self._launches:
            flag = packed.data_ptr() + offset
            place = flag + _FLAG_BYTES
            pack(w.data_ptr(), place, flag)
            if add is not None:
                partial = torch.empty(self._partial_bytes, dtype=torch.uint8, device=x.device)
                launch(x.data_ptr(), place, partial.data_ptr(), 0, flag)
                add(partial.data_ptr(), y.data_ptr(), bias)
                continue
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
    problem: Problem, first: TensorForm, second: TensorForm, y: tuple[int, ...], result_layout: str
) -> _Operands:
    w_k, w_c, w_r, w_s = second.strides
    w = (w_k, w_c, w_r, w_s) if problem.direction == "fprop" else (w_c, w_k, w_r, w_s)
    storage = storage_of(problem, first, y, result_layout)
    return _Operands(first, storage, w, problem.k_per_group * w_k, y)


def _partial(tiling: Tiling, operands: _Operands, result_layout: str) -> _Operands:
    """The operands of a launch whose groups are parts of the channels, and whose result is their sums."""
    form = tiling.form
    shape = (form.n, form.splits * form.filters, form.vertical.out_extent, form.horizontal.out_extent)
    w_group, y = form.channels * operands.w[1], strides_of(shape, result_layout)
    return replace(operands, storage=tiling.storage, w_group=w_group, y=y)


def _sum_launch(problem: Problem, tiling: Tiling, device: torch.device) -> Launch:
    """The launch that adds up the parts (families/halo_sm90/sum.cu)."""
    form = tiling.form
    pixels = form.vertical.out_extent * form.horizontal.out_extent
    inner, plane = (form.filters, 1) if tiling.storage.y_inner else (form.filters * pixels, pixels)
    outputs = form.n * form.filters * pixels
    grid = min(_SUM_BLOCKS, ceil_div(outputs, _PACK_THREADS))
    fields = (outputs, inner, form.splits, plane, form.filters)
    return PositionalLaunch(sum_source(problem), device, grid, _PACK_THREADS, 0, _SUM_FORMAT, fields)


def _pack_launch(problem: Problem, tiling: Tiling, operands: _Operands, device: torch.device) -> Launch:
    config, form, vertical = tiling.config, tiling.form, tiling.vertical
    pieces = tiling.chunks * tiling.taps * config.stage_bytes // config.terms // 16
    fields = (
        *(operands.w[0], operands.w[1], operands.w[2], operands.w[3], operands.w_group),
        *(form.filters, form.channels, tiling.packed_blocks, tiling.chunks, vertical.taps, tiling.taps_s),
        *(form.vertical.filter_first, form.vertical.filter_step, form.vertical.taps, vertical.shift, config.pack_h),
        *(form.horizontal.filter_first, form.horizontal.filter_step, form.horizontal.taps, tiling.shift_s),
        *(config.pack_w, BLOCK_M // config.packs, pieces),
    )
    grid = form.groups * tiling.packed_blocks * ceil_div(pieces, _PACK_THREADS)
    return PositionalLaunch(pack_source(problem, tiling), device, grid, _PACK_THREADS, 0, _PACK_FORMAT, fields)


def repair_launch(problem: Problem, form: Form, operands: _Operands, device: torch.device) -> Launch:
    """The launch after a packed one (families/halo_sm90/fixup.cu); it ends at once if every sum was finite."""
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
    return PositionalLaunch(repair_source(problem), device, grid, _PACK_THREADS, 0, _REPAIR_FORMAT, fields)


def _output_strides(form: Form, operands: _Operands) -> tuple[int, int, int, int, int]:
    """Strides of image, filter, output row and column of the launch, and its first element."""
    rows, cols = form.vertical, form.horizontal
    y_n, y_k, y_h, y_w = operands.y
    return (y_n, y_k, y_h * rows.out_step, y_w * cols.out_step, y_h * rows.out_first + y_w * cols.out_first)


def sources(problem: Problem, first: TensorForm, second: TensorForm, result_layout: str) -> Iterator[KernelSource]:
    """The texts of every tile shape that the problem's launches choose from, and of their packing."""
    for form, storage in _launches(problem, first, second, result_layout):
        for tiling in tilings(form, storage):
            yield pack_source(problem, tiling)
            yield source(problem, tiling)
            if tiling.config.repaired:
                yield repair_source(problem)


def split_sources(
    problem: Problem, first: TensorForm, second: TensorForm, result_layout: str
) -> Iterator[KernelSource]:
    """The same with the channels in two parts, and the text that adds them up."""
    for form, storage in _launches(problem, first, second, result_layout):
        for tiling in (each for each in split_tilings(form, storage) if each.config.splits == 2):
            yield pack_source(problem, tiling)
            yield source(problem, tiling)
            yield sum_source(problem)


def _launches(
    problem: Problem, first: TensorForm, second: TensorForm, result_layout: str
) -> Iterator[tuple[Form, Storage]]:
    shape = problem.y_shape if problem.direction == "fprop" else problem.x_shape
    storage = storage_of(problem, first, strides_of(shape, result_layout), result_layout)
    yield from ((form, storage) for form in forms(problem) if form.taps)


def _launch(problem: Problem, tiling: Tiling, operands: _Operands, device: torch.device, sm_count: int) -> Launch:
    text = source(problem, tiling)
    share, block = tiling.share(sm_count), threads(tiling.config, operands.storage)
    maps = (_x_map(problem, tiling, operands), _y_map(problem, tiling, operands))
    fields = (*_fields(tiling, operands), *tiling.share_fields(share))
    return PositionalLaunch(text, device, share.grid, block, tiling.smem_bytes, _PARAMS_FORMAT, fields, maps, pdl=True)


def _x_map(problem: Problem, tiling: Tiling, operands: _Operands) -> BoxMap | None:
    """Boxes of a chunk of channels: rows of pixels where they go right into a slot, else raw tiles of 32 pixels."""
    config, form = tiling.config, tiling.form
    if not config.boxes:
        return None
    size = problem.dtype.itemsize
    chunk = config.chunk_bytes // size
    x_n, x_c, x_h, x_w = (stride * size for stride in operands.x.strides)
    rows, cols = form.vertical.in_extent, form.horizontal.in_extent
    if operands.storage.x_inner:
        extents, strides = (form.channels, form.groups, cols, rows, form.n), (form.channels * size, x_w, x_h, x_n)
        box, swizzle = (chunk, 1, tiling.box_px, 1, 1), _SWIZZLES[config.chunk_bytes]
    else:
        planes = joined_planes(config, operands.storage)
        if operands.storage.x_joined:  # one row: of as many channels as it takes until one is aligned again
            rows, cols, x_h = 1, (planes - 1) * x_c // size + rows * cols, 16
        extents = (cols, rows, form.channels // planes, form.groups, form.n)
        strides = (x_h, planes * x_c, form.channels * x_c, x_n)
        box, swizzle = (UNIT_PX, 1, chunk // planes, 1, 1), _SWIZZLES[UNIT_PX * size]
    kind = _MAP_TYPES[problem.dtype] if config.terms == 1 else DataType.FLOAT32
    return BoxMap(kind, extents, strides, box, swizzle, pointer=_X_POINTER)


def _y_map(problem: Problem, tiling: Tiling, operands: _Operands) -> BoxMap | None:
    """Boxes as halo_sm90/write.cuh keeps them in its buffers."""
    form, config = tiling.form, tiling.config
    if not tiling.y_boxes:
        return None
    size = tiling.storage.y_bytes
    y_n, y_k, y_row, y_col, y_first = (stride * size for stride in _output_strides(form, operands))
    rows, cols = form.vertical.out_extent, form.horizontal.out_extent
    if operands.storage.y_inner:
        row_bytes = min(128, BLOCK_M // config.packs * size)
        extents, strides = (form.filters, form.groups, cols, rows, form.n), (form.filters * size, y_col, y_row, y_n)
        box, swizzle = (row_bytes // size, 1, 128 // size, 1, 1), _SWIZZLES[row_bytes]
    else:
        if tiling.lead:
            rows, cols, y_row = 1, rows * cols, 16
        extents, strides = (cols, rows, form.filters, form.groups, form.n), (y_row, y_k, form.filters * y_k, y_n)
        box, swizzle = (128 // size, 1, 16, 1, 1), _SWIZZLES[128]
    stored = DataType.FLOAT32 if size == 4 else _MAP_TYPES[problem.dtype]
    return BoxMap(stored, extents, strides, box, swizzle, pointer=_Y_POINTER, offset=y_first)


def _fields(tiling: Tiling, operands: _Operands) -> tuple[int, ...]:
    """The scalars of ``HaloParams`` (halo_sm90/tile.cuh), in its order, but for the share."""
    form, config, vertical = tiling.form, tiling.config, tiling.vertical
    rows, cols = form.vertical, form.horizontal
    phases = tiling.phases
    return (
        *operands.x.strides,
        *_output_strides(form, operands),
        *(form.n, rows.in_extent, cols.in_extent, form.channels),
        *(rows.out_extent, cols.out_extent, form.filters),
        *(rows.pad, cols.pad + tiling.lead),
        *(vertical.stride, tiling.stride_w),
        *(vertical.taps, tiling.taps_s, vertical.dil, tiling.dil_w),
        *(vertical.class_move, vertical.line_move),
        *(config.pack_h, config.pack_w),
        *(tiling.strip_cols, tiling.lead),
        *divisor(tiling.pitch),
        *divisor(tiling.wrap),
        *divisor(tiling.plane_px),
        *(tiling.planes_w, tiling.slot_px, tiling.boxes, tiling.single_boxes, tiling.box_px),
        *divisor(tiling.box_units),
        *(*phases.middle, tiling.middle_tap, *phases.begin),
        *(tiling.blocks, tiling.chunks, tiling.slot_bytes),
    )
