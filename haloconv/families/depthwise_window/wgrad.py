"""Host half of families/depthwise_window/wgrad.cu: the filter gradient of depthwise layers with filters of any size.

The roles of fprop are exchanged: the filter is the result, dy stands for the taps, and images are summed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from haloconv.device import DeviceFacts
from haloconv.families.base import BoundCall, Config, config_key
from haloconv.families.common import ELEMENTS, ceil_div, few_apart, named, why_not_direction
from haloconv.families.depthwise_window.axes import Axis, met_fraction, output_axis, why_too_many_steps
from haloconv.families.depthwise_window.cut import (
    BLOCKS,
    EDGE_INSTRUCTIONS,
    MULTIPLY_FRACTION,
    ROW_INSTRUCTIONS,
    RUN_PRODUCTS,
    TILE_J,
    WORD_BYTES,
    Block,
    Cut,
    Layer,
    Layout,
    Planes,
    Work,
    cut_fields,
    edges,
    layout,
)
from haloconv.families.reduce.partials import of_filter, wgrad_call
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape, Value, ceil_to
from haloconv.problem import Problem, Request

KERNEL = "depthwise_window/wgrad"
_MOST_PARTS = 256
_WAVES = 3
_PART_CYCLES = 150  # of sum_partials
_BLOCK_CHANNELS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64)
_MOST_RESULTS = (64, 32, 16, 8)  # a filter that is cut is staged in parts: only if it does not fit


@dataclass(frozen=True)
class Split:
    """How terms (ranges of dy of an image) are divided: among threads of a block by rows, among blocks by parts."""

    slices: int
    slice_rows: int
    part_terms: int

    def __str__(self) -> str:
        """Words of the key that records have."""
        return f"shares{self.slices} share_rows{self.slice_rows} part_terms{self.part_terms}"


class Tiling(NamedTuple):
    """What the gradient runs with."""

    block: Block
    cut: Cut
    split: Split


class _Derived(NamedTuple):
    """A tiling of a layer, where things stand in shared memory, how many parts are summed, and the launch."""

    tiling: Tiling
    layer: Layer
    places: Layout
    parts: int
    shape: LaunchShape


def axes(problem: Problem) -> tuple[Axis, Axis]:
    """Both axes: results are filter rows and columns, taps are output pixels; stride and dilation change places."""
    (stride_h, stride_w), (dil_h, dil_w) = problem.stride, problem.dilation
    return (
        output_axis(problem.p, problem.h, problem.r, problem.padding[0], dil_h, stride_h),
        output_axis(problem.q, problem.w, problem.s, problem.padding[2], dil_w, stride_w),
    )


def layer_of(request: Request) -> Layer:
    """What is cut. Whether channels or columns are neighbours is asked of x."""
    problem, (_, x_c, _, x_w) = request.problem, request.second.strides
    return Layer(axes(problem), Planes(problem.n, problem.k, 1), x_c == 1 and x_w != 1)


def _chunks_of_image(layer: Layer, cut: Cut) -> tuple[int, int]:
    """Ranges of dy of an image, below and beside each other."""
    rows, cols = layer.axes
    return ceil_div(rows.taps, cut.chunk_r), ceil_div(cols.taps, cut.chunk_s)


def terms(layer: Layer, cut: Cut) -> int:
    """Ranges of dy of all images."""
    row_chunks, col_chunks = _chunks_of_image(layer, cut)
    return layer.planes.images * row_chunks * col_chunks


def smem_bytes(cut: Cut, split: Split, places: Layout) -> int:
    """Shared memory of a block: windows of x and ranges of dy, later the sums of all slices."""
    staged = cut.planes * (places.plane_words + places.filter_words)
    return WORD_BYTES * max(staged, cut.planes * split.slices * cut.tile_p * cut.tile_q)


def threads_used(tiling: Tiling) -> int:
    """Threads that have a tile."""
    block, cut, split = tiling
    return cut.planes * split.slices * (cut.tile_p // block.tile_i) * (cut.tile_q // TILE_J)


def invalid(tiling: Tiling, layer: Layer, max_smem: int) -> str | None:
    """Why a block cannot be cut like this, or None."""
    block, cut, split = tiling
    if cut.tile_p % block.tile_i or cut.tile_q % TILE_J:
        return f"tiles of {cut.tile_p} x {cut.tile_q} are no multiple of a thread's {block.tile_i} x {TILE_J}"
    if split.slices * split.slice_rows < ceil_div(cut.chunk_r, layer.axes[0].steps):
        return f"{split.slices} slices of {split.slice_rows} rows leave some of {cut.chunk_r} out"
    if threads_used(tiling) > block.threads:
        return f"{threads_used(tiling)} thread tiles do not fit a block of {block.threads} threads"
    if layer.channels_inner and cut.planes & (cut.planes - 1):
        return f"{cut.planes} channels are no power of two, as lanes need it"
    needed = smem_bytes(cut, split, layout(block, cut, layer.axes))
    if needed > max_smem:
        return f"needs {needed} bytes of shared memory per block; the device has {max_smem}"
    return None


def _blocks_of_a_part(layer: Layer, cut: Cut) -> int:
    rows, cols = layer.axes
    tiles = ceil_div(rows.class_results, cut.tile_p) * ceil_div(cols.class_results, cut.tile_q)
    return tiles * rows.classes * cols.classes * ceil_div(layer.planes.channels, cut.planes)


def _cost(tiling: Tiling, layer: Layer, facts: DeviceFacts) -> float:
    """Estimated cycles of a launch."""
    block, cut, split = tiling
    places = layout(block, cut, layer.axes)
    steps_h, steps_w = (axis.steps for axis in layer.axes)
    rows = min(split.slice_rows, ceil_div(cut.chunk_r, steps_h)) * steps_h
    own = block.tile_i * TILE_J * rows * cut.chunk_s / MULTIPLY_FRACTION
    row_instructions = (rows + (block.tile_i - 1) * steps_h) * ROW_INSTRUCTIONS
    own += (row_instructions + steps_h * edges(block) * EDGE_INSTRUCTIONS) * steps_w
    own *= met_fraction(layer.axes[0], block.tile_i)
    parts = ceil_div(terms(layer, cut), split.part_terms)
    work = Work(
        blocks=parts * _blocks_of_a_part(layer, cut),
        smem_bytes=smem_bytes(cut, split, places),
        warps=ceil_div(threads_used(tiling), 32),
        instructions=split.part_terms * own,
        terms=split.part_terms,
        staged=cut.planes * (places.lines_h * places.lines_w * steps_h * steps_w + places.filter_words),
        channel_run=cut.planes if layer.channels_inner else 0,
    )
    return work.cycles(block, facts) + parts * _PART_CYCLES


def _fitting(layer: Layer, facts: DeviceFacts, most_results: int) -> Iterator[Tiling]:
    """Every tiling worth a thought that runs, with tiles of up to ``most_results`` squared."""
    rows, cols = layer.axes
    for block in BLOCKS:
        tile_q = min(ceil_to(cols.class_results, TILE_J), most_results)
        tile_p = min(ceil_to(rows.class_results, block.tile_i), most_results, block.threads * TILE_J // tile_q)
        tile_p -= tile_p % block.tile_i
        for (chunk_r, chunk_s), slices in product(_chunks(layer), (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)):
            slice_rows = ceil_div(ceil_div(chunk_r, rows.steps), slices)
            if slices > 1 and (slices - 1) * slice_rows * rows.steps >= chunk_r:
                continue
            most = block.threads // (slices * (tile_p // block.tile_i) * (tile_q // TILE_J))
            for channels in (1, 2, 4, 8, 16, 32) if layer.channels_inner else _BLOCK_CHANNELS:
                if channels > most or (channels >= 2 * layer.planes.channels and channels > 1):
                    continue
                cut = Cut(tile_p, tile_q, channels, channels, chunk_r, chunk_s)
                tiling = Tiling(block, cut, _split(layer, cut, slices, slice_rows, facts))
                if invalid(tiling, layer, facts.max_smem_bytes) is None:
                    yield tiling


def _chunks(layer: Layer) -> Iterator[tuple[int, int]]:
    """Rows and columns of dy that are staged at a time: whole rows, unless one row is too long."""
    rows, cols = layer.axes
    chunk_s = min(cols.taps, 512)
    for parts in (1, 2, 3, 4, 7, 8, 14, 16, 32, 64, 128, 1 << 20):
        yield ceil_div(min(rows.taps, 512), parts), chunk_s
    yield 1, min(chunk_s, 64)


def _split(layer: Layer, cut: Cut, slices: int, slice_rows: int, facts: DeviceFacts) -> Split:
    """The split into as many parts as fill the device, or more where rounding asks for them."""
    count = terms(layer, cut)
    wanted = ceil_div(_WAVES * 2 * facts.sm_count, _blocks_of_a_part(layer, cut))
    products = min(cut.chunk_r, slice_rows * layer.axes[0].steps) * cut.chunk_s
    rounding = ceil_div(count * products, RUN_PRODUCTS)
    parts = min(count, max(rounding, min(wanted, _MOST_PARTS)))
    return Split(slices, slice_rows, ceil_div(count, parts))


def tilings(layer: Layer, facts: DeviceFacts) -> list[Tiling]:
    """The best with each block that has one, best first; empty if nothing fits."""
    for most_results in _MOST_RESULTS:
        costs = [(_cost(tiling, layer, facts), tiling) for tiling in _fitting(layer, facts, most_results)]
        if costs:
            ordered = sorted(costs, key=lambda each: each[0])
            return few_apart((tiling for _, tiling in ordered), lambda tiling: tiling.block)
    return []


def why_not(request: Request) -> str | None:
    """None if some tiling fits, else a sentence that says why not.

    One channel a block needs the least memory, whatever the channels of x are to each other.
    """
    problem, facts = request.problem, request.facts
    layer = Layer(axes(problem), Planes(problem.n, problem.k, 1), channels_inner=False)
    reason = why_not_direction(problem, "wgrad") or why_too_many_steps(layer.axes)
    if reason is not None:
        return reason
    if any(True for most_results in _MOST_RESULTS for _ in _fitting(layer, facts, most_results)):
        return None
    steps = " x ".join(str(axis.steps) for axis in layer.axes)
    return f"{steps} residues of the dilation do not fit {facts.max_smem_bytes} bytes of shared memory"


def configs(request: Request) -> list[Config]:
    """One for each of ``tilings``, best first."""
    layer = layer_of(request)
    found = [_derived(tiling, layer) for tiling in tilings(layer, request.facts)]
    return [Config(KERNEL, config_key(each.tiling), each) for each in found]


def _derived(tiling: Tiling, layer: Layer) -> _Derived:
    block, cut, split = tiling
    places = layout(block, cut, layer.axes)
    parts = ceil_div(terms(layer, cut), split.part_terms)
    grid = parts * _blocks_of_a_part(layer, cut)
    shape = LaunchShape(grid, block.threads, smem_bytes(cut, split, places))
    return _Derived(tiling, layer, places, parts, shape)


def source(request: Request, block: Block) -> KernelSource:
    """The specialised source. No extent of image, filter, stride or dilation takes part."""
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[request.problem.dtype],
        "TILE_I": block.tile_i,
        "THREADS": block.threads,
        "MIN_BLOCKS": block.min_blocks,
    }
    return kernel_source(KERNEL, "depthwise_window_wgrad", constants)


def _fields(request: Request, derived: _Derived) -> dict[str, Value]:
    """The scalars of ``Params`` in wgrad.cu."""
    (_, cut, split), layer, places, *_ = derived
    row_chunks, col_chunks = _chunks_of_image(layer, cut)
    return {
        **named("x", "nchw", request.second.strides),
        **named("y", "nkpq", request.first.strides),
        "channels": layer.planes.channels,
        "multiplier": request.problem.k_per_group,
        "c_groups": ceil_div(layer.planes.channels, cut.planes),
        "row_chunks": row_chunks,
        "col_chunks": col_chunks,
        "terms": terms(layer, cut),
        "part_terms": split.part_terms,
        "slices": split.slices,
        "slice_rows": split.slice_rows,
        **cut_fields(cut, places, layer),
    }


def bind(request: Request, config: Config) -> BoundCall:
    """wgrad(dy, x) -> dw."""
    derived: _Derived = config.derived
    kernel = source(request, derived.tiling.block)
    launch = Launch(kernel, request.device, derived.shape, _fields(request, derived))
    return wgrad_call(launch, request, of_filter(request, derived.parts))
