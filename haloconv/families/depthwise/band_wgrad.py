"""Host half of families/depthwise/band_wgrad.cu: the filter gradient of depthwise layers in 16 bits on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from haloconv.families.base import BoundCall, Config
from haloconv.families.common import ELEMENTS, ceil_div
from haloconv.families.depthwise import strips
from haloconv.families.depthwise.band import columns
from haloconv.families.depthwise.layer import padding
from haloconv.families.depthwise.one_config import OneConfig
from haloconv.families.depthwise.strips import Staged, Window
from haloconv.families.reduce.partials import of_filter, wgrad_call
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape
from haloconv.problem import Problem, Request

KERNEL = "depthwise/band_wgrad"
_PIECE = 8  # columns of one copy
_ROWS, _COLS = 16, 32  # pixels of dy of a warp's step
_X_TILE = 8
_MOST_SUMS = 16  # fragments of a warp: rows of the filter by tiles of x
_MOST_PRODUCTS = 4096  # of one fp32 sum: bounds its rounding


@dataclass(frozen=True)
class Tiling:
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


def _refused(request: Request) -> str | None:
    """Why the kernel does not take the request, if not for want of room; else None."""
    problem = request.problem
    if problem.dtype.itemsize != 2 or problem.direction != "wgrad":
        return "this is for filter gradients in 16 bits"
    if best_tiling(problem) is None:
        return "the sums of the filter do not fit registers"
    return strips.why_not(request)


def best_tiling(problem: Problem) -> Tiling | None:
    """The fewest warps to a step that their registers allow; the rest best of a sweep on an NVIDIA H200 (2026-11-22).

    None: the sums do not fit.
    """
    tiles = _window(problem)[1]
    for slices in (1, 2):
        rows = ceil_div(problem.r, slices)
        if rows * tiles <= _MOST_SUMS:
            return Tiling(rows, 2, 3 if slices == 1 else 4)
    return None


class _Cut(NamedTuple):
    """Strips of dy, how both tensors are staged, bytes of shared memory, blocks that run at a time."""

    strips: tuple[int, int]
    x: Staged
    dy: Staged
    smem_bytes: int
    slots: int


def _cut(request: Request, tiling: Tiling) -> _Cut | None:
    problem, facts, dy, x = request.problem, request.facts, request.first, request.second
    (left, x_tiles), (pad_top, pad_left) = _window(problem), padding(problem)
    halo_h, halo_w = ((n - 1) * dil for n, dil in zip((problem.r, problem.s), problem.dilation, strict=True))
    dy_width = ceil_div(problem.q, _COLS) * _COLS
    x_width = left + max(problem.w, problem.q - pad_left + halo_w)
    most = (tiling.buffer_bytes - 2 * halo_h * x_width) // (2 * (x_width + dy_width))
    cut = strips.cut_rows(problem.p, most, _ROWS)
    x_read = dy_width - _COLS + 16 + ceil_div(x_tiles, 2) * 16  # columns that the last step reads
    rows = min(cut[1], problem.p)  # the rest of a step is spare
    x_window = Window(pad_top, rows + halo_h, left // _PIECE, x_width, x_read, cut[1] - rows)
    of_x = strips.staged(x, problem.x_shape, x_window, 2)
    of_dy = strips.staged(dy, problem.y_shape, Window(0, rows, 0, dy_width, dy_width, cut[1] - rows), 2)
    smem = tiling.buffers * (of_x.buffer_bytes + of_dy.buffer_bytes)
    static = tiling.warps * 16 * (x_tiles + 1) * _X_TILE * 4
    running = strips.slots(facts, smem + static, tiling.min_blocks) if smem + static <= facts.max_smem_bytes else 0
    return _Cut(cut, of_x, of_dy, smem, running) if running else None


_ONE = OneConfig(KERNEL, _refused, best_tiling, _cut, strips.NO_ROOM)


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, else a sentence that says why not."""
    return _ONE.why_not(request)


def configs(request: Request) -> list[Config]:
    """The config of a request that the kernel takes; empty if it does not."""
    return _ONE.configs(request)


def source(problem: Problem, tiling: Tiling) -> KernelSource:
    """The specialised source of the kernel. No extent of the image takes part."""
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[problem.dtype],
        "R": problem.r,
        "S": problem.s,
        "DIL_H": problem.dilation[0],
        "DIL_W": problem.dilation[1],
        "MULTIPLIER": problem.k_per_group,
        "FILTER_ROWS": tiling.filter_rows,
        "X_TILES": _window(problem)[1],
        "BUFFERS": tiling.buffers,
        "THREADS": 32 * tiling.warps,
        "MIN_BLOCKS": tiling.min_blocks,
    }
    return kernel_source(KERNEL, "depthwise_band_wgrad", constants)


def bind(request: Request, config: Config) -> BoundCall:
    """wgrad(dy, x) -> dw."""
    problem, (tiling, cut) = request.problem, config.derived
    steps = cut.strips[1] // _ROWS * ceil_div(problem.q, _COLS) * ceil_div(problem.r, tiling.filter_rows)
    most_units = max(1, _MOST_PRODUCTS // (ceil_div(steps, tiling.warps) * _COLS))
    buffer_bytes = cut.x.buffer_bytes + cut.dy.buffer_bytes
    divided = strips.partition(problem.k, problem.n, cut.strips, buffer_bytes, cut.slots, most_units)
    fields = {
        "x_staged": cut.x._asdict(),
        "dy_staged": cut.dy._asdict(),
        "partition": divided._asdict(),
        "x_bytes": cut.x.buffer_bytes,
        **{"h": problem.h, "w": problem.w, "p": problem.p, "q": problem.q, "pad_left": padding(problem)[1]},
    }
    shape = LaunchShape(problem.k * divided.parts, 32 * tiling.warps, cut.smem_bytes)
    launch = Launch(source(problem, tiling), request.device, shape, fields)
    return wgrad_call(launch, request, of_filter(request, divided.parts))
