"""Host half of families/depthwise_toeplitz/toeplitz.cu: fprop and dgrad of depthwise layers with large filters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from haloconv.families.base import BoundCall, Config, config_key
from haloconv.families.common import ceil_div, dense_call, named, why_not_direction
from haloconv.families.depthwise.layer import padding, shapes
from haloconv.families.depthwise.strips import partition, slots
from haloconv.families.depthwise_toeplitz.planes import (
    GROUP_BYTES,
    Planes,
    blocks_that_fit,
    copy_bytes,
    element,
    groups_of,
    in_terms,
    planes,
    why_no_bands,
)
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape, Value
from haloconv.problem import Problem, Request, TensorForm

KERNEL = "depthwise_toeplitz/toeplitz"
_ROWS, _COLS = 8, 8  # outputs of a row group, of a tile of columns
_MOST_COLS = 64  # of the filter
_MOST_TILES = 14  # of a half tile
_WARPS = (4, 5, 6, 7, 8)  # of a block
_MOST_WARPS, _NEARLY = 16, 0.8  # of a multiprocessor; of the most that work at a time
_MOST_REGISTERS = 255  # of a thread
_REGISTERS, _OTHER_REGISTERS = 65536, 40  # of a multiprocessor; of a thread, beside those that are counted
_SOME_FORM = TensorForm((1, 1, 1, 1), True)  # how planes are copied does not change their place


@dataclass(frozen=True)
class Tiling:
    """A warp has ``m_tiles`` pairs of half tiles of ``row_groups`` times 8 rows and ``n_tiles`` times 8 columns.

    ``images`` are staged at a time, in ``buffers``; ``min_blocks`` blocks of ``warps`` must fit a multiprocessor. A
    strip has ``rows`` rows of the output (0: all).
    """

    m_tiles: int
    row_groups: int
    n_tiles: int
    images: int
    min_blocks: int
    buffers: int = 2
    warps: int = 4
    rows: int = 0


class Window(NamedTuple):
    """Groups of columns: ``start`` is the first of the first window in the image, [lo, hi) of a window are multiplied.

    ``left`` groups of zeros stand before a row in shared memory, which has ``groups`` of them; ``shift`` columns of a
    window lie before the first tap; ``parts`` half tiles lie side by side.
    """

    start: int
    lo: int
    hi: int
    left: int
    groups: int
    shift: int
    parts: int


def window(problem: Problem, tiling: Tiling) -> Window:
    """Which groups of input columns a half tile meets, and how the filter lies in them."""
    itemsize = problem.dtype.itemsize
    group = GROUP_BYTES // itemsize
    in_shape, out_shape = shapes(problem)
    pad, tile = padding(problem)[1], _COLS // group
    start = -ceil_div(pad, group)
    shift = -pad - start * group
    of_window = (tiling.n_tiles - 1) * tile + ceil_div(_COLS - 1 + problem.s + shift, group)
    of_image = groups_of(in_shape[3], itemsize)
    parts = ceil_div(out_shape[3], _COLS * tiling.n_tiles)
    if parts == 1:  # what lies outside of the image is left out
        lo, hi = max(0, -start), min(of_window, of_image - start)
        return Window(start, lo, hi, 0, max(of_image, start + hi), shift, 1)
    left = max(0, -start)
    read = left + start + (parts - 1) * tiling.n_tiles * tile + of_window
    return Window(start, 0, of_window, left, max(left + of_image, read), shift, parts)


def source(request: Request, tiling: Tiling) -> KernelSource:
    """The specialised source. Of the image its width takes part, unless rows are longer than a half tile."""
    problem = request.problem
    of_window = window(problem, tiling)
    in_shape, out_shape = shapes(problem)
    constants: dict[str, int | str] = {
        "ELEM": element(problem),
        "DGRAD": int(problem.direction == "dgrad"),
        "R": problem.r,
        "S": problem.s,
        "SHIFT": of_window.shift,
        "MULTIPLIER": problem.k_per_group,
        "M_TILES": tiling.m_tiles,
        "ROW_GROUPS": tiling.row_groups,
        "N_TILES": tiling.n_tiles,
        "LO": of_window.lo,
        "HI": of_window.hi,
        "IMAGES": tiling.images,
        "BUFFERS": tiling.buffers,
        "COPY_BYTES": copy_bytes(request.first, in_shape[3], problem.dtype.itemsize),
        "STORE_PAIRS": int(out_shape[3] % 2 == 0 and request.result_layout == "nchw"),
        "THREADS": 32 * tiling.warps,
        "MIN_BLOCKS": tiling.min_blocks,
        "HAS_BIAS": int(problem.bias),
    }
    return kernel_source(KERNEL, "depthwise_toeplitz", constants)


class _Cut(NamedTuple):
    """Strips of the output; planes in shared memory; rows of zeros that may be met; half tiles of a strip."""

    strips: tuple[int, int]
    staged: Planes
    margin: int
    parts: tuple[int, int]


def _cut(problem: Problem, side: TensorForm, tiling: Tiling) -> _Cut:
    in_shape, out_shape = shapes(problem)
    of_window, pad_top = window(problem, tiling), padding(problem)[0]
    half_rows = _ROWS * tiling.row_groups
    each = tiling.rows or out_shape[2]
    row_parts = ceil_div(each, half_rows)
    mixed = tiling.images % (2 * tiling.m_tiles) != 0  # a warp's half tiles begin in different rows
    reach = half_rows * row_parts if mixed else ceil_div(each, _ROWS) * _ROWS
    margin = _ROWS - 1 + (half_rows * (row_parts - 1) if mixed else 0)
    rows = max(
        min(first + reach + problem.r - 1 - pad_top, in_shape[2] + margin) - max(first - pad_top, -margin)
        for first in range(0, out_shape[2], each)
    )
    odd_groups = of_window.groups | 1  # rows below each other begin in different banks
    first = max(-pad_top, -margin)
    inside = (-first, in_shape[2] - first) if each == out_shape[2] else (0, rows)
    staged = planes(side, in_shape, rows, inside, (of_window.left, odd_groups), problem.dtype.itemsize)
    return _Cut((ceil_div(out_shape[2], each), each), staged, margin, (row_parts, of_window.parts))


def _table_bytes(problem: Problem, shift: int) -> int:
    """Bytes of the filter between zeros in shared memory (``Bands::Table`` in bands.cuh), at most."""
    group, copies = GROUP_BYTES // problem.dtype.itemsize, 4 // problem.dtype.itemsize
    words = ceil_div(18 + ceil_div(_COLS - 1 + problem.s + shift, group) * group, copies)
    return problem.r * copies * (words + 16) * 4


def _smem_bytes(problem: Problem, tiling: Tiling) -> int:
    """Shared memory of a block: planes and the filter."""
    plane_bytes = _cut(problem, _SOME_FORM, tiling).staged.plane_bytes
    return tiling.buffers * tiling.images * plane_bytes + _table_bytes(problem, window(problem, tiling).shift)


def _registers(problem: Problem, tiling: Tiling) -> int:
    """About what a thread needs: sums, groups of rows, bands, and the rest."""
    of_window, group = window(problem, tiling), GROUP_BYTES // problem.dtype.itemsize
    band = ceil_div(_COLS - 1 + problem.s + of_window.shift, group)
    sums = 4 * tiling.m_tiles * tiling.row_groups * tiling.n_tiles
    rows = 2 * tiling.m_tiles * (of_window.hi - of_window.lo)
    if in_terms(problem):  # of rows and of a band both terms, and sums of one row of the filter
        return ceil_div(sums + 2 * rows + 2 * band + 4 * tiling.n_tiles + _OTHER_REGISTERS, 8) * 8
    return ceil_div(sums + rows + tiling.row_groups * band + _OTHER_REGISTERS, 8) * 8


def _in_strips(problem: Problem, tiling: Tiling, max_smem: int) -> Tiling | None:
    """The tiling with as few strips as keep nearly as many warps at work as any do; None: none fits."""
    out_rows, half_rows = shapes(problem)[1][2], _ROWS * tiling.row_groups
    found: list[tuple[float, Tiling]] = []
    for strips in range(1, ceil_div(out_rows, half_rows) + 1):
        rows = ceil_div(ceil_div(out_rows, strips), half_rows) * half_rows
        halves = ceil_div(min(rows, out_rows), half_rows) * window(problem, tiling).parts * tiling.images
        tasks = ceil_div(halves, 2 * tiling.m_tiles)
        warps = max(_WARPS, key=lambda warps: tasks / (ceil_div(tasks, warps) * warps))
        cut = replace(tiling, rows=rows if rows < out_rows else 0, warps=warps)
        blocks = min(_MOST_WARPS // warps, _REGISTERS // (32 * warps * _registers(problem, tiling)))
        blocks = min(blocks, blocks_that_fit(_smem_bytes(problem, cut), max_smem))
        if blocks > 0:
            found.append((blocks * tasks / ceil_div(tasks, warps), replace(cut, min_blocks=blocks)))
    most = max((at_work for at_work, _ in found), default=0)
    return next((cut for at_work, cut in found if at_work >= _NEARLY * most), None)


def _n_tiles(problem: Problem, tiles: int) -> int:
    """Tiles of a half tile, of ``tiles`` side by side: as many as have registers, in half tiles that are alike."""
    most = _MOST_TILES
    while in_terms(problem) and most > 1 and _registers(problem, Tiling(1, 1, most, 1, 1)) > _MOST_REGISTERS:
        most -= 1
    return ceil_div(tiles, ceil_div(tiles, most))


def tilings(problem: Problem, max_smem: int) -> list[Tiling]:
    """Tilings that run, best first by sweeps on an NVIDIA H200 (2026-11-22, maps of 14, 28, 56 and 112)."""
    out_rows, out_cols = shapes(problem)[1][2:]
    tiles = ceil_div(out_cols, _COLS)
    n_tiles = _n_tiles(problem, tiles)
    m_tiles = 2 if n_tiles * problem.dtype.itemsize <= 4 and problem.n >= 4 else 1
    found = []
    for row_groups in (2, 1) if out_rows > _ROWS and n_tiles <= _MOST_TILES // 2 else (1,):
        units = ceil_div(out_rows, _ROWS * row_groups) * ceil_div(tiles, n_tiles)
        images = 2 * m_tiles * min(ceil_div(_WARPS[0], units), ceil_div(problem.n, 2 * m_tiles))
        tiling = Tiling(m_tiles, row_groups, n_tiles, images if problem.n > 1 else 1, 1)
        if in_terms(problem) and row_groups > 1 and _registers(problem, tiling) > _MOST_REGISTERS:
            continue
        found.append(_in_strips(problem, tiling, max_smem))
    return [tiling for tiling in found if tiling is not None]


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, else a sentence that says why not."""
    reason = why_not_direction(request.problem, "fprop", "dgrad") or why_no_bands(request)
    return reason or _why_no_tiling(request.problem, request.facts.max_smem_bytes)


def _why_no_tiling(problem: Problem, max_smem: int) -> str | None:
    """None if fprop or dgrad runs with ``max_smem`` bytes of shared memory a block, else why not, as a sentence."""
    if problem.direction == "dgrad" and problem.k_per_group > 1:
        return f"an input channel has {problem.k_per_group} filters; bands sum over one"
    if problem.s > _MOST_COLS:
        return f"the filter has more than {_MOST_COLS} columns, whose bands do not fit registers"
    found = tilings(problem, max_smem)
    if not found:
        return "the rows that a strip needs do not fit shared memory"
    if any(of_window.hi <= of_window.lo for of_window in (window(problem, tiling) for tiling in found)):
        return "no output meets the image"
    return None


def configs(request: Request) -> list[Config]:
    """One for each of ``tilings``, best first."""
    problem, first = request.problem, request.first
    found = tilings(problem, request.facts.max_smem_bytes)
    return [Config(KERNEL, config_key(tiling), (tiling, _cut(problem, first, tiling))) for tiling in found]


def bind(request: Request, config: Config) -> BoundCall:
    """fprop(x, w, b) -> y or dgrad(dy, w) -> dx."""
    problem, (tiling, cut) = request.problem, config.derived
    (images, _, _, in_cols), (_, channels, out_rows, out_cols) = shapes(problem)
    cut, of_window, (pad_top, pad_left) = (
        _cut(problem, request.first, tiling),
        window(problem, tiling),
        padding(problem),
    )
    running = slots(request.facts, _smem_bytes(problem, tiling), tiling.min_blocks)
    buffer_bytes = tiling.images * cut.staged.plane_bytes
    divided = partition(channels, ceil_div(images, tiling.images), cut.strips, buffer_bytes, running)
    row_parts, col_parts = cut.parts
    fields: dict[str, Value] = {
        **named("w", "k.rs", request.second.strides),
        **named("out", "nchw", request.result_strides),
        "staged": cut.staged._asdict(),
        "partition": divided._asdict(),
        **{"out_rows": out_rows, "out_cols": out_cols, "in_cols": in_cols, "pad_top": pad_top, "pad_left": pad_left},
        "margin": cut.margin,
        "window": (of_window.left + of_window.start + of_window.lo) * GROUP_BYTES,
        **{"row_parts": row_parts, "col_parts": col_parts},
    }
    shape = LaunchShape(divided.channels * divided.parts, 32 * tiling.warps, tiling.buffers * buffer_bytes)
    launch = Launch(source(request, tiling), request.device, shape, fields)
    return dense_call(launch, problem, request.result_shape, request.result_strides)
