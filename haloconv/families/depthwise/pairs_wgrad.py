"""Host half of families/depthwise/pairs_wgrad.cu: filter gradients of depthwise channels_last layers in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from haloconv.env import DeviceFacts, device_facts, max_smem_bytes_of
from haloconv.families.base import BoundCall
from haloconv.families.common import ELEMENTS, ceil_div, summed_call
from haloconv.families.depthwise import nhwc_wgrad_sum as depthwise_nhwc_wgrad_sum
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import PositionalLaunch
from haloconv.layout import strides_of
from haloconv.problem import Problem, TensorForm

_PARAMS_FORMAT = "3Q6q15i"
_CAPABILITY = (9, 0)
_PATCH_ROWS, _PATCH_COLS, _PATCH = 4, 2, 8
_BAND_ROWS, _UNIT_COLS = 8, 8
_EIGHT, _EIGHT_BYTES = 8, 16
_MOST_TAPS = 7  # in a row or a column of the filter
_MOST_PRODUCTS = 4096  # of one fp32 sum: bounds its rounding
_HALO_BANDS = 0.25  # what the rows of x below a piece cost
_WIDTHS = ((16, 32), (8, 16))  # columns of dy beyond which strips may be so wide
_MOST_STAGES, _STAGES, _FEW_STAGES = 6, 4, 3  # the last where bands have large halos
_FEWEST_LOADERS, _MOST_LOADERS = 2, 4
_WARPS = ((64, 16, 4), (104, 12, 2), (160, 8, 2))  # sums up to which a block has so many warps, of which copy so many


@dataclass(frozen=True)
class Config:
    """Of a block: eights of channels, columns of a strip and of a fragment, warps, bands in the ring of dy."""

    eights: int
    cols: int
    frag_cols: int
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
        return self.config.eights * self.config.unit_warps

    @cached_property
    def sums(self) -> int:
        """Registers of a thread."""
        return self.row_frags * self.col_frags * 16

    @cached_property
    def smem_bytes(self) -> int:
        config, pixel_bytes = self.config, (self.config.eights | 1) * _EIGHT_BYTES
        unit_rows = (self.row_frags * _PATCH + _PATCH_ROWS * config.frag_cols) // config.frag_cols
        x_stages = config.stages + (unit_rows > _BAND_ROWS)
        x_cols = config.cols - _PATCH_COLS + self.col_frags * config.frag_cols
        rings = (x_stages * x_cols + config.stages * config.cols) * _BAND_ROWS * pixel_bytes
        barriers = ceil_div(8 * 2 * x_stages, 128) * 128
        return barriers + max(rings, self.warps * (self.sums * 33 + 16) * 4)


def why_not(problem: Problem, dy: TensorForm, x: TensorForm, facts: DeviceFacts) -> str | None:
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


def best_config(problem: Problem) -> Config:
    """The config by sweeps on an NVIDIA H200: many channels of a block, wide strips, but some bands under way."""

    def fewest_products(cols: int) -> tuple[int, int]:
        shape = Shape(problem.r, problem.s, Config(1, _UNIT_COLS, cols, 1, 1, 1))
        return shape.row_frags * shape.col_frags, -cols

    frag_cols = min((2, 4, 8), key=fewest_products)
    sums = fewest_products(frag_cols)[0] * 16
    warps, loaders = next((each, copy) for most, each, copy in _WARPS if sums <= most)
    widths = [cols for least, cols in _WIDTHS if problem.q > least] if problem.q > _UNIT_COLS else [_UNIT_COLS]
    found = [
        _config(problem, frag_cols, warps - loaders, eights, cols)
        for eights in _eights(problem.k // _EIGHT, warps - loaders)
        for cols in widths
    ]
    enough = _FEW_STAGES if frag_cols == _UNIT_COLS else _STAGES
    return next((config for config in found if config.stages >= enough), max(found, key=lambda each: each.stages))


def _config(problem: Problem, frag_cols: int, warps: int, eights: int, cols: int) -> Config:
    """With the warps and the bands that fit a multiprocessor; ``warps``: that may multiply."""
    units = cols // _UNIT_COLS
    unit_warps = max(
        each for each in range(1, units + 1) if units % each == 0 and (each == 1 or each * eights <= warps)
    )
    multiply = eights * unit_warps
    loaders = min(_MOST_LOADERS, ceil_div(multiply + _FEWEST_LOADERS, 4) * 4 - multiply)  # of four schedulers
    configs = (Config(eights, cols, frag_cols, unit_warps, loaders, stages) for stages in range(_MOST_STAGES, 0, -1))
    most = max_smem_bytes_of(_CAPABILITY)
    return next(each for each in configs if each.stages == 1 or Shape(problem.r, problem.s, each).smem_bytes <= most)


def _eights(count: int, most: int) -> list[int]:
    """Of a channel block, where there are ``count``: those of which the fewest are left over, many first."""
    if count <= most:
        return [count]
    spare = {each: ceil_div(count, each) * each for each in range(most, most // 2 - 1, -1)}
    return [each for each in spare if spare[each] == min(spare.values())]


def source(problem: Problem, config: Config) -> KernelSource:
    """The specialised text of the kernel. No extent of the image takes part."""
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[problem.dtype],
        "R": problem.r,
        "S": problem.s,
        "EIGHTS": config.eights,
        "COLS": config.cols,
        "FRAG_COLS": config.frag_cols,
        "UNIT_WARPS": config.unit_warps,
        "LOADERS": config.loaders,
        "STAGES": config.stages,
    }
    return kernel_source("depthwise/pairs_wgrad", "depthwise_pairs_wgrad", constants)


class _Cut(NamedTuple):
    """``Cut`` of the kernel without its channel blocks."""

    parts: int
    images: int
    strips: int
    pieces: int
    piece_bands: int
    bands: int
    turn: int


def _cut(problem: Problem, config: Config, blocks: int) -> _Cut:
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
    problem: Problem,
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
    launch = PositionalLaunch(
        source(problem, config), device, channel_blocks * cut.parts, 32 * (shape.warps + config.loaders),
        shape.smem_bytes, _PARAMS_FORMAT, fields,
    )  # fmt: skip
    strides, block_channels = strides_of(problem.w_shape, result_layout), _EIGHT * config.eights
    sum_parts = depthwise_nhwc_wgrad_sum.bind(problem, strides, channel_blocks, block_channels, cut.parts, device)
    elems = channel_blocks * block_channels * problem.r * problem.s  # of a part
    return summed_call(launch, sum_parts, cut.parts * elems, problem.w_shape, strides)
