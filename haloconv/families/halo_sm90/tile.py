"""How a launch of halo_sm90 is cut into tiles: the configuration, and the numbers that follow from it.

Names are those of families/halo_sm90/conv.cu and families/halo_sm90/tile.cuh, where each is explained.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from haloconv.families.common import ceil_div
from haloconv.families.halo_sm90.form import Axis, Form
from haloconv.families.halo_sm90.scheduler import Schedule, best_schedule, divisor
from haloconv.families.halo_sm90.shape import (
    BLOCK_M,
    MAX_TAPS,
    UNIT_PX,
    Storage,
    TileShape,
    Vertical,
    buffer_bytes,
    fit_rings,
    leaves_by_stages,
    raw_bytes,
    raw_depths,
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
    rows = ceil_div(ceil_div(axis.out_extent, classes), shape.pack_h)
    planes = 1 + max(tap * dil % stride for tap in range(taps)) if shape.flat else 1
    line_move = 1 if shape.flat else axis.dil
    return Vertical(
        stride, taps, dil, classes, axis.stride, line_move, shift, rows, planes, (taps - 1) * dil // stride
    )  # fmt: skip


def segment(outputs: int, halo: int, extent: int, pad: int, stride: int) -> int:
    """Pixels (rows) from one segment to the next: neighbours share zeros if each reads only zeros of the other."""
    apart = outputs + halo
    if stride > 1 or pad < 0:
        return apart
    return min(apart, max(outputs, extent + pad, apart - pad))


@dataclass(frozen=True)
class Tiling:
    """The numbers of one launch with one configuration."""

    form: Form
    shape: TileShape
    storage: Storage
    vertical: Vertical
    stride_w: int
    taps_s: int
    dil_w: int
    shift_s: int
    pitch: int
    wrap: int
    strips: int
    strip_cols: int
    plane_px: int
    planes_w: int
    slot_px: int
    boxes: int
    single_boxes: int
    box_px: int
    box_units: int
    bands: int
    column_rows: int
    work_tiles: int
    phases: Phases
    blocks: int
    chunks: int
    ring: int
    stages: int
    smem_bytes: int
    lead: int
    y_boxes: bool
    y_buffers: int
    raw_depth: int

    @property
    def slot_bytes(self) -> int:
        return slot_bytes(self.slot_px, self.shape)

    @property
    def taps(self) -> int:
        return self.vertical.taps * self.taps_s

    @property
    def middle_tap(self) -> int:
        """Taps of phase 0, of all its chunks."""
        chunk, row, col = self.phases.begin
        return (chunk * self.vertical.taps + row) * self.taps_s + col

    @property
    def total(self) -> int:
        """Work tiles of the launch: a tile for each consumer."""
        return self.work_tiles * self.vertical.classes * self.bands * self.strips * self.blocks * self.form.groups

    def schedule(self, sm_count: int) -> Schedule:
        """Who takes which work tiles. Only where TMA writes rows that are not aligned do strips share sectors."""
        return best_schedule(self.total, self.blocks, self.strips * self.form.groups, sm_count, self.lead > 0)

    def schedule_fields(self, schedule: Schedule) -> dict[str, Value]:
        """The fields of ``Schedule`` in families/halo_sm90/scheduler.cuh."""
        return {
            "strips": divisor(self.strips),
            "bands": divisor(self.bands),
            "classes": divisor(self.vertical.classes),
            "blocks": divisor(self.blocks // schedule.team),
            "work_tiles": divisor(self.work_tiles),
            **schedule.fields(self.total, self.strips * self.form.groups),
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
    """Where the taps of a tile are cut in two (families/halo_sm90/tile.cuh): in chunks, rows or columns of taps.

    ``first`` is 1 if they are not, and then both consumers work on the same taps of a tile. ``middle`` is where phase 0
    ends in each of chunks, rows and columns, ``begin`` where phase 1 starts.
    """

    first: int
    middle: tuple[int, int, int]
    begin: tuple[int, int, int]

    @property
    def splits_rows(self) -> bool:
        return self.begin[1] > 0


def _phases(chunks: int, vertical: Vertical, taps_s: int, shape: TileShape, ring: int) -> Phases:
    """Consumers half a tile apart, unless that takes lines to be staged twice by loads or without their rows."""
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
    """The chunk and row of taps nearest to the middle that one consumer reaches while the other releases nothing."""
    best = (0, 0)
    for chunk in range(chunks):
        for row in range(vertical.taps):
            below = (shape.runs - 1) * vertical.stride
            lines = chunk + 1 if shape.flat else chunk * (below + vertical.taps) + below + row + 1
            if 2 * (chunk * vertical.taps + row) <= chunks * vertical.taps and (shape.keeps or lines <= ring):
                best = (chunk, row)
    return best


def tile(form: Form, shape: TileShape, storage: Storage) -> Tiling | str:
    """The tiling of ``form``, or a sentence that says why the configuration does not run it."""
    if shape.packs > 1 and form.filters > BLOCK_M // shape.packs:
        return f"{form.filters} filters do not fit {BLOCK_M // shape.packs} rows of a pack"
    if (shape.pack_w > 1 and form.horizontal.dil > 1) or (shape.pack_h > 1 and shape.flat and form.vertical.dil > 1):
        return "outputs of a dilated axis do not share taps"
    if shape.shared_tile and (shape.packs > 1 or form.filters <= BLOCK_M):
        return f"{form.filters} filters are one block"
    vertical, across = _vertical(form.vertical, shape), form.horizontal
    stride_w = across.stride * shape.pack_w
    taps_s = across.taps + (shape.pack_w - 1) * across.stride
    if max(vertical.taps, taps_s) > MAX_TAPS:
        return f"a filter of {vertical.taps} x {taps_s} taps has more than {MAX_TAPS} along one axis"
    planes_w = 1 + max(tap * across.dil % stride_w for tap in range(taps_s))
    planes = planes_w * vertical.planes
    if shape.boxes and (not (storage.x_whole or storage.x_joined) or planes > 1 or stride_w > 1):
        return "TMA takes aligned rows, and no strides across them"
    if shape.boxes and shape.chunk_bytes // storage.elem_bytes < 8 * storage.x_joined:
        return f"a chunk of {shape.chunk_bytes} bytes has fewer than 8 channels in every {storage.x_joined}-th plane"
    halo = (taps_s - 1) * across.dil // stride_w
    cols = ceil_div(across.out_extent, shape.pack_w)
    lead = _lead(form, shape, storage) if planes == stride_w == 1 else 0
    columns = (_flat if shape.flat else _rows)(form, shape, vertical, cols + lead, halo + lead, stride_w)
    line = _line(form.horizontal.pad + lead, shape, storage, planes, columns)
    if isinstance(line, str):
        return line
    chunks = ceil_div(form.channels * storage.elem_bytes, shape.chunk_bytes)
    y_boxes = lead > 0 or _y_boxes(form, shape, storage)
    memory = _cut_memory(shape, storage, vertical, chunks, line["slot_px"], y_boxes)
    if isinstance(memory, str):
        return memory
    del columns["lines_of_one"], columns["lines_of_work_tile"]
    result = Tiling(
        form,
        shape,
        storage,
        vertical,
        **{"stride_w": stride_w, "taps_s": taps_s, "dil_w": across.dil, "shift_s": across.stride},
        **columns,
        **line,
        planes_w=planes_w,
        phases=_phases(chunks, vertical, taps_s, shape, memory["ring"]),
        blocks=ceil_div(form.filters, BLOCK_M // shape.packs * shape.streams),
        chunks=chunks,
        **memory,
        lead=lead,
        y_boxes=y_boxes,
    )
    if max(result.total, (result.column_rows + vertical.halo + 2) * result.pitch) >= _VIRTUAL_PIXELS:
        return f"{result.total} work tiles are more than 32-bit indices reach"
    return result


def _cut_memory(
    shape: TileShape, storage: Storage, vertical: Vertical, chunks: int, slot_px: int, y_boxes: bool
) -> dict[str, int] | str:
    """Rings, raw tiles of a warp and output buffers: two of each while that leaves the rings enough."""
    found: dict[str, int] | str = ""
    for raw_depth in raw_depths(shape, storage):
        for y_buffers in _buffers(shape, storage, y_boxes):
            besides = buffer_bytes(shape, storage, y_buffers) + raw_bytes(shape, storage, raw_depth)
            found = fit_rings(shape, storage, vertical, chunks, slot_px, besides)
            if not isinstance(found, str):
                found |= {"y_buffers": y_buffers, "raw_depth": raw_depth}
                if found["stages"] > 5:
                    return found
        if not isinstance(found, str):
            break
    return found


def _buffers(shape: TileShape, storage: Storage, y_boxes: bool) -> tuple[int, ...]:
    """How many output buffers a tiling may have, best first."""
    if storage.y_inner:
        return (2,)
    return (2, 1) if y_boxes and not leaves_by_stages(shape, storage) else (1,)


def _rows(form: Form, shape: TileShape, vertical: Vertical, cols: int, halo: int, stride_w: int) -> dict[str, int]:
    """Strips of single rows: a line is a row of a strip, a band an image."""
    return {
        "pitch": shape.run + halo,
        "wrap": _NEVER,
        "strips": ceil_div(cols, shape.run),
        "strip_cols": shape.run,
        "plane_px": shape.run + halo,
        "bands": form.n,
        "column_rows": vertical.rows,
        "work_tiles": ceil_div(vertical.rows, shape.tiles * shape.runs),
        "lines_of_one": 1,
        "lines_of_work_tile": 1,
    }


def _flat(form: Form, shape: TileShape, vertical: Vertical, cols: int, halo: int, stride_w: int) -> dict[str, int]:
    """Rows end to end: a band is an image, or all of them one after the other if that leaves fewer work tiles."""
    across = form.horizontal
    strip_cols = shape.strip_cols or cols
    pitch = strip_cols + halo
    if not shape.strip_cols:
        pitch = segment(cols, halo, across.in_extent, across.pad, stride_w)
    if shape.boxes:
        pitch = ceil_div(pitch * shape.chunk_bytes, 128) * 128 // shape.chunk_bytes  # boxes begin there
    apart = segment(vertical.rows, vertical.halo, form.vertical.in_extent, form.vertical.pad, vertical.stride)

    def work_tiles_of(rows: int) -> int:
        return ceil_div((rows - 1) * pitch + strip_cols, shape.tiles * shape.tile_px)

    together = (form.n - 1) * apart + vertical.rows
    joins = work_tiles_of(together) <= form.n * work_tiles_of(vertical.rows)
    bands, wrap, column_rows = (1, apart, together) if joins else (form.n, _NEVER, vertical.rows)

    def rows_of(tiles: int) -> int:
        return ceil_div(pitch - 1 + tiles * shape.tile_px + halo, pitch) + vertical.halo

    return {
        "pitch": pitch,
        "wrap": wrap,
        "strips": ceil_div(cols, strip_cols),
        "strip_cols": strip_cols,
        "plane_px": rows_of(shape.tiles) * pitch,
        "bands": bands,
        "column_rows": column_rows,
        "work_tiles": work_tiles_of(column_rows),
        "lines_of_one": rows_of(1),
        "lines_of_work_tile": rows_of(shape.tiles),
    }


def _line(pad: int, shape: TileShape, storage: Storage, planes: int, columns: dict[str, int]) -> dict[str, int] | str:
    """What a slot holds, and the boxes that bring it."""
    plane_px, pitch = columns["plane_px"], columns["pitch"]
    if not shape.boxes:
        return {"slot_px": plane_px * planes, "boxes": 0, "single_boxes": 0, "box_px": 0, "box_units": 1}
    boxes, single, box_px = columns["lines_of_work_tile"], columns["lines_of_one"], pitch
    if storage.x_inner and not shape.flat:
        boxes = single = ceil_div(plane_px, _BOX_PX)
        box_px = ceil_div(ceil_div(plane_px, boxes) * shape.chunk_bytes, 128) * 128 // shape.chunk_bytes
    if storage.x_inner and box_px > _BOX_PX:
        return f"rows of {box_px} pixels are longer than a box"
    aligned = 16 // storage.elem_bytes
    shift = -pad % aligned
    if storage.x_joined or (columns["strips"] > 1 and columns["strip_cols"] % aligned):
        shift = aligned - 1
    units = ceil_div(box_px + shift, UNIT_PX)
    return {
        "slot_px": boxes * box_px, "boxes": boxes, "single_boxes": single, "box_px": box_px, "box_units": units
    }  # fmt: skip


def _lead(form: Form, shape: TileShape, storage: Storage) -> int:
    """Pixels by which tiles begin before their strips, so that boxes begin at multiples of 16 bytes in every row."""
    whole = form.vertical.out_step == form.horizontal.out_step == shape.packs == 1
    aligned = 16 // storage.y_bytes
    return aligned - gcd(form.horizontal.out_extent, aligned) if storage.y_joined and whole and not shape.flat else 0


def _y_boxes(form: Form, shape: TileShape, storage: Storage) -> bool:
    """Whether TMA writes the output: strips of rows whose boxes hold no other tile's pixels."""
    if shape.flat or shape.pack_w > 1 or not storage.y_whole:
        return False
    return storage.y_inner or form.horizontal.out_step == 1
