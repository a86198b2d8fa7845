"""Tiles of families/halo_sm90/wgrad.cu, how tensors come into shared memory, and what fits there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from haloconv.families.common import ceil_div
from haloconv.problem import Problem, TensorForm

_M = 64  # of wgmma: channels by columns of taps
_CHANNELS = (8, 16, 32, 64)
_FILTERS = (32, 64, 96, 128, 192, 256)
_SPLITS = ((3, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 3, 1), (1, 1, 3))
_MOST_ROWS, _MOST_COLUMN_GROUPS = 7, 5
_REGISTERS = {2: 180, 3: 108}  # of a consumer, for sums, fragments and descriptors, by the number of consumers
_SPAN_BYTES, _PIECE_BYTES, _BOX = 128, 16, 256
_MOST_STAGES = (8, 4)  # of dy beyond the rows of taps, of x
_BARRIER_BYTES = 16  # of a stage: its two barriers


@dataclass(frozen=True)
class Tile:
    """What a block sums: ``rows`` of taps, and of each warpgroup ``channels`` by ``filters`` by column groups.

    ``split`` is how its warpgroups share columns of taps, channels and filters. Its fields name it in records.
    """

    rows: int
    channels: int
    filters: int
    column_groups: int
    split: tuple[int, int, int]

    def __str__(self) -> str:
        parts = "x".join(map(str, self.split))
        return f"rows{self.rows} channels{self.channels} filters{self.filters} columns{self.columns} split{parts}"

    @property
    def consumers(self) -> int:
        return max(self.split)

    @property
    def threads(self) -> int:
        """Of a block: one warpgroup produces."""
        return 128 * (self.consumers + 1)

    @property
    def columns(self) -> int:
        """Columns of taps of a block."""
        return self.split[0] * self.column_groups * _M // self.channels

    @property
    def registers(self) -> int:
        """Of a consumer's thread: sums, two fragments and where they come from, descriptors."""
        return self.column_groups * self.rows * self.filters // 2 + 10 * self.column_groups + 2 * self.rows

    def blocks_of(self, problem: Problem) -> tuple[int, int, int, int]:
        """Blocks along filters and channels of a group, rows and columns of taps."""
        return (
            ceil_div(problem.k_per_group, self.split[2] * self.filters),
            ceil_div(problem.c_per_group, self.split[1] * self.channels),
            ceil_div(problem.r, self.rows),
            ceil_div(problem.s, self.columns),
        )

    def blocks(self, problem: Problem) -> int:
        """Tiles of the layer."""
        of_k, of_c, of_r, of_s = self.blocks_of(problem)
        return problem.groups * of_k * of_c * of_r * of_s

    def step_cycles(self, fragment_cycles: int) -> float:
        """Of a multiprocessor, for a step: tensor cores, or reads from shared memory where those take longer."""
        multiply = self.rows * self.filters / 2
        read = fragment_cycles + self.rows * self.filters / 4
        return self.consumers * self.column_groups * max(multiply, read)


def tiles(problem: Problem) -> Iterator[Tile]:
    """Those whose sums fit registers, and none that is only more than the layer needs."""
    every_rows = {ceil_div(problem.r, count) for count in range(1, problem.r + 1)}
    rows = [each for each in every_rows if each <= _MOST_ROWS]
    for rows_, channels, filters, groups, split in product(
        rows, _CHANNELS, _FILTERS, range(1, _MOST_COLUMN_GROUPS + 1), _SPLITS
    ):
        tile = Tile(rows_, channels, filters, groups, split)
        if tile.registers <= _REGISTERS[tile.consumers] and _is_of_use(tile, problem):
            yield tile


def _is_of_use(tile: Tile, problem: Problem) -> bool:
    """Whether no part of the tile would be empty for every block."""
    s_parts, c_parts, k_parts = tile.split
    one_column = _M // tile.channels
    return (
        (tile.channels == _CHANNELS[0] or c_parts * tile.channels < 2 * problem.c_per_group)
        and (tile.filters == _FILTERS[0] or k_parts * tile.filters < 2 * problem.k_per_group)
        and (tile.columns < problem.s + s_parts * one_column or s_parts * tile.column_groups == 1)
        and (c_parts - 1) * tile.channels < problem.c_per_group
        and (k_parts - 1) * tile.filters < problem.k_per_group
        and (s_parts * tile.column_groups - 1) * one_column < problem.s
    )


@dataclass(frozen=True)
class Operand:
    """How x or dy comes into shared memory.

    ``inner``: as [pixel][channels], else as [channel][pixels]. ``loads`` is 0 where TMA brings it, V where loads of V
    pixels do, -V where loads of V channels do. ``steps`` are strides in elements; where an extent is 1, any that TMA
    takes.
    """

    inner: bool
    loads: int
    steps: tuple[int, int, int, int]

    @classmethod
    def of(cls, problem: Problem, form: TensorForm, shape: tuple[int, ...], channels: int) -> Operand:
        """``shape`` is (N, C, H, W), ``channels`` are those of a group. Of dy in fp32 pixels must be neighbours."""
        size = problem.dtype.itemsize
        piece = _PIECE_BYTES // size
        is_dy = shape == problem.y_shape and channels == problem.k_per_group
        steps = tuple(
            step if extent > 1 else ceil_div(max(step, 1), piece) * piece
            for extent, step in zip(shape, form.strides, strict=True)
        )
        n, c, h, w = steps

        def whole(*others: int) -> bool:
            return form.aligned and all(step > 0 and step % piece == 0 for step in others)

        if (form.strides[3] == 1 or shape[3] == 1) and whole(n, c, h):
            return cls(False, 0, steps)
        inner = form.strides[1] == 1 and (problem.groups == 1 or channels % piece == 0)
        if inner and whole(n, h, w) and (size == 2 or not is_dy):
            return cls(True, 0, steps)
        return cls(False, _load_width(problem, form, shape, channels), form.strides)


def _load_width(problem: Problem, form: TensorForm, shape: tuple[int, ...], channels: int) -> int:
    """Elements of a load: the most that its neighbours and the tensor's alignment allow."""
    n, c, h, w = form.strides
    widths = (4, 2, 1) if form.aligned else (1,)
    if w == 1:
        return next(each for each in widths if not any(value % each for value in (n, c, h, shape[3])))
    if c == 1:
        return -next(each for each in widths if not any(value % each for value in (n, h, w, channels)))
    return 1


@dataclass(frozen=True)
class Stage:
    """Lines in shared memory: pixels of a line of dy and of x, lines of both rings, how they come, and all bytes."""

    strip: int
    x_pitch: int
    x_stages: int
    y_stages: int
    x: Operand
    dy: Operand
    smem_bytes: int
    depth: int
    fragment_cycles: int


def stage_of(problem: Problem, tile: Tile, x: Operand, dy: Operand, max_smem_bytes: int) -> Stage | None:
    """The longest lines of which the rings have room for enough; None if there are none."""
    if dy.inner and tile.filters % (_SPAN_BYTES // 2) and tile.filters not in (16, 32):
        return None
    size = problem.dtype.itemsize
    depth, span = 32 // size, _SPAN_BYTES // size
    found = None
    for strip in (span, 2 * span, 4 * span):
        if found is not None and strip >= problem.q + span:
            break
        pitch = _x_pitch(problem, tile, x, min(strip, ceil_div(problem.q, depth) * depth))
        y_bytes, x_bytes = tile.split[2] * tile.filters * strip * size, tile.split[1] * tile.channels * pitch * size
        if pitch > _BOX or max(tile.split[2] * tile.filters, tile.split[1] * tile.channels) > _BOX:
            break
        rings = _rings(tile.rows, x_bytes + _BARRIER_BYTES, y_bytes + _BARRIER_BYTES, max_smem_bytes)
        if rings is None:
            break
        smem_bytes = rings[0] * (x_bytes + _BARRIER_BYTES) + rings[1] * (y_bytes + _BARRIER_BYTES)
        fragment_cycles = 24 if size == 2 and not x.inner else 32 if x.inner and size == 4 else 16
        found = Stage(strip, pitch, *rings, x, dy, smem_bytes, depth, fragment_cycles)
    return found


def _rings(rows: int, x_bytes: int, y_bytes: int, room: int) -> tuple[int, int] | None:
    """Stages of x and of dy: as many as there is room for, of both about as many lines ahead."""
    best = None
    for ahead in range(2, _MOST_STAGES[1] + 1):
        if ahead * x_bytes + (rows + ahead - 1) * y_bytes <= room:
            best = (ahead, rows + ahead - 1)
    return best


def _x_pitch(problem: Problem, tile: Tile, x: Operand, pixels: int) -> int:
    """Pixels of a line of x: those that ``pixels`` of dy meet, from an aligned one on."""
    size = problem.dtype.itemsize
    piece = _PIECE_BYTES // size
    aligned = 1 if x.inner or x.loads < 0 else x.loads or piece
    columns = pixels + (min(tile.columns, problem.s) - 1) * problem.dilation[1] + aligned - 1
    if x.inner:
        return ceil_div(columns, 8) * 8
    return ceil_div(columns - piece, 2 * piece) * 2 * piece + piece  # rows begin in different banks
