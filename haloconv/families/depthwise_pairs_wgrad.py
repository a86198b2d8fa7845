"""Host half of kernels/depthwise_pairs_wgrad.cu: filter gradients of depthwise channels_last layers in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from haloconv.env import DeviceFacts, device_facts, max_smem_bytes_of
from haloconv.families import depthwise_nhwc_wgrad_sum
from haloconv.families.base import BoundCall, TensorForm, ceil_div, strides_of, summed_call
from haloconv.families.direct_sums import ELEMENTS
from haloconv.families.launch import Launch
from haloconv.jit import KernelSource, kernel_source
from haloconv.problem import Conv2dProblem

_PARAMS_FORMAT = "3Q6q15i"
_CAPABILITY = (9, 0)
_PATCH_ROWS, _PATCH_COLS, _PATCH = 4, 2, 8
_BAND_ROWS, _UNIT_COLS = 8, 8
_EIGHT, _EIGHT_BYTES = 8, 16
_MOST_TAPS = 7  # in a row or a column of the filter
_MOST_PRODUCTS = 4096  # of one fp32 sum: bounds its rounding
_HALO_BANDS = 0.25  # what the rows of x below a piece cost
_MOST_COLS, _MOST_STAGES = 32, 6
_WARPS = ((64, 16, 4), (104, 12, 2), (160, 8, 2))  # sums up to which a block has so many warps, of which copy so many


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
    """What follows from a filter's extents and a config, as the kernel has it."""

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
    def warps(self) -> int:
        """Of a block, that multiply."""
        return self.config.eights * self.config.col_warps * self.config.unit_warps

    @cached_property
    def sums(self) -> int:
        """Registers of a thread."""
        return self.row_frags * self.col_frags // self.config.col_warps * 16

    @cached_property
    def smem_bytes(self) -> int:
        config, pixel_bytes = self.config, (self.config.eights | 1) * _EIGHT_BYTES
        unit_rows = (self.row_frags * _PATCH + _PATCH_ROWS * config.frag_cols) // config.frag_cols
        x_stages = config.stages + (unit_rows > _BAND_ROWS)
        x_cols = config.cols - _PATCH_COLS + self.col_frags * config.frag_cols
        rings = (x_stages * x_cols + config.stages * config.cols) * _BAND_ROWS * pixel_bytes
        barriers = ceil_div(8 * 2 * x_stages, 128) * 128
        return barriers + max(rings, self.warps * (self.sums * 33 + 16) * 4)


def why_not(problem: Conv2dProblem, dy: TensorForm, x: TensorForm, facts: DeviceFacts) -> str | None:
    """None if the kernel takes the problem with tensors of these forms on the device, else why not."""
    if facts.capability != _CAPABILITY:
        return "the device is no Hopper GPU (compute capability 9.0)"
    if problem.direction != "wgrad" or problem.dtype.itemsize != 2:
        return "this is for filter gradients in 16 bits"
    if problem.stride != (1, 1) or problem.dilation != (1, 1):
        return "the layer is strided or dilated"
    if problem.k_per_group != 1 or problem.k % _EIGHT:
        return "channels are no eights, or have several filters"
    if max(problem.r, problem.s) > _MOST_TAPS:
        return f"the filter has more than {_MOST_TAPS} taps in a row or a column"
    if any(form.strides[1] != 1 or not form.aligned or _has_gaps(form) for form in (dy, x)):
        return "channels are no neighbours at multiples of 16 bytes"
    return None


def _has_gaps(form: TensorForm) -> bool:
    return any(step % _EIGHT for step in (form.strides[0], *form.strides[2:]))


def best_config(problem: Conv2dProblem) -> Config:
    """The config by a sweep on an NVIDIA H200: as many channels as warps, strips that leave room for three bands."""

    def fewest_products(cols: int) -> tuple[int, int]:
        shape = Shape(problem.r, problem.s, Config(1, _UNIT_COLS, cols, 1, 1, 1, 1))
        return shape.row_frags * shape.col_frags, -cols

    frag_cols = min((2, 4, 8), key=fewest_products)
    sums = fewest_products(frag_cols)[0] * 16
    warps, loaders = next((each, copy) for most, each, copy in _WARPS if sums <= most)
    eights = _eights(problem.k // _EIGHT, warps - loaders)
    widest = min(_MOST_COLS, ceil_div(problem.q, _UNIT_COLS) * _UNIT_COLS)
    unit_warps = max(1, min(widest // _UNIT_COLS, (warps - loaders) // eights))
    loaders = min(4, ceil_div(eights * unit_warps + loaders, 4) * 4 - eights * unit_warps)
    for cols in range(widest, 0, -_UNIT_COLS):
        for stages in range(_MOST_STAGES, 2, -1):
            config = Config(eights, cols, frag_cols, 1, unit_warps, loaders, stages)
            if Shape(problem.r, problem.s, config).smem_bytes <= max_smem_bytes_of(_CAPABILITY):
                return config
    raise AssertionError("three bands of a unit fit every Hopper GPU")


def _eights(count: int, most: int) -> int:
    """Of a channel block, where there are ``count``: such that few are left over, and then many."""
    if count <= most:
        return count
    return min(range(most // 2, most + 1), key=lambda each: (ceil_div(count, each) * each, -each))


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


class _Cut(NamedTuple):
    """``Cut`` of the kernel without its channel blocks."""

    parts: int
    images: int
    strips: int
    pieces: int
    piece_bands: int
    bands: int
    turn: int


def _cut(problem: Conv2dProblem, config: Config, blocks: int) -> _Cut:
    """The pieces of strips that let ``blocks`` blocks end at the same time, rows of x that are read twice included."""
    strips, bands = ceil_div(problem.q, config.cols), ceil_div(problem.p, _BAND_ROWS)

    def rounds(piece_bands: int) -> int:
        return ceil_div(problem.n * strips * ceil_div(bands, piece_bands), blocks)

    piece_bands = min(range(1, bands + 1), key=lambda each: (rounds(each) * (each + _HALO_BANDS), -each))
    products = rounds(piece_bands) * piece_bands * _BAND_ROWS * config.cols // _PATCH  # of a sum
    pieces = ceil_div(bands, piece_bands)
    parts = min(problem.n * strips * pieces, blocks * ceil_div(products, _MOST_PRODUCTS))
    return _Cut(parts, problem.n, strips, pieces, piece_bands, bands, int(parts % strips == 0))


def bind(
    problem: Conv2dProblem,
    dy: TensorForm,
    x: TensorForm,
    result_layout: str,
    device: torch.device,
    config: Config | None = None,
) -> BoundCall:
    """wgrad(dy, x) -> dw."""
    facts = device_facts(device.index)
    config = config or best_config(problem)
    shape = Shape(problem.r, problem.s, config)
    channel_blocks = ceil_div(problem.k, _EIGHT * config.eights)
    cut = _cut(problem, config, max(1, facts.sm_count // channel_blocks))
    fields = (
        x.strides[0], x.strides[2], x.strides[3], dy.strides[0], dy.strides[2], dy.strides[3], channel_blocks, *cut,
        problem.k, problem.h, problem.w, problem.p, problem.q, problem.padding[0], problem.padding[2],
    )  # fmt: skip
    launch = Launch(
        source(problem, config), device, channel_blocks * cut.parts, 32 * (shape.warps + config.loaders),
        shape.smem_bytes, _PARAMS_FORMAT, fields,
    )  # fmt: skip
    strides, block_channels = strides_of(problem.w_shape, result_layout), _EIGHT * config.eights
    sum_parts = depthwise_nhwc_wgrad_sum.bind(problem, strides, channel_blocks, block_channels, cut.parts, device)
    elems = channel_blocks * block_channels * problem.r * problem.s  # of a part
    return summed_call(launch, sum_parts, cut.parts * elems, problem.w_shape, strides)
