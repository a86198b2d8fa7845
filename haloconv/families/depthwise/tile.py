"""Host half of families/depthwise/tile.cu: fprop and dgrad of depthwise layers in fp32 from planes in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from haloconv.env import DeviceFacts, device_facts
from haloconv.families.base import BoundCall
from haloconv.families.common import ceil_div
from haloconv.families.depthwise import strips as depthwise_strips
from haloconv.families.depthwise.strips import Cut, bind_strips, padding, shapes, slots, staged, strips
from haloconv.jit import KernelSource, kernel_source
from haloconv.problem import Problem, TensorForm

_COLS = 4  # columns of a thread, and of one copy
_MOST_TAPS = 49  # that stand in registers


@dataclass(frozen=True)
class Config:
    """``rows`` of a thread's outputs; ``buffers`` and ``warps`` of a block.

    ``min_blocks`` blocks must fit a multiprocessor.
    """

    rows: int
    buffers: int
    min_blocks: int
    warps: int


def why_not(problem: Problem, side: TensorForm, result_layout: str, facts: DeviceFacts) -> str | None:
    """None if the kernel takes the problem on the device, else a sentence that says why not."""
    if problem.dtype != torch.float32 or problem.direction == "wgrad" or result_layout != "nchw":
        return "this is for fprop and dgrad in fp32 and nchw"
    if problem.r * problem.s > _MOST_TAPS or problem.dilation != (1, 1):
        return "the filter is dilated, or does not fit registers"
    if padding(problem)[1] < 0:
        return "the filter begins behind the outputs"
    refused = depthwise_strips.why_not(problem, (side,), facts)
    if refused is None and not _cut(problem, side, best_config(problem), facts).slots:
        refused = "the rows that a strip needs do not fit shared memory"
    return refused


def best_config(problem: Problem) -> Config:
    """Best of a sweep on an NVIDIA H200 (2026-11-22, 5x5 on maps of 56, 7x7 of 56 and 112)."""
    return Config(7, 3, 3, 4) if problem.r * problem.s > 25 else Config(4, 3, 3, 7)


def _lead(problem: Problem) -> int:
    """Columns of the first copy of a window before the first one that the filter meets."""
    return -padding(problem)[1] % _COLS


def source(problem: Problem, config: Config) -> KernelSource:
    """The specialised text of the kernel. No extent of the image takes part."""
    constants: dict[str, int | str] = {
        "DGRAD": int(problem.direction == "dgrad"),
        "R": problem.r,
        "S": problem.s,
        "MULTIPLIER": problem.k_per_group,
        "ROWS": config.rows,
        "LEAD": _lead(problem),
        "BUFFERS": config.buffers,
        "THREADS": 32 * config.warps,
        "MIN_BLOCKS": config.min_blocks,
        "HAS_BIAS": int(problem.bias),
    }
    return kernel_source("depthwise/tile", "depthwise_tile", constants)


def _cut(problem: Problem, first: TensorForm, config: Config, facts: DeviceFacts) -> Cut:
    in_shape, out_shape = shapes(problem)
    pad_top, pad_left = padding(problem)
    left, groups = ceil_div(pad_left, _COLS), out_shape[3] // _COLS
    width = left * _COLS + max(in_shape[3], out_shape[3] - pad_left + problem.s - 1)
    cut = strips(out_shape[2], 32 * config.warps // groups * config.rows, config.rows)
    vectors = ceil_div(_lead(problem) + _COLS + problem.s - 1, _COLS)  # of a thread's window
    read = (groups - 1 + vectors) * _COLS
    side = staged(first, in_shape, pad_top, cut[1] + problem.r - 1, left, width, read, 4)
    smem = config.buffers * side.buffer_bytes
    return Cut(cut, side, smem, slots(facts, smem, config.min_blocks))


def bind(problem: Problem, first: TensorForm, w: TensorForm, result_layout: str, device: torch.device) -> BoundCall:
    """fprop(x, w, b) -> y or dgrad(dy, w) -> dx."""
    out_shape, config = shapes(problem)[1], best_config(problem)
    cut = _cut(problem, first, config, device_facts(device.index))
    text, own = source(problem, config), (out_shape[2], out_shape[3] // _COLS)
    return bind_strips(text, 32 * config.warps, problem, w, result_layout, device, cut, own)
