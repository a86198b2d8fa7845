"""Host half of families/depthwise/band_wgrad.cu: the filter gradient of depthwise layers in 16 bits on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from haloconv.env import DeviceFacts, device_facts
from haloconv.families.base import BoundCall
from haloconv.families.common import ELEMENTS, ceil_div, summed_call
from haloconv.families.depthwise import strips as depthwise_strips
from haloconv.families.depthwise.band import columns
from haloconv.families.depthwise.strips import (
    SHARE_FORMAT,
    STAGED_FORMAT,
    Staged,
    padding,
    share,
    slots,
    staged,
    strips,
)
from haloconv.families.reduce.sums import bind_sum
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import PositionalLaunch
from haloconv.layout import strides_of
from haloconv.problem import Problem, TensorForm

_PIECE = 8  # columns of one copy
_ROWS, _COLS = 16, 32  # pixels of dy of a warp's step
_X_TILE = 8
_MOST_SUMS = 16  # fragments of a warp: rows of the filter by tiles of x
_MOST_PRODUCTS = 4096  # of one fp32 sum: bounds its rounding
_PARAMS_FORMAT = f"3Q{STAGED_FORMAT}{STAGED_FORMAT}{SHARE_FORMAT}6i"


@dataclass(frozen=True)
class Config:
    """``filter_rows`` of a warp, ``buffers`` of a block, ``min_blocks`` of a multiprocessor, ``warps`` of a block.

    A strip of both planes is cut to about ``buffer_bytes``.
    """

    filter_rows: int
    buffers: int
    min_blocks: int
    warps: int = 4
    buffer_bytes: int = 24 << 10


def _window(problem: Problem) -> tuple[int, int]:
    """Columns of x before a tile of dy, and tiles of x that it meets."""
    left, pad = columns(problem).left, problem.padding[2]
    return left, ceil_div(left - pad + 16 + (problem.s - 1) * problem.dilation[1], _X_TILE)


def why_not(problem: Problem, dy: TensorForm, x: TensorForm, facts: DeviceFacts) -> str | None:
    """None if the kernel takes the problem on the device, else a sentence that says why not."""
    if problem.dtype.itemsize != 2 or problem.direction != "wgrad":
        return "this is for filter gradients in 16 bits"
    config = best_config(problem)
    if config is None:
        return "the sums of the filter do not fit registers"
    refused = depthwise_strips.why_not(problem, (dy, x), facts)
    if refused is None and not _cut(problem, dy, x, config, facts).slots:
        refused = "the rows that a strip needs do not fit shared memory"
    return refused


def best_config(problem: Problem) -> Config | None:
    """As few warps share a step as their registers allow, the rest best of a sweep on an NVIDIA H200 (2026-11-22).

    None: the sums do not fit.
    """
    tiles = _window(problem)[1]
    for shares in (1, 2):
        rows = ceil_div(problem.r, shares)
        if rows * tiles <= _MOST_SUMS:
            return Config(rows, 2, 3 if shares == 1 else 4)
    return None


def source(problem: Problem, config: Config) -> KernelSource:
    """The specialised text of the kernel. No extent of the image takes part."""
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[problem.dtype],
        "R": problem.r,
        "S": problem.s,
        "DIL_H": problem.dilation[0],
        "DIL_W": problem.dilation[1],
        "MULTIPLIER": problem.k_per_group,
        "FILTER_ROWS": config.filter_rows,
        "X_TILES": _window(problem)[1],
        "BUFFERS": config.buffers,
        "THREADS": 32 * config.warps,
        "MIN_BLOCKS": config.min_blocks,
    }
    return kernel_source("depthwise/band_wgrad", "depthwise_band_wgrad", constants)


class _Cut(NamedTuple):
    """Strips of dy, how both tensors are staged, bytes of shared memory, blocks that run at a time."""

    strips: tuple[int, int]
    x: Staged
    dy: Staged
    smem_bytes: int
    slots: int


def _cut(problem: Problem, dy: TensorForm, x: TensorForm, config: Config, facts: DeviceFacts) -> _Cut:
    (left, x_tiles), (pad_top, pad_left) = _window(problem), padding(problem)
    halo_h, halo_w = ((n - 1) * dil for n, dil in zip((problem.r, problem.s), problem.dilation, strict=True))
    dy_width = ceil_div(problem.q, _COLS) * _COLS
    x_width = left + max(problem.w, problem.q - pad_left + halo_w)
    most = (config.buffer_bytes - 2 * halo_h * x_width) // (2 * (x_width + dy_width))
    cut = strips(problem.p, most, _ROWS)
    x_read = dy_width - _COLS + 16 + ceil_div(x_tiles, 2) * 16  # columns that the last step reads
    rows = min(cut[1], problem.p)  # the rest of a step is spare
    of_x = staged(x, problem.x_shape, pad_top, rows + halo_h, left // _PIECE, x_width, x_read, 2, cut[1] - rows)
    of_dy = staged(dy, problem.y_shape, 0, rows, 0, dy_width, dy_width, 2, cut[1] - rows)
    smem = config.buffers * (of_x.buffer_bytes + of_dy.buffer_bytes)
    static = config.warps * 16 * (x_tiles + 1) * _X_TILE * 4
    fits = smem + static <= facts.max_smem_bytes
    return _Cut(cut, of_x, of_dy, smem, slots(facts, smem + static, config.min_blocks) if fits else 0)


def bind(problem: Problem, dy: TensorForm, x: TensorForm, result_layout: str, device: torch.device) -> BoundCall:
    """wgrad(dy, x) -> dw."""
    config = best_config(problem)
    assert config is not None
    cut = _cut(problem, dy, x, config, device_facts(device.index))
    steps = cut.strips[1] // _ROWS * ceil_div(problem.q, _COLS) * ceil_div(problem.r, config.filter_rows)
    most_units = max(1, _MOST_PRODUCTS // (ceil_div(steps, config.warps) * _COLS))
    buffer_bytes = cut.x.buffer_bytes + cut.dy.buffer_bytes
    shared = share(problem.k, problem.n, cut.strips, buffer_bytes, cut.slots, most_units)
    fields = (
        *(*cut.x, *cut.dy, *shared, cut.x.buffer_bytes),
        *(problem.h, problem.w, problem.p, problem.q, padding(problem)[1]),
    )
    grid = problem.k * shared.parts
    text = source(problem, config)
    launch = PositionalLaunch(text, device, grid, 32 * config.warps, cut.smem_bytes, _PARAMS_FORMAT, fields)
    dw_shape, dw_strides = problem.w_shape, strides_of(problem.w_shape, result_layout)
    sum_parts = bind_sum(problem.dtype, dw_shape, dw_strides, shared.parts, device)
    partial_elems = shared.parts * problem.k * problem.r * problem.s
    return summed_call(launch, sum_parts, partial_elems, dw_shape, dw_strides)
