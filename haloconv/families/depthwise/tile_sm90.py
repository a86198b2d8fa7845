"""Host half of families/depthwise/tile_sm90.cu: fprop and dgrad of depthwise layers in fp32, planes that land whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from haloconv.env import DeviceFacts, device_facts
from haloconv.families.base import BoundCall
from haloconv.families.common import ceil_div, dense_call
from haloconv.families.depthwise.march import beyond_l2
from haloconv.families.depthwise.strips import padding, shapes, slots, strips
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import PositionalLaunch
from haloconv.layout import strides_of
from haloconv.problem import Problem, TensorForm

_COLS = 4  # columns of a thread, and of 16 bytes
_CAPABILITY = (9, 0)
_NARROW = 48  # columns, up to which other kernels are used
_MARCHED_TAPS, _MOST_TAPS = 9, 25  # of more than the latter, depthwise_tile was measured as faster
_PARAMS_FORMAT = "4Q3q2q4i4i5i"


@dataclass(frozen=True)
class Config:
    """``rows`` of a thread's outputs; ``buffers`` and ``warps`` of a block.

    ``min_blocks`` blocks must fit a multiprocessor. A strip of a plane is cut to about ``buffer_bytes``.
    """

    rows: int
    buffers: int
    min_blocks: int
    warps: int
    buffer_bytes: int = 16 << 10


def why_not(problem: Problem, side: TensorForm, result_layout: str, facts: DeviceFacts) -> str | None:
    """None if the kernel takes the problem on the device, else a sentence that says why not."""
    if facts.capability != _CAPABILITY:
        return "the device is no Hopper GPU (compute capability 9.0)"
    if problem.dtype != torch.float32 or problem.direction == "wgrad" or result_layout != "nchw":
        return "this is for fprop and dgrad in fp32 and nchw"
    if problem.r * problem.s > _MOST_TAPS or problem.dilation != (1, 1) or problem.stride != (1, 1):
        return f"the filter is strided or dilated, or has more than {_MOST_TAPS} taps"
    if problem.r * problem.s <= _MARCHED_TAPS and beyond_l2(problem):
        return f"with {_MARCHED_TAPS} taps beyond the L2 a march of short strips is faster"
    in_cols, out_cols = (shape[3] for shape in shapes(problem))
    if side.strides[2:] != (in_cols, 1) or not side.aligned or any(each % _COLS for each in side.strides[:2]):
        return "rows have gaps, or planes do not begin at multiples of 16 bytes"
    config = best_config(problem)
    if any(cols % _COLS or not _NARROW <= cols <= 32 * config.warps * _COLS for cols in (in_cols, out_cols)):
        return f"rows are not of {_NARROW} columns or more in pieces of {_COLS}"
    if not _cut(problem, config, facts).slots:
        return "the rows that a strip needs do not fit shared memory"
    return None


def best_config(problem: Problem) -> Config:
    """Best of a sweep on an NVIDIA H200 (2026-11-22, 3x3 and 5x5 on maps of 56, 64, 96, 112, 128 and 224)."""
    return Config(4, 3, 4, 7) if problem.r * problem.s <= 9 else Config(7, 3, 4, 4)


def _before(problem: Problem) -> int:
    """Columns of 16 bytes that a window begins before its outputs."""
    return ceil_div(padding(problem)[1], _COLS)


def source(problem: Problem, config: Config) -> KernelSource:
    """The specialised text of the kernel. No extent of the image takes part."""
    constants: dict[str, int | str] = {
        "DGRAD": int(problem.direction == "dgrad"),
        "R": problem.r,
        "S": problem.s,
        "MULTIPLIER": problem.k_per_group,
        "ROWS": config.rows,
        "LEAD": _before(problem) * _COLS - padding(problem)[1],
        "BUFFERS": config.buffers,
        "THREADS": 32 * config.warps,
        "MIN_BLOCKS": config.min_blocks,
        "HAS_BIAS": int(problem.bias),
    }
    return kernel_source("depthwise/tile_sm90", "depthwise_tile_sm90", constants)


class _Cut(NamedTuple):
    """Strips of the output, rows of one and rows of the input that it reads, bytes, blocks at a time."""

    strips: int
    rows: int
    in_rows: int
    landing_bytes: int
    smem_bytes: int
    slots: int


def _cut(problem: Problem, config: Config, facts: DeviceFacts) -> _Cut:
    (_, _, extent, cols), (_, _, out_rows, _) = shapes(problem)
    halo = problem.r - 1
    count, rows = strips(out_rows, config.buffer_bytes // (cols * 4) - halo, config.rows)
    landing = ceil_div(min(rows + halo, extent) * cols * 4, 128) * 128
    smem = config.buffers * landing
    return _Cut(count, rows, rows + halo, landing, smem, slots(facts, smem + 64, config.min_blocks))


def bind(problem: Problem, first: TensorForm, w: TensorForm, result_layout: str, device: torch.device) -> BoundCall:
    """fprop(x, w, b) -> y or dgrad(dy, w) -> dx."""
    in_shape, out_shape = shapes(problem)
    config = best_config(problem)
    cut = _cut(problem, config, device_facts(device.index))
    units = out_shape[0] * out_shape[1] * cut.strips
    fields = (
        *(w.strides[0], *w.strides[2:], *first.strides[:2], in_shape[2], in_shape[3] // _COLS, cut.in_rows),
        *(padding(problem)[0], units, out_shape[0], cut.strips, cut.rows),
        *(*out_shape[1:], _before(problem), cut.landing_bytes),
    )
    text, grid, threads = source(problem, config), min(units, cut.slots), 32 * config.warps
    launch = PositionalLaunch(text, device, grid, threads, cut.smem_bytes, _PARAMS_FORMAT, fields)
    return dense_call(launch, problem, out_shape, strides_of(out_shape, result_layout))
