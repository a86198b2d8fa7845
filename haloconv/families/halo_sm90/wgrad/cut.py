"""Into how many parts the boxes of families/halo_sm90/wgrad/wgrad.cu are cut, and the cost model of a tiling."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from haloconv.families.common import ceil_div
from haloconv.families.halo_sm90.wgrad.tile import Stage, Tile, lines_of, part_counts, row_steps
from haloconv.problem import Problem

_MOST_PARTIAL_BYTES, _MOST_WAVES = 64 << 20, 4
# The cost model, by a fit to times of an NVIDIA H100: cycles between the products of two lines, the least of a box, and
# those of the first lines of a block; partial sums that are written and added in a cycle; how much longer steps of a
# tile take whose rows of taps are not all in the filter.
_LINE_CYCLES, _BOX_CYCLES, _BLOCK_CYCLES, _SUMS_OF_CYCLE, _PARTIAL_ROWS = 120, 1000, 6000, 300, 1.3


class Cut(NamedTuple):
    """How the lines of x are dealt out: strips of columns, boxes of each class of rows, blocks of each tile."""

    column_strips: int
    bands: int
    parts: int


class Layer(NamedTuple):
    """What all tilings have in common: images by classes of rows, lines of a class and their pixels.

    ``short``: copies of x and dy may be multiplied instead.
    """

    problem: Problem
    images: int
    lines: int
    q: int
    sm_count: int
    short: bool


def cut_of(layer: Layer, tile: Tile, stage: Stage) -> tuple[Cut, float]:
    """The parts of a tile that take least time by the model, and that time in cycles of a multiprocessor."""
    problem, images, lines, q, sm_count, short = layer
    bands, strips, of = ceil_div(lines, stage.box_rows), ceil_div(q, stage.strip), tile.blocks_of(problem)
    boxes, blocks = images * strips * bands, problem.groups * of.k * of.c * of.r * of.s
    steps = ceil_div(q, stage.depth) / strips
    whole = of.r * tile.rows == problem.r
    partial = 1 if whole else _PARTIAL_ROWS  # rows of taps that are none are asked for at each step
    line_cycles = max(partial * steps * stage.step_cycles(tile) + _LINE_CYCLES, stage.load_cycles(tile, short))
    box_cycles, ahead = max(stage.box_rows * line_cycles, _BOX_CYCLES), ceil_div(tile.rows - 1, stage.box_rows)
    sums = tile.split[3] * blocks * tile.block_sums
    most, best, least = max(1, min(boxes, _MOST_WAVES * sm_count // blocks, _MOST_PARTIAL_BYTES // (4 * sums))), 1, inf
    for parts in part_counts(boxes, most):
        of_block = (-(-boxes // parts) + ahead) * box_cycles + _BLOCK_CYCLES
        cycles = -(-blocks * parts // sm_count) * of_block + parts * sums / _SUMS_OF_CYCLE
        if cycles < least:
            best, least = parts, cycles
    return Cut(strips, bands, best), least


def classes_of(problem: Problem) -> int:
    """Classes of rows, among those a stride apart, that do not meet each other's outputs."""
    return min(row_steps(problem)[1], lines_of(problem))
