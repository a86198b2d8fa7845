"""Host half of families/depthwise_toeplitz/wgrad.cu: filter gradients of depthwise layers with large filters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from haloconv.families.base import MOST_CONFIGS, BoundCall, Config, config_key
from haloconv.families.common import ceil_div, why_not_direction
from haloconv.families.depthwise.strips import partition, slots
from haloconv.families.depthwise_toeplitz.planes import (
    Planes,
    blocks_that_fit,
    copy_bytes,
    element,
    groups_of,
    in_terms,
    planes,
    why_no_bands,
)
from haloconv.families.reduce.partials import of_filter, wgrad_call
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape
from haloconv.problem import Problem, Request, TensorForm

KERNEL = "depthwise_toeplitz/wgrad"
_BESIDE = 12  # columns of zeros beside dy, in whole groups: a group that meets dy, and the taps of a tile
_MOST_PRODUCTS = 4096  # of one fp32 sum: bounds its rounding
_MOST_SUMS, _MOST_IN_TERMS = 16, 8  # tiles of 16 x 8 taps: four registers each; in terms more beside them
_MOST_WARPS = 16  # of a multiprocessor
_UNIT_ROWS = 56  # of dy, in several images if they are small
_SOME_FORM = TensorForm((1, 1, 1, 1), True)  # how planes are copied does not change their place


@dataclass(frozen=True)
class Tiling:
    """``images`` are staged at a time, in ``buffers``; ``min_blocks`` blocks of ``warps`` must fit a multiprocessor.

    A strip has ``rows`` rows of dy (0: all).
    """

    images: int
    min_blocks: int
    buffers: int = 2
    warps: int = 4
    rows: int = 0


def source(request: Request, tiling: Tiling) -> KernelSource:
    """The specialised source: images, channels and rows of the planes are run-time values."""
    problem, dy, x = request.problem, request.first, request.second
    itemsize = problem.dtype.itemsize
    constants: dict[str, int | str] = {
        "ELEM": element(problem),
        "R": problem.r,
        "S": problem.s,
        "PAD_LEFT": problem.padding[2],
        "MULTIPLIER": problem.k_per_group,
        "X_GROUPS": groups_of(problem.w, itemsize),
        "DY_COLS": problem.q,
        "X_COPY": copy_bytes(x, problem.w, itemsize),
        "DY_COPY": copy_bytes(dy, problem.q, itemsize),
        "IMAGES": tiling.images,
        "BUFFERS": tiling.buffers,
        "THREADS": 32 * tiling.warps,
        "MIN_BLOCKS": tiling.min_blocks,
    }
    return kernel_source(KERNEL, "depthwise_toeplitz_wgrad", constants)


class _Cut(NamedTuple):
    """Strips of dy, and planes in shared memory."""

    strips: tuple[int, int]
    x: Planes
    dy: Planes


def _cut(problem: Problem, dy: TensorForm, x: TensorForm, tiling: Tiling) -> _Cut:
    itemsize, top = problem.dtype.itemsize, problem.padding[0]
    each = tiling.rows or problem.p
    rows = each + ceil_div(problem.r, 16) * 16 - 1
    inside = (top, problem.h + top) if each == problem.p else (0, rows)
    beside = groups_of(_BESIDE, itemsize)
    return _Cut(
        (ceil_div(problem.p, each), each),
        planes(x, problem.x_shape, rows, inside, (0, groups_of(problem.w, itemsize) | 1), itemsize),
        planes(dy, problem.y_shape, each, (0, each), (beside, groups_of(problem.q, itemsize) + 2 * beside), itemsize),
    )


def _smem_bytes(problem: Problem, tiling: Tiling) -> int:
    """Shared memory of a block: planes and the copy of dy, later the sums of all warps."""
    cut = _cut(problem, _SOME_FORM, _SOME_FORM, tiling)
    dy_bytes = tiling.images * cut.dy.plane_bytes
    sums = tiling.warps * ceil_div(problem.r, 16) * 16 * ceil_div(problem.s, 8) * 8 * 4
    copied = dy_bytes if problem.dtype.itemsize == 2 else 0
    return max(tiling.buffers * (tiling.images * cut.x.plane_bytes + dy_bytes) + copied, sums)


def tilings(problem: Problem, max_smem: int) -> list[Tiling]:
    """Tilings that run, best first by sweeps on an NVIDIA H200 (2026-11-22, maps of 14, 28, 56 and 112)."""
    images = min(problem.n, ceil_div(_UNIT_ROWS, problem.p))
    forms, most_warps = (((4, 2), (8, 1)), 8) if in_terms(problem) else (((4, 3), (8, 2), (8, 1)), _MOST_WARPS)
    found: list[Tiling] = []
    for strips in range(1, problem.p + 1):
        rows = ceil_div(problem.p, strips)
        for warps, fewest in forms:
            tiling = Tiling(images, 1, warps=warps, rows=rows if strips > 1 else 0)
            blocks = min(most_warps // warps, blocks_that_fit(_smem_bytes(problem, tiling), max_smem))
            if blocks >= fewest and not (fewest == 1 and (found or rows > 1)):
                found.append(replace(tiling, min_blocks=blocks))
                break
        if found and found[-1].warps == 4:
            break
    return found[:MOST_CONFIGS]


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, else a sentence that says why not."""
    reason = why_not_direction(request.problem, "wgrad") or why_no_bands(request)
    return reason or _why_no_tiling(request.problem, request.facts.max_smem_bytes)


def _why_no_tiling(problem: Problem, max_smem: int) -> str | None:
    """None if the gradient runs with ``max_smem`` bytes of shared memory a block, else a sentence that says why not."""
    if ceil_div(problem.r, 16) * ceil_div(problem.s, 8) > (_MOST_IN_TERMS if in_terms(problem) else _MOST_SUMS):
        return f"{problem.r} x {problem.s} sums do not fit registers"
    return None if tilings(problem, max_smem) else "the rows that a strip needs do not fit shared memory"


def configs(request: Request) -> list[Config]:
    """One for each of ``tilings``, best first."""
    problem, (dy, x) = request.problem, (request.first, request.second)
    found = tilings(problem, request.facts.max_smem_bytes)
    return [Config(KERNEL, config_key(tiling), (tiling, _cut(problem, dy, x, tiling))) for tiling in found]


def bind(request: Request, config: Config) -> BoundCall:
    """wgrad(dy, x) -> dw."""
    problem, (tiling, cut) = request.problem, config.derived
    smem = _smem_bytes(problem, tiling)
    x_bytes, dy_bytes = tiling.images * cut.x.plane_bytes, tiling.images * cut.dy.plane_bytes
    running = slots(request.facts, smem, tiling.min_blocks)
    products = ceil_div(tiling.images * cut.strips[1], tiling.warps) * min(problem.w, problem.q)
    most_units = max(1, _MOST_PRODUCTS // products)
    divided = partition(
        problem.k, ceil_div(problem.n, tiling.images), cut.strips, x_bytes + dy_bytes, running, most_units
    )
    fields = {
        "x_staged": cut.x._asdict(),
        "dy_staged": cut.dy._asdict(),
        "partition": divided._asdict(),
        **{"x_bytes": x_bytes, "dy_bytes": dy_bytes},
        **{"h": problem.h, "w": problem.w, "p": problem.p, "pad_top": problem.padding[0]},
    }
    shape = LaunchShape(problem.k * divided.parts, 32 * tiling.warps, smem)
    launch = Launch(source(request, tiling), request.device, shape, fields)
    return wgrad_call(launch, request, of_filter(request, divided.parts))
