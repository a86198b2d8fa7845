"""Host half of the ``halo_sm80`` family (device half: conv.cu): few channels per group on tensor cores.

fprop and dgrad from compute capability 8.0 on. fp32 tensors are multiplied in TF32, fp16 and bf16 in their own type;
sums are fp32. NCHW and channels_last, in and out, are native. The filter is packed by a small kernel at every call.
"""

from __future__ import annotations

from math import gcd

import torch

from haloconv import support
from haloconv.env import DeviceFacts, device_facts
from haloconv.families.base import MOST_CANDIDATES, BoundCall
from haloconv.families.common import ELEMENTS, ceil_div, few_apart
from haloconv.families.grouped_sm90 import conv as march
from haloconv.families.halo_sm80.configs import configs, fits
from haloconv.families.halo_sm80.fold import fold, folded, has_folds
from haloconv.families.halo_sm80.tile import Config, Layer, Tiling
from haloconv.jit import BoxMap, DataType, KernelSource, Swizzle, kernel_source
from haloconv.jit.launch import PositionalLaunch
from haloconv.layout import strides_of
from haloconv.problem import Problem, TensorForm

_X_POINTER = 0
_MAP_TYPES = {
    torch.float32: DataType.TFLOAT32,  # rounds on the way
    torch.float16: DataType.FLOAT16,
    torch.bfloat16: DataType.BFLOAT16,
}
_PARAMS_FORMAT = "4Q8q5q10i 3i 3i 5i iIiIiIi 4i 4i 2i iIiIiIiI 2i 3i i iIiI 5i".replace(" ", "")
_PACK_FORMAT = "2Q6q10i 3i 4i 5i".replace(" ", "")
_PACK_THREADS = 256
_WIDE_ELEMS = (1 << 31) - (1 << 24)  # offsets from a tile's first place, which may lie before the tensor
_LEAST_CAPABILITY = (8, 0)
_BOX_CAPABILITY = (9, 0)  # of the copy engine that takes tensor maps


class HaloSm80Family:
    """Stems and grouped layers of few channels, forward and input gradient."""

    name = "halo_sm80"

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        reason = support.why_not(problem, device) or support.why_no_tensor_cores(problem)
        if reason is not None:
            return reason
        facts = device_facts(device.index)
        if facts.capability < _LEAST_CAPABILITY:
            return "the device has no tensor cores for TF32 and bf16 (compute capability 8.0)"
        inner = problem.layout == "nhwc"
        if not fits(_layer(problem, 0, 1, inner), facts.max_smem_bytes):
            return "no tile of halo_sm80 fits shared memory"
        return None

    def candidates(
        self, problem: Problem, first: TensorForm, second: TensorForm, result_layout: str, device: torch.device
    ) -> list[Config | march.Config]:
        """The best march, then the best tile of each way to multiply: other tiles of the same way are close to it."""
        facts = device_facts(device.index)
        marches = _marches(problem, first, result_layout, facts)[:1]
        problem, first, second = _folded(problem, first, second, facts)
        tilings = configs(layer_of(problem, first, result_layout, facts), facts.sm_count, facts.max_smem_bytes)
        found = few_apart(tilings, lambda each: (each.config.m_tiles, each.config.n_tiles, each.config.warps))
        return [*marches, *(tiling.config for tiling in found)][:MOST_CANDIDATES]

    def bind(
        self,
        problem: Problem,
        first: TensorForm,
        second: TensorForm,
        result_layout: str,
        device: torch.device,
        config: Config | march.Config | None = None,
    ) -> BoundCall:
        facts = device_facts(device.index)
        if config is None:
            config = next(iter(_marches(problem, first, result_layout, facts)), None)
        if isinstance(config, march.Config):
            return march.bind(problem, first, second, result_layout, device, config)
        problem, first, second = _folded(problem, first, second, facts)
        bound = Bound(problem, first, second, result_layout, device, config)
        return bound.fprop if problem.direction == "fprop" else bound.dgrad


class Bound:
    """A problem bound to its launches: pack the filter, unless there is little of it, then multiply."""

    def __init__(
        self,
        problem: Problem,
        first: TensorForm,
        second: TensorForm,
        result_layout: str,
        device: torch.device,
        wanted: Config | None = None,
    ) -> None:
        facts = device_facts(device.index)
        self._shape = problem.y_shape if problem.direction == "fprop" else problem.x_shape
        self._strides = strides_of(self._shape, result_layout)
        layer = layer_of(problem, first, result_layout, facts)
        best = None if wanted else configs(layer, facts.sm_count, facts.max_smem_bytes)[0]
        tiling = best or Tiling(layer, wanted)
        config = tiling.config
        self._packed_bytes, self._pack = 0, None
        if tiling.packed:
            tiles = layer.classes * tiling.group_tiles * tiling.filter_tiles * tiling.chunks
            self._packed_bytes = tiles * tiling.weight_bytes
            pack = _pack_fields(problem, tiling, second.strides, self._packed_bytes // 8)
            grid = ceil_div(self._packed_bytes // 8, _PACK_THREADS)
            self._pack = PositionalLaunch(
                pack_source(problem, tiling), device, grid, _PACK_THREADS, 0, _PACK_FORMAT, pack
            )
        blocks = tiling.blocks(facts.sm_count, facts.max_smem_bytes)
        grid = layer.classes * tiling.filter_tiles * tiling.group_tiles * blocks
        fields = _fields(problem, tiling, blocks, first.strides, second.strides, self._strides)
        text = source(problem, tiling)
        maps = (_x_map(problem, tiling, first) if tiling.boxes else None,)
        self._launch = PositionalLaunch(
            text, device, grid, config.threads, tiling.smem_bytes, _PARAMS_FORMAT, fields, maps
        )

    def _run(self, x: torch.Tensor, w: torch.Tensor, bias: int) -> torch.Tensor:
        y = x.new_empty_strided(self._shape, self._strides)
        if self._pack is None:
            self._launch(x.data_ptr(), w.data_ptr(), y.data_ptr(), bias)
            return y
        packed = torch.empty(self._packed_bytes, dtype=torch.uint8, device=x.device)
        self._pack(w.data_ptr(), packed.data_ptr())
        self._launch(x.data_ptr(), packed.data_ptr(), y.data_ptr(), bias)
        return y

    def fprop(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        """y (N, K, P, Q) of x (N, C, H, W), w (K, C/G, R, S) and b (K,) or None."""
        if b is None:
            return self._run(x, w, 0)
        b = b if b.is_contiguous() else b.contiguous()
        return self._run(x, w, b.data_ptr())

    def dgrad(self, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """dx (N, C, H, W) of dy (N, K, P, Q) and w (K, C/G, R, S)."""
        return self._run(dy, w, 0)


def _marches(problem: Problem, x: TensorForm, result_layout: str, facts: DeviceFacts) -> list[march.Config]:
    """The configs of families/grouped_sm90/conv.cu where it takes the problem, best first."""
    return [] if march.why_not(problem, x, result_layout, facts) else march.configs(problem, facts.max_smem_bytes)


def _folded(
    problem: Problem, x: TensorForm, w: TensorForm, facts: DeviceFacts
) -> tuple[Problem, TensorForm, TensorForm]:
    """A channels_last stem as one of a single channel, where its rows can then be copied as they lie in memory."""
    words = problem.dtype.itemsize == 4 or problem.stride[1] * problem.c % 2 == 0  # 16 bits: pixels begin at words
    if problem.direction != "fprop" or not words or not has_folds(problem, x, w):
        return problem, x, w
    one, *forms = fold(problem), *(folded(form) for form in (x, w))
    layer = layer_of(one, forms[0], "nhwc", facts)
    return (one, *forms) if layer.x_run > 1 and fits(layer, facts.max_smem_bytes) else (problem, x, w)


def layer_of(problem: Problem, x: TensorForm, result_layout: str, facts: DeviceFacts | None = None) -> Layer:
    """The layer whose gathered tensor is stored as ``x``; without ``facts`` for a device without a copy engine."""
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
    boxes = planes and facts is not None and facts.capability >= _BOX_CAPABILITY
    return _layer(problem, copy, run, result_layout == "nhwc", span, boxes)


def _layer(problem: Problem, x_copy: int, x_run: int, y_inner: bool, span: int = 0, x_boxes: bool = False) -> Layer:
    elems = max(span, *(n * c * h * w for n, c, h, w in (problem.x_shape, problem.y_shape)))
    stored = {"elem_bytes": problem.dtype.itemsize, "x_copy": x_copy, "x_run": x_run, "y_inner": y_inner}
    stored["x_boxes"] = x_boxes
    stored["wide"] = elems >= _WIDE_ELEMS
    common = {"n": problem.n, "groups": problem.groups, **stored}
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
    """The text of the packing kernel."""
    constants = {
        "ELEM": ELEMENTS[problem.dtype],
        "DGRAD": int(problem.direction == "dgrad"),
        "SPLIT": int(tiling.config.split),
        "FOUR_FILTERS": int(tiling.four_filters),
    }
    return kernel_source("halo_sm80/pack", "halo_sm80_pack", constants)


def source(problem: Problem, tiling: Tiling) -> KernelSource:
    """The text of the kernel: extents of images and filters are run-time values."""
    config = tiling.config
    constants = {
        "ELEM": ELEMENTS[problem.dtype],
        "DGRAD": int(problem.direction == "dgrad"),
        "SPLIT": int(config.split),
        "UNIT_BYTES": config.unit_bytes,
        "COPY_BYTES": config.copy_bytes,
        "STAGED_PX": config.run,
        "BOXES": int(tiling.boxes),
        "M_TILES": config.m_tiles,
        "N_TILES": config.n_tiles,
        "WARPS": config.warps,
        "DEPTH": config.depth,
        "MIN_BLOCKS": tiling.min_blocks,
        "Y_PAIRS": tiling.y_pairs,
        "FOUR_FILTERS": int(tiling.four_filters),
        "IN_ROW": int(config.in_row),
        "MOVE_W": tiling.layer.move_w,
        "PACKED": int(tiling.packed),
        "LATE": int(tiling.late),
        "WIDE": int(tiling.layer.wide),
        "HAS_BIAS": int(problem.bias),
    }
    return kernel_source("halo_sm80/conv", "halo_sm80", constants)


def _x_map(problem: Problem, tiling: Tiling, x: TensorForm) -> BoxMap:
    """Boxes of one channel: the lines of a tile."""
    size = problem.dtype.itemsize
    n, c, h, w = problem.x_shape if problem.direction == "fprop" else problem.y_shape
    x_n, x_c, x_h, _ = (stride * size for stride in x.strides)
    box = (tiling.row_bytes // size, tiling.lines, 1, 1)
    return BoxMap(_MAP_TYPES[problem.dtype], (w, h, c, n), (x_h, x_c, x_n), box, Swizzle.NONE, pointer=_X_POINTER)


def _extents(problem: Problem) -> tuple[int, ...]:
    """The ``Extents`` of halo_sm80/order.cuh."""
    rows, cols = (problem.p, problem.q) if problem.direction == "fprop" else (problem.h, problem.w)
    padding = (problem.padding[0], problem.padding[2])
    return (problem.r, problem.s, *problem.stride, *problem.dilation, *padding, rows, cols)


def _filter_strides(problem: Problem, w: tuple[int, ...]) -> tuple[int, ...]:
    """The ``FilterStrides`` of halo_sm80/weights.cuh: dgrad's filters are the channels of ``w`` (K, C/G, R, S)."""
    w_filter, w_channel = (w[0], w[1]) if problem.direction == "fprop" else (w[1], w[0])
    return (problem.k_per_group * w[0], w_filter, w_channel, w[2], w[3])


def _pack_fields(problem: Problem, tiling: Tiling, w: tuple[int, ...], lanes: int) -> tuple[int, ...]:
    """The scalars of ``Params`` in halo_sm80_pack.cu; ``w`` are the filter's strides in elements."""
    layer, config = tiling.layer, tiling.config
    return (
        *(*_filter_strides(problem, w), lanes),
        *_extents(problem),
        *(layer.channels, layer.filters, layer.groups),
        *(tiling.group_tiles, config.tile_groups, tiling.filter_tiles, config.n_items * config.n_tiles),
        *(config.chunk_channels, tiling.chunks, tiling.parts, tiling.slices, int(tiling.taps_first)),
    )


def _divisor(value: int) -> tuple[int, int]:
    """A ``SmallDivisor`` of halo_sm80/shape.cuh."""
    return (value, 0 if value == 1 else ceil_div(1 << 32, value))


def _fields(
    problem: Problem, tiling: Tiling, blocks: int, x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...]
) -> tuple[int, ...]:
    """The scalars of ``Params`` in halo_sm80/shape.cuh; ``x``, ``w`` and ``y`` are strides in elements."""
    layer, config = tiling.layer, tiling.config
    height, width = (problem.h, problem.w) if problem.direction == "fprop" else (problem.p, problem.q)
    return (
        *(*x, *y),
        *_filter_strides(problem, w),
        *_extents(problem),
        *(problem.n, height, width),
        *(layer.channels, layer.filters, layer.groups),
        *(layer.classes, config.tile_groups, tiling.group_tiles, tiling.tile_filters, tiling.filter_tiles),
        *(*_divisor(config.tile_n), *_divisor(config.tile_p), *_divisor(config.row_slots), config.tile_q),
        *(*tiling.tiles, blocks),
        *(config.chunk_channels, tiling.chunks, tiling.parts, tiling.slices),
        *(int(tiling.taps_first), tiling.columns),
        *(*_divisor(tiling.runs), *_divisor(tiling.row_parts), *_divisor(tiling.planes), *_divisor(tiling.pieces)),
        *(tiling.lines, tiling.part_rows),
        *(tiling.row_bytes, tiling.lines * tiling.row_bytes, tiling.plane_bytes),
        layer.move_h * tiling.row_bytes,
        *(*_divisor(tiling.m_items), *_divisor(config.n_items)),
        *(tiling.k_bytes, tiling.table_bytes, tiling.weight_bytes, tiling.weight_buffers, tiling.x_bytes),
    )
