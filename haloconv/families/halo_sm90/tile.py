"""How a launch of halo_sm90 is cut into tiles: the configuration, and the numbers that follow from it.

Names are those of families/halo_sm90/conv.cu and families/halo_sm90/tile.cuh, where each is explained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from math import gcd

from haloconv.families.common import ceil_div
from haloconv.families.halo_sm90.form import Axis, Form
from haloconv.families.halo_sm90.scheduler import Share, divisor, share_steps
from haloconv.families.halo_sm90.shape import (
    BLOCK_M,
    MAX_TAPS,
    UNIT_PX,
    Config,
    Storage,
    buffer_bytes,
    fit_rings,
    leaves_by_stages,
    raw_bytes,
    raw_depths,
    slot_bytes,
)

_BOX_PX = 256  # the largest extent of a box
_NEVER = 1 << 30
_VIRTUAL_PIXELS = 1 << 31


@dataclass(frozen=True)
class Vertical:
    """Rows as the kernel counts them: lines of classes, or (flat) rows of planes."""

    stride: int
    taps: int
    dil: int
    classes: int
    class_move: int
    line_move: int
    shift: int
    rows: int
    planes: int
    halo: int


def _vertical(axis: Axis, config: Config) -> Vertical:
    common = 1 if config.flat else gcd(axis.stride, axis.dil)
    classes = 1 if config.flat else axis.dil // common
    shift = axis.stride // common
    stride = shift * config.pack_h
    taps = axis.taps + (config.pack_h - 1) * shift
    dil = axis.dil if config.flat else 1
    rows = ceil_div(ceil_div(axis.out_extent, classes), config.pack_h)
    planes = 1 + max(tap * dil % stride for tap in range(taps)) if config.flat else 1
    line_move = 1 if config.flat else axis.dil
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
    config: Config
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
    steps: int
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
        return slot_bytes(self.slot_px, self.config)

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
        """Steps of the launch: a tile for each consumer."""
        return self.steps * self.vertical.classes * self.bands * self.strips * self.blocks * self.form.groups

    def share(self, sm_count: int) -> Share:
        """Who does which steps. Only where the copy engine writes unaligned rows do strips share sectors of memory."""
        return share_steps(self.total, self.blocks, self.strips * self.form.groups, sm_count, self.lead > 0)

    def share_fields(self, share: Share) -> Iterator[int]:
        """The fields of ``Share`` in families/halo_sm90/share.cuh, in its order."""
        loops = (self.strips, self.bands, self.vertical.classes, self.blocks // share.team, self.steps)
        yield from chain.from_iterable(map(divisor, loops))
        yield from share.fields(self.total, self.strips * self.form.groups)

    @property
    def staged_lines(self) -> int:
        """Lines that a step stages, of all chunks, away from the ends of columns."""
        phases, config = self.phases, self.config
        if config.flat:
            return self.chunks * (1 if phases.first == 1 or self.chunks > 1 else 2)
        below = config.step_tiles * config.runs * self.vertical.stride
        if config.keeps:
            return self.chunks * below
        both = below - self.vertical.stride
        return self.chunks * (both + self.vertical.taps) + (both if phases.splits_rows else 0)

    @property
    def packed_blocks(self) -> int:
        """Blocks of 64 filters of a group, as they are packed."""
        return self.blocks * self.config.streams

    @property
    def packed_bytes(self) -> int:
        """Packed weights of the launch."""
        return self.form.groups * self.packed_blocks * self.chunks * self.taps * self.config.stage_bytes


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


def _phases(chunks: int, vertical: Vertical, taps_s: int, config: Config, ring: int) -> Phases:
    """Consumers half a tile apart, unless that takes lines to be staged twice by loads or without their rows."""
    taps_r = vertical.taps
    if config.shared_tile:
        return Phases(1, (*_half_way(chunks, vertical, config, ring), 0), (0, 0, 0))
    if chunks > 1 and (config.boxes or not config.flat):
        return Phases(0, (chunks // 2, taps_r, taps_s), (chunks // 2, 0, 0))
    if chunks == 1 and taps_r > 1 and not config.flat:
        return Phases(0, (1, taps_r // 2, taps_s), (0, taps_r // 2, 0))
    if chunks == 1 and taps_s > 1 and not config.flat:
        return Phases(0, (1, 1, taps_s // 2), (0, 0, taps_s // 2))
    return Phases(1, (0, 0, 0), (0, 0, 0))


def _half_way(chunks: int, vertical: Vertical, config: Config, ring: int) -> tuple[int, int]:
    """The chunk and row of taps nearest to the middle that one consumer reaches while the other releases nothing."""
    best = (0, 0)
    for chunk in range(chunks):
        for row in range(vertical.taps):
            below = (config.runs - 1) * vertical.stride
            lines = chunk + 1 if config.flat else chunk * (below + vertical.taps) + below + row + 1
            if 2 * (chunk * vertical.taps + row) <= chunks * vertical.taps and (config.keeps or lines <= ring):
                best = (chunk, row)
    return best


def tile(form: Form, config: Config, storage: Storage) -> Tiling | str:
    """The tiling of ``form``, or a sentence that says why the configuration does not run it."""
    if config.packs > 1 and form.filters > BLOCK_M // config.packs:
        return f"{form.filters} filters do not fit {BLOCK_M // config.packs} rows of a pack"
    if (config.pack_w > 1 and form.horizontal.dil > 1) or (config.pack_h > 1 and config.flat and form.vertical.dil > 1):
        return "outputs of a dilated axis do not share taps"
    if config.shared_tile and (config.packs > 1 or form.filters <= BLOCK_M):
        return f"{form.filters} filters are one block"
    vertical, across = _vertical(form.vertical, config), form.horizontal
    stride_w = across.stride * config.pack_w
    taps_s = across.taps + (config.pack_w - 1) * across.stride
    if max(vertical.taps, taps_s) > MAX_TAPS:
        return f"a filter of {vertical.taps} x {taps_s} taps has more than {MAX_TAPS} along one axis"
    planes_w = 1 + max(tap * across.dil % stride_w for tap in range(taps_s))
    planes = planes_w * vertical.planes
    if config.boxes and (not (storage.x_whole or storage.x_joined) or planes > 1 or stride_w > 1):
        return "the copy engine takes aligned rows, and no strides across them"
    if config.boxes and config.chunk_bytes // storage.elem_bytes < 8 * storage.x_joined:
        return f"a chunk of {config.chunk_bytes} bytes has fewer than 8 channels in every {storage.x_joined}-th plane"
    halo = (taps_s - 1) * across.dil // stride_w
    cols = ceil_div(across.out_extent, config.pack_w)
    lead = _lead(form, config, storage) if planes == stride_w == 1 else 0
    columns = (_flat if config.flat else _rows)(form, config, vertical, cols + lead, halo + lead, stride_w)
    line = _line(form.horizontal.pad + lead, config, storage, planes, columns)
    if isinstance(line, str):
        return line
    chunks = ceil_div(form.channels * storage.elem_bytes, config.chunk_bytes)
    y_boxes = lead > 0 or _y_boxes(form, config, storage)
    memory = _share_memory(config, storage, vertical, chunks, line["slot_px"], y_boxes)
    if isinstance(memory, str):
        return memory
    del columns["lines_of_one"], columns["lines_of_step"]
    result = Tiling(
        form,
        config,
        storage,
        vertical,
        **{"stride_w": stride_w, "taps_s": taps_s, "dil_w": across.dil, "shift_s": across.stride},
        **columns,
        **line,
        planes_w=planes_w,
        phases=_phases(chunks, vertical, taps_s, config, memory["ring"]),
        blocks=ceil_div(form.filters, BLOCK_M // config.packs * config.streams),
        chunks=chunks,
        **memory,
        lead=lead,
        y_boxes=y_boxes,
    )
    if max(result.total, (result.column_rows + vertical.halo + 2) * result.pitch) >= _VIRTUAL_PIXELS:
        return f"{result.total} steps are more than 32-bit indices reach"
    return result


def _share_memory(
    config: Config, storage: Storage, vertical: Vertical, chunks: int, slot_px: int, y_boxes: bool
) -> dict[str, int] | str:
    """Rings, raw tiles of a warp and output buffers: two of each while that leaves the rings enough."""
    found: dict[str, int] | str = ""
    for raw_depth in raw_depths(config, storage):
        for y_buffers in _buffers(config, storage, y_boxes):
            besides = buffer_bytes(config, storage, y_buffers) + raw_bytes(config, storage, raw_depth)
            found = fit_rings(config, storage, vertical.stride, vertical.taps, chunks, slot_px, besides)
            if not isinstance(found, str):
                found |= {"y_buffers": y_buffers, "raw_depth": raw_depth}
                if found["stages"] > 5:
                    return found
        if not isinstance(found, str):
            break
    return found


def _buffers(config: Config, storage: Storage, y_boxes: bool) -> tuple[int, ...]:
    """How many output buffers a tiling may have, best first."""
    if storage.y_inner:
        return (2,)
    return (2, 1) if y_boxes and not leaves_by_stages(config, storage) else (1,)


def _rows(form: Form, config: Config, vertical: Vertical, cols: int, halo: int, stride_w: int) -> dict[str, int]:
    """Strips of single rows: a line is a row of a strip, a band an image."""
    return {
        "pitch": config.run + halo,
        "wrap": _NEVER,
        "strips": ceil_div(cols, config.run),
        "strip_cols": config.run,
        "plane_px": config.run + halo,
        "bands": form.n,
        "column_rows": vertical.rows,
        "steps": ceil_div(vertical.rows, config.step_tiles * config.runs),
        "lines_of_one": 1,
        "lines_of_step": 1,
    }


def _flat(form: Form, config: Config, vertical: Vertical, cols: int, halo: int, stride_w: int) -> dict[str, int]:
    """Rows end to end: a band is an image, or all of them one after the other if that leaves fewer steps."""
    across = form.horizontal
    strip_cols = config.strip_cols or cols
    pitch = strip_cols + halo
    if not config.strip_cols:
        pitch = segment(cols, halo, across.in_extent, across.pad, stride_w)
    if config.boxes:
        pitch = ceil_div(pitch * config.chunk_bytes, 128) * 128 // config.chunk_bytes  # boxes begin there
    apart = segment(vertical.rows, vertical.halo, form.vertical.in_extent, form.vertical.pad, vertical.stride)

    def steps_of(rows: int) -> int:
        return ceil_div((rows - 1) * pitch + strip_cols, config.step_tiles * config.tile_px)

    together = (form.n - 1) * apart + vertical.rows
    shares = steps_of(together) <= form.n * steps_of(vertical.rows)
    bands, wrap, column_rows = (1, apart, together) if shares else (form.n, _NEVER, vertical.rows)

    def rows_of(tiles: int) -> int:
        return ceil_div(pitch - 1 + tiles * config.tile_px + halo, pitch) + vertical.halo

    return {
        "pitch": pitch,
        "wrap": wrap,
        "strips": ceil_div(cols, strip_cols),
        "strip_cols": strip_cols,
        "plane_px": rows_of(config.step_tiles) * pitch,
        "bands": bands,
        "column_rows": column_rows,
        "steps": steps_of(column_rows),
        "lines_of_one": rows_of(1),
        "lines_of_step": rows_of(config.step_tiles),
    }


def _line(pad: int, config: Config, storage: Storage, planes: int, columns: dict[str, int]) -> dict[str, int] | str:
    """What a slot holds, and the boxes that bring it."""
    plane_px, pitch = columns["plane_px"], columns["pitch"]
    if not config.boxes:
        return {"slot_px": plane_px * planes, "boxes": 0, "single_boxes": 0, "box_px": 0, "box_units": 1}
    boxes, single, box_px = columns["lines_of_step"], columns["lines_of_one"], pitch
    if storage.x_inner and not config.flat:
        boxes = single = ceil_div(plane_px, _BOX_PX)
        box_px = ceil_div(ceil_div(plane_px, boxes) * config.chunk_bytes, 128) * 128 // config.chunk_bytes
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


def _lead(form: Form, config: Config, storage: Storage) -> int:
    """Pixels by which tiles begin before their strips, so that boxes begin at multiples of 16 bytes in every row."""
    whole = form.vertical.out_step == form.horizontal.out_step == config.packs == 1
    aligned = 16 // storage.y_bytes
    return aligned - gcd(form.horizontal.out_extent, aligned) if storage.y_joined and whole and not config.flat else 0


def _y_boxes(form: Form, config: Config, storage: Storage) -> bool:
    """Whether the copy engine writes the output: strips of rows whose boxes hold no other tile's pixels."""
    if config.flat or config.pack_w > 1 or not storage.y_whole:
        return False
    return storage.y_inner or form.horizontal.out_step == 1
