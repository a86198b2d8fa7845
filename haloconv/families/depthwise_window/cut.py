"""How a depthwise layer is cut for the kernels of depthwise_window: tiles, shared memory, and what a cut costs.

``Block`` is what is compiled, ``Cut`` what the launch says; a new image or filter changes the latter only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import NamedTuple

from haloconv.device import DeviceFacts
from haloconv.families.common import ceil_div
from haloconv.families.depthwise_window.axes import Axis, met_fraction, stored_lines
from haloconv.jit.launch import Value, ceil_to

TILE_J = 8  # columns of a thread's tile
WORD_BYTES = 4

_MAX_PLANES = 64  # of a block
_MAX_CHANNEL_LANES = 32
RUN_PRODUCTS = 4096  # that one sum takes before it is added to others: more would round too much

_BLOCK_SMEM_BYTES = 1024  # that the driver takes of each block's shared memory
_PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 512)

# The cost model, fitted to 39 layers on an H200: its first choice took 2.5 % longer there than the best that was tried.
MULTIPLY_FRACTION = 0.9  # of the instructions of the inner loop
ROW_INSTRUCTIONS = 220  # a window row, beside its multiplies
EDGE_INSTRUCTIONS = 90  # a row of the tile that meets a window row by itself, beside its multiplies
_STAGE_INSTRUCTIONS = 20  # an element that is staged
_STAGE_CYCLES = 0.55  # the same, as memory allows a multiprocessor
_SECTOR_WORDS = 8
_LOADS_IN_FLIGHT = 14  # of a thread
_LOAD_CYCLES = 550
_TERM_CYCLES = 1100  # barriers, and the first load of a term
_BLOCK_CYCLES = 1000
_LONE_WARP = 0.4  # what a scheduler's only warp waits, in its instructions
_SCHEDULERS = 4


@dataclass(frozen=True)
class Block:
    """What is compiled: rows of a thread's tile, threads of a block, blocks that registers must allow."""

    tile_i: int
    threads: int
    min_blocks: int


class Planes(NamedTuple):
    """Images and channels of the result, and how many filters each of them sums; in wgrad those of dy, and one."""

    images: int
    channels: int
    filters: int


class Layer(NamedTuple):
    """What is cut: the vertical and the horizontal axis, and planes.

    ``channels_inner``: channels, not columns, are neighbours in memory, in the result or, in wgrad, in x.
    """

    axes: tuple[Axis, Axis]
    planes: Planes
    channels_inner: bool


BLOCKS = (Block(4, 128, 4), Block(4, 256, 2), Block(4, 512, 1))


@dataclass(frozen=True)
class Cut:
    """What one block computes and stages: results of a class, planes and their filters, taps at a time.

    ``promotes``: the sums of each range of taps are added to totals in shared memory, as one run would
    round too much. ``classes_w`` classes of columns are done side by side.
    """

    tile_p: int
    tile_q: int
    planes: int
    filters: int
    chunk_r: int
    chunk_s: int
    promotes: bool = False
    classes_w: int = 1


class Tiling(NamedTuple):
    """What fprop or dgrad runs with."""

    block: Block
    cut: Cut


@dataclass(frozen=True)
class Layout:
    """Places in shared memory, in words (``WindowParams`` in families/depthwise_window/windows.cuh)."""

    lines_h: int
    lines_w: int
    skew_words: int
    class_words: int
    plane_words: int
    tap_words: int
    filter_row_words: int
    filter_words: int


def layout(block: Block, cut: Cut, axes: tuple[Axis, Axis]) -> Layout:
    """Rows and planes are set apart so that threads next to each other read 16 bytes on other banks.

    The next thread behind those of a row has the next plane, and behind those of all planes the next row.
    """
    steps_h, steps_w = axes[0].steps, axes[1].steps
    lines_h = stored_lines(axes[0], cut.tile_p, cut.chunk_r)
    tap_words = ceil_to(ceil_div(cut.chunk_s, steps_w), 4)
    lines_w = ceil_to(cut.tile_q + tap_words, 8)
    cols = cut.tile_q // TILE_J
    skew_words = (cols - block.tile_i * lines_w // 4) % 8 * 4
    class_words = lines_h * lines_w + (lines_h - 1) // block.tile_i * skew_words
    plane_words = steps_h * steps_w * cut.classes_w * class_words
    plane_words += ((cols % 8 or 1) - plane_words // 4) % 8 * 4
    filter_words = cut.chunk_r * steps_w * tap_words
    filter_words += (1 - filter_words // 4 % 2) * 4
    return Layout(lines_h, lines_w, skew_words, class_words, plane_words, tap_words, steps_w * tap_words, filter_words)


def totals_words(cut: Cut, places: Layout) -> int:
    """Where the totals of long sums begin: behind the planes with their halo, and the filters."""
    return cut.planes * places.plane_words + cut.filters * places.filter_words


def results_words(cut: Cut, channels_inner: bool) -> int:
    """Sums of a block that leave in the order of memory (``write_together`` in window.cu), or 0.

    They begin where the windows were. A window may be smaller: rows outside of the source are one row.
    """
    if not channels_inner and cut.classes_w == 1:
        return 0
    return cut.planes * (cut.tile_p * cut.tile_q * cut.classes_w + 1)


def smem_bytes(tiling: Tiling, places: Layout, channels_inner: bool) -> int:
    """Shared memory of a block: planes with their halo, filters and totals, later the results in their place."""
    block, cut = tiling
    totals = block.tile_i * TILE_J * block.threads if cut.promotes else 0
    return WORD_BYTES * max(totals_words(cut, places) + totals, results_words(cut, channels_inner))


def threads_used(tiling: Tiling) -> int:
    """Threads that have a tile."""
    block, cut = tiling
    return cut.classes_w * cut.planes * (cut.tile_p // block.tile_i) * (cut.tile_q // TILE_J)


def invalid(tiling: Tiling, layer: Layer, max_smem_bytes: int) -> str | None:
    """Why a block cannot be cut like this, or None."""
    block, cut = tiling
    if cut.tile_p % block.tile_i or cut.tile_q % TILE_J:
        return f"tiles of {cut.tile_p} x {cut.tile_q} are no multiple of a thread's {block.tile_i} x {TILE_J}"
    if threads_used(tiling) > block.threads:
        return f"{threads_used(tiling)} thread tiles do not fit a block of {block.threads} threads"
    if layer.channels_inner and (cut.filters & (cut.filters - 1) or cut.filters > _MAX_CHANNEL_LANES):
        return f"{cut.filters} channels are no power of two up to {_MAX_CHANNEL_LANES}, as lanes need it"
    needed = smem_bytes(tiling, layout(block, cut, layer.axes), layer.channels_inner)
    if needed > max_smem_bytes:
        return f"needs {needed} bytes of shared memory per block; the device has {max_smem_bytes}"
    return None


def groups(layer: Layer, cut: Cut) -> tuple[int, int]:
    """Groups of planes, a block's each; and of channels, if channels are neighbours, or 1."""
    planes = layer.planes
    if not layer.channels_inner:
        return ceil_div(planes.images * planes.channels, cut.planes), 1
    of_channels = ceil_div(planes.channels, cut.filters)
    return ceil_div(planes.images, cut.planes // cut.filters) * of_channels, of_channels


def grid(layer: Layer, cut: Cut) -> int:
    """Blocks of a launch."""
    rows, cols = layer.axes
    tiles = ceil_div(rows.class_results, cut.tile_p) * ceil_div(cols.class_results, cut.tile_q)
    return groups(layer, cut)[0] * tiles * rows.classes * (cols.classes // cut.classes_w)


def edges(block: Block) -> int:
    """Pairs (tile row, window row) that meet where the window row does not meet all rows of the tile.

    They are 2 * (1 + ... + (tile_i - 1)).
    """
    return block.tile_i * (block.tile_i - 1)


def cost(tiling: Tiling, layer: Layer, facts: DeviceFacts) -> float:
    """Estimated cycles of a launch."""
    block, cut = tiling
    (rows, cols), filters, places = layer.axes, layer.planes.filters, layout(block, cut, layer.axes)
    steps = rows.steps * cols.steps * cut.classes_w
    terms = filters * ceil_div(rows.taps, cut.chunk_r) * ceil_div(cols.taps, cut.chunk_s)
    window_rows = filters * rows.taps + terms * (block.tile_i - 1) * rows.steps
    own = block.tile_i * TILE_J * filters * rows.taps * cols.taps / MULTIPLY_FRACTION
    own += (window_rows * ROW_INSTRUCTIONS + terms * rows.steps * edges(block) * EDGE_INSTRUCTIONS) * cols.steps
    own *= met_fraction(rows, block.tile_i)
    window = places.lines_h * places.lines_w * steps
    work = Work(
        blocks=grid(layer, cut),
        smem_bytes=smem_bytes(tiling, places, layer.channels_inner),
        warps=ceil_div(threads_used(tiling), 32),
        instructions=own,
        terms=terms,
        staged=cut.planes * window + cut.filters * places.filter_words,
        channel_run=cut.filters if layer.channels_inner else 0,
    )
    return work.cycles(block, facts)


@dataclass(frozen=True)
class Work:
    """What the cost model knows of a launch: of a block unless it says otherwise.

    ``instructions`` are a thread's, of all terms; ``staged`` are words of a term; ``channel_run`` is the number of
    neighbouring channels that are read together, 0 where columns are neighbours.
    """

    blocks: int
    smem_bytes: int
    warps: int
    instructions: float
    terms: int
    staged: int
    channel_run: int

    def cycles(self, block: Block, facts: DeviceFacts) -> float:
        """Estimated cycles of the launch."""
        sm_count = facts.sm_count
        fit = (facts.max_smem_bytes + _BLOCK_SMEM_BYTES) // (self.smem_bytes + _BLOCK_SMEM_BYTES)
        resident = min(block.min_blocks, fit, ceil_div(self.blocks, sm_count))
        active = resident * ceil_div(self.warps, _SCHEDULERS)  # warps of a scheduler: a block's begin at the first
        multiply = active * self.instructions * (1 + _LONE_WARP / active**2)
        waste = max(1, _SECTOR_WORDS // self.channel_run) if self.channel_run else 1
        staged = resident * self.staged * max(_STAGE_INSTRUCTIONS / 32 / _SCHEDULERS, waste * _STAGE_CYCLES)
        rounds_of_loads = ceil_div(self.staged, block.threads * _LOADS_IN_FLIGHT)
        waiting = self.terms * (_TERM_CYCLES + rounds_of_loads * _LOAD_CYCLES) + _BLOCK_CYCLES
        cycles = multiply + self.terms * staged + waiting / resident
        rounds = self.blocks / (sm_count * resident)
        return cycles * (ceil(rounds) if rounds < 4 else rounds + 0.5)


def cuts(block: Block, layer: Layer, max_smem: int, classes_w: int) -> Iterator[Cut]:
    """Every cut worth a thought that runs with this block and does so many classes of columns side by side."""
    rows, cols = layer.axes
    promotes = layer.planes.filters * rows.taps * cols.taps > RUN_PRODUCTS
    tiles_p = sorted({ceil_to(ceil_div(rows.class_results, part), block.tile_i) for part in _PARTS})
    tiles_q = sorted({ceil_to(ceil_div(cols.class_results, part), TILE_J) for part in _PARTS})
    for tile_p, tile_q in product(tiles_p, tiles_q):
        most = block.threads // ((tile_p // block.tile_i) * (tile_q // TILE_J) * classes_w)
        for count, filters in _plane_blocks(min(most, _MAX_PLANES), layer):
            tile = Cut(tile_p, tile_q, count, filters, 0, 0, promotes, classes_w)
            cut = _fitting(Tiling(block, tile), layer, max_smem)
            if cut is not None:
                yield cut


def _plane_blocks(most: int, layer: Layer) -> Iterator[tuple[int, int]]:
    """(planes, filters) of a block of up to ``most`` planes."""
    planes = layer.planes
    if layer.channels_inner:
        for channels in (1, 2, 4, 8, 16, 32):
            if channels <= most and channels < 2 * planes.channels:
                yield channels, channels
                if channels >= min(16, planes.channels):
                    yield min(most // channels, planes.images) * channels, channels
        return
    for count in range(1, min(most, planes.images * planes.channels) + 1):
        yield count, filters_met(count, planes.images)


def filters_met(count: int, images: int) -> int:
    """Most distinct filters among ``count`` consecutive planes that start at a multiple of ``count``.

    Each filter has ``images`` consecutive planes.
    """
    if images % count == 0 or count % images == 0:
        return max(1, count // images)
    return (count - 2) // images + 2


def _fitting(tiling: Tiling, layer: Layer, max_smem: int) -> Cut | None:
    """The cut with as many taps at a time as shared memory allows, or None."""
    rows, cols = layer.axes
    for chunk_s, chunk_r in product(_halves(cols.taps), _halves(rows.taps)):
        whole = replace(tiling.cut, chunk_r=chunk_r, chunk_s=chunk_s)
        if chunk_r * chunk_s <= RUN_PRODUCTS and invalid(Tiling(tiling.block, whole), layer, max_smem) is None:
            return whole
    return None


def _halves(taps: int) -> Iterator[int]:
    while taps > 1:
        yield taps
        taps = ceil_div(taps, 2)
    yield 1


def best_cut(block: Block, layer: Layer, facts: DeviceFacts) -> Cut | None:
    """The cut that the cost model likes best, of those that do classes of columns side by side if any of them fits.

    None if nothing fits shared memory.
    """
    for classes_w in dict.fromkeys((layer.axes[1].joined_classes, 1)):
        found = list(cuts(block, layer, facts.max_smem_bytes, classes_w))
        if found:
            return min(found, key=lambda cut: cost(Tiling(block, cut), layer, facts))
    return None


def axis_fields(axis: Axis, tile: int, chunk: int, lines: int) -> dict[str, int]:
    """``AxisParams`` in families/depthwise_window/line.cuh."""
    return {
        "taps": axis.filter_taps,
        "stride": axis.stride,
        "dil": axis.dil,
        "pad": axis.pad,
        "results": axis.results,
        "extent": axis.extent,
        "classes": axis.classes,
        "tile": tile,
        "tiles": ceil_div(axis.class_results, tile),
        "chunk": chunk,
        "lines": lines,
        "steps": axis.steps,
    }


def window_fields(cut: Cut, places: Layout, layer: Layer) -> dict[str, int]:
    """``WindowParams`` in families/depthwise_window/windows.cuh."""
    channel_shift = cut.filters.bit_length() - 1 if layer.channels_inner else 0
    col_shift, tap_shift = (
        min(5 - channel_shift, (columns - 1).bit_length())
        for columns in (places.lines_w * layer.axes[1].steps * cut.classes_w, places.filter_row_words)
    )
    return {
        "half_words": places.lines_w // 2,
        "row_words": places.lines_w,
        "skew_words": places.skew_words,
        "class_words": places.class_words,
        "plane_words": places.plane_words,
        "tap_words": places.tap_words,
        "filter_row_words": places.filter_row_words,
        "filter_words": places.filter_words,
        "channel_shift": channel_shift,
        "col_shift": col_shift,
        "tap_shift": tap_shift,
        "planes": cut.planes,
        "filters": cut.filters,
        "classes_w": cut.classes_w,
    }


def cut_fields(cut: Cut, places: Layout, layer: Layer) -> dict[str, Value]:
    """The members ``axes`` and ``window``, which the structs of both kernels end with."""
    rows, cols = layer.axes
    return {
        "axes": [
            axis_fields(rows, cut.tile_p, cut.chunk_r, places.lines_h),
            axis_fields(cols, cut.tile_q, cut.chunk_s, places.lines_w),
        ],
        "window": window_fields(cut, places, layer),
    }
