"""How a launch of halo_sm90 is cut into tiles: the configuration, and the numbers that follow from it.

Names are those of kernels/halo_sm90.cu and kernels/halo_sm90/tile.cuh, where each is explained.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from haloconv.families.halo_sm90_form import Axis, Form

_SMEM_BYTES = 232_448  # of a block on sm_90: 227 KiB
_MAX_SLOTS, _MAX_STAGES, MAX_TAPS = 32, 32, 64
_CONTROL_BYTES = 8 * (2 * _MAX_SLOTS + 2 * _MAX_STAGES + 1) + 4 * 2 * MAX_TAPS
_CONSUMERS, _CONSUMER_WARPS, _WARP_ROWS = 2, 8, 16
_VIRTUAL_PIXELS = 1 << 31


@dataclass(frozen=True)
class Config:
    """The shape of a tile: everything that is compiled into the kernel or fixes what a block keeps in shared memory.

    ``pack_h`` by ``pack_w`` output pixels share the 64 rows of M where filters are few. With ``quads`` four input
    pixels are one aligned load, and lines are cut so that each four are inside or outside the image together.
    """

    flat: bool
    run: int
    runs: int
    consumers_m: int
    chunk_bytes: int
    pack_h: int = 1
    pack_w: int = 1
    strip_cols: int = 0
    quads: bool = False
    line_warps: int = 3

    @property
    def packs(self) -> bool:
        """Whether several outputs share the rows of M."""
        return self.pack_h * self.pack_w > 1

    @property
    def block_m(self) -> int:
        return 64 * self.consumers_m

    @property
    def consumers_n(self) -> int:
        return _CONSUMERS // self.consumers_m

    @property
    def tile_rows(self) -> int:
        return 1 if self.flat else self.consumers_n * self.runs

    @property
    def threads(self) -> int:
        return 32 * (_CONSUMER_WARPS + self.line_warps + 1)

    @property
    def stage_bytes(self) -> int:
        return self.block_m * self.chunk_bytes


def ceil_div(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


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


def _segment(outputs: int, halo: int, extent: int, pad: int, stride: int) -> int:
    """Pixels from one segment to the next: neighbours share zeros if each reads only zeros of the other."""
    apart = outputs + halo
    if stride > 1 or pad < 0:
        return apart
    return min(apart, max(outputs, extent + pad, apart - pad))


@dataclass(frozen=True)
class Tiling:
    """The numbers of one launch with one configuration."""

    form: Form
    config: Config
    vertical: Vertical
    stride_w: int
    taps_s: int
    dil_w: int
    shift_s: int
    pad_left: int
    first_tap_px: int
    planes_w: int
    pitch: int
    segment_rows: int
    strips: int
    strip_cols: int
    plane_px: int
    slot_px: int
    tiles: int
    tile_step: int
    steps: int
    lines: int
    new_lines: int
    blocks: int
    chunks: int
    slots: int
    stages: int
    virtual_px: int
    smem_bytes: int

    @property
    def slot_bytes(self) -> int:
        return ceil_div(self.slot_px * self.config.chunk_bytes, 1024) * 1024

    @property
    def taps(self) -> int:
        return self.vertical.taps * self.taps_s

    @property
    def total(self) -> int:
        tiles = self.steps * self.vertical.classes * self.tiles * self.strips
        return tiles * self.blocks * self.form.groups

    @property
    def packed_bytes(self) -> int:
        """Packed weights of the launch."""
        return self.form.groups * self.blocks * self.chunks * self.taps * self.config.stage_bytes

    @property
    def lead(self) -> int:
        """Taps that the first consumer starts ahead: never more than it can do while the other one waits."""
        lines = self.slots - (self.config.runs - 1) * self.vertical.stride - 2
        reach = self.taps if self.config.flat else min(self.taps, max(lines, 0) * self.taps_s)
        return max(0, min(self.stages - 2, reach))


def buffer_bytes(elem_bytes: int, by_rows: bool) -> int:
    """Shared memory of the consumers' output buffers (``WarpBuffer`` in halo_sm90/write.cuh)."""
    pixels = 32 if by_rows else 128 // elem_bytes
    pitch = _WARP_ROWS + 16 // elem_bytes if by_rows else pixels + 8
    return _CONSUMER_WARPS * (pixels if by_rows else _WARP_ROWS) * pitch * elem_bytes


def tile(form: Form, config: Config, elem_bytes: int, by_rows: bool) -> Tiling | str:
    """The tiling of ``form``, or a sentence that says why the configuration does not run it."""
    pack = config.pack_h * config.pack_w
    if pack > 1 and form.filters > config.block_m // pack:
        return f"{form.filters} filters do not fit {config.block_m // pack} rows of a pack"
    if (config.pack_w > 1 and form.horizontal.dil > 1) or (config.pack_h > 1 and config.flat and form.vertical.dil > 1):
        return "outputs of a dilated axis do not share taps"
    vertical, across = _vertical(form.vertical, config), form.horizontal
    stride_w = across.stride * config.pack_w
    taps_s = across.taps + (config.pack_w - 1) * across.stride
    if max(vertical.taps, taps_s) > MAX_TAPS:
        return f"a filter of {vertical.taps} x {taps_s} taps has more than {MAX_TAPS} along one axis"
    if config.quads and (stride_w > 1 or across.in_extent % 4 or config.strip_cols % 4):
        return "four neighbouring pixels are no aligned group"
    columns = _columns(form, config, vertical, stride_w, taps_s)
    chunks = ceil_div(form.channels * elem_bytes, config.chunk_bytes)
    steps = 1 if config.flat else ceil_div(vertical.rows, config.tile_rows)
    lines = 1 if config.flat else (config.tile_rows - 1) * vertical.stride + vertical.taps
    below = config.tile_rows * vertical.stride
    keeps = not config.flat and chunks == 1 and below < lines and steps > 1
    numbers = {**columns, "chunks": chunks, "steps": steps, "lines": lines, "new_lines": below if keeps else lines}
    blocks = ceil_div(form.filters, config.block_m) if pack == 1 else 1
    rings = _rings(config, vertical, numbers, buffer_bytes(elem_bytes, by_rows))
    if isinstance(rings, str) and keeps:  # too many lines to keep: each tile stages its own
        numbers["new_lines"] = lines
        rings = _rings(config, vertical, numbers, buffer_bytes(elem_bytes, by_rows))
    if isinstance(rings, str):
        return rings
    result = Tiling(
        form, config, vertical, stride_w, taps_s, across.dil, across.stride, **numbers, blocks=blocks, **rings
    )
    if max(result.virtual_px, result.total) >= _VIRTUAL_PIXELS:
        return f"{result.virtual_px} pixels are more than 32-bit indices reach"
    return result


def _columns(form: Form, config: Config, vertical: Vertical, stride_w: int, taps_s: int) -> dict[str, int]:
    """Segments, strips and tiles along the virtual line, and what a slot holds."""
    across = form.horizontal
    pad_left = ceil_div(across.pad, 4) * 4 if config.quads else across.pad
    first_tap_px = pad_left - across.pad
    halo = first_tap_px + (taps_s - 1) * across.dil // stride_w
    planes_w = 1 + max(tap * across.dil % stride_w for tap in range(taps_s))
    cols = ceil_div(across.out_extent, config.pack_w)
    tile_px = config.consumers_n * config.runs * config.run if config.flat else config.run
    segment_rows = 1
    if config.flat:
        rows = (vertical.rows, vertical.halo, form.vertical.in_extent, form.vertical.pad, vertical.stride)
        segment_rows = _segment(*rows)
    if config.strip_cols:
        strip_cols, pitch = config.strip_cols, config.strip_cols + halo
    else:
        strip_cols, pitch = cols, _segment(cols, halo, across.in_extent, pad_left, stride_w)
    group = 4 if config.quads else 1
    pitch = ceil_div(pitch, group) * group
    segments = form.n * segment_rows
    whole = config.strip_cols > 0 and not config.flat  # one segment a tile
    last_px = (segments - 1 - (segment_rows - vertical.rows if config.flat else 0)) * pitch + strip_cols
    plane_px = ceil_div(tile_px + halo + (vertical.halo * pitch if config.flat else 0), group) * group
    return {
        "pad_left": pad_left,
        "first_tap_px": first_tap_px,
        "planes_w": planes_w,
        "pitch": pitch,
        "segment_rows": segment_rows,
        "strips": ceil_div(cols, strip_cols),
        "strip_cols": strip_cols,
        "plane_px": plane_px,
        "slot_px": plane_px * planes_w * vertical.planes,
        "tiles": segments if whole else ceil_div(last_px, tile_px),
        "tile_step": pitch if whole else tile_px,
        "virtual_px": segments * pitch + plane_px,
    }


def _rings(config: Config, vertical: Vertical, numbers: dict[str, int], buffers: int) -> dict[str, int] | str:
    """How many slots and stages fit, slots first: what a tile needs, then weights, then more lines ahead."""
    slot_bytes = ceil_div(numbers["slot_px"] * config.chunk_bytes, 1024) * 1024
    room = _SMEM_BYTES - buffers - _CONTROL_BYTES
    lines, keeps = numbers["lines"], numbers["new_lines"] < numbers["lines"]
    window = (config.tile_rows - 1) * vertical.stride + 3
    least = 2 if config.flat else lines if keeps else min(lines, window)
    most = (room - 3 * config.stage_bytes) // slot_bytes
    if most < least or least > _MAX_SLOTS:
        return f"{least} lines of {slot_bytes} bytes do not fit shared memory"
    wanted_stages = 8 if config.stage_bytes >= 8192 else 12
    slots = max(least, min(most, (room - wanted_stages * config.stage_bytes) // slot_bytes))
    slots = min(slots, 3 if config.flat else lines + config.tile_rows * vertical.stride, _MAX_SLOTS)
    stages = min((room - slots * slot_bytes) // config.stage_bytes, _MAX_STAGES, 16)
    used = slots * slot_bytes + stages * config.stage_bytes + buffers + _CONTROL_BYTES
    return {"slots": slots, "stages": stages, "smem_bytes": used}
