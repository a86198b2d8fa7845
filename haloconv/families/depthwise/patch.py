"""Host half of families/depthwise/patch.cu: fprop and dgrad of depthwise layers in 16 bits on Hopper's tensor cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from haloconv.families.base import BoundCall, Config
from haloconv.families.common import ELEMENTS, ceil_div, named
from haloconv.families.depthwise import finish, patches
from haloconv.families.depthwise.landing import whole
from haloconv.families.depthwise.layer import padding, shapes
from haloconv.families.depthwise.one_config import OneConfig
from haloconv.families.depthwise.patches import EDGE, ELEM_BYTES, THREADS, Side, window
from haloconv.families.depthwise.strips import NO_ROOM, slots
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape
from haloconv.problem import Problem, Request

KERNEL = "depthwise/patch"
_MOST_SLICES = 16  # of A: four registers each
MOST_IDLE = 1.6  # pixels of patches for one of the result, up to which an NVIDIA H200 was faster with them


@dataclass(frozen=True)
class Tiling:
    """``groups`` rows of patches at a time, ``steps`` of them in a strip; ``buffers`` that strips land in.

    ``min_blocks`` blocks must fit a multiprocessor.
    """

    groups: int
    steps: int
    buffers: int
    min_blocks: int


def _refused(request: Request) -> str | None:
    """Why the kernel does not take the request, if not for want of room; else None."""
    problem = request.problem
    if problem.direction == "wgrad" or request.result_layout != "nchw":
        return "this is for fprop and dgrad in nchw"
    if _slices(problem) > _MOST_SLICES:
        return "the windows of the filter do not fit registers"
    if patches.idle(_padded_rows(problem, best_tiling(problem)), request.result_shape) > MOST_IDLE:
        return "too many patches would lie outside the image"
    return patches.why_not(request)


def _slices(problem: Problem) -> int:
    """Steps of k (families/depthwise/patch.cu)."""
    view = window(problem)
    return view.height * (view.pieces // 2) + view.pieces % 2 * ceil_div(view.height, 2)


def best_tiling(problem: Problem) -> Tiling:
    """Eight or seven rows of patches, whichever leave fewer idle; the rest best of a sweep on an NVIDIA H200.

    With a residual, whose addresses do not fit the registers of four blocks, there are three.
    """
    blocks = 3 if problem.epilogue.residual else 4
    return min((Tiling(groups, 1, 2, blocks) for groups in (8, 7)), key=lambda tiling: _padded_rows(problem, tiling))


def _padded_rows(problem: Problem, tiling: Tiling) -> int:
    rows = tiling.groups * tiling.steps * EDGE
    return ceil_div(shapes(problem)[1][2], rows) * rows


class _Cut(NamedTuple):
    """Strips of a plane and the output's rows of one, how the input is padded, bytes of buffers, blocks at a time."""

    strips: int
    rows: int
    side: Side
    padded_bytes: int
    smem_bytes: int
    slots: int


def _cut(request: Request, tiling: Tiling) -> _Cut | None:
    problem = request.problem
    in_shape, (_, _, out_rows, out_cols) = shapes(problem)
    rows, view = tiling.groups * tiling.steps * EDGE, window(problem)
    padded_rows = rows + ceil_div(view.height - EDGE, 2) * 2
    row_pieces = patches.padded_pieces(out_cols, view.pieces)
    side = patches.side(request.first, in_shape, padded_rows, row_pieces, padding(problem))
    padded = whole(padded_rows * side.row_bytes)
    smem = tiling.buffers * side.planes.landing_bytes + padded + whole(rows * out_cols * ELEM_BYTES)
    static = THREADS * 16 + 4 * (view.height + EDGE) * (10 + EDGE * view.pieces) + 64
    running = slots(request.facts, smem + static, tiling.min_blocks)
    return _Cut(ceil_div(out_rows, rows), rows, side, padded, smem, running) if running else None


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
        "DGRAD": int(problem.direction == "dgrad"),
        "R": problem.r,
        "S": problem.s,
        "DIL_H": problem.dilation[0],
        "DIL_W": problem.dilation[1],
        "MULTIPLIER": problem.k_per_group,
        "SHIFT": patches.shift(problem),
        "GROUPS": tiling.groups,
        "BUFFERS": tiling.buffers,
        "MIN_BLOCKS": tiling.min_blocks,
        "HAS_BIAS": int(problem.bias),
        **finish.constants(problem),
    }
    return kernel_source(KERNEL, "depthwise_patch", constants)


def bind(request: Request, config: Config) -> BoundCall:
    """fprop(x, w, b) -> y, with an epilogue, or dgrad(dy, w) -> dx, with a bias: ``finish.call``."""
    problem, (tiling, cut) = request.problem, config.derived
    n, channels, rows, cols = request.result_shape
    units = n * channels * cut.strips
    fields = {
        **named("w", "k.rs", request.second.strides),
        "side": cut.side.fields,
        "cut": {"units": units, "images": n, "strips": cut.strips, "rows": cut.rows},
        **{"channels": channels, "out_rows": rows, "out_cols": cols},
        **{"landing_bytes": cut.side.planes.landing_bytes, "padded_bytes": cut.padded_bytes},
    }
    shape = LaunchShape(min(units, cut.slots), THREADS, cut.smem_bytes)
    launch = Launch(source(problem, tiling), request.device, shape, fields)
    return finish.call(launch, request)
