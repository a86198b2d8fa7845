"""Host half of families/depthwise/plane_wgrad.cu: filter gradients of depthwise layers on small planes."""

from __future__ import annotations

from typing import NamedTuple

from haloconv.families.base import BoundCall, Config
from haloconv.families.common import ceil_div
from haloconv.families.depthwise import small_planes
from haloconv.families.depthwise.layer import Extents, activations
from haloconv.families.depthwise.one_config import OneConfig
from haloconv.families.depthwise.small_planes import NO_ROOM, Tiling, is_dense, pitch_bytes, unit_planes
from haloconv.families.depthwise.strips import slots
from haloconv.families.reduce.partials import of_filter, wgrad_call
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape
from haloconv.problem import Problem, Request, TensorForm

KERNEL = "depthwise/plane_wgrad"
_MOST_PRODUCTS = 4096  # of one fp32 sum: bounds its rounding
_START_STEPS = 3  # what a block's begin, its sums and their parts cost, in steps
_PIECE_BYTES = 16
_STAGES = 2


def _refused(request: Request) -> str | None:
    """Why the kernel does not take the request, if not for want of room; else None."""
    if request.problem.direction != "wgrad":
        return "this is for filter gradients"
    reason = small_planes.why_not_planes(request)
    if reason is not None:
        return reason
    if not all(_in_runs(side, shape, request.problem) for side, shape in activations(request)):
        return "planes of an image do not follow one another from a multiple of 16 bytes on"
    return None


def _in_runs(side: TensorForm, shape: Extents, problem: Problem) -> bool:
    image_bytes = side.strides[0] * problem.dtype.itemsize if problem.n > 1 else 0
    return side.aligned and is_dense(side, shape, 1) and image_bytes % _PIECE_BYTES == 0


def best_tiling(problem: Problem) -> Tiling | None:
    """The one with the fewest instructions by count; its planes are those of all images at a time, twice.

    None if no thread holds a row of dy.
    """
    planes = pitch_bytes(problem, problem.y_shape) + pitch_bytes(problem, problem.x_shape)
    return small_planes.best_tiling(problem, problem.r * problem.s + problem.w, _STAGES * planes)


class _Cut(NamedTuple):
    """Images side by side, threads of a block, bytes of shared memory, blocks at a time."""

    images: int
    threads: int
    smem_bytes: int
    slots: int


def _cut(request: Request, tiling: Tiling) -> _Cut | None:
    problem = request.problem
    unit = unit_planes(problem)
    threads = tiling.planes * ceil_div(problem.p, tiling.rows)
    x_bytes = unit // problem.k_per_group * pitch_bytes(problem, problem.x_shape)
    dy_bytes = unit * pitch_bytes(problem, problem.y_shape)
    images = tiling.planes // unit
    smem = max(_STAGES * images * (x_bytes + dy_bytes), problem.r * problem.s * (threads | 1) * 4)
    smem = ceil_div(smem, _PIECE_BYTES) * _PIECE_BYTES
    running = slots(request.facts, smem, tiling.min_blocks)
    return _Cut(images, threads, smem, running) if running else None


_ONE = OneConfig(KERNEL, _refused, best_tiling, _cut, NO_ROOM)


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, else a sentence that says why not."""
    return _ONE.why_not(request)


def configs(request: Request) -> list[Config]:
    """The config of a request that the kernel takes; empty if it does not."""
    return _ONE.configs(request)


def source(problem: Problem, tiling: Tiling) -> KernelSource:
    """The specialised source of the kernel, one for each extent of a plane."""
    unit = unit_planes(problem)
    constants = {
        **small_planes.constants(problem, tiling),
        **{"MULTIPLIER": problem.k_per_group, "PLANES": unit, "SLOTS": tiling.planes // unit},
    }
    return kernel_source(KERNEL, "depthwise_plane_wgrad", constants)


def part_images(problem: Problem, tiling: Tiling, cut: _Cut, groups: int) -> int:
    """Images of a part: of the cuts into equal parts that with the fewest steps of a multiprocessor one after another.

    ``groups`` blocks do the filters of a part.
    """
    most = max(1, _MOST_PRODUCTS // (tiling.rows * problem.q)) * cut.images  # of a sum, one of so many side by side
    steps = ceil_div(min(problem.n, most), cut.images)

    def cost(each: int) -> int:
        blocks = groups * ceil_div(problem.n, each * cut.images)
        return ceil_div(blocks, cut.slots) * (each + _START_STEPS)

    return min(range(1, steps + 1), key=cost) * cut.images


def bind(request: Request, config: Config) -> BoundCall:
    """wgrad(dy, x) -> dw."""
    problem, dy, x, (tiling, cut) = request.problem, request.first, request.second, config.derived
    groups = ceil_div(problem.k, unit_planes(problem))
    images = part_images(problem, tiling, cut, groups)
    parts = ceil_div(problem.n, images)
    fields = {
        **{"x_image": x.strides[0], "dy_image": dy.strides[0]},
        **{"images": problem.n, "filters": problem.k},
        **{"groups": groups, "part_images": images},
    }
    shape = LaunchShape(groups * parts, cut.threads, cut.smem_bytes)
    launch = Launch(source(problem, tiling), request.device, shape, fields)
    return wgrad_call(launch, request, of_filter(request, parts))
