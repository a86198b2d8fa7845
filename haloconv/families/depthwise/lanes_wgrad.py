"""Host half of families/depthwise/lanes_wgrad.cu: filter gradients of depthwise layers in fp32 and channels_last."""

from __future__ import annotations

from haloconv.families.base import BoundCall, Config
from haloconv.families.depthwise import lanes_cut
from haloconv.families.depthwise.lanes_cut import ELEM_BYTES, LANES, ROWS, Cut, Tiling
from haloconv.families.depthwise.layer import by_channel_blocks
from haloconv.families.depthwise.one_config import OneConfig
from haloconv.families.reduce.partials import wgrad_call
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape
from haloconv.problem import Problem, Request

KERNEL = "depthwise/lanes_wgrad"
_X_POINTER, _DY_POINTER = 0, 1
_MOST_PRODUCTS = 4096  # of one fp32 sum: what bounds its rounding
_MOST_Q = 8  # warps beside each other in columns
_WARPS = 16  # of a block, at most
_ORDER = ((2, 4), (1, 4), (2, 2), (1, 2))  # warps beside each other in rows, rows of each


def _refused(request: Request) -> str | None:
    """Why the kernel does not take the request, if not for want of room; else None."""
    return lanes_cut.why_not(request) if request.problem.direction == "wgrad" else "this is for wgrad"


def best_tiling(problem: Problem) -> Tiling | None:
    """The best tiling that fits, by a sweep on an NVIDIA H200 (2026-11-22); None if none does.

    Rows of dy land, too: what shared memory then has room for is few rows of many columns, or of many channels.
    """
    _, channels, height, width = problem.y_shape
    cols, warps_q = lanes_cut.columns(width, problem.s, _MOST_Q)
    most_qc = 4 if lanes_cut.over_25_taps(problem) else 8  # warps beside each other in columns and channels
    warps_c = lanes_cut.channel_warps(channels, max(1, most_qc // warps_q))
    whole = [rows for rows in ROWS if height % rows == 0] or ROWS
    found = (Tiling(rows, cols, warps_q, warps_c, warps_r) for warps_r, rows in _ORDER if rows in whole)
    return next((each for each in found if _fits(problem, each)), None)


def _fits(problem: Problem, tiling: Tiling) -> bool:
    cut = Cut(problem, tiling)
    ahead = cut.stages - cut.window_rows
    return tiling.warps <= _WARPS and lanes_cut.fits(tiling, problem) and ahead > tiling.step_rows // 2


def _cut(request: Request, tiling: Tiling) -> Cut:
    return Cut(request.problem, tiling)


_ONE = OneConfig(
    KERNEL, _refused, best_tiling, _cut, "the sums do not fit registers, or the rows that they take shared memory"
)


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, else a sentence that says why not."""
    return _ONE.why_not(request)


def configs(request: Request) -> list[Config]:
    """The config of a request that the kernel takes; empty if it does not."""
    return _ONE.configs(request)


def source(problem: Problem, tiling: Tiling) -> KernelSource:
    """The specialised source of the kernel. No extent of the image takes part."""
    return kernel_source(KERNEL, "depthwise_lanes_wgrad", lanes_cut.constants(problem, tiling))


def bind(request: Request, config: Config) -> BoundCall:
    """wgrad(dy, x) -> dw."""
    problem, dy, x, (tiling, cut) = request.problem, request.first, request.second, config.derived
    parts = cut.parts(request.facts.sm_count, _MOST_PRODUCTS // tiling.cols)
    maps = {
        "x_map": cut.box_map(problem.x_shape, x.strides, cut.x_cols, _X_POINTER),
        "dy_map": cut.box_map(problem.y_shape, dy.strides, tiling.strip_cols, _DY_POINTER),
    }
    sums_bytes = tiling.warps * LANES * problem.r * problem.s * ELEM_BYTES
    shape = LaunchShape(cut.slabs * parts, tiling.threads, max(cut.stages * cut.stage_bytes, sums_bytes))
    launch = Launch(source(problem, tiling), request.device, shape, {"cut": cut.fields(parts)}, maps)
    return wgrad_call(launch, request, by_channel_blocks(request, 1, problem.c, parts))
