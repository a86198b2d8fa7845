"""Host half of families/depthwise/band.cu: fprop and dgrad of depthwise layers in 16 bits on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from haloconv.env import DeviceFacts, device_facts
from haloconv.families.base import BoundCall
from haloconv.families.common import ELEMENTS, ceil_div
from haloconv.families.depthwise import strips as depthwise_strips
from haloconv.families.depthwise.strips import PIECE_BYTES, Cut, bind_strips, padding, shapes, slots, staged, strips
from haloconv.jit import KernelSource, kernel_source
from haloconv.problem import Problem, TensorForm

_PIECE = 8  # columns of one copy
_ROWS, _TILE = 8, 16  # output rows of a warp's step, output columns of a tile
_MOST_BANDS = 18  # slices of all filter rows: four registers each
_MOST_ABOVE = 16  # columns of a window before the first that a filter meets
_FILTER_BYTES = 4096  # about what a filter between zeros takes


@dataclass(frozen=True)
class Config:
    """``tiles`` of 16 columns in a warp's step; ``buffers`` and ``warps`` of a block.

    ``min_blocks`` blocks must fit a multiprocessor. A strip of a plane is cut to about ``buffer_bytes``.
    """

    tiles: int
    buffers: int
    min_blocks: int
    warps: int = 4
    buffer_bytes: int = 12 << 10


class Columns(NamedTuple):
    """A window of a tile: it begins ``left`` columns before the tile, and has ``slices`` of 16 columns."""

    left: int
    slices: int


def columns(problem: Problem) -> Columns:
    """The window of a tile, which begins at a piece."""
    pad = padding(problem)[1]
    left = ceil_div(max(pad, 0), _PIECE) * _PIECE
    return Columns(left, ceil_div(left - pad + _TILE + (problem.s - 1) * problem.dilation[1], _TILE))


def why_not(problem: Problem, side: TensorForm, result_layout: str, facts: DeviceFacts) -> str | None:
    """None if the bands take the problem on the device, else a sentence that says why not."""
    if problem.dtype.itemsize != 2 or problem.direction == "wgrad" or result_layout != "nchw":
        return "bands are for fprop and dgrad in 16 bits and nchw"
    if problem.r * columns(problem).slices > _MOST_BANDS:
        return "the bands of the filter do not fit registers"
    if padding(problem)[1] < -_MOST_ABOVE:
        return "the filter begins too far from the outputs"
    refused = depthwise_strips.why_not(problem, (side,), facts)
    if refused is None and not _cut(problem, side, best_config(problem), facts).slots:
        refused = "the rows that a strip needs do not fit shared memory"
    return refused


def best_config(problem: Problem) -> Config:
    """Best of a sweep on an NVIDIA H200 (2026-11-22, 5x5 and 7x7 on maps of 56, 64 and 112)."""
    return Config(4, 3, 4)


def source(problem: Problem, config: Config) -> KernelSource:
    """The specialised text of the kernel. No extent of the image takes part."""
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[problem.dtype],
        "DGRAD": int(problem.direction == "dgrad"),
        "R": problem.r,
        "S": problem.s,
        "DIL_H": problem.dilation[0],
        "DIL_W": problem.dilation[1],
        "MULTIPLIER": problem.k_per_group,
        "SLICES": columns(problem).slices,
        "TILES": config.tiles,
        "BUFFERS": config.buffers,
        "THREADS": 32 * config.warps,
        "MIN_BLOCKS": config.min_blocks,
        "HAS_BIAS": int(problem.bias),
    }
    return kernel_source("depthwise/band", "depthwise_band", constants)


def _cut(problem: Problem, first: TensorForm, config: Config, facts: DeviceFacts) -> Cut:
    in_shape, out_shape = shapes(problem)
    (left, slices), (pad_top, pad_left) = columns(problem), padding(problem)
    halo_h, halo_w = ((n - 1) * dil for n, dil in zip((problem.r, problem.s), problem.dilation, strict=True))
    width, step_cols = left + max(in_shape[3], out_shape[3] - pad_left + halo_w), _TILE * config.tiles
    cut = strips(out_shape[2], config.buffer_bytes // (2 * (width + _PIECE)) - halo_h, _ROWS)
    read = ceil_div(out_shape[3], step_cols) * step_cols + _TILE * (slices - 1)
    side = staged(first, in_shape, pad_top, cut[1] + halo_h, left // _PIECE, width, read, 2)
    smem = config.buffers * side.buffer_bytes + config.warps * _ROWS * (2 * config.tiles + 1) * PIECE_BYTES
    return Cut(cut, side, smem, slots(facts, smem + _FILTER_BYTES, config.min_blocks))


def bind(problem: Problem, first: TensorForm, w: TensorForm, result_layout: str, device: torch.device) -> BoundCall:
    """fprop(x, w, b) -> y or dgrad(dy, w) -> dx."""
    out_shape, config = shapes(problem)[1], best_config(problem)
    cut = _cut(problem, first, config, device_facts(device.index))
    text, own = source(problem, config), (*out_shape[2:], padding(problem)[1])
    return bind_strips(text, 32 * config.warps, problem, w, result_layout, device, cut, own)
