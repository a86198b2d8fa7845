"""Host half of families/depthwise/tile.cu: fprop and dgrad of depthwise layers in fp32 from planes in shared memory."""

from __future__ import annotations

import torch

from haloconv.families.base import BoundCall, Config
from haloconv.families.common import ceil_div
from haloconv.families.depthwise import strips
from haloconv.families.depthwise.layer import lead, padding, shapes
from haloconv.families.depthwise.one_config import OneConfig
from haloconv.families.depthwise.register_tile import COLS, Tiling, constants
from haloconv.families.depthwise.strips import Cut, Window
from haloconv.jit import KernelSource, kernel_source
from haloconv.problem import Problem, Request

KERNEL = "depthwise/tile"
_MOST_TAPS = 49  # that stand in registers


def _refused(request: Request) -> str | None:
    """Why the kernel does not take the request, if not for want of room; else None."""
    problem = request.problem
    if problem.dtype != torch.float32 or problem.direction == "wgrad" or request.result_layout != "nchw":
        return "this is for fprop and dgrad in fp32 and nchw"
    if problem.r * problem.s > _MOST_TAPS or problem.dilation != (1, 1):
        return "the filter is dilated, or does not fit registers"
    if padding(problem)[1] < 0:
        return "the filter begins behind the outputs"
    return strips.why_not(request)


def best_tiling(problem: Problem) -> Tiling:
    """Best of a sweep on an NVIDIA H200 (2026-11-22, 5x5 on maps of 56, 7x7 of 56 and 112)."""
    return Tiling(7, 3, 3, 4) if problem.r * problem.s > 25 else Tiling(4, 3, 3, 7)


def _cut(request: Request, tiling: Tiling) -> Cut | None:
    problem = request.problem
    in_shape, out_shape = shapes(problem)
    pad_top, pad_left = padding(problem)
    left, groups = ceil_div(pad_left, COLS), out_shape[3] // COLS
    width = left * COLS + max(in_shape[3], out_shape[3] - pad_left + problem.s - 1)
    cut = strips.cut_rows(out_shape[2], 32 * tiling.warps // groups * tiling.rows, tiling.rows)
    vectors = ceil_div(lead(problem, COLS) + COLS + problem.s - 1, COLS)  # of a thread's window
    read = (groups - 1 + vectors) * COLS
    side = strips.staged(request.first, in_shape, Window(pad_top, cut[1] + problem.r - 1, left, width, read), 4)
    smem = tiling.buffers * side.buffer_bytes
    running = strips.slots(request.facts, smem, tiling.min_blocks)
    return Cut(cut, side, smem, running) if running else None


_ONE = OneConfig(KERNEL, _refused, best_tiling, _cut, strips.NO_ROOM)


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, else a sentence that says why not."""
    return _ONE.why_not(request)


def configs(request: Request) -> list[Config]:
    """The config of a request that the kernel takes; empty if it does not."""
    return _ONE.configs(request)


def source(problem: Problem, tiling: Tiling) -> KernelSource:
    """The specialised source of the kernel."""
    return kernel_source(KERNEL, "depthwise_tile", constants(problem, tiling))


def bind(request: Request, config: Config) -> BoundCall:
    """fprop(x, w, b) -> y, with an epilogue, or dgrad(dy, w) -> dx, with a bias: ``finish.call``."""
    tiling, cut = config.derived
    _, _, rows, cols = request.result_shape
    own = {"out_rows": rows, "col_groups": cols // COLS}
    return strips.bind(source(request.problem, tiling), request, cut, 32 * tiling.warps, own)
