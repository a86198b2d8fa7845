"""Host half of families/depthwise/band.cu: fprop and dgrad of depthwise layers in 16 bits on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from haloconv.families.base import BoundCall, Config
from haloconv.families.common import ELEMENTS, ceil_div
from haloconv.families.depthwise import finish, strips
from haloconv.families.depthwise.layer import padding, shapes
from haloconv.families.depthwise.one_config import OneConfig
from haloconv.families.depthwise.strips import PIECE_BYTES, Cut, Window
from haloconv.jit import KernelSource, kernel_source
from haloconv.problem import Problem, Request

KERNEL = "depthwise/band"
_PIECE = 8  # columns of one copy
_ROWS, _TILE = 8, 16  # output rows of a warp's step, output columns of a tile
_MOST_BANDS = 18  # slices of all filter rows: four registers each
_MOST_ABOVE = 16  # columns of a window before the first that a filter meets
_FILTER_BYTES = 4096  # about what a filter between zeros takes


@dataclass(frozen=True)
class Tiling:
    """``tiles`` of 16 columns in a warp's step; ``buffers`` and ``warps`` of a block.

    ``min_blocks`` blocks must fit a multiprocessor. A strip of a plane is cut to about ``buffer_bytes``.
    """

    tiles: int
    buffers: int
    min_blocks: int
    warps: int = 4
    buffer_bytes: int = 12 << 10


class Columns(NamedTuple):
    """A window of a tile: it begins ``left`` columns before the tile, and has ``slices`` of 16 columns."""

    left: int
    slices: int


def columns(problem: Problem) -> Columns:
    """The window of a tile, which begins at a piece."""
    pad = padding(problem)[1]
    left = ceil_div(max(pad, 0), _PIECE) * _PIECE
    return Columns(left, ceil_div(left - pad + _TILE + (problem.s - 1) * problem.dilation[1], _TILE))


def _refused(request: Request) -> str | None:
    """Why the kernel does not take the request, if not for want of room; else None."""
    problem = request.problem
    if problem.dtype.itemsize != 2 or problem.direction == "wgrad" or request.result_layout != "nchw":
        return "bands are for fprop and dgrad in 16 bits and nchw"
    if problem.r * columns(problem).slices > _MOST_BANDS:
        return "the bands of the filter do not fit registers"
    if padding(problem)[1] < -_MOST_ABOVE:
        return "the filter begins too far from the outputs"
    return strips.why_not(request)


def best_tiling(problem: Problem) -> Tiling:
    """Best of a sweep on an NVIDIA H200 (2026-11-22, 5x5 and 7x7 on maps of 56, 64 and 112)."""
    return Tiling(4, 3, 4)


def _cut(request: Request, tiling: Tiling) -> Cut | None:
    problem = request.problem
    in_shape, out_shape = shapes(problem)
    (left, slices), (pad_top, pad_left) = columns(problem), padding(problem)
    halo_h, halo_w = ((n - 1) * dil for n, dil in zip((problem.r, problem.s), problem.dilation, strict=True))
    width, step_cols = left + max(in_shape[3], out_shape[3] - pad_left + halo_w), _TILE * tiling.tiles
    cut = strips.cut_rows(out_shape[2], tiling.buffer_bytes // (2 * (width + _PIECE)) - halo_h, _ROWS)
    read = ceil_div(out_shape[3], step_cols) * step_cols + _TILE * (slices - 1)
    window = Window(pad_top, cut[1] + halo_h, left // _PIECE, width, read)
    side = strips.staged(request.first, in_shape, window, 2)
    smem = tiling.buffers * side.buffer_bytes + tiling.warps * _ROWS * (2 * tiling.tiles + 1) * PIECE_BYTES
    running = strips.slots(request.facts, smem + _FILTER_BYTES, tiling.min_blocks)
    return Cut(cut, side, smem, running) if running else None


_ONE = OneConfig(KERNEL, _refused, best_tiling, _cut, strips.NO_ROOM)


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
        "SLICES": columns(problem).slices,
        "TILES": tiling.tiles,
        "BUFFERS": tiling.buffers,
        "THREADS": 32 * tiling.warps,
        "MIN_BLOCKS": tiling.min_blocks,
        "HAS_BIAS": int(problem.bias),
        **finish.constants(problem),
    }
    return kernel_source(KERNEL, "depthwise_band", constants)


def bind(request: Request, config: Config) -> BoundCall:
    """fprop(x, w, b) -> y, with an epilogue, or dgrad(dy, w) -> dx, with a bias: ``finish.call``."""
    problem, (tiling, cut) = request.problem, config.derived
    _, _, rows, cols = request.result_shape
    own = {"out_rows": rows, "out_cols": cols, "pad_left": padding(problem)[1]}
    return strips.bind(source(problem, tiling), request, cut, 32 * tiling.warps, own)
