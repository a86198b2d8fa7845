"""Host half of families/depthwise/pairs_wgrad.cu: filter gradients of depthwise channels_last layers in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from haloconv.device import max_smem_bytes_of
from haloconv.families.base import BoundCall, Config, config_key
from haloconv.families.common import ELEMENTS, ceil_div, named
from haloconv.families.depthwise.layer import HOPPER, NO_HOPPER, by_channel_blocks, in_pieces, is_hopper
from haloconv.families.reduce.partials import wgrad_call
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape, Value
from haloconv.problem import Problem, Request

KERNEL = "depthwise/pairs_wgrad"
_PATCH_ROWS, _PATCH_COLS, _PATCH = 4, 2, 8
_BAND_ROWS, _UNIT_COLS = 8, 8
_EIGHT, _EIGHT_BYTES = 8, 16
_MOST_TAPS = 7  # in a row or a column of the filter
_MOST_PRODUCTS = 4096  # of one fp32 sum: bounds its rounding
_HALO_BANDS = 0.25  # what the rows of x below a piece cost
_WIDTHS = ((16, 32), (8, 16))  # columns of dy beyond which strips may be so wide
_MOST_STAGES = 6
_FEWEST_LOADERS, _MOST_LOADERS = 2, 4
_WARPS = ((64, 16, 4), (104, 12, 2), (160, 8, 2))  # sums up to which a block has so many warps, of which copy so many


@dataclass(frozen=True)
class Tiling:
    """Eights of channels of a block, columns of a strip and of a fragment, warps, and bands in the ring of dy."""

    eights: int
    cols: int
    frag_cols: int
    unit_warps: int
    loaders: int
    stages: int


@dataclass(frozen=True)
class Shape:
    """What follows from a filter's extents and a tiling, as the kernel has it."""

    r: int
    s: int
    tiling: Tiling

    @cached_property
    def row_frags(self) -> int:
        return ceil_div(_PATCH_ROWS + self.r - 1, _PATCH // self.tiling.frag_cols)

    @cached_property
    def col_frags(self) -> int:
        return ceil_div(_PATCH_COLS + self.s - 1, self.tiling.frag_cols)

    @cached_property
    def warps(self) -> int:
        """Warps of a block that multiply."""
        return self.tiling.eights * self.tiling.unit_warps

    @cached_property
    def sums(self) -> int:
        """Sums of a thread, each a register."""
        return self.row_frags * self.col_frags * 16

    @cached_property
    def smem_bytes(self) -> int:
        tiling, pixel_bytes = self.tiling, (self.tiling.eights | 1) * _EIGHT_BYTES
        unit_rows = (self.row_frags * _PATCH + _PATCH_ROWS * tiling.frag_cols) // tiling.frag_cols
        x_stages = tiling.stages + (unit_rows > _BAND_ROWS)
        x_cols = tiling.cols - _PATCH_COLS + self.col_frags * tiling.frag_cols
        rings = (x_stages * x_cols + tiling.stages * tiling.cols) * _BAND_ROWS * pixel_bytes
        barriers = ceil_div(8 * 2 * x_stages, 128) * 128
        return barriers + max(rings, self.warps * (self.sums * 33 + 16) * 4)


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, else a sentence that says why not."""
    problem = request.problem
    if not is_hopper(request):
        return NO_HOPPER
    if problem.direction != "wgrad" or problem.dtype.itemsize != 2:
        return "this is for filter gradients in 16 bits"
    if problem.stride != (1, 1) or problem.dilation != (1, 1):
        return "the layer is strided or dilated"
    if problem.k_per_group != 1 or problem.k % _EIGHT:
        return "channels are no eights, or have several filters"
    if max(problem.r, problem.s) > _MOST_TAPS:
        return f"the filter has more than {_MOST_TAPS} taps in a row or a column"
    if not in_pieces(request, 1, _EIGHT):
        return "channels are no neighbours at multiples of 16 bytes"
    return None


def configs(request: Request) -> list[Config]:
    """The one of a request that the kernel takes."""
    if why_not(request) is not None:
        return []
    tiling = best_tiling(request.problem)
    return [Config(KERNEL, config_key(tiling), tiling)]


def best_tiling(problem: Problem) -> Tiling:
    """The tiling by sweeps on an NVIDIA H200: many channels of a block, wide strips, but some bands under way."""

    def fewest_products(cols: int) -> tuple[int, int]:
        shape = Shape(problem.r, problem.s, Tiling(1, _UNIT_COLS, cols, 1, 1, 1))
        return shape.row_frags * shape.col_frags, -cols

    frag_cols = min((2, 4, 8), key=fewest_products)
    sums = fewest_products(frag_cols)[0] * 16
    warps, loaders = next((each, copy) for most, each, copy in _WARPS if sums <= most)
    widths = [cols for least, cols in _WIDTHS if problem.q > least] if problem.q > _UNIT_COLS else [_UNIT_COLS]
    found = [
        _tiling(problem, frag_cols, warps - loaders, eights, cols)
        for eights in _eights(problem.k // _EIGHT, warps - loaders)
        for cols in widths
    ]
    enough = 3 if frag_cols == _UNIT_COLS else 4  # bands under way, by the same sweeps; such fragments have large halos
    return next((tiling for tiling in found if tiling.stages >= enough), max(found, key=lambda each: each.stages))


def _tiling(problem: Problem, frag_cols: int, warps: int, eights: int, cols: int) -> Tiling:
    """The tiling with the most warps, up to ``warps`` that multiply, and the most bands that fit a multiprocessor."""
    units = cols // _UNIT_COLS
    unit_warps = max(
        each for each in range(1, units + 1) if units % each == 0 and (each == 1 or each * eights <= warps)
    )
    multiply = eights * unit_warps
    loaders = min(_MOST_LOADERS, ceil_div(multiply + _FEWEST_LOADERS, 4) * 4 - multiply)  # of four schedulers
    tilings = (Tiling(eights, cols, frag_cols, unit_warps, loaders, stages) for stages in range(_MOST_STAGES, 0, -1))
    most = max_smem_bytes_of(HOPPER)
    return next(each for each in tilings if each.stages == 1 or Shape(problem.r, problem.s, each).smem_bytes <= most)


def _eights(count: int, most: int) -> list[int]:
    """How many groups of 8 channels a block may take, of ``count``: those that waste least, largest first."""
    if count <= most:
        return [count]
    spare = {each: ceil_div(count, each) * each for each in range(most, most // 2 - 1, -1)}
    return [each for each in spare if spare[each] == min(spare.values())]


def source(problem: Problem, tiling: Tiling) -> KernelSource:
    """The specialised source of the kernel. No extent of the image takes part."""
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[problem.dtype],
        "R": problem.r,
        "S": problem.s,
        "EIGHTS": tiling.eights,
        "COLS": tiling.cols,
        "FRAG_COLS": tiling.frag_cols,
        "UNIT_WARPS": tiling.unit_warps,
        "LOADERS": tiling.loaders,
        "STAGES": tiling.stages,
    }
    return kernel_source(KERNEL, "depthwise_pairs_wgrad", constants)


class _Cut(NamedTuple):
    """``Cut`` of the kernel."""

    channel_blocks: int
    parts: int
    images: int
    strips: int
    pieces: int
    piece_bands: int
    bands: int
    strip_shift: int


def _cut(problem: Problem, tiling: Tiling, channel_blocks: int, blocks: int) -> _Cut:
    """The pieces of strips that let ``blocks`` blocks end at the same time, rows of x that are read twice included."""
    strips, bands = ceil_div(problem.q, tiling.cols), ceil_div(problem.p, _BAND_ROWS)

    def rounds(piece_bands: int) -> int:
        return ceil_div(problem.n * strips * ceil_div(bands, piece_bands), blocks)

    piece_bands = min(range(1, bands + 1), key=lambda each: (rounds(each) * (each + _HALO_BANDS), -each))
    products = rounds(piece_bands) * piece_bands * _BAND_ROWS * tiling.cols // _PATCH  # of a sum
    pieces = ceil_div(bands, piece_bands)
    parts = min(problem.n * strips * pieces, blocks * ceil_div(products, _MOST_PRODUCTS))
    return _Cut(channel_blocks, parts, problem.n, strips, pieces, piece_bands, bands, int(parts % strips == 0))


def bind(request: Request, config: Config) -> BoundCall:
    """wgrad(dy, x) -> dw."""
    problem, tiling = request.problem, config.derived
    layout = Shape(problem.r, problem.s, tiling)
    block_channels = _EIGHT * tiling.eights
    channel_blocks = ceil_div(problem.k, block_channels)
    cut = _cut(problem, tiling, channel_blocks, max(1, request.facts.sm_count // channel_blocks))
    fields: dict[str, Value] = {
        **named("x", "n.hw", request.second.strides),
        **named("dy", "n.hw", request.first.strides),
        "cut": cut._asdict(),
        **{"channels": problem.k, "h": problem.h, "w": problem.w, "p": problem.p, "q": problem.q},
        **{"pad_top": problem.padding[0], "pad_left": problem.padding[2]},
    }
    threads = 32 * (layout.warps + tiling.loaders)
    shape = LaunchShape(channel_blocks * cut.parts, threads, layout.smem_bytes)
    launch = Launch(source(problem, tiling), request.device, shape, fields)
    return wgrad_call(launch, request, by_channel_blocks(request, channel_blocks, block_channels, cut.parts))
