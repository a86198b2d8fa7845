"""Host half of families/depthwise/lanes.cu: fprop and dgrad of depthwise layers in fp32 and channels_last."""

from __future__ import annotations

from haloconv.families.base import BoundCall, Config
from haloconv.families.common import named
from haloconv.families.depthwise import finish, lanes_cut
from haloconv.families.depthwise.lanes_cut import LANES, ROWS, Cut, Tiling
from haloconv.families.depthwise.layer import shapes
from haloconv.families.depthwise.one_config import OneConfig
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape
from haloconv.problem import Problem, Request

KERNEL = "depthwise/lanes"
_IN_POINTER = 0


def _refused(request: Request) -> str | None:
    """Why the kernel does not take the request, if not for want of room; else None."""
    if request.problem.direction == "wgrad" or request.result_layout != "nhwc":
        return "this is for fprop and dgrad in nhwc"
    return lanes_cut.why_not(request)


def best_tiling(problem: Problem) -> Tiling | None:
    """The best tiling that fits, by a sweep on an NVIDIA H200 (2026-11-22); None if none does.

    Blocks take as many channels as they can, so that they read and write long pieces of memory.
    """
    _, channels, height, width = shapes(problem)[1]
    over_25_taps = lanes_cut.over_25_taps(problem)
    most = 12 if over_25_taps else 20  # warps of a block
    most_q = 8 if channels <= LANES * (1 if over_25_taps else 2) else 4  # beside each other in columns
    cols, warps_q = lanes_cut.columns(width, problem.s, most_q)
    warps_c = lanes_cut.channel_warps(channels, most // warps_q)
    for warps_r in range(min(2, most // (warps_q * warps_c)), 0, -1):
        tiles = ROWS if warps_q * warps_c * warps_r <= 16 else ROWS[1:]  # of more warps a thread has two rows
        found = (Tiling(rows, cols, warps_q, warps_c, warps_r) for rows in tiles)
        fitting = [each for each in found if _fits(problem, each)]
        if fitting:
            return min(fitting, key=lambda each: lanes_cut.idle_rows_cost(each, height))
    return None


def _fits(problem: Problem, tiling: Tiling) -> bool:
    cut = Cut(problem, tiling)
    return lanes_cut.fits(tiling, problem) and cut.stages >= cut.window_rows + tiling.step_rows


def _cut(request: Request, tiling: Tiling) -> Cut:
    return Cut(request.problem, tiling)


_ONE = OneConfig(
    KERNEL, _refused, best_tiling, _cut, "the filter does not fit registers, or the rows that it meets shared memory"
)


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, else a sentence that says why not."""
    return _ONE.why_not(request)


def configs(request: Request) -> list[Config]:
    """The config of a request that the kernel takes; empty if it does not."""
    return _ONE.configs(request)


def source(problem: Problem, tiling: Tiling) -> KernelSource:
    """The specialised source of the kernel. No extent of the image takes part."""
    own = {"DGRAD": int(problem.direction == "dgrad"), "HAS_BIAS": int(problem.bias)}
    constants = {**lanes_cut.constants(problem, tiling), **own, **finish.constants(problem)}
    return kernel_source(KERNEL, "depthwise_lanes", constants)


def bind(request: Request, config: Config) -> BoundCall:
    """fprop(x, w, b) -> y, with an epilogue, or dgrad(dy, w) -> dx, with a bias: ``finish.call``."""
    problem, (_, cut) = request.problem, config.derived
    parts = cut.parts(request.facts.sm_count)
    fields = {**named("w", "k.rs", request.second.strides), "cut": cut.fields(parts)}
    maps = {"in_map": cut.box_map(shapes(problem)[0], request.first.strides, cut.x_cols, _IN_POINTER)}
    shape = LaunchShape(cut.slabs * parts, cut.tiling.threads, cut.stages * cut.stage_bytes)
    launch = Launch(source(problem, cut.tiling), request.device, shape, fields, maps)
    return finish.call(launch, request)
