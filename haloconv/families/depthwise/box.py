"""Host half of families/depthwise/box.cu: fprop and dgrad of depthwise layers of many taps, fp32, nchw, on Hopper."""

from __future__ import annotations

from haloconv.families.base import BoundCall, Config
from haloconv.families.common import named
from haloconv.families.depthwise import boxes, finish
from haloconv.families.depthwise.boxes import COLS, Cut, Tiling
from haloconv.families.depthwise.layer import shapes
from haloconv.families.depthwise.one_config import OneConfig
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape
from haloconv.problem import Problem, Request

KERNEL = "depthwise/box"
LEAST_TAPS, LEAST_COLS = 26, 20  # on others other kernels were measured as fast, or faster
_MOST_TAP_ROWS = 15  # the same: of a filter of 31 rows
_IN_POINTER = 0


def _refused(request: Request) -> str | None:
    """Why the kernel does not take the request, if not for want of room; else None."""
    problem = request.problem
    if problem.direction == "wgrad" or request.result_layout != "nchw":
        return "this is for fprop and dgrad in nchw"
    cols = request.result_shape[3]
    if problem.r * problem.s < LEAST_TAPS or cols < LEAST_COLS:
        return f"other kernels are as fast with fewer than {LEAST_TAPS} taps or {LEAST_COLS} columns"
    if problem.r > _MOST_TAP_ROWS:
        return f"depthwise/tile is faster with more than {_MOST_TAP_ROWS} rows of taps"
    if cols % COLS:
        return f"rows of the result do not come in pieces of {COLS}"
    return boxes.why_not(request)


def best_tiling(problem: Problem) -> Tiling | None:
    """By a sweep on an NVIDIA H200 (2026-11-22, 7x7 on maps of 20 to 224); None if none fits."""
    return boxes.best(problem, {Tiling(7, 2, 3, 4): 1.0, Tiling(8, 2, 3, 4): 1.0, Tiling(7, 2, 2, 8): 1.3})


def _cut(request: Request, tiling: Tiling) -> Cut:
    return Cut(request.problem, tiling)


_ONE = OneConfig(KERNEL, _refused, best_tiling, _cut, boxes.NO_ROOM)


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, else a sentence that says why not."""
    return _ONE.why_not(request)


def configs(request: Request) -> list[Config]:
    """The config of a request that the kernel takes; empty if it does not."""
    return _ONE.configs(request)


def source(problem: Problem, tiling: Tiling) -> KernelSource:
    """The specialised source of the kernel. No extent of the image takes part."""
    own: dict[str, int | str] = {"DGRAD": int(problem.direction == "dgrad"), "HAS_BIAS": int(problem.bias)}
    constants = {**boxes.constants(problem, tiling), **own, **finish.constants(problem)}
    return kernel_source(KERNEL, "depthwise_box", constants)


def bind(request: Request, config: Config) -> BoundCall:
    """fprop(x, w, b) -> y, with an epilogue, or dgrad(dy, w) -> dx, with a bias: ``finish.call``."""
    problem, (_, cut) = request.problem, config.derived
    n, channels, rows, _ = request.result_shape
    parts = cut.parts(request.facts.sm_count)
    fields = {
        **named("w", "k.rs", request.second.strides),
        **named("out", "nch.", request.result_strides),
        "cut": cut.fields(parts),
        **{"channels": channels, "images": n, "out_rows": rows},
    }
    maps = {"in_map": boxes.box_map(shapes(problem)[0], request.first, cut.in_box, _IN_POINTER)}
    shape = LaunchShape(channels * parts, cut.tiling.threads, cut.smem_bytes)
    launch = Launch(source(problem, cut.tiling), request.device, shape, fields, maps)
    return finish.call(launch, request)
