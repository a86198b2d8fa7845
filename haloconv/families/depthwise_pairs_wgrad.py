"""Host half of kernels/depthwise_pairs_wgrad.cu: filter gradients of depthwise channels_last layers in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from haloconv.env import DeviceFacts, device_facts
from haloconv.families.base import BoundCall, TensorForm, ceil_div, strides_of, summed_call
from haloconv.families.direct_sums import ELEMENTS
from haloconv.families.launch import Launch
from haloconv.jit import BoxMap, DataType, KernelSource, Swizzle, kernel_source
from haloconv.problem import Conv2dProblem

_PARAMS_FORMAT, _SUM_FORMAT = "3Q6q15i", "2Q3q3i"
_PART_WARPS = 8  # that share the parts of a sum
_PATCH_ROWS, _PATCH_COLS, _PATCH = 4, 2, 8
BAND_ROWS, UNIT_COLS = 8, 8
_EIGHT, _EIGHT_BYTES = 8, 16
_MOST_TAPS = 7  # in a row or a column of the filter
_MOST_SUMS = 160  # registers of a thread
_MOST_PRODUCTS = 4096  # of one fp32 sum: bounds its rounding
_HALO_BANDS = 0.25  # what the rows of x below a piece cost
_RESERVED_BYTES = 1 << 10
_X_POINTER, _DY_POINTER = 0, 1
_LOADED = {torch.float16: DataType.FLOAT16, torch.bfloat16: DataType.BFLOAT16}


@dataclass(frozen=True)
class Config:
    """Of a block: eights of channels, columns of a strip, how warps share them, warps that copy, bands in the rings."""

    eights: int
    cols: int
    frag_cols: int
    col_warps: int
    unit_warps: int
    loaders: int
    stages: int


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
        stages = self.config.stages
        below = ceil_div((self.row_frags + _PATCH_ROWS * self.config.frag_cols // _PATCH) * _PATCH, self.config.frag_cols)
        x_stages = stages + (below > BAND_ROWS)
        barriers = ceil_div(8 * (2 * x_stages + stages), 128) * 128
        return max(x_stages * self.x_bytes + stages * self.dy_bytes, self.warps * (self.sums * 33 + 16) * 4) + barriers


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
        "LOADERS": config.loaders,
        "STAGES": config.stages,
    }
    return kernel_source("depthwise_pairs_wgrad", "depthwise_pairs_wgrad", constants)


def sum_source(problem: Conv2dProblem, config: Config) -> KernelSource:
    """The text of the kernel that adds the parts."""
    constants = {"ELEM": ELEMENTS[problem.dtype], "R": problem.r, "S": problem.s, "CHANNELS": _EIGHT * config.eights}
    constants["PART_WARPS"] = _PART_WARPS
    return kernel_source("depthwise_pairs_wgrad_sum", "depthwise_pairs_wgrad_sum", constants)


class _Cut(NamedTuple):
    """``Cut`` of the kernel without its channel blocks."""

    parts: int
    images: int
    strips: int
    pieces: int
    piece_bands: int
    bands: int
    turn: int


def _cut(problem: Conv2dProblem, shape: Shape, blocks: int) -> _Cut:
    """The pieces of strips that let ``blocks`` blocks end at the same time, rows of x that are read twice included."""
    strips, bands = ceil_div(problem.q, shape.config.cols), ceil_div(problem.p, BAND_ROWS)

    def rounds(piece_bands: int) -> int:
        return ceil_div(problem.n * strips * ceil_div(bands, piece_bands), blocks)

    piece_bands = min(range(1, bands + 1), key=lambda each: (rounds(each) * (each + _HALO_BANDS), -each))
    products = rounds(piece_bands) * piece_bands * BAND_ROWS * shape.config.cols // _PATCH  # of a sum
    pieces = ceil_div(bands, piece_bands)
    parts = min(problem.n * strips * pieces, blocks * ceil_div(products, _MOST_PRODUCTS))
    return _Cut(parts, problem.n, strips, pieces, piece_bands, bands, int(parts % strips == 0))


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
    channel_blocks = ceil_div(problem.k, _EIGHT * config.eights)
    cut = _cut(problem, shape, max(1, facts.sm_count // channel_blocks))
    fields = (
        x.strides[0], x.strides[2], x.strides[3], dy.strides[0], dy.strides[2], dy.strides[3], channel_blocks, *cut,
        problem.k, problem.h, problem.w, problem.p, problem.q, problem.padding[0], problem.padding[2],
    )  # fmt: skip
    launch = Launch(
        source(problem, config), device, channel_blocks * cut.parts, 32 * (shape.warps + config.loaders), shape.smem_bytes,
        _PARAMS_FORMAT, fields,
    )  # fmt: skip
    dw_shape, dw_strides = problem.w_shape, strides_of(problem.w_shape, result_layout)
    elems = channel_blocks * _EIGHT * config.eights * problem.r * problem.s
    sum_parts = Launch(
        sum_source(problem, config), device, ceil_div(elems, 32), 32 * _PART_WARPS, 0, _SUM_FORMAT,
        (dw_strides[0], *dw_strides[2:], elems, problem.k, cut.parts),
    )  # fmt: skip
    return summed_call(launch, sum_parts, cut.parts * elems, dw_shape, dw_strides)

