"""Host half of families/depthwise/patch_wgrad.cu: filter gradients of depthwise layers in 16 bits on Hopper's cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from haloconv.env import DeviceFacts, device_facts
from haloconv.families.base import BoundCall
from haloconv.families.common import ELEMENTS, ceil_div, summed_call
from haloconv.families.depthwise import patches as depthwise_patches
from haloconv.families.depthwise.patches import (
    CUT_FORMAT,
    EDGE,
    SIDE_FORMAT,
    THREADS,
    Side,
    padded_pieces,
    shift,
    side,
    whole,
    window,
)
from haloconv.families.depthwise.strips import padding, slots
from haloconv.families.reduce.sums import bind_sum
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import PositionalLaunch
from haloconv.layout import strides_of
from haloconv.problem import Problem, TensorForm

_STEP_ROWS = 2 * EDGE  # of dy in a product
_MOST_SUMS = 128  # registers of a thread
_TALLEST = 16  # rows of a window: what wgmma takes as columns
_MOST_PRODUCTS = 4096  # of one fp32 sum: bounds its rounding
_FEW_TAPS = 9
MOST_IDLE = 1.32  # pixels of patches for one of dy, up to which an NVIDIA H200 was faster with them
_PARAMS_FORMAT = f"3Q{SIDE_FORMAT}{SIDE_FORMAT}{CUT_FORMAT}8i"


@dataclass(frozen=True)
class Config:
    """``rows`` of dy in a strip; ``buffers`` that strips land in, ``min_blocks`` of a multiprocessor."""

    rows: int
    buffers: int
    min_blocks: int


def why_not(problem: Problem, dy: TensorForm, x: TensorForm, facts: DeviceFacts) -> str | None:
    """None if the kernel takes the problem on the device, else a sentence that says why not."""
    if problem.direction != "wgrad":
        return "this is for filter gradients"
    config, view = best_config(problem), window(problem)
    padded_rows = ceil_div(problem.p, config.rows) * ceil_div(config.rows, _STEP_ROWS) * _STEP_ROWS
    if depthwise_patches.idle(padded_rows, problem.y_shape) > MOST_IDLE:
        return "too many patches would lie outside the image"
    if view.height > _TALLEST or view.pieces * EDGE * ceil_div(view.height, 2) > _MOST_SUMS:
        return "the sums of the filter do not fit registers"
    refused = depthwise_patches.why_not(problem, ((dy, problem.y_shape), (x, problem.x_shape)), facts)
    if refused is None and not _cut(problem, dy, x, config, facts).slots:
        refused = "the rows that a strip needs do not fit shared memory"
    return refused


def best_config(problem: Problem) -> Config:
    """Best of a sweep on an NVIDIA H200: strips of one height, of wide planes and few taps shorter ones."""
    few = problem.r * problem.s <= _FEW_TAPS
    most = 32 if few and problem.q > 8 * EDGE else 64
    return Config(ceil_div(problem.p, ceil_div(problem.p, most)), 2, 4 if few else 3)


def source(problem: Problem, config: Config) -> KernelSource:
    """The specialised text of the kernel. No extent of the image takes part."""
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[problem.dtype],
        "R": problem.r,
        "S": problem.s,
        "DIL_H": problem.dilation[0],
        "DIL_W": problem.dilation[1],
        "MULTIPLIER": problem.k_per_group,
        "SHIFT": shift(problem),
        "BUFFERS": config.buffers,
        "MIN_BLOCKS": config.min_blocks,
    }
    return kernel_source("depthwise/patch_wgrad", "depthwise_patch_wgrad", constants)


class _Cut(NamedTuple):
    """Strips of a plane and the rows of one, how both sides are padded, bytes of buffers, blocks at a time.

    ``landing`` and ``padded`` are of x and of both.
    """

    strips: int
    dy_rows: int
    x: Side
    dy: Side
    landing: tuple[int, int]
    padded: tuple[int, int]
    smem_bytes: int
    slots: int


def _cut(problem: Problem, dy: TensorForm, x: TensorForm, config: Config, facts: DeviceFacts) -> _Cut:
    view = window(problem)
    dy_rows, halo = ceil_div(config.rows, _STEP_ROWS) * _STEP_ROWS, ceil_div(view.height - EDGE, 2) * 2
    of_x = side(x, problem.x_shape, config.rows + halo, padded_pieces(problem.q, view.pieces), *padding(problem))
    of_dy = side(dy, problem.y_shape, config.rows, padded_pieces(problem.q, 1), 0, 0)
    x_landing, x_padded = whole(of_x.landing_bytes), whole((dy_rows + halo) * of_x.row_bytes)
    landing = (x_landing, x_landing + whole(of_dy.landing_bytes))
    padded = (x_padded, x_padded + dy_rows * of_dy.row_bytes)
    smem = config.buffers * landing[1] + padded[1]
    static = 4 * problem.r * EDGE * (EDGE * view.pieces + 1) * 4 + 64
    return _Cut(
        ceil_div(problem.p, config.rows), dy_rows, of_x, of_dy, landing, padded, smem,
        slots(facts, smem + static, config.min_blocks),
    )  # fmt: skip


def bind(problem: Problem, dy: TensorForm, x: TensorForm, result_layout: str, device: torch.device) -> BoundCall:
    """wgrad(dy, x) -> dw."""
    config = best_config(problem)
    cut = _cut(problem, dy, x, config, device_facts(device.index))
    planes = problem.n * cut.strips
    units = planes * problem.k
    products = cut.dy_rows * cut.dy.row_bytes // 128  # of a sum, for each unit
    grid = min(units, max(cut.slots, ceil_div(units * products, _MOST_PRODUCTS)))
    parts = max(
        ((unit + planes) * grid - 1) // units - ((unit + 1) * grid - 1) // units + 1 for unit in range(0, units, planes)
    )  # blocks that share a filter
    fields = (
        *(*cut.x, *cut.dy, units, problem.n, cut.strips, config.rows, problem.k, parts),
        *(*cut.landing, *cut.padded, cut.dy_rows, padding(problem)[1]),
    )
    launch = PositionalLaunch(source(problem, config), device, grid, THREADS, cut.smem_bytes, _PARAMS_FORMAT, fields)
    dw_shape, dw_strides = problem.w_shape, strides_of(problem.w_shape, result_layout)
    sum_parts = bind_sum(problem.dtype, dw_shape, dw_strides, parts, device)
    return summed_call(launch, sum_parts, parts * problem.k * problem.r * problem.s, dw_shape, dw_strides)
