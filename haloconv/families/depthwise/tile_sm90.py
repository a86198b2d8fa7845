"""Host half of families/depthwise/tile_sm90.cu: fprop and dgrad of depthwise layers in fp32, planes that land whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from haloconv.families.base import BoundCall, Config
from haloconv.families.common import ceil_div, named
from haloconv.families.depthwise import finish, register_tile
from haloconv.families.depthwise.landing import LEAST_COLS, NO_PLANES, Planes, land_whole
from haloconv.families.depthwise.layer import NO_HOPPER, beyond_l2, is_hopper, padding, shapes
from haloconv.families.depthwise.one_config import OneConfig
from haloconv.families.depthwise.register_tile import COLS, constants
from haloconv.families.depthwise.strips import NO_ROOM, cut_rows, slots
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape
from haloconv.problem import Problem, Request

KERNEL = "depthwise/tile_sm90"
_MARCHED_TAPS, _MOST_TAPS = 9, 25  # of more than the latter, depthwise/tile was measured as faster


@dataclass(frozen=True)
class Tiling(register_tile.Tiling):
    """A strip of a plane is cut to about ``buffer_bytes``."""

    buffer_bytes: int = 16 << 10


def _refused(request: Request) -> str | None:
    """Why the kernel does not take the request, if not for want of room; else None."""
    problem = request.problem
    if not is_hopper(request):
        return NO_HOPPER
    if problem.dtype != torch.float32 or problem.direction == "wgrad" or request.result_layout != "nchw":
        return "this is for fprop and dgrad in fp32 and nchw"
    if problem.r * problem.s > _MOST_TAPS or problem.dilation != (1, 1) or problem.stride != (1, 1):
        return f"the filter is strided or dilated, or has more than {_MOST_TAPS} taps"
    if problem.r * problem.s <= _MARCHED_TAPS and beyond_l2(problem):
        return f"with {_MARCHED_TAPS} taps beyond the L2 a march of short strips is faster"
    if not land_whole(request, COLS):
        return NO_PLANES
    most = 32 * best_tiling(problem).warps * COLS
    if any(cols % COLS or not LEAST_COLS <= cols <= most for cols in (problem.w, problem.q)):
        return f"rows are not of {LEAST_COLS} columns or more in pieces of {COLS}"
    return None


def best_tiling(problem: Problem) -> Tiling:
    """Best of a sweep on an NVIDIA H200 (2026-11-22, 3x3 and 5x5 on maps of 56, 64, 96, 112, 128 and 224)."""
    return Tiling(4, 3, 4, 7) if problem.r * problem.s <= 9 else Tiling(7, 3, 4, 4)


class _Cut(NamedTuple):
    """Strips of a plane and the output's rows of one, how those of the input land, bytes, blocks at a time."""

    strips: int
    rows: int
    planes: Planes
    smem_bytes: int
    slots: int


def _cut(request: Request, tiling: Tiling) -> _Cut | None:
    problem, side = request.problem, request.first
    (_, _, extent, cols), (_, _, out_rows, _) = shapes(problem)
    halo = problem.r - 1
    count, rows = cut_rows(out_rows, tiling.buffer_bytes // (cols * 4) - halo, tiling.rows)
    image, channel, _, _ = side.strides
    planes = Planes(image, channel, extent, cols // COLS, rows + halo, padding(problem)[0])
    smem = tiling.buffers * planes.landing_bytes
    running = slots(request.facts, smem + 64, tiling.min_blocks)
    return _Cut(count, rows, planes, smem, running) if running else None


_ONE = OneConfig(KERNEL, _refused, best_tiling, _cut, NO_ROOM)


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, else a sentence that says why not."""
    return _ONE.why_not(request)


def configs(request: Request) -> list[Config]:
    """The config of a request that the kernel takes; empty if it does not."""
    return _ONE.configs(request)


def source(problem: Problem, tiling: Tiling) -> KernelSource:
    """The specialised source of the kernel."""
    return kernel_source(KERNEL, "depthwise_tile_sm90", constants(problem, tiling))


def bind(request: Request, config: Config) -> BoundCall:
    """fprop(x, w, b) -> y, with an epilogue, or dgrad(dy, w) -> dx, with a bias: ``finish.call``."""
    problem, (tiling, cut) = request.problem, config.derived
    n, channels, rows, cols = request.result_shape
    units = n * channels * cut.strips
    fields = {
        **named("w", "k.rs", request.second.strides),
        "planes": cut.planes._asdict(),
        "cut": {"units": units, "images": n, "strips": cut.strips, "rows": cut.rows},
        **{"channels": channels, "out_rows": rows, "out_cols": cols},
        "before": ceil_div(padding(problem)[1], COLS),
        "landing_bytes": cut.planes.landing_bytes,
    }
    shape = LaunchShape(min(units, cut.slots), 32 * tiling.warps, cut.smem_bytes)
    launch = Launch(source(problem, tiling), request.device, shape, fields)
    return finish.call(launch, request)
