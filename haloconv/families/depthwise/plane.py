"""Host half of families/depthwise/plane.cu: fprop and dgrad of depthwise layers on small planes, copied as runs."""

from __future__ import annotations

from typing import NamedTuple

from haloconv.families.base import BoundCall, Config
from haloconv.families.common import ceil_div, divisor
from haloconv.families.depthwise import finish, small_planes
from haloconv.families.depthwise.layer import shapes
from haloconv.families.depthwise.one_config import OneConfig
from haloconv.families.depthwise.small_planes import NO_ROOM, Tiling, is_dense, pitch_bytes
from haloconv.families.depthwise.strips import slots
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape, Value
from haloconv.problem import Problem, Request

KERNEL = "depthwise/plane"
_MOST = 1 << 30  # planes, and elements of all filters, which 32 bits number


def _refused(request: Request) -> str | None:
    """Why the kernel does not take the request, if not for want of room; else None."""
    problem = request.problem
    if problem.direction == "wgrad":
        return "this is for fprop and dgrad"
    if problem.direction == "dgrad" and problem.k_per_group > 1:
        return "a channel has several filters, whose input gradients would have to be summed"
    reason = small_planes.why_not_planes(request)
    if reason is not None:
        return reason
    if not (request.first.aligned and is_dense(request.first, shapes(problem)[0])):
        return "planes do not follow one another from a multiple of 16 bytes on"
    filters = (problem.k, 1, problem.r, problem.s)
    if not is_dense(request.second, filters) or problem.k * problem.r * problem.s >= _MOST:
        return "filters do not follow one another"
    if problem.n * problem.k >= _MOST:
        return f"there are {_MOST} planes or more"
    return None


def best_tiling(problem: Problem) -> Tiling | None:
    """The one with the fewest instructions by count; None if no thread holds a row of the output."""
    taps, in_cols = problem.r * problem.s, shapes(problem)[0][3]
    return small_planes.best_tiling(problem, taps + in_cols, _plane_bytes(problem))


def _plane_bytes(problem: Problem) -> int:
    """Bytes of shared memory for each plane of a block: the output takes the input's place; its filter in fp32."""
    return max(pitch_bytes(problem, shape) for shape in shapes(problem)) + (problem.r * problem.s | 1) * 4


class _Cut(NamedTuple):
    """Threads of a block, and bytes of its shared memory."""

    threads: int
    smem_bytes: int


def _cut(request: Request, tiling: Tiling) -> _Cut | None:
    problem = request.problem
    smem = ceil_div(tiling.planes * _plane_bytes(problem), 16) * 16
    threads = tiling.planes * ceil_div(shapes(problem)[1][2], tiling.rows)
    return _Cut(threads, smem) if slots(request.facts, smem, tiling.min_blocks) else None


_ONE = OneConfig(KERNEL, _refused, best_tiling, _cut, NO_ROOM)


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, else a sentence that says why not."""
    return _ONE.why_not(request)


def configs(request: Request) -> list[Config]:
    """The config of a request that the kernel takes; empty if it does not."""
    return _ONE.configs(request)


def source(problem: Problem, tiling: Tiling) -> KernelSource:
    """The specialised source of the kernel, one for each extent of a plane."""
    dgrad = int(problem.direction == "dgrad")
    constants: dict[str, int | str] = {
        **small_planes.constants(problem, tiling),
        **(finish.constants(problem) or {"DGRAD": dgrad, "HAS_BIAS": int(problem.bias)}),
    }
    return kernel_source(KERNEL, "depthwise_plane", constants)


def bind(request: Request, config: Config) -> BoundCall:
    """fprop(x, w, b) -> y, with an epilogue, or dgrad(dy, w) -> dx, with a bias: ``finish.call``."""
    problem, (tiling, cut) = request.problem, config.derived
    n, channels, _, _ = request.result_shape
    fields: dict[str, Value] = {
        "planes": n * channels,
        "filters": divisor(channels),
        "w_elems": divisor(channels * problem.r * problem.s),
        "multiplier": divisor(problem.k_per_group),
    }
    shape = LaunchShape(ceil_div(n * channels, tiling.planes), cut.threads, cut.smem_bytes)
    launch = Launch(source(problem, tiling), request.device, shape, fields)
    return finish.call(launch, request)
