"""Host half of families/depthwise/patch_wgrad.cu: filter gradients of depthwise layers in 16 bits on Hopper's cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from haloconv.families.base import BoundCall, Config
from haloconv.families.common import ELEMENTS, ceil_div
from haloconv.families.depthwise import patches
from haloconv.families.depthwise.landing import whole
from haloconv.families.depthwise.layer import padding
from haloconv.families.depthwise.one_config import OneConfig
from haloconv.families.depthwise.patches import EDGE, THREADS, Side, padded_pieces, window
from haloconv.families.depthwise.strips import NO_ROOM, slots
from haloconv.families.reduce.partials import of_filter, wgrad_call
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape
from haloconv.problem import Problem, Request

KERNEL = "depthwise/patch_wgrad"
_STEP_ROWS = 2 * EDGE  # of dy in a product
_MOST_SUMS = 128  # registers of a thread
_MOST_WINDOW_ROWS = 16  # rows of a window: what wgmma takes as columns
_LOW_WINDOW_ROWS = 10  # of 3x3 without dilation
_MOST_PRODUCTS = 4096  # of one fp32 sum: bounds its rounding
MOST_IDLE = 1.32  # pixels of patches for one of dy, up to which an NVIDIA H200 was faster with them


@dataclass(frozen=True)
class Tiling:
    """``rows`` of dy in a strip; ``buffers`` that strips land in, ``min_blocks`` of a multiprocessor."""

    rows: int
    buffers: int
    min_blocks: int


def _refused(request: Request) -> str | None:
    """Why the kernel does not take the request, if not for want of room; else None."""
    problem = request.problem
    if problem.direction != "wgrad":
        return "this is for filter gradients"
    tiling, view = best_tiling(problem), window(problem)
    padded_rows = ceil_div(problem.p, tiling.rows) * ceil_div(tiling.rows, _STEP_ROWS) * _STEP_ROWS
    if patches.idle(padded_rows, problem.y_shape) > MOST_IDLE:
        return "too many patches would lie outside the image"
    if view.height > _MOST_WINDOW_ROWS or view.pieces * EDGE * ceil_div(view.height, 2) > _MOST_SUMS:
        return "the sums of the filter do not fit registers"
    return patches.why_not(request)


def best_tiling(problem: Problem) -> Tiling:
    """Best of a sweep on an NVIDIA H200: strips of one height, of wide planes and few taps shorter ones.

    Four blocks have 128 registers a thread, in which sums of a window of 12 rows or more do not fit.
    """
    few = problem.r * problem.s <= 9
    most = 32 if few and problem.q > 8 * EDGE else 64
    low = few and window(problem).height <= _LOW_WINDOW_ROWS
    return Tiling(ceil_div(problem.p, ceil_div(problem.p, most)), 2, 4 if low else 3)


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


def _cut(request: Request, tiling: Tiling) -> _Cut | None:
    problem, dy, x = request.problem, request.first, request.second
    view, rows = window(problem), tiling.rows
    dy_rows, halo = ceil_div(rows, _STEP_ROWS) * _STEP_ROWS, ceil_div(view.height - EDGE, 2) * 2
    x_pieces = padded_pieces(problem.q, view.pieces)
    of_x = patches.side(x, problem.x_shape, rows + halo, x_pieces, padding(problem))
    of_dy = patches.side(dy, problem.y_shape, rows, padded_pieces(problem.q, 1), (0, 0))
    x_landing, x_padded = of_x.planes.landing_bytes, whole((dy_rows + halo) * of_x.row_bytes)
    landing = (x_landing, x_landing + of_dy.planes.landing_bytes)
    padded = (x_padded, x_padded + dy_rows * of_dy.row_bytes)
    smem = tiling.buffers * landing[1] + padded[1]
    static = 4 * problem.r * EDGE * (EDGE * view.pieces + 1) * 4 + 64
    running = slots(request.facts, smem + static, tiling.min_blocks)
    if not running:
        return None
    return _Cut(ceil_div(problem.p, rows), dy_rows, of_x, of_dy, landing, padded, smem, running)


_ONE = OneConfig(KERNEL, _refused, best_tiling, _cut, NO_ROOM)


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
        "SHIFT": patches.shift(problem),
        "BUFFERS": tiling.buffers,
        "MIN_BLOCKS": tiling.min_blocks,
    }
    return kernel_source(KERNEL, "depthwise_patch_wgrad", constants)


def bind(request: Request, config: Config) -> BoundCall:
    """wgrad(dy, x) -> dw."""
    problem, (tiling, cut) = request.problem, config.derived
    planes = problem.n * cut.strips
    units = planes * problem.k
    products = cut.dy_rows * cut.dy.row_bytes // 128  # of a sum, for each unit
    grid = min(units, max(cut.slots, ceil_div(units * products, _MOST_PRODUCTS)))
    parts = max(
        ((unit + planes) * grid - 1) // units - ((unit + 1) * grid - 1) // units + 1 for unit in range(0, units, planes)
    )  # blocks that share a filter
    fields = {
        **{"x_side": cut.x.fields, "dy_side": cut.dy.fields},
        "cut": {"units": units, "images": problem.n, "strips": cut.strips, "rows": tiling.rows},
        **{"channels": problem.k, "parts": parts},
        **{"x_landing_bytes": cut.landing[0], "landing_bytes": cut.landing[1]},
        **{"x_padded_bytes": cut.padded[0], "padded_bytes": cut.padded[1]},
        **{"dy_rows": cut.dy_rows, "pad_left": padding(problem)[1]},
    }
    launch = Launch(source(problem, tiling), request.device, LaunchShape(grid, THREADS, cut.smem_bytes), fields)
    return wgrad_call(launch, request, of_filter(request, parts))
