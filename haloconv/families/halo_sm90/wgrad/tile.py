"""Tiles of families/halo_sm90/wgrad/wgrad.cu, and what fits shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import gcd
from typing import NamedTuple

from haloconv.families.common import ceil_div
from haloconv.families.halo_sm90.terms import TERMS, products_of
from haloconv.families.halo_sm90.wgrad.operand import PIECE_BYTES, SPAN_BYTES, Operand
from haloconv.problem import Problem

_M = 64  # of wgmma: channels by columns of taps
_MOST_N = 256
_CHANNELS = (8, 16, 32, 64)
_FILTERS = (32, 64, 128, 192, 256)
_SPLITS = (
    (3, 1, 1, 1),
    (2, 1, 1, 1),
    (1, 2, 1, 1),
    (1, 1, 2, 1),
    (1, 3, 1, 1),
    (1, 1, 3, 1),
    (1, 1, 1, 2),
    (1, 1, 1, 3),
)
_MOST_ROWS, _MOST_COLUMN_GROUPS = 7, 5
_MOST_SUMS = {2: 160, 3: 96}  # registers of a thread, by the number of consumers
_REGISTERS = {2: 204, 3: 124}  # the same for sums, fragments and descriptors
_REGISTERS_IN_TERMS = {2: 196, 3: 132}  # with several terms: above it ptxas spills
_PART_STEPS = 4  # of a partial sum, with several terms, at most
# With several terms, by counted instructions: of a fragment's terms, of a partial sum for each column of N, and of what
# a consumer waits for, twice in each. Not measured.
_SPLIT_CYCLES, _ADD_CYCLES, _PART_CYCLES = 40, 1, 300
_LEAST_CYCLES = 28  # of a wgmma: below 56 filters reading its fragment of x takes longer than the product
_UNHIDDEN = 0.25  # of the shorter of two times that overlap, what still counts: by a fit to times of an NVIDIA H100
_BATCH_BYTES, _BATCH_CYCLES = 128 * 24 * 4, 1000  # of loads in flight, and how long they take
_BYTES_OF_CYCLE = 20  # that a multiprocessor gets from memory and the L2
_BOX = 256
_MOST_STAGES = 4  # boxes of x
_TRANSPOSED_STAGES = 3  # of long lines, at least: on an NVIDIA H200 layers of 5x9 were 3 to 5 % slower with two
_BOX_STEPS = 16  # of a line or a box of them, at most: longer boxes would save little
_SHIFT_CYCLES = 100  # of a thread for 16 bytes: some seven instructions, while tensor cores work
_ROW_CYCLES = 450  # of a thread for a row, and again for each plane that a warp has rows of: by the notebook's table
_BARRIER_BYTES = 16  # of a stage: its two barriers
_RAW_BARRIER_BYTES = 4 * 2 * 8  # four for each stage of raw lines
_FILLED_BARRIER_BYTES = 8  # of a stage of lines that threads fill up: one more


class Blocks(NamedTuple):
    """Tiles along filters, channels, rows and columns of taps; rows of taps of a tile are ``row_step`` apart."""

    k: int
    c: int
    r: int
    s: int
    row_step: int


def row_steps(problem: Problem) -> tuple[int, int]:
    """Rows of taps that meet whole strides of rows of x: how many taps, and how many rows of dy, they are apart."""
    stride, dilation = problem.stride[0], problem.dilation[0]
    common = gcd(stride, dilation)
    return stride // common, dilation // common


def lines_of(problem: Problem) -> int:
    """Rows of x a stride apart that outputs meet, at most, counted from the first row of the image on."""
    stride, last = problem.stride[0], (problem.r - 1) * problem.dilation[0] - problem.padding[0]
    return max(1, min(ceil_div(problem.h, stride), problem.p + last // stride))


@dataclass(frozen=True)
class Tile:
    """What a block sums: ``rows`` of taps, and of each warpgroup ``channels`` by ``filters`` by column groups.

    ``split``: into how many parts its warpgroups divide columns of taps, channels, filters and steps.
    """

    rows: int
    channels: int
    filters: int
    column_groups: int
    split: tuple[int, int, int, int]

    def __str__(self) -> str:
        parts = "x".join(map(str, self.split))
        return f"rows{self.rows} channels{self.channels} filters{self.filters} columns{self.columns} split{parts}"

    @property
    def consumers(self) -> int:
        return max(self.split)

    @property
    def threads(self) -> int:
        """Threads of a block: those of the consumers, and a warpgroup that produces."""
        return 128 * (self.consumers + 1)

    @property
    def columns(self) -> int:
        """Columns of taps of a block."""
        return self.split[0] * self.column_groups * _M // self.channels

    def fits(self, words: int, terms: int) -> bool:
        """Whether a thread has registers for sums, fragments that are read from ``words`` words each, descriptors.

        With several terms for partial sums of a column group, too, and for the terms of its fragments: one wgmma takes
        the filters of all rows of taps.
        """
        sums = self.column_groups * self.rows * self.filters // 2
        if terms > 1:
            n = self.rows * self.filters
            parts = n // 2 + 4 * _PART_STEPS * terms + words // 2 * self.column_groups
            one_after_the_other = n <= _MOST_N and 1 in (self.rows, self.split[2])
            return one_after_the_other and sums + parts <= _REGISTERS_IN_TERMS[self.consumers]
        all_registers = sums + (4 + 2 * words) * self.column_groups + 2 * self.rows
        return sums <= _MOST_SUMS[self.consumers] and all_registers <= _REGISTERS[self.consumers]

    @property
    def block_sums(self) -> int:
        """Partial sums of a block, with those behind the last filter, channel and tap."""
        return self.consumers // self.split[3] * self.column_groups * self.rows * self.filters * _M

    def sums(self, problem: Problem) -> int:
        """Partial sums of a part, of all tiles."""
        return self.blocks(problem) * self.block_sums

    def blocks_of(self, problem: Problem) -> Blocks:
        """The tiles of a group, along each axis."""
        step, _ = row_steps(problem)
        whole, left = divmod(problem.r, step * self.rows)
        return Blocks(
            ceil_div(problem.k_per_group, self.split[2] * self.filters),
            ceil_div(problem.c_per_group, self.split[1] * self.channels),
            whole * step + min(step, left),
            ceil_div(problem.s, self.columns),
            step,
        )

    def blocks(self, problem: Problem) -> int:
        """Tiles of the layer."""
        of_k, of_c, of_r, of_s, _ = self.blocks_of(problem)
        return problem.groups * of_k * of_c * of_r * of_s

    def step_cycles(self, read: int, bytes_: float) -> float:
        """Cycles of a multiprocessor for a step: of tensor cores, shared memory or the L2, whichever takes longest.

        ``read`` are cycles of reading a fragment of x, ``bytes_`` what a step brings to shared memory.
        """
        multiply = self.rows * max(self.filters / 2, _LEAST_CYCLES)
        cycles = self.consumers * _overlapped(multiply, read + self.rows * self.filters / 4)
        return max(cycles * self.column_groups / self.split[3], bytes_ / _BYTES_OF_CYCLE)

    def step_cycles_in_terms(self, read: int, bytes_: float, terms: int, part_steps: int) -> float:
        """``step_cycles`` with several terms, where ``part_steps`` steps are a partial sum.

        The time of all consumers together, or of one by itself if that is longer.
        """
        products, n = products_of(terms), self.rows * self.filters
        multiply = products * max(n / 2, _LEAST_CYCLES)
        others = read + _SPLIT_CYCLES + _ADD_CYCLES * n / part_steps
        alone = multiply + others + _PART_CYCLES / part_steps
        cycles = max(self.consumers * _overlapped(multiply, others + products * n / 4), alone)
        return max(cycles * self.column_groups / self.split[3], bytes_ / _BYTES_OF_CYCLE)


def _overlapped(one: float, other: float) -> float:
    return max(one, other) + _UNHIDDEN * min(one, other)


def part_counts(boxes: int, most: int) -> Iterator[int]:
    """Numbers of parts up to ``most`` whose longest part is shorter than with one part less."""
    parts = 1
    while parts <= most:
        yield parts
        longest = ceil_div(boxes, parts)
        if longest == 1:
            return
        parts = ceil_div(boxes, longest - 1)


def tiles(problem: Problem) -> list[Tile]:
    """Every tile that has no more rows, channels, filters or columns of taps than the layer can use."""
    return _tiles(ceil_div(problem.r, row_steps(problem)[0]), problem.s, problem.c_per_group, problem.k_per_group)


@lru_cache(maxsize=256)
def _tiles(rows: int, columns: int, channels: int, filters: int) -> list[Tile]:
    """Tiles for so many rows and columns of taps, channels and filters of a group."""
    of_tile = [each for each in {ceil_div(rows, count) for count in range(1, rows + 1)} if each <= _MOST_ROWS]
    every = product(of_tile, _CHANNELS, _FILTERS, range(1, _MOST_COLUMN_GROUPS + 1), _SPLITS)
    return [tile for each in every if _is_of_use(tile := Tile(*each), columns, channels, filters)]


def _is_of_use(tile: Tile, columns: int, channels: int, filters: int) -> bool:
    """Whether no part of the tile would be empty for every block."""
    s_parts, c_parts, k_parts, _ = tile.split
    one_column = _M // tile.channels
    return (
        (tile.channels == _CHANNELS[0] or c_parts * tile.channels < 2 * channels)
        and (tile.filters == _FILTERS[0] or k_parts * tile.filters < 2 * filters)
        and (tile.columns < columns + s_parts * one_column or s_parts * tile.column_groups == 1)
        and (c_parts - 1) * tile.channels < channels
        and (k_parts - 1) * tile.filters < filters
        and (s_parts * tile.column_groups - 1) * one_column < columns
    )


@dataclass(frozen=True)
class Stage:
    """Lines in shared memory: pixels of a line of dy and of x, lines of a box, boxes of x, how they come, all bytes.

    ``raw`` are pixels of a box of x and of dy before its lines are shifted, ``terms`` TF32 values of an fp32 value,
    ``image_columns`` those of dy of an image if images are side by side in a row, else 0.
    """

    strip: int
    x_pitch: int
    box_rows: int
    stages: int
    raw: tuple[int, int]
    x: Operand
    dy: Operand
    smem_bytes: int
    depth: int
    terms: int
    image_columns: int = 0

    @property
    def x_box_rows(self) -> int:
        """Lines of x that TMA brings at a time."""
        return 1 if self.x.rows_apart else self.box_rows

    def step_cycles(self, tile: Tile) -> float:
        """Cycles of a multiprocessor for a step, by the model."""
        x_bytes = tile.split[1] * tile.channels * self.x_pitch / self.strip
        read, bytes_ = 4 * self.x.words(self.depth), 32 * (x_bytes + tile.split[2] * tile.filters)
        if self.terms == 1:
            return tile.step_cycles(read, bytes_)
        part_steps = min(_PART_STEPS, max(1, self.strip // self.depth // tile.split[3]))
        return tile.step_cycles_in_terms(read, bytes_, self.terms, part_steps)

    def load_cycles(self, tile: Tile, with_rows: bool) -> int:
        """Cycles that the loads of a line take, by the model: batch after batch of what the producers' registers hold.

        ``with_rows``: what each shifted row costs counts, too, which decides whether copies are multiplied instead.
        """
        lines = (
            (self.x, tile.split[1] * tile.channels, self.x_pitch),
            (self.dy, tile.split[2] * tile.filters, self.strip),
        )
        batches = shifts = row_cycles = 0
        for operand, rows, pixels in lines:
            elems = rows * pixels
            if operand.loads:
                word = 4 if abs(operand.loads) == 1 else 32 // self.depth  # bytes of a register that are used
                batches += ceil_div(elems * word, _BATCH_BYTES)
            elif operand.is_raw:
                shifts += self.terms * ceil_div(elems * 32 // self.depth, 128 * PIECE_BYTES)
            if operand.planes and with_rows:
                warp_planes = ceil_div(32 * operand.planes, rows)  # that shift by as much each, one after the other
                row_cycles += _ROW_CYCLES * rows * (1 + warp_planes) // 128
        return batches * _BATCH_CYCLES + shifts * _SHIFT_CYCLES + row_cycles


def stage_of(problem: Problem, tile: Tile, x: Operand, dy: Operand, max_smem_bytes: int) -> Stage | None:
    """The longest lines of which the rings have room for enough; None if there are none."""
    size = problem.dtype.itemsize
    depth, span = 32 // size, SPAN_BYTES // size
    terms = TERMS.get(problem.precision, 1)
    if not tile.fits(x.words(depth), terms) or (dy.inner and tile.filters > span and tile.filters % span):
        return None
    channels, filters = tile.split[1] * tile.channels, tile.split[2] * tile.filters
    return _longest(problem, _Block(tile.rows, min(tile.columns, problem.s), channels, filters), x, dy, max_smem_bytes)


class _Block(NamedTuple):
    """What lines depend on of a tile: rows and columns of taps, channels and filters of a block."""

    rows: int
    columns: int
    channels: int
    filters: int


@lru_cache(maxsize=4096)
def _longest(problem: Problem, block: _Block, x: Operand, dy: Operand, max_smem_bytes: int) -> Stage | None:
    """Tiles that divide a block otherwise have the same lines."""
    depth, terms, found = 32 // problem.dtype.itemsize, TERMS.get(problem.precision, 1), None
    for strip in _strips(problem, dy):
        if found is not None and ceil_div(problem.q, strip) == ceil_div(problem.q, found.strip):
            continue  # as many lines, and room for fewer of them
        pitch = _x_pitch(problem, block, x, min(strip, ceil_div(problem.q, depth) * depth))
        boxes = _Lines(problem, block, x, dy, strip, pitch).boxes(max_smem_bytes)
        if boxes is None:
            break
        if found is not None and dy.transposed and boxes.rows == 1 and boxes.stages < _TRANSPOSED_STAGES:
            break
        found = Stage(strip, pitch, boxes.rows, boxes.stages, boxes.raw, x, dy, boxes.smem_bytes, depth, terms)
    return found


def _strips(problem: Problem, dy: Operand) -> Iterator[int]:
    """Pixels of a line of dy: whole spans of 128 bytes where pixels are neighbours; of short rows whole steps."""
    size = problem.dtype.itemsize
    depth, span = 32 // size, SPAN_BYTES // size
    if dy.inner and problem.q < span:
        yield ceil_div(problem.q, depth) * depth
    else:
        yield from range(span, 4 * span + 1, span)


class _Boxes(NamedTuple):
    """Lines of a box, boxes of x at a time, pixels of boxes of x and of dy before they are shifted, and all bytes."""

    rows: int
    stages: int
    raw: tuple[int, int]
    smem_bytes: int


@dataclass(frozen=True)
class _Lines:
    """Lines of dy of ``strip`` pixels, and of x of ``pitch``, as they come for a block."""

    problem: Problem
    block: _Block
    x: Operand
    dy: Operand
    strip: int
    pitch: int

    def boxes(self, max_smem_bytes: int) -> _Boxes | None:
        """The tallest boxes of which there is room for enough; None if there is not even for single lines.

        Boxes of an image are about as tall.
        """
        lines = lines_of(self.problem)
        tallest = ceil_div(lines, ceil_div(lines, self._tallest()))
        wanted = 2 if self.x.is_raw or self.dy.is_raw else _MOST_STAGES  # raw ones are in flight, too
        for rows in (ceil_div(lines, count) for count in part_counts(lines, lines)):
            if rows > tallest:
                continue
            found = self._boxes_of(rows, max_smem_bytes)
            if found is not None and (rows == 1 or found.stages >= wanted):
                return found
        return None

    def _tallest(self) -> int:
        """Lines of the tallest boxes: of short rows that follow one another, as many as have _BOX_STEPS steps."""
        problem = self.problem
        if (problem.stride[0], problem.dilation[0]) != (1, 1) or problem.q > self.strip:
            return 1
        if self.x.rows_apart and (self.x.loads or self.x.planes):  # which are brought by rows that do
            return 1
        return max(1, _BOX_STEPS // ceil_div(problem.q, 32 // problem.dtype.itemsize))

    def _boxes_of(self, rows: int, max_smem_bytes: int) -> _Boxes | None:
        """Boxes of so many lines."""
        problem, x, dy, size = self.problem, self.x, self.dy, self.problem.dtype.itemsize
        _, _, channels, filters = self.block
        depth = 32 // size
        read = min(self.strip, ceil_div(problem.q, depth) * depth)  # pixels of a line of dy that are multiplied
        raw = x.raw_pixels(problem.w, self.pitch, rows, size), dy.raw_pixels(problem.q, read, rows, size)
        if max(*raw, 0 if x.planes else self.pitch, channels, filters) > _BOX:
            return None
        raw_bytes = (
            x.raw_bytes(channels, raw[0], rows, size) + dy.raw_bytes(filters, raw[1], rows, size) + _RAW_BARRIER_BYTES
        )
        of_x = rows * channels * self.pitch * size + _BARRIER_BYTES + x.is_filled * _FILLED_BARRIER_BYTES
        terms = TERMS.get(problem.precision, 1)
        of_dy = terms * rows * filters * self.strip * size + _BARRIER_BYTES
        copies = terms * (self.block.rows - 1) * filters * self.strip * size if terms > 1 else 0
        ahead_bytes = ceil_div(self.block.rows - 1, rows) * of_dy + copies
        stages = min(_MOST_STAGES, (max_smem_bytes - raw_bytes - ahead_bytes) // (of_x + of_dy))
        return _Boxes(rows, stages, raw, stages * (of_x + of_dy) + ahead_bytes + raw_bytes) if stages >= 2 else None


def _x_pitch(problem: Problem, block: _Block, x: Operand, pixels: int) -> int:
    """Pixels of a line of x: those that ``pixels`` of dy meet, from an aligned one on where pixels are neighbours."""
    piece = PIECE_BYTES // problem.dtype.itemsize
    columns = (pixels - 1) * problem.stride[1] + (block.columns - 1) * problem.dilation[1]
    if x.inner:
        return ceil_div(columns + 1, 8) * 8
    return ceil_div(columns, 2 * piece) * 2 * piece + piece  # rows begin in different banks
