"""The tiles of ``halo_sm80``: what lies where in shared memory, how much of everything there is, and what fits.

A tile is ``tile_n`` images, ``tile_p`` rows and ``tile_q`` columns of the output for ``tile_groups`` groups and
``n_items * n_tiles * 8`` filters of each. Extents are pixels, counts or bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

from haloconv.families.common import ceil_div

_ATOM_BYTES = 16  # of a copy, where boxes are possible
SLICE_BYTES = 256  # of the weights of 8 filters
_REGISTERS, _THREADS, _BLOCKS = 1 << 16, 2048, 32  # of a multiprocessor
_RESERVED_BYTES = 1024  # of shared memory, for each block
_MOST_SMEM_BYTES = 228 * 1024  # of a multiprocessor, on any device
_MADE_WORDS = 12  # pairs of weights that a thread makes at most
WARP_TILES = {(4, 1): 96, (4, 2): 112, (2, 4): 96, (2, 6): 128, (2, 8): 128, (1, 8): 96, (4, 4): 168, (4, 6): 208}
"""Registers of a thread by M_TILES and N_TILES."""
_GATHER_REGISTERS = 96
_WORD_REGISTERS = 8  # more where words of fp32 planes are read one by one
COLUMN_ISSUES, COPY_ISSUES = 30, 7
"""Instructions that stage a column, and each copy of it."""
_MOST_BOX = 256  # rows or columns of a box of TMA
_BOX_BYTES = 128  # where boxes begin in shared memory
_MOST_INDEX = (1 << 16) - 1  # SmallDivisor of kernels/small_divisor.cuh is exact up to here


@dataclass(frozen=True)
class Layer:
    """What tiles depend on: one direction of a problem, its gathered tensor ("x"), and how both tensors are stored.

    ``rows`` and ``cols`` are those of the largest of ``classes`` of output pixels; a tap adds up to ``reach_h`` and
    ``reach_w`` to a pixel's position, and the next pixel ``move_h`` and ``move_w``. ``x_copy`` is the size in bytes of
    a copy along channels (0: they are no neighbours, or not aligned); ``x_run`` are the pixels of the largest
    load along a row, whole and aligned wherever a row is cut into such; ``pad_w`` those left of the image that the
    first tap of the first pixel meets. ``x_boxes``: TMA takes boxes of planes. ``i64_offsets``:
    a tensor has 2^31 elements or more.
    """

    n: int
    groups: int
    channels: int
    filters: int
    rows: int
    cols: int
    taps_r: int
    taps_s: int
    reach_h: int
    reach_w: int
    move_h: int
    move_w: int
    classes: int
    elem_bytes: int
    x_copy: int
    x_run: int
    pad_w: int
    x_boxes: bool
    y_inner: bool
    i64_offsets: bool


@dataclass(frozen=True)
class Tile:
    """A tile and how it is staged and multiplied; the constants of conv.cu and the extents of a tile."""

    m_tiles: int
    n_tiles: int
    warps: int
    depth: int
    split: bool
    unit_bytes: int
    copy_bytes: int
    run: int
    tile_n: int
    tile_p: int
    tile_q: int
    tile_groups: int
    n_items: int
    chunk_channels: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def min_blocks(self) -> int:
        """Blocks per multiprocessor that registers must allow."""
        registers = WARP_TILES[self.m_tiles, self.n_tiles]
        if self.copy_bytes == 0:
            registers = max(registers, _GATHER_REGISTERS)
        if self.unit_bytes == 4 and self.n_tiles == 8:
            registers += _WORD_REGISTERS
        return _REGISTERS // (self.threads * registers)

    @property
    def in_row(self) -> bool:
        """Rows of the tile are rounded up to whole fragments, where that adds little."""
        return ceil_div(self.tile_q, 16) * 16 * 5 <= self.tile_q * 6

    @property
    def row_slots(self) -> int:
        """Places of a row of the tile."""
        return ceil_div(self.tile_q, 16) * 16 if self.in_row else self.tile_q


@dataclass(frozen=True)
class Tiling:
    """A tile on a layer: what lies where in shared memory, and how many of everything there are."""

    layer: Layer
    tile: Tile

    @property
    def pixels(self) -> int:
        return self.tile.tile_n * self.tile.tile_p * self.tile.tile_q

    @cached_property
    def m_items(self) -> int:
        places = self.tile.tile_n * self.tile.tile_p * self.tile.row_slots
        return ceil_div(places, 16 * self.tile.m_tiles)

    @property
    def items(self) -> int:
        return self.m_items * self.tile.n_items * self.tile.tile_groups

    @property
    def tile_filters(self) -> int:
        return 8 * self.tile.n_tiles * self.tile.n_items

    @property
    def chunks(self) -> int:
        return ceil_div(self.layer.channels, self.tile.chunk_channels)

    @cached_property
    def planes(self) -> int:
        """Planes of one group and chunk."""
        return ceil_div(self.tile.chunk_channels * self.layer.elem_bytes, self.tile.unit_bytes)

    @cached_property
    def parts(self) -> int:
        """Words or atoms of one tap and chunk."""
        channels = self.tile.chunk_channels
        return channels if self.tile.split else ceil_div(channels * self.layer.elem_bytes, 8)

    @cached_property
    def slices(self) -> int:
        return ceil_div(self.parts * self.layer.taps_r * self.row_words, 8 if self.tile.split else 4)

    @property
    def word_px(self) -> int:
        """Taps of a row that share a word."""
        return 4 // self.layer.elem_bytes if self.tile.split else 1

    @property
    def first_half(self) -> int:
        """The half of its word in which the first tap of a row lies."""
        return self.layer.pad_w % self.word_px

    @property
    def row_words(self) -> int:
        """Taps of a row of the filter, or words of two."""
        return ceil_div(self.layer.taps_s + self.first_half, self.word_px)

    @property
    def taps_first(self) -> bool:
        """SPLIT: k counts taps, then channels, where neighbouring taps of a row use the banks better."""
        return self.tile.split and (self.layer.channels % 4 != 0 or self.layer.move_w > 1)

    @property
    def run(self) -> int:
        """Pixels of one copy, or of one load through registers."""
        return self.tile.run

    @cached_property
    def lines(self) -> int:
        """Rows of one image that are staged."""
        return (self.tile.tile_p - 1) * self.layer.move_h + self.layer.reach_h + 1

    def _px(self, slots: int) -> int:
        """Pixels that so many places of a row meet, whole runs; the first may begin ``run - 1`` pixels early."""
        reach = self.layer.reach_w
        if self.tile.split:
            reach = max(reach, self.row_words * self.word_px - self.first_half - 1)
        return ceil_div((slots - 1) * self.layer.move_w + reach + self.run, self.run) * self.run

    @cached_property
    def boxes(self) -> bool:
        """Whether TMA brings the tile: a plane is one box."""
        tile = self.tile
        planes = self.layer.x_boxes and tile.split and tile.copy_bytes == _ATOM_BYTES and tile.tile_n == 1
        return planes and self._px(tile.tile_q) <= _MOST_BOX and self.lines <= _MOST_BOX

    @cached_property
    def runs(self) -> int:
        """Runs of pixels of a line: of all its places, or (boxes) of those that are pixels of the tile."""
        return self._px(self.tile.tile_q if self.boxes else self.tile.row_slots) // self.run

    @cached_property
    def pieces(self) -> int:
        """Copies of one pixel of all planes, or (through registers) stores."""
        tile = self.tile
        return tile.tile_groups * self.planes * (1 if tile.split else tile.unit_bytes // (tile.copy_bytes or 8))

    @cached_property
    def row_parts(self) -> int:
        """Into which the lines of a piece are cut, so that threads have about as much to stage."""
        columns, threads = self.pieces * self.tile.tile_n * self.runs, self.tile.threads

        def issues(parts: int) -> int:
            return ceil_div(columns * parts, threads) * (COLUMN_ISSUES + ceil_div(self.lines, parts) * COPY_ISSUES)

        return min((parts for parts in (1, 2, 3, 4, 6, 8) if parts <= self.lines), key=issues)

    @property
    def part_rows(self) -> int:
        return ceil_div(self.lines, self.row_parts)

    @property
    def columns(self) -> int:
        """Parts of lines below each other that a thread stages."""
        return self.pieces * self.tile.tile_n * self.runs * self.row_parts

    @cached_property
    def row_bytes(self) -> int:
        """Pitch of a line: such that the four k of a slice use different banks also where they meet two rows."""
        layer, unit = self.layer, self.tile.unit_bytes
        px = self.runs * self.run
        if self.taps_first:
            step = unit * layer.move_w * (2 if self.y_pairs == 2 else 1) // 4
            most = _MOST_BOX * unit if self.boxes else px * unit + 124
            return _row_pitch(px * unit, most, unit * self.run, self.row_words, step)
        row = unit * layer.move_w * (2 if self.y_pairs == 2 else 1)  # between the rows of a fragment
        if unit == 8 and row == 32:
            px += (layer.taps_s - px) % 4
        elif unit == 16 and row == 32:
            px += (layer.taps_s - px) % 2
        elif unit == 16 and row == 16:
            px += (layer.taps_s + 3 - px) % 8
        return px * unit

    @cached_property
    def plane_bytes(self) -> int:
        """Pitch of a plane. SPLIT: so that the four planes of a slice use different banks; else neighbours' copies."""
        used = self.tile.tile_n * self.lines * self.row_bytes
        if self.boxes:  # places without a pixel read on behind the last line
            behind = max(0, self._px(self.tile.row_slots) * self.tile.unit_bytes - self.row_bytes)
            return ceil_div(used + behind, _BOX_BYTES) * _BOX_BYTES
        if not self.tile.split:
            wanted = max(self.tile.unit_bytes, 128 // (self.tile.tile_groups * self.planes) // 16 * 16)
            return ceil_div(used, 16) * 16 + (wanted - ceil_div(used, 16) * 16) % 128
        wanted = 32
        if self.taps_first:
            wanted = self.layer.taps_r * self.row_bytes
        return used + (wanted - used) % 128

    @property
    def staged(self) -> float:
        """Input pixels for each of the output."""
        n, p, q = self.tiles
        pixels = n * p * q * self.tile.tile_n * self.lines * self.runs * self.run
        return pixels / (self.layer.n * self.layer.rows * self.layer.cols)

    @property
    def k_bytes(self) -> int:
        return self.slices * ((32 if self.layer.elem_bytes == 4 else 64) if self.tile.split else 16)

    @property
    def table_bytes(self) -> int:
        """The offsets of k, and those of each pixel in the input and in the output."""
        used = self.k_bytes + self.m_items * 16 * self.tile.m_tiles * (12 if self.layer.i64_offsets else 8)
        return ceil_div(used, _BOX_BYTES) * _BOX_BYTES if self.boxes else used

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of a chunk of weights, of all filters and groups of the tile."""
        return self.tile.tile_groups * self.tile.n_items * self.tile.n_tiles * self.slices * SLICE_BYTES

    @property
    def packed(self) -> bool:
        """Whether the filter is packed before the launch. Few weights are made by the blocks themselves."""
        return self.chunks > 1 or self.weight_bytes > 8 * _MADE_WORDS * self.tile.threads

    @property
    def weight_buffers(self) -> int:
        return min(self.tile.depth, self.chunks)

    @cached_property
    def x_bytes(self) -> int:
        return ceil_div(self.tile.tile_groups * self.planes * self.plane_bytes, 16) * 16

    @cached_property
    def smem_bytes(self) -> int:
        barriers = 8 * self.tile.depth if self.boxes else 0
        return self.table_bytes + self.weight_buffers * self.weight_bytes + self.tile.depth * self.x_bytes + barriers

    @property
    def group_tiles(self) -> int:
        return ceil_div(self.layer.groups, self.tile.tile_groups)

    @property
    def filter_tiles(self) -> int:
        return ceil_div(self.layer.filters, self.tile_filters)

    @cached_property
    def tiles(self) -> tuple[int, int, int]:
        """Along images, rows and columns."""
        layer, tile = self.layer, self.tile
        extents = ((layer.n, tile.tile_n), (layer.rows, tile.tile_p), (layer.cols, tile.tile_q))
        return tuple(ceil_div(extent, each) for extent, each in extents)  # type: ignore[return-value]

    @cached_property
    def y_pairs(self) -> int:
        """STORES of conv.cu: which stores of two neighbours are whole, aligned, and inside or outside as one."""
        layer, tile = self.layer, self.tile
        if layer.y_inner:
            return int(layer.filters % 2 == 0 and not self.four_filters)
        if layer.classes > 1 or (layer.elem_bytes == 4 and not self._single_pairs):
            return 0
        if layer.cols % 2 == 0 and tile.tile_q % 2 == 0:
            return 2
        if tile.in_row:
            return 0
        whole_rows = tile.tile_q == layer.cols and layer.rows * layer.cols % 2 == 0
        return 2 if whole_rows and (tile.tile_p % 2 == 0 or tile.tile_p == layer.rows) else 0

    @property
    def four_filters(self) -> bool:
        """Whether stores of four neighbouring filters are whole and aligned: then STORES is 3."""
        return self.layer.y_inner and self.layer.filters % 4 == 0 and self.tile.n_tiles % 2 == 0

    @property
    def _single_pairs(self) -> bool:
        """Whether stores of two fp32 pixels were measured ahead: stems of stride 2, whose reads keep to their banks."""
        return self.tile.split and self.layer.groups == 1 and self.layer.move_w == 2

    def invalid(self, max_smem_bytes: int) -> str | None:
        """Why a block of this tile cannot run on a device with ``max_smem_bytes`` per block, or None."""
        if self.smem_bytes > max_smem_bytes:
            return f"needs {self.smem_bytes} bytes of shared memory per block; the device has {max_smem_bytes}"
        if max(self.columns, self.m_items * 16 * self.tile.m_tiles) > _MOST_INDEX:
            return f"a tile has {self.columns} columns and {self.pixels} outputs; both are at most {_MOST_INDEX}"
        if self.chunks > 1 and self.items > self.tile.warps:
            return f"{self.items} items need a warp each to keep their sums from chunk to chunk"
        return None

    @property
    def min_blocks(self) -> int:
        """Blocks per multiprocessor that registers must allow: no more than shared memory ever does."""
        return max(1, min(self.tile.min_blocks, _MOST_SMEM_BYTES // (self.smem_bytes + _RESERVED_BYTES)))

    def resident(self, max_smem_bytes: int) -> int:
        """Blocks on a multiprocessor."""
        smem = (max_smem_bytes + _RESERVED_BYTES) // (self.smem_bytes + _RESERVED_BYTES)
        return max(1, min(smem, self.min_blocks, _THREADS // self.tile.threads, _BLOCKS))

    def blocks(self, sm_count: int, max_smem_bytes: int) -> int:
        """Blocks that share the tiles of one class, groups and filters: as many as run at once, evenly loaded."""
        n, p, q = self.tiles
        others = self.layer.classes * self.group_tiles * self.filter_tiles
        each = ceil_div(n * p * q * others, sm_count * self.resident(max_smem_bytes))
        return ceil_div(n * p * q, max(1, each if self.persists else 1))

    @property
    def late(self) -> bool:
        """Whether outputs go while the next tile comes: where a block is alone, and a warp has but one item."""
        return self.tile.depth == 1 and self.min_blocks == 1 and self.items <= self.tile.warps

    @property
    def persists(self) -> bool:
        """Blocks take several tiles where that saves staging: weights, or the wait for the next tile."""
        return self.tile.depth == 2 or not self.packed or 4 * self.weight_bytes > self.x_bytes


@lru_cache(maxsize=1 << 12)
def _row_pitch(row_bytes: int, most_bytes: int, copy_bytes: int, row_words: int, step: int) -> int:
    """The pitch of rows, from ``row_bytes`` on, under which the fewest reads of a slice meet a bank twice.

    Rows of a fragment are ``step`` words apart, four neighbouring k are words of one row or of two.
    """

    def passes(pitch: int) -> int:
        total = 0
        for first in range(0, 4 * row_words, 4):
            banks: dict[int, set[int]] = {}
            for k, row in product(range(first, first + 4), range(8)):
                at = k // row_words * (pitch // 4) + k % row_words + row * step
                banks.setdefault(at % 32, set()).add(at)
            total += max(map(len, banks.values()))
        return total

    start = ceil_div(row_bytes, copy_bytes) * copy_bytes
    return min(range(start, min(start + 124, most_bytes) + 1, max(4, copy_bytes)), key=passes)
