"""How a launch of halo_sm90 is cut into tiles: the configuration, and the numbers that follow from it.

Names are those of families/halo_sm90/conv/conv.cu and families/halo_sm90/conv/tile.cuh, where each is explained.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from haloconv.families.common import ceil_div, divisor
from haloconv.families.halo_sm90.conv.classes import rows_of_m
from haloconv.families.halo_sm90.conv.form import Axis, Form
from haloconv.families.halo_sm90.conv.scheduler import Schedule, best_schedule
from haloconv.families.halo_sm90.conv.shape import (
    BLOCK_M,
    MAX_TAPS,
    SUM_REGISTERS,
    UNIT_PX,
    Memory,
    Storage,
    TileShape,
    Vertical,
    cut_memory,
    slot_bytes,
)
from haloconv.jit.launch import Value

_BOX_PX = 256  # the largest extent of a box
_NEVER = 1 << 30
_VIRTUAL_PIXELS = 1 << 31


def _vertical(axis: Axis, shape: TileShape) -> Vertical:
    common = 1 if shape.flat else gcd(axis.stride, axis.dil)
    classes = 1 if shape.flat else axis.dil // common
    shift = axis.stride // common
    stride = shift * shape.pack_h
    taps = axis.taps + (shape.pack_h - 1) * shift
    dil = axis.dil if shape.flat else 1
    rows = ceil_div(ceil_div(axis.places, classes), shape.pack_h)
    planes = 1 + max(tap * dil % stride for tap in range(taps)) if shape.flat else 1
    line_move = 1 if shape.flat else axis.dil
    return Vertical(
        stride, taps, dil, classes, axis.stride, line_move, shift, rows, planes, (taps - 1) * dil // stride
    )  # fmt: skip


def _horizontal(axis: Axis, shape: TileShape) -> Horizontal:
    stride = axis.stride * shape.pack_w
    taps = axis.taps + (shape.pack_w - 1) * axis.stride
    planes = 1 + max(tap * axis.dil % stride for tap in range(taps))
    return Horizontal(stride, taps, axis.dil, axis.stride, planes, (taps - 1) * axis.dil // stride)


def segment(outputs: int, halo: int, extent: int, pad: int, stride: int) -> int:
    """Pixels (rows) from one segment to the next: neighbours share zeros if each reads only zeros of the other."""
    apart = outputs + halo
    if stride > 1 or pad < 0:
        return apart
    return min(apart, max(outputs, extent + pad, apart - pad))


class Horizontal(NamedTuple):
    """Columns as the kernel counts them, those of an output pack together; ``planes`` stand side by side."""

    stride: int
    taps: int
    dil: int
    shift: int
    planes: int
    halo: int


class Columns(NamedTuple):
    """How the output is cut into tile columns: ``strips`` times ``images`` (of a residue class), ``rows`` rows each.

    ``images`` is 1 where all images lie end to end.

    Rows of a line are ``pitch`` pixels apart, images ``wrap`` rows. A line has ``lines_of_one`` rows where one tile
    reads it, ``lines_of_work_tile`` where all of a work tile do.
    """

    pitch: int
    wrap: int
    strips: int
    strip_cols: int
    plane_px: int
    images: int
    rows: int
    work_tiles: int
    lines_of_one: int = 1
    lines_of_work_tile: int = 1


class Line(NamedTuple):
    """What a slot holds, and the TMA boxes that bring it: those of a work tile, of one tile, and units of 32 pixels."""

    slot_px: int
    boxes: int = 0
    single_boxes: int = 0
    box_px: int = 0
    box_units: int = 1


@dataclass(frozen=True)
class Tiling:
    """The numbers of one launch with tiles of one shape."""

    form: Form
    shape: TileShape
    storage: Storage
    vertical: Vertical
    horizontal: Horizontal
    columns: Columns
    line: Line
    memory: Memory
    phases: Phases
    blocks: int
    chunks: int
    lead: int
    y_boxes: bool
    rest: Tiling | None = None  # of the last columns, which a launch of their own computes

    @property
    def launches(self) -> tuple[Tiling, ...]:
        """The tiling of each launch: this one, and that of the columns that it leaves out."""
        return (self,) if self.rest is None else (self, self.rest)

    @property
    def slot_bytes(self) -> int:
        return slot_bytes(self.line.slot_px, self.shape)

    @property
    def taps(self) -> int:
        return self.vertical.taps * self.horizontal.taps

    @property
    def y_planes(self) -> int:
        """Filters whose planes boxes take as one long row, of which a block of filters has one."""
        return self.storage.y_joined if self.lead > 0 else 1

    @property
    def needs_fixup(self) -> bool:
        """Whether the nonfinite fix-up follows (families/halo_sm90/conv/fixup.cu): a value meets weights of zero."""
        return self.shape.packs > 1 or self.shape.terms > 1 or (self.form.interleaves and self.form.has_zero_taps)

    @property
    def middle_tap(self) -> int:
        """Taps of phase 0, of all its chunks."""
        chunk, row, col = self.phases.begin
        return (chunk * self.vertical.taps + row) * self.horizontal.taps + col

    @property
    def all_strips(self) -> int:
        """Strips of all groups."""
        return self.columns.strips * self.form.groups

    @property
    def total(self) -> int:
        """Work tiles of the launch: a tile for each consumer."""
        return self.columns.work_tiles * self.vertical.classes * self.columns.images * self.all_strips * self.blocks

    def schedule(self, sm_count: int) -> Schedule:
        """Who takes which work tiles. Only where TMA writes rows that are not aligned do strips share sectors."""
        return best_schedule(self.total, self.blocks, self.all_strips, sm_count, self.lead > 0)

    def schedule_fields(self, schedule: Schedule) -> dict[str, Value]:
        """The fields of ``Schedule`` in families/halo_sm90/conv/scheduler.cuh."""
        return {
            "strips": divisor(self.columns.strips),
            "images": divisor(self.columns.images),
            "classes": divisor(self.vertical.classes),
            "blocks": divisor(self.blocks // schedule.team),
            "work_tiles": divisor(self.columns.work_tiles),
            **schedule.fields(self.total, self.all_strips),
        }

    @property
    def staged_lines(self) -> int:
        """Lines that a work tile stages, of all chunks, away from the ends of tile columns."""
        phases, shape = self.phases, self.shape
        if shape.flat:
            return self.chunks * (1 if phases.first == 1 or self.chunks > 1 else 2)
        below = shape.tiles * shape.runs * self.vertical.stride
        if shape.keeps:
            return self.chunks * below
        both = below - self.vertical.stride
        return self.chunks * (both + self.vertical.taps) + (both if phases.splits_rows else 0)

    @property
    def packed_blocks(self) -> int:
        """Blocks of 64 filters of a group, as they are packed."""
        return self.blocks * self.shape.streams

    @property
    def packed_bytes(self) -> int:
        """Packed weights of the launch."""
        return self.form.groups * self.packed_blocks * self.chunks * self.taps * self.shape.stage_bytes


@dataclass(frozen=True)
class Phases:
    """Where the taps of a tile are cut in two (families/halo_sm90/conv/tile.cuh): by chunks, rows or columns of taps.

    ``first`` is 1 if they are not cut: all taps are in phase 1. ``middle`` is the (chunk, row, column) of taps where
    phase 0 ends, ``begin`` that where phase 1 starts.
    """

    first: int
    middle: tuple[int, int, int]
    begin: tuple[int, int, int]

    @property
    def splits_rows(self) -> bool:
        return self.begin[1] > 0


def _phases(chunks: int, vertical: Vertical, taps_s: int, shape: TileShape, ring: int) -> Phases:
    """Cuts the taps in two, so that consumers run half a tile apart: by chunks, else by rows, else by columns of taps.

    Flat tiles are cut by chunks only, and only where TMA stages the lines. A shared tile is never cut: ``middle`` is
    where a consumer lets the other one begin its next tile.
    """
    taps_r = vertical.taps
    if shape.shared_tile:
        return Phases(1, (*_half_way(chunks, vertical, shape, ring), 0), (0, 0, 0))
    if chunks > 1 and (shape.boxes or not shape.flat):
        return Phases(0, (chunks // 2, taps_r, taps_s), (chunks // 2, 0, 0))
    if chunks == 1 and taps_r > 1 and not shape.flat:
        return Phases(0, (1, taps_r // 2, taps_s), (0, taps_r // 2, 0))
    if chunks == 1 and taps_s > 1 and not shape.flat:
        return Phases(0, (1, 1, taps_s // 2), (0, 0, taps_s // 2))
    return Phases(1, (0, 0, 0), (0, 0, 0))


def _half_way(chunks: int, vertical: Vertical, shape: TileShape, ring: int) -> tuple[int, int]:
    """The last (chunk, row of taps) in the first half of the taps that a consumer reaches with the lines of one ring.

    Until then the other consumer need not release any line. With ``keeps`` the ring of each chunk has them all.
    """
    best = (0, 0)
    for chunk in range(chunks):
        for row in range(vertical.taps):
            below = (shape.runs - 1) * vertical.stride
            lines = chunk + 1 if shape.flat else chunk * (below + vertical.taps) + below + row + 1
            if 2 * (chunk * vertical.taps + row) <= chunks * vertical.taps and (shape.keeps or lines <= ring):
                best = (chunk, row)
    return best


def tile(form: Form, shape: TileShape, storage: Storage) -> Tiling | str:
    """The tiling of ``form``, or a sentence that says why tiles of the shape do not run it."""
    if shape.packs > 1 and form.filters > BLOCK_M // shape.packs:
        return f"{form.filters} filters do not fit {BLOCK_M // shape.packs} rows of a pack"
    if (shape.pack_w > 1 and form.horizontal.dil > 1) or (shape.pack_h > 1 and shape.flat and form.vertical.dil > 1):
        return "outputs of a dilated axis do not share taps"
    rows_m = rows_of_m(form, storage)
    if shape.shared_tile and (shape.packs > 1 or rows_m <= BLOCK_M):
        return f"{rows_m} filters are one block"
    if shape.sum_registers > SUM_REGISTERS:
        return f"{shape.sum_registers} sums of a thread leave no registers for the rest"
    vertical, across = _vertical(form.vertical, shape), _horizontal(form.horizontal, shape)
    if max(vertical.taps, across.taps) > MAX_TAPS:
        return f"a filter of {vertical.taps} x {across.taps} taps has more than {MAX_TAPS} along one axis"
    planes = across.planes * vertical.planes
    if shape.boxes and (not (storage.x_whole or storage.x_joined) or planes > 1 or across.stride > 1):
        return "TMA takes aligned rows, and no strides across them"
    if shape.boxes and shape.chunk_bytes // storage.elem_bytes < 8 * storage.x_joined:
        return f"a chunk of {shape.chunk_bytes} bytes has fewer than 8 channels in every {storage.x_joined}-th plane"
    blocks = ceil_div(rows_m, BLOCK_M // shape.packs * shape.streams)
    lead = _lead(form, shape, storage, blocks) if planes == across.stride == 1 else 0
    columns = (_flat if shape.flat else _rows)(form, shape, vertical, across, lead)
    line = _line(form.horizontal.pad + lead, shape, storage, planes, columns)
    if isinstance(line, str):
        return line
    chunks = ceil_div(form.channels * storage.elem_bytes, shape.chunk_bytes)
    y_boxes = lead > 0 or _y_boxes(form, shape, storage)
    memory = cut_memory(shape, storage, vertical, chunks, line.slot_px, y_boxes)
    if isinstance(memory, str):
        return memory
    phases = _phases(chunks, vertical, across.taps, shape, memory.ring)
    parts = (form, shape, storage, vertical, across, columns, line, memory, phases, blocks, chunks, lead, y_boxes)
    result = Tiling(*parts)
    if max(result.total, (columns.rows + vertical.halo + 2) * columns.pitch) >= _VIRTUAL_PIXELS:
        return f"{result.total} work tiles are more than 32-bit indices reach"
    return result


def _rows(form: Form, shape: TileShape, vertical: Vertical, across: Horizontal, lead: int) -> Columns:
    """Strips of single rows: a line is a row of a strip, an image by itself."""
    pitch = shape.run + across.halo + lead
    strips = ceil_div(ceil_div(form.horizontal.places, shape.pack_w) + lead, shape.run)
    work_tiles = ceil_div(vertical.rows, shape.tiles * shape.runs)
    return Columns(pitch, _NEVER, strips, shape.run, pitch, form.n, vertical.rows, work_tiles)


def _flat(form: Form, shape: TileShape, vertical: Vertical, across: Horizontal, lead: int) -> Columns:
    """Rows end to end: each image by itself, or all of them one after the other if that leaves fewer work tiles."""
    axis, halo = form.horizontal, across.halo + lead
    cols = ceil_div(axis.places, shape.pack_w) + lead
    strip_cols = shape.strip_cols or cols
    pitch = strip_cols + halo
    if not shape.strip_cols:
        pitch = segment(cols, halo, axis.in_extent, axis.pad, across.stride)
    if shape.boxes:
        pitch = ceil_div(pitch * shape.chunk_bytes, 128) * 128 // shape.chunk_bytes  # boxes begin there
    apart = segment(vertical.rows, vertical.halo, form.vertical.in_extent, form.vertical.pad, vertical.stride)

    def work_tiles_of(rows: int) -> int:
        return ceil_div((rows - 1) * pitch + strip_cols, shape.tiles * shape.tile_px)

    def lines_of(tiles: int) -> int:
        return ceil_div(pitch - 1 + tiles * shape.tile_px + halo, pitch) + vertical.halo

    together = (form.n - 1) * apart + vertical.rows
    joins = work_tiles_of(together) <= form.n * work_tiles_of(vertical.rows)
    images, wrap, rows = (1, apart, together) if joins else (form.n, _NEVER, vertical.rows)
    strips, lines = ceil_div(cols, strip_cols), (lines_of(1), lines_of(shape.tiles))
    return Columns(pitch, wrap, strips, strip_cols, lines[1] * pitch, images, rows, work_tiles_of(rows), *lines)


def _line(pad: int, shape: TileShape, storage: Storage, planes: int, columns: Columns) -> Line | str:
    """What a slot holds, or a sentence if TMA cannot bring it."""
    if not shape.boxes:
        return Line(columns.plane_px * planes)
    boxes, single, box_px = columns.lines_of_work_tile, columns.lines_of_one, columns.pitch
    if storage.x_inner and not shape.flat:
        boxes = single = ceil_div(columns.plane_px, _BOX_PX)
        box_px = ceil_div(ceil_div(columns.plane_px, boxes) * shape.chunk_bytes, 128) * 128 // shape.chunk_bytes
    if storage.x_inner and box_px > _BOX_PX:
        return f"rows of {box_px} pixels are longer than a box"
    aligned = 16 // storage.elem_bytes
    shift = -pad % aligned
    if storage.x_joined or (columns.strips > 1 and columns.strip_cols % aligned):
        shift = aligned - 1
    return Line(boxes * box_px, boxes, single, box_px, ceil_div(box_px + shift, UNIT_PX))


def _lead(form: Form, shape: TileShape, storage: Storage, blocks: int) -> int:
    """Pixels by which tiles begin before their strips, so that boxes begin at multiples of 16 bytes in every row.

    0 where lanes store rows end to end, too: no residue classes are the rows of M, and blocks of every ``y_joined``-th
    filter are those of one group, and no more than ``blocks``.
    """
    if not storage.y_joined or form.interleaves or shape.packs > 1 or shape.flat:
        return 0
    if storage.y_joined > 1 and form.groups > 1:
        return 0
    of_planes = storage.y_joined * ceil_div(form.filters // storage.y_joined, BLOCK_M)
    aligned = 16 // storage.y_bytes
    return aligned - gcd(form.horizontal.out_extent, aligned) if ceil_div(of_planes, shape.streams) <= blocks else 0


def _y_boxes(form: Form, shape: TileShape, storage: Storage) -> bool:
    """Whether TMA writes the output: strips of rows whose boxes hold no other tile's pixels.

    Those of residue classes have a coordinate more, and none left for groups; none of theirs may be below zero.
    """
    if shape.flat or shape.pack_w > 1 or not storage.y_whole:
        return False
    if not form.interleaves:
        return True
    cols = form.horizontal
    return storage.y_inner and form.groups == 1 and cols.out_before == cols.out_extent % cols.out_step == 0
