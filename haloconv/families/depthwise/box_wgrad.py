"""Host half of families/depthwise/box_wgrad.cu: the filter gradient of depthwise layers in fp32 and nchw on Hopper."""

from __future__ import annotations

from haloconv.families.base import BoundCall, Config
from haloconv.families.depthwise import boxes
from haloconv.families.depthwise.boxes import COLS, ELEM_BYTES, Cut, Tiling
from haloconv.families.depthwise.layer import Extents
from haloconv.families.depthwise.one_config import OneConfig
from haloconv.families.reduce.partials import of_filter, wgrad_call
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape
from haloconv.problem import Problem, Request, TensorForm

KERNEL = "depthwise/box_wgrad"
LEAST_TAPS, LEAST_COLS = 10, 20  # on others marches were measured as fast, or faster
_MOST_PRODUCTS = 2048  # of one fp32 sum: bounds its rounding
_X_POINTER, _DY_POINTER = 0, 1


def _refused(request: Request) -> str | None:
    """Why the kernel does not take the request, if not for want of room; else None."""
    problem = request.problem
    if problem.direction != "wgrad":
        return "this is for filter gradients"
    least = LEAST_COLS if problem.r * problem.s >= LEAST_TAPS else 192  # of fewer taps: from there boxes were faster
    if problem.q < least:
        return f"marches are as fast with {problem.r * problem.s} taps and fewer than {least} columns"
    return boxes.why_not(request)


def best_tiling(problem: Problem) -> Tiling | None:
    """By a sweep on an NVIDIA H200 (2026-11-22, 5x5 and 7x7 on maps of 20 to 224); None if none fits."""
    many = problem.r * problem.s > 25
    large = {Tiling(7, 2, 1, 8): 1.05} if many else {Tiling(14, 2, 3, 4): 1.0}
    return boxes.best(problem, {Tiling(7, 2, 3, 4): 1.0, Tiling(8, 2, 3, 4): 1.0, **large})


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
    return kernel_source(KERNEL, "depthwise_box_wgrad", boxes.constants(problem, tiling))


def bind(request: Request, config: Config) -> BoundCall:
    """wgrad(dy, x) -> dw."""
    problem, dy, x, (_, cut) = request.problem, request.first, request.second, config.derived
    parts = cut.parts(request.facts.sm_count, _MOST_PRODUCTS // (cut.tiling.rows * COLS))
    fields = {
        "x_side": _side_fields(x, problem.x_shape),
        "dy_side": _side_fields(dy, problem.y_shape),
        "cut": cut.fields(parts),
        **{"images": problem.n, "filters": problem.k},
        **{"dy_offset": cut.out_offset, "dy_row_bytes": cut.out_box[0] * ELEM_BYTES},
    }
    maps = {
        "x_map": boxes.box_map(problem.x_shape, x, cut.in_box, _X_POINTER),
        "dy_map": boxes.box_map(problem.y_shape, dy, cut.out_box, _DY_POINTER),
    }
    shape = LaunchShape(problem.k * parts, cut.tiling.threads, cut.smem_bytes)
    launch = Launch(source(problem, cut.tiling), request.device, shape, fields, maps)
    return wgrad_call(launch, request, of_filter(request, parts))


def _side_fields(side: TensorForm, shape: Extents) -> dict[str, int]:
    """``Side`` of the kernel."""
    image, channel, row, _ = side.strides
    return {"image": image, "channel": channel, "row": row, "rows": shape[2], "cols": shape[3]}
