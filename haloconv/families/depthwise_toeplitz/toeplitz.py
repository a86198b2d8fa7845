"""Host half of the ``depthwise_toeplitz`` family: depthwise layers with large filters on tensor cores.

One input channel per group, any number of filters per channel, four-sided padding; TF32, fp16 and bf16 with fp32 sums.
Device halves: families/depthwise_toeplitz/toeplitz.cu and families/depthwise_toeplitz/wgrad.cu.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from haloconv import support
from haloconv.env import device_facts
from haloconv.families.base import BoundCall
from haloconv.families.common import ELEMENTS, ceil_div, dense_call
from haloconv.families.depthwise.layer import padding, shapes
from haloconv.families.depthwise.strips import share, slots
from haloconv.families.depthwise_toeplitz import planes as depthwise_toeplitz_planes
from haloconv.families.depthwise_toeplitz import wgrad as depthwise_toeplitz_wgrad
from haloconv.families.depthwise_toeplitz.planes import (
    GROUP_BYTES,
    STAGED_FORMAT,
    Planes,
    blocks_that_fit,
    copy_bytes,
    groups_of,
    planes,
)
from haloconv.families.depthwise_toeplitz.wgrad import Config as WgradConfig
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import PositionalLaunch
from haloconv.layout import strides_of
from haloconv.problem import DIRECTIONS, Problem, TensorForm

_ROWS, _COLS = 8, 8  # outputs of a row group, of a tile of columns
_MOST_COLS = 64  # of the filter
_MOST_TILES = 14  # of a half tile
_WARPS = (4, 5, 6, 7, 8)  # of a block
_MOST_WARPS, _NEARLY = 16, 0.8  # of a multiprocessor; of the most that work at a time
_REGISTERS, _OTHER_REGISTERS = 65536, 40  # of a multiprocessor; of a thread, beside those that are counted
_SOME_FORM = TensorForm((1, 1, 1, 1), True)  # how planes are copied does not change their place
_SHIPPED_SMEM = 99 << 10  # what every device of the family has
_PARAMS_FORMAT = f"4Q7q{STAGED_FORMAT}6i9i"


@dataclass(frozen=True)
class Config:
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


def window(problem: Problem, config: Config) -> Window:
    """Which groups of input columns a half tile meets, and how the filter lies in them."""
    itemsize = problem.dtype.itemsize
    group = GROUP_BYTES // itemsize
    in_shape, out_shape = shapes(problem)
    pad, tile = padding(problem)[1], _COLS // group
    start = -ceil_div(pad, group)
    shift = -pad - start * group
    of_window = (config.n_tiles - 1) * tile + ceil_div(_COLS - 1 + problem.s + shift, group)
    of_image = groups_of(in_shape[3], itemsize)
    parts = ceil_div(out_shape[3], _COLS * config.n_tiles)
    if parts == 1:  # what lies outside of the image is left out
        lo, hi = max(0, -start), min(of_window, of_image - start)
        return Window(start, lo, hi, 0, max(of_image, start + hi), shift, 1)
    left = max(0, -start)
    read = left + start + (parts - 1) * config.n_tiles * tile + of_window
    return Window(start, 0, of_window, left, max(left + of_image, read), shift, parts)


def source(problem: Problem, config: Config, side: TensorForm, result_layout: str) -> KernelSource:
    """The specialised text. Of the image its width takes part, unless rows are longer than a half tile."""
    of_window = window(problem, config)
    in_shape, out_shape = shapes(problem)
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[problem.dtype],
        "DGRAD": int(problem.direction == "dgrad"),
        "R": problem.r,
        "S": problem.s,
        "SHIFT": of_window.shift,
        "MULTIPLIER": problem.k_per_group,
        "M_TILES": config.m_tiles,
        "ROW_GROUPS": config.row_groups,
        "N_TILES": config.n_tiles,
        "LO": of_window.lo,
        "HI": of_window.hi,
        "IMAGES": config.images,
        "BUFFERS": config.buffers,
        "COPY_BYTES": copy_bytes(side, in_shape[3], problem.dtype.itemsize),
        "STORE_PAIRS": int(out_shape[3] % 2 == 0 and result_layout == "nchw"),
        "THREADS": 32 * config.warps,
        "MIN_BLOCKS": config.min_blocks,
        "HAS_BIAS": int(problem.bias),
    }
    return kernel_source("depthwise_toeplitz/toeplitz", "depthwise_toeplitz", constants)


class _Cut(NamedTuple):
    """Strips of the output; planes in shared memory; rows of zeros that may be met; half tiles of a strip."""

    strips: tuple[int, int]
    staged: Planes
    margin: int
    parts: tuple[int, int]


def _cut(problem: Problem, side: TensorForm, config: Config) -> _Cut:
    in_shape, out_shape = shapes(problem)
    of_window, pad_top = window(problem, config), padding(problem)[0]
    half_rows = _ROWS * config.row_groups
    each = config.rows or out_shape[2]
    row_parts = ceil_div(each, half_rows)
    mixed = config.images % (2 * config.m_tiles) != 0  # a warp's half tiles begin in different rows
    reach = half_rows * row_parts if mixed else ceil_div(each, _ROWS) * _ROWS
    margin = _ROWS - 1 + (half_rows * (row_parts - 1) if mixed else 0)
    rows = max(
        min(first + reach + problem.r - 1 - pad_top, in_shape[2] + margin) - max(first - pad_top, -margin)
        for first in range(0, out_shape[2], each)
    )
    odd_groups = of_window.groups | 1  # rows below each other begin in different banks
    first = max(-pad_top, -margin)
    inside = (-first, in_shape[2] - first) if each == out_shape[2] else (0, rows)
    staged = planes(side, in_shape, rows, inside, of_window.left, odd_groups, problem.dtype.itemsize)
    return _Cut((ceil_div(out_shape[2], each), each), staged, margin, (row_parts, of_window.parts))


def _table_bytes(problem: Problem, shift: int) -> int:
    """Of the filter between zeros in shared memory (``Bands::Table`` in bands.cuh), at most."""
    group, copies = GROUP_BYTES // problem.dtype.itemsize, 4 // problem.dtype.itemsize
    words = ceil_div(18 + ceil_div(_COLS - 1 + problem.s + shift, group) * group, copies)
    return problem.r * copies * (words + 16) * 4


def _smem_bytes(problem: Problem, config: Config) -> int:
    """Of a block: planes and the filter."""
    plane_bytes = _cut(problem, _SOME_FORM, config).staged.plane_bytes
    return config.buffers * config.images * plane_bytes + _table_bytes(problem, window(problem, config).shift)


def _registers(problem: Problem, config: Config) -> int:
    """About what a thread needs: sums, groups of rows, bands, and the rest."""
    of_window, group = window(problem, config), GROUP_BYTES // problem.dtype.itemsize
    band = ceil_div(_COLS - 1 + problem.s + of_window.shift, group)
    sums = 4 * config.m_tiles * config.row_groups * config.n_tiles
    rows = 2 * config.m_tiles * (of_window.hi - of_window.lo)
    return ceil_div(sums + rows + config.row_groups * band + _OTHER_REGISTERS, 8) * 8


def _in_strips(problem: Problem, config: Config, max_smem: int) -> Config | None:
    """The config with as few strips as keep nearly as many warps at work as any do; None: none fits."""
    out_rows, half_rows = shapes(problem)[1][2], _ROWS * config.row_groups
    found: list[tuple[float, Config]] = []
    for strips in range(1, ceil_div(out_rows, half_rows) + 1):
        rows = ceil_div(ceil_div(out_rows, strips), half_rows) * half_rows
        halves = ceil_div(min(rows, out_rows), half_rows) * window(problem, config).parts * config.images
        tasks = ceil_div(halves, 2 * config.m_tiles)
        warps = max(_WARPS, key=lambda warps: tasks / (ceil_div(tasks, warps) * warps))
        cut = replace(config, rows=rows if rows < out_rows else 0, warps=warps)
        blocks = min(_MOST_WARPS // warps, _REGISTERS // (32 * warps * _registers(problem, config)))
        blocks = min(blocks, blocks_that_fit(_smem_bytes(problem, cut), max_smem))
        if blocks > 0:
            found.append((blocks * tasks / ceil_div(tasks, warps), replace(cut, min_blocks=blocks)))
    most = max((at_work for at_work, _ in found), default=0)
    return next((cut for at_work, cut in found if at_work >= _NEARLY * most), None)


def good_configs(problem: Problem, max_smem: int) -> list[Config]:
    """Configs that run, best first by sweeps on an NVIDIA H200 (2026-11-22, maps of 14, 28, 56 and 112)."""
    out_rows, out_cols = shapes(problem)[1][2:]
    tiles = ceil_div(out_cols, _COLS)
    n_tiles = ceil_div(tiles, ceil_div(tiles, _MOST_TILES))
    m_tiles = 2 if n_tiles * problem.dtype.itemsize <= 4 and problem.n >= 4 else 1
    found = []
    for row_groups in (2, 1) if out_rows > _ROWS and n_tiles <= _MOST_TILES // 2 else (1,):
        units = ceil_div(out_rows, _ROWS * row_groups) * ceil_div(tiles, n_tiles)
        images = 2 * m_tiles * min(ceil_div(_WARPS[0], units), ceil_div(problem.n, 2 * m_tiles))
        config = Config(m_tiles, row_groups, n_tiles, images if problem.n > 1 else 1, 1)
        found.append(_in_strips(problem, config, max_smem))
    return [config for config in found if config is not None]


def _why_not(problem: Problem, max_smem: int) -> str | None:
    """None if fprop or dgrad runs, else a sentence that says why not."""
    if problem.direction == "dgrad" and problem.k_per_group > 1:
        return f"an input channel has {problem.k_per_group} filters; bands sum over one"
    if problem.s > _MOST_COLS:
        return f"the filter has more than {_MOST_COLS} columns, whose bands do not fit registers"
    configs = good_configs(problem, max_smem)
    if not configs:
        return "the rows that a strip needs do not fit shared memory"
    if any(of_window.hi <= of_window.lo for of_window in (window(problem, config) for config in configs)):
        return "no output meets the image"
    return None


class DepthwiseToeplitzFamily:
    """Bands of filters on tensor cores: depthwise layers without stride and dilation."""

    name = "depthwise_toeplitz"

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        reason = support.why_not(problem, device)
        if reason is not None:
            return reason
        facts = device_facts(device.index)
        reason = depthwise_toeplitz_planes.why_not(problem, facts)
        if reason is not None:
            return reason
        if problem.direction == "wgrad":
            return depthwise_toeplitz_wgrad.why_not(problem, facts.max_smem_bytes)
        return _why_not(problem, facts.max_smem_bytes)

    def candidates(
        self, problem: Problem, first: TensorForm, second: TensorForm, result_layout: str, device: torch.device
    ) -> list[Config | WgradConfig]:
        max_smem = device_facts(device.index).max_smem_bytes
        if problem.direction == "wgrad":
            return [*depthwise_toeplitz_wgrad.good_configs(problem, max_smem)]
        return [*good_configs(problem, max_smem)]

    def bind(
        self,
        problem: Problem,
        first: TensorForm,
        second: TensorForm,
        result_layout: str,
        device: torch.device,
        config: Config | WgradConfig | None = None,
    ) -> BoundCall:
        if problem.direction == "wgrad":
            assert not isinstance(config, Config)
            return depthwise_toeplitz_wgrad.bind(problem, first, second, result_layout, device, config)
        assert not isinstance(config, WgradConfig)
        return bind(problem, first, second, result_layout, device, config)


def bind(
    problem: Problem,
    first: TensorForm,
    w: TensorForm,
    result_layout: str,
    device: torch.device,
    wanted: Config | None = None,
) -> BoundCall:
    """fprop(x, w, b) -> y or dgrad(dy, w) -> dx."""
    in_shape, out_shape = shapes(problem)
    facts = device_facts(device.index)
    config = wanted or good_configs(problem, facts.max_smem_bytes)[0]
    cut, of_window = _cut(problem, first, config), window(problem, config)
    out_strides = strides_of(out_shape, result_layout)
    running = slots(facts, _smem_bytes(problem, config), config.min_blocks)
    image_groups, buffer_bytes = ceil_div(in_shape[0], config.images), config.images * cut.staged.plane_bytes
    shared = share(out_shape[1], image_groups, cut.strips, buffer_bytes, running)
    window_bytes = (of_window.left + of_window.start + of_window.lo) * GROUP_BYTES
    fields = (
        *(w.strides[0], *w.strides[2:], *out_strides, *cut.staged, *shared),
        *(*out_shape[2:], in_shape[3], *padding(problem), cut.margin, window_bytes, *cut.parts),
    )
    text = source(problem, config, first, result_layout)
    grid = shared.channels * shared.parts
    launch = PositionalLaunch(
        text, device, grid, 32 * config.warps, config.buffers * buffer_bytes, _PARAMS_FORMAT, fields
    )
    return dense_call(launch, problem, out_shape, out_strides)


def shipped_sources() -> list[KernelSource]:
    """The best config of a few layers that differ in what warps hold and in how planes are copied."""
    sources = {}
    for problem in _representative_problems():
        x, y = (TensorForm(strides_of(shape, problem.layout), True) for shape in (problem.x_shape, problem.y_shape))
        if problem.direction == "wgrad":
            config = depthwise_toeplitz_wgrad.good_configs(problem, _SHIPPED_SMEM)[0]
            text = depthwise_toeplitz_wgrad.source(problem, config, y, x)
        else:
            side = y if problem.direction == "dgrad" else x
            text = source(problem, good_configs(problem, _SHIPPED_SMEM)[0], side, problem.layout)
        sources[text.digest] = text
    return [*sources.values()]


def _representative_problems() -> Iterator[Problem]:
    layers = (
        (torch.float16, "nchw", 56, 31, DIRECTIONS),
        (torch.float32, "nchw", 56, 31, DIRECTIONS),
        (torch.bfloat16, "nchw", 28, 29, DIRECTIONS[::2]),
        (torch.float16, "nchw", 14, 27, DIRECTIONS[1:]),
        (torch.bfloat16, "nchw", 7, 13, DIRECTIONS),
        (torch.float32, "nhwc", 28, 13, DIRECTIONS),
        (torch.float16, "nhwc", 112, 21, DIRECTIONS[::2]),
        (torch.float32, "nchw", 112, 31, DIRECTIONS[1:]),
    )
    for dtype, order, extent, taps, directions in layers:
        for direction in directions:
            yield Problem(
                direction, n=8, c=32, h=extent, w=extent, k=32, r=taps, s=taps, padding=(taps // 2,) * 4, groups=32,
                bias=direction == "fprop", dtype=dtype, layout=order,
                precision="tf32" if dtype == torch.float32 else "ieee",
            )  # fmt: skip
