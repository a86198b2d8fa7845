"""Host half of kernels/depthwise_pairs_wgrad.cu: filter gradients of depthwise channels_last layers in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from haloconv.env import DeviceFacts, device_facts
from haloconv.families.base import BoundCall, TensorForm, ceil_div, strides_of, summed_call
from haloconv.families.direct_sums import ELEMENTS, bind_sum
from haloconv.families.launch import Launch
from haloconv.jit import BoxMap, DataType, KernelSource, Swizzle, kernel_source
from haloconv.problem import Conv2dProblem

_PARAMS_FORMAT = "3Q6q12i"
_PATCH_ROWS, _PATCH_COLS, _PATCH = 4, 2, 8
BAND_ROWS, UNIT_COLS = 8, 8
_EIGHT, _EIGHT_BYTES = 8, 16
_MOST_TAPS = 7  # in a row or a column of the filter
_MOST_SUMS = 160  # registers of a thread
_MOST_PRODUCTS = 4096  # of one fp32 sum: bounds its rounding
_RESERVED_BYTES = 1 << 10
_X_POINTER, _DY_POINTER = 0, 1
_LOADED = {torch.float16: DataType.FLOAT16, torch.bfloat16: DataType.BFLOAT16}


@dataclass(frozen=True)
class Config:
    """Of a block: eights of channels, columns of a strip, how warps share them, bands in the rings."""

    eights: int
    cols: int
    frag_cols: int
    col_warps: int
    unit_warps: int
    x_stages: int
    dy_stages: int


@dataclass(frozen=True)
class Shape:
    """What follows from a filter's extents and a config, as the kernel has it. Extents in bytes are of shared memory."""

    r: int
    s: int
    config: Config

    @cached_property
    def row_frags(self) -> int:
        return ceil_div(_PATCH_ROWS + self.r - 1, _PATCH // self.config.frag_cols)

    @cached_property
    def col_frags(self) -> int:
        return ceil_div(_PATCH_COLS + self.s - 1, self.config.frag_cols)

    @cached_property
    def x_cols(self) -> int:
        return self.config.cols - _PATCH_COLS + self.col_frags * self.config.frag_cols

    @cached_property
    def warps(self) -> int:
        return self.config.eights * self.config.col_warps * self.config.unit_warps

    @cached_property
    def sums(self) -> int:
        """Registers of a thread."""
        return self.row_frags * self.col_frags // self.config.col_warps * 16

    @cached_property
    def pixel_bytes(self) -> int:
        return (self.config.eights | 1) * _EIGHT_BYTES

    @cached_property
    def x_bytes(self) -> int:
        """Of a band."""
        return BAND_ROWS * self.x_cols * self.pixel_bytes

    @cached_property
    def dy_bytes(self) -> int:
        return BAND_ROWS * self.config.cols * self.pixel_bytes

    @cached_property
    def smem_bytes(self) -> int:
        config = self.config
        barriers = ceil_div(8 * (2 * config.x_stages + config.dy_stages), 128) * 128
        rings = config.x_stages * self.x_bytes + config.dy_stages * self.dy_bytes
        return max(rings, self.warps * self.sums * 32 * 4) + barriers


def source(problem: Conv2dProblem, config: Config) -> KernelSource:
    """The specialised text of the kernel. No extent of the image takes part."""
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[problem.dtype],
        "R": problem.r,
        "S": problem.s,
        "EIGHTS": config.eights,
        "COLS": config.cols,
        "FRAG_COLS": config.frag_cols,
        "COL_WARPS": config.col_warps,
        "UNIT_WARPS": config.unit_warps,
        "X_STAGES": config.x_stages,
        "DY_STAGES": config.dy_stages,
    }
    return kernel_source("depthwise_pairs_wgrad", "depthwise_pairs_wgrad", constants)


def bind(
    problem: Conv2dProblem,
    dy: TensorForm,
    x: TensorForm,
    result_layout: str,
    device: torch.device,
    config: Config,
) -> BoundCall:
    """wgrad(dy, x) -> dw."""
    facts = device_facts(device.index)
    shape = Shape(problem.r, problem.s, config)
    channel_blocks = problem.k // (_EIGHT * config.eights)
    strips, bands = ceil_div(problem.q, config.cols), ceil_div(problem.p, BAND_ROWS)
    all_bands = problem.n * strips * bands
    products = BAND_ROWS * config.cols // _PATCH  # of a sum, for each band
    parts = max(facts.sm_count // channel_blocks, ceil_div(all_bands * products, _MOST_PRODUCTS))
    parts = max(1, min(all_bands, parts))
    fields = (
        x.strides[0], x.strides[2], x.strides[3], dy.strides[0], dy.strides[2], dy.strides[3],
        channel_blocks, problem.n, strips, bands, *divmod(all_bands, parts),
        problem.h, problem.w, problem.p, problem.q, problem.padding[0], problem.padding[2],
    )  # fmt: skip
    maps = (
        _boxes(problem, problem.x_shape, x.strides, shape, shape.x_cols, _X_POINTER),
        _boxes(problem, problem.y_shape, dy.strides, shape, config.cols, _DY_POINTER),
    )
    launch = Launch(
        source(problem, config), device, channel_blocks * parts, 32 * (shape.warps + 1), shape.smem_bytes,
        _PARAMS_FORMAT, fields, maps,
    )  # fmt: skip
    dw_shape, dw_strides = problem.w_shape, strides_of(problem.w_shape, result_layout)
    sum_parts = bind_sum(problem.dtype, dw_shape, dw_strides, parts, device)
    return summed_call(launch, sum_parts, parts * problem.k * problem.r * problem.s, dw_shape, dw_strides)


def _boxes(
    problem: Conv2dProblem,
    extents: tuple[int, ...],
    strides: tuple[int, ...],
    shape: Shape,
    cols: int,
    pointer: int,
) -> BoxMap:
    """Bands of ``cols`` columns: (channel of a block, block, column, row, image)."""
    n, c, h, w = extents
    size, channels = problem.dtype.itemsize, _EIGHT * shape.config.eights
    steps = tuple(step * size for step in (channels, strides[3], strides[2], strides[0]))
    box = (shape.pixel_bytes // size, 1, cols, BAND_ROWS, 1)
    return BoxMap(_LOADED[problem.dtype], (channels, c // channels, w, h, n), steps, box, Swizzle.NONE, pointer)
