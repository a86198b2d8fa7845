"""Tiles of families/halo_sm90/wgrad_ss/wgrad_ss.cu, the boxes that fit shared memory, and the cost model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from haloconv.families.common import ceil_div
from haloconv.problem import Problem

PIXEL_BYTES, SPAN = 128, 64  # of a swizzled row: a pixel of 64 channels, or filters
DEPTH = 16  # pixels of a wgmma: a step
_M = 64  # filters of a wgmma
_COLUMNS = (32, 64, 128, 256)
_TAPS = (1, 2, 3, 4, 5, 6, 9)
_SPLITS = ((1, 1, 3), (1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 3, 1), (3, 1, 1))
_MOST_SUMS = {2: 192, 3: 128}  # registers of a thread, by the number of consumers
_MOST_COLUMNS = {2: 256, 3: 128}  # ptxas takes wgmma of more only where a block has 384 threads
_BOX = 256  # columns and rows of a box of TMA
_STAGES = (2, 8)  # at least, at most
_LEAST_STRIP = 32  # columns of dy, of several strips
_BARRIER_BYTES = 16  # of a stage
_MOST_PARTIAL_BYTES = 64 << 20
_MOST_WAVES = 4
_CLUSTERS = (1, 2)  # blocks of one: of four or eight find room on 120 multiprocessors of 132, and never were ahead
_MOST_STEPS = 2048  # of a block that is in a cluster: wgmma cuts its sums
# The cost model, in cycles of a multiprocessor: bytes that shared memory reads in one, by the hardware, and that the L2
# brings to one of all; bytes that device memory brings to all, and of tensors that the L2 holds; from asking for a
# stage until it is there, if the L2 holds it and if not; a stage by itself; the launch and the first stage of a block;
# partial sums that are written and added in a cycle of all, and the launch that adds them; bytes of sums that the
# blocks of a cluster add, and its barriers. Fitted to 226 times of 13 layers on an NVIDIA H200 at 1.7 GHz: 8 % off in
# the mean, and its first tiling 1.5 % slower than the fastest.
_SMEM_BYTES, _L2_BYTES, _DEVICE_BYTES, _L2_HOLDS = 128, 41, 1720, 50 << 20
_LATENCY_CYCLES, _FAR_CYCLES, _STAGE_CYCLES = 2400, 4400, 57
_BLOCK_CYCLES, _SUMS_OF_CYCLE, _SUM_CYCLES = 9600, 230, 3400
_PEER_BYTES, _CLUSTER_CYCLES = 11, 830


class Blocks(NamedTuple):
    """Tiles along filters, channels and taps."""

    k: int
    c: int
    t: int


@dataclass(frozen=True)
class Tile:
    """What a block sums: of each consumer ``m_blocks`` of 64 filters, ``columns`` channels and ``taps``.

    ``split``: into how many parts its consumers divide filters, channels and taps.
    """

    m_blocks: int
    columns: int
    taps: int
    split: tuple[int, int, int]

    def __str__(self) -> str:
        filters, channels, taps = self.extents
        return f"filters{filters} channels{channels} taps{taps} split{'x'.join(map(str, self.split))}"

    @property
    def extents(self) -> tuple[int, int, int]:
        """Filters, channels and taps of a block."""
        return self.split[0] * self.m_blocks * _M, self.split[1] * self.columns, self.split[2] * self.taps

    @property
    def consumers(self) -> int:
        return max(self.split)

    @property
    def threads(self) -> int:
        """Threads of a block: those of the consumers, and a warpgroup that asks TMA."""
        return 128 * (self.consumers + 1)

    @property
    def spans(self) -> tuple[int, int]:
        """Spans of 64 filters and of 64 channels."""
        filters, channels, _ = self.extents
        return filters // SPAN, ceil_div(channels, SPAN)

    def blocks_of(self, problem: Problem) -> Blocks:
        """The tiles of a layer, along each axis."""
        filters, channels, taps = self.extents
        return Blocks(
            ceil_div(problem.k, filters), ceil_div(problem.c, channels), ceil_div(problem.r * problem.s, taps)
        )

    def blocks(self, problem: Problem) -> int:
        """Tiles of the layer."""
        of_k, of_c, of_t = self.blocks_of(problem)
        return of_k * of_c * of_t

    def sums(self, problem: Problem) -> int:
        """Partial sums of a part: of all tiles, with those behind the last filter, channel and tap."""
        filters, channels, taps = self.extents
        return self.blocks(problem) * filters * channels * taps

    @property
    def step_cycles(self) -> float:
        """Cycles of a step of all consumers: of tensor cores, or of shared memory that gives both operands."""
        wgmma = max(self.columns / 2, DEPTH * 2 * (_M + self.columns) / _SMEM_BYTES)
        return self.consumers * self.taps * self.m_blocks * wgmma

    def reach(self, problem: Problem, pitch: int) -> tuple[int, int]:
        """Rows between a tile's first and last tap, and pixels between the first of its first row and its last tap.

        Of all tiles the most; rows are ``pitch`` pixels.
        """
        count, most = problem.r * problem.s, self.extents[2]
        rows = pixels = 0
        for first in range(0, count, most):
            taps = range(first, min(first + most, count))
            top = first // problem.s
            rows = max(rows, (taps[-1] // problem.s - top) * problem.dilation[0])
            for tap in taps:
                r, s = divmod(tap, problem.s)
                pixels = max(pixels, (r - top) * problem.dilation[0] * pitch + s * problem.dilation[1])
        return rows, pixels


def tiles(problem: Problem) -> Iterator[Tile]:
    """Every tile that has no more filters, channels or taps than the layer can use."""
    for m_blocks, columns, taps, split in product((1, 2), _COLUMNS, _TAPS, _SPLITS):
        tile = Tile(m_blocks, columns, taps, split)
        fits = taps * m_blocks * columns // 2 <= _MOST_SUMS[tile.consumers]
        fits = fits and columns <= _MOST_COLUMNS[tile.consumers]
        if fits and _is_of_use(tile, problem):
            yield tile


def _is_of_use(tile: Tile, problem: Problem) -> bool:
    """Whether no consumer would be idle in every block, and channels of a block begin with a span."""
    (filters, channels, taps), (of_k, of_c, of_t) = tile.extents, tile.split
    several = channels < problem.c
    return (
        filters - filters // of_k < problem.k
        and filters // of_k < problem.k + _M
        and channels - channels // of_c < problem.c
        and tile.columns < problem.c + max(_COLUMNS[0], tile.columns // 2)
        and taps - tile.taps < problem.r * problem.s
        and taps < problem.r * problem.s + of_t
        and not (tile.columns % SPAN and (several or of_c > 1))
    )


class Strips(NamedTuple):
    """Strips of columns of dy: how many, columns from one to the next, pixels of a row of a box.

    ``apart``: columns behind a strip are taken for zeros, although dy has more there.
    """

    number: int
    cols: int
    pitch: int
    apart: bool


def strips_of(problem: Problem) -> Iterator[Strips]:
    """Images as one strip, where a box has such rows; else strips that are all as wide.

    As one strip a row needs room for the wider padding alone: what lies right of it is the left padding of the row
    below. Strips of one column of taps have no columns behind them, so that the last may be less wide.
    """
    _, _, left, right = problem.padding
    pitch, reach = max(problem.w + max(left, right), problem.q), (problem.s - 1) * problem.dilation[1]
    if pitch <= _BOX:
        yield Strips(1, problem.q, pitch, False)
    if reach == 0:
        yield from (Strips(ceil_div(problem.q, n), n, n, False) for n in (64, 128, 256) if n < problem.q)
        return
    for count in range(2, problem.q // _LEAST_STRIP + 1):
        cols, rest = divmod(problem.q, count)
        if rest == 0 and cols + reach <= _BOX:
            yield Strips(count, cols, cols + reach, True)


@dataclass(frozen=True)
class Box:
    """A stage in shared memory: strips; rows of dy and of x that TMA writes; all pixels of a span of x and of dy."""

    strips: Strips
    rows: int
    x_rows: int
    x_pixels: int
    y_pixels: int

    @property
    def filled(self) -> tuple[int, int]:
        """Pixels of a span of x, and of dy, that TMA writes."""
        return self.x_rows * self.strips.pitch, self.rows * self.strips.pitch

    def stage_bytes(self, tile: Tile) -> int:
        of_k, of_c = tile.spans
        return PIXEL_BYTES * (of_k * self.y_pixels + of_c * self.x_pixels)

    def boxes(self, problem: Problem) -> int:
        """Boxes of the layer."""
        return problem.n * self.strips.number * ceil_div(problem.p, self.rows)

    def cycles(self, tile: Tile, stages: int, is_near: bool) -> float:
        """Cycles of a box, by the model, where all stages but one are on their way."""
        (of_k, of_c), (of_x, of_dy) = tile.spans, self.filled
        bring = PIXEL_BYTES * (of_k * of_dy + of_c * of_x) / _L2_BYTES
        comes = (bring + (_LATENCY_CYCLES if is_near else _FAR_CYCLES)) / (stages - 1)
        return _STAGE_CYCLES + max(self.y_pixels // DEPTH * tile.step_cycles, bring, comes)


def boxes(problem: Problem, tile: Tile, max_smem_bytes: int) -> Iterator[tuple[Box, int]]:
    """Every box that fits shared memory, with the stages that do."""
    for strips in strips_of(problem):
        reach_rows, reach_pixels = tile.reach(problem, strips.pitch)
        heights = {ceil_div(problem.p, count) for count in range(1, problem.p + 1)}
        for rows in sorted(heights):
            if rows + reach_rows > _BOX:
                break
            y_pixels = ceil_div(rows * strips.pitch, DEPTH) * DEPTH
            x_pixels = ceil_div(y_pixels + reach_pixels, 8) * 8
            box = Box(strips, rows, rows + reach_rows, x_pixels, y_pixels)
            stages = max_smem_bytes // (box.stage_bytes(tile) + _BARRIER_BYTES)
            if stages < _STAGES[0]:
                break
            yield box, min(stages, _STAGES[1])


class Tiling(NamedTuple):
    """A layer's tiles, boxes, stages, blocks of each tile, and the cost model's cycles.

    ``cluster`` blocks of a tile add their sums in shared memory; 1: each writes its own.
    """

    tile: Tile
    box: Box
    stages: int
    cluster: int
    parts: int
    cycles: float

    def __str__(self) -> str:
        return f"{self.tile} cluster{self.cluster}" if self.cluster > 1 else str(self.tile)

    @property
    def smem_bytes(self) -> int:
        """Sums take the place of stages; barriers lie behind both."""
        stages = self.stages * self.box.stage_bytes(self.tile)
        return max(stages, _sum_bytes(self.tile) if self.cluster > 1 else 0) + self.stages * _BARRIER_BYTES

    @property
    def sums(self) -> int:
        """How many partial sums of each element of dw are written; 0: none, since blocks write dw."""
        left = self.parts // self.cluster
        return 0 if left == 1 and self.cluster > 1 else left


def _sum_bytes(tile: Tile) -> int:
    """Bytes of the sums of a block."""
    filters, channels, taps = tile.extents
    return 4 * filters * channels * taps


def tilings(problem: Problem, max_smem_bytes: int, sm_count: int) -> list[Tiling]:
    """The best of each tile without clusters, and with clusters of each size, best first."""
    operands = 2 * (math.prod(problem.x_shape) + math.prod(problem.y_shape))  # bytes
    found = []
    for tile in tiles(problem):
        staged = list(boxes(problem, tile, max_smem_bytes))
        for cluster in _CLUSTERS:
            if cluster > 1 and _sum_bytes(tile) + _STAGES[1] * _BARRIER_BYTES > max_smem_bytes:
                continue
            each = [one for box in staged if (one := _tiling(problem, tile, box, cluster, sm_count, operands))]
            found += sorted(each, key=lambda one: one.cycles)[:1]
    return sorted(found, key=lambda each: each.cycles)


def _tiling(
    problem: Problem, tile: Tile, staged: tuple[Box, int], cluster: int, sm_count: int, operands: int
) -> Tiling | None:
    """With the parts of a tile that take least time by the model; None if clusters of that size cannot have its sums.

    ``staged``: boxes and their stages. ``operands``: bytes of x and dy.
    """
    box, stages = staged
    is_near = operands <= _L2_HOLDS
    of_box, far = box.cycles(tile, stages, is_near), 0 if is_near else operands / _DEVICE_BYTES + _BLOCK_CYCLES
    blocks, sums, count = tile.blocks(problem), tile.sums(problem), box.boxes(problem)
    most = min(count, _MOST_WAVES * sm_count // blocks, cluster * _MOST_PARTIAL_BYTES // (4 * sums))
    if most < cluster:
        return None

    def cycles(parts: int) -> float:
        of_block = ceil_div(count, parts) * of_box + _BLOCK_CYCLES
        left = 0 if parts == cluster > 1 else parts // cluster
        if cluster > 1:
            of_block += _sum_bytes(tile) / _PEER_BYTES + _CLUSTER_CYCLES * (1 if left else 2)
        adding = left * sums / _SUMS_OF_CYCLE + _SUM_CYCLES if left else 0
        return max(ceil_div(blocks * parts, sm_count) * of_block, far) + adding

    waves = range(1, _MOST_WAVES + 1)
    wanted = {cluster, *(max(1, min(most, wave * sm_count // blocks) // cluster) * cluster for wave in waves)}
    steps = box.y_pixels // DEPTH
    fits = [parts for parts in sorted(wanted) if cluster == 1 or ceil_div(count, parts) * steps <= _MOST_STEPS]
    if not fits:
        return None
    best = min(fits, key=cycles)
    return Tiling(tile, box, stages, cluster, best, cycles(best))
