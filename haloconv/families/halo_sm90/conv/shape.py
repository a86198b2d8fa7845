"""The shape of a block of halo_sm90: of its tiles, its warps, and how it cuts up shared memory.

Names are those of families/halo_sm90/conv/conv.cu and families/halo_sm90/conv/shape.cuh, where each is explained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from haloconv.families.common import ceil_div
from haloconv.families.halo_sm90.terms import products_of
from haloconv.problem import ZEROS, EdgeModes

_SMEM_BYTES = 232_448  # of a block on sm_90: 227 KiB
_MAX_SLOTS, _MAX_STAGES, MAX_TAPS = 32, 32, 64
_CONSUMERS, _CONSUMER_WARPS, UNIT_PX = 2, 8, 32
_MAX_RAW_TILES = 14
_STAGES_BESIDE = 6  # of weights, which two output buffers of a warp must leave room for: else it has one buffer
SUM_REGISTERS = 128  # of a thread, which leave it room for the rest
_BARRIERS = 2 * _MAX_SLOTS + 2 * _MAX_STAGES + _MAX_RAW_TILES + _CONSUMERS + 2 * 2 * _CONSUMERS
_CONTROL_BYTES = 8 * _BARRIERS + 4 * 2 * MAX_TAPS
BLOCK_M = 64


@dataclass(frozen=True)
class Storage:
    """How a launch's tensors lie in memory, as far as it decides how tiles are cut.

    ``x_inner`` and ``y_inner``: neighbours are channels (filters), not pixels. ``x_whole`` and ``y_whole``: addresses
    and strides are multiples of 16 bytes, and so are the channels (filters) of a group where they are neighbours.
    ``x_joined``: 0, or rows follow each other without a gap, and every ``x_joined``-th channel (1, 2, 4 or 8) begins at
    a multiple of 16 bytes. ``y_joined``: the same of every ``y_joined``-th filter. ``partial``: the result is fp32
    partial sums of split-K. ``terms``: TF32 values that an fp32 value is multiplied as (1: rounded to one).
    ``residual``: one is added to the result, and its addresses need registers. ``modes``: those of a ``Request``.
    """

    elem_bytes: int
    x_inner: bool
    x_whole: bool
    y_inner: bool
    y_whole: bool
    x_joined: int = 0
    y_joined: int = 0
    partial: bool = False
    terms: int = 1
    residual: bool = False
    modes: EdgeModes = ZEROS

    @property
    def has_edges(self) -> bool:
        """Whether what is outside the image is other pixels of it, or those of a halo, not zeros (edges.cuh)."""
        return self.modes != ZEROS

    @property
    def has_halo(self) -> bool:
        """Whether rows above and below the image are those of another tensor."""
        return self.modes[0] == "halo"

    @property
    def y_bytes(self) -> int:
        """Bytes of an element of the result."""
        return 4 if self.partial else self.elem_bytes


@dataclass(frozen=True)
class TileShape:
    """The shape of a tile: everything that is compiled into the kernel or fixes what a block keeps in shared memory.

    ``pack_h`` by ``pack_w`` output pixels share the 64 rows of M where filters are few. ``strip_cols`` are the columns
    of a strip of flat tiles (0: all of them, in one strip). With ``boxes`` TMA brings the input. With ``keeps`` the
    lines of a tile column are staged once, else once for each phase. With ``shared_tile`` the consumers work on two
    blocks of filters of the same tile, else on neighbouring tiles of one block. ``splits`` of split-K: so many ranges
    of the channels, which different blocks of threads sum. ``terms`` are those of ``Storage``. ``copied``: the input is
    first copied with channels as neighbours.
    """

    flat: bool
    run: int
    runs: int
    chunk_bytes: int
    pack_h: int = 1
    pack_w: int = 1
    strip_cols: int = 0
    boxes: bool = False
    keeps: bool = False
    shared_tile: bool = False
    splits: int = 1
    terms: int = 1
    copied: bool = False

    @property
    def packs(self) -> int:
        """Outputs that share the rows of M."""
        return self.pack_h * self.pack_w

    @property
    def tile_px(self) -> int:
        """Pixels of a tile, which is one consumer's."""
        return self.runs * self.run

    @property
    def sum_registers(self) -> int:
        """Registers of a thread that hold sums: a tile's, and with several terms as many partial sums."""
        return self.tile_px // 2 * (2 if self.terms > 1 else 1)

    @property
    def tiles(self) -> int:
        """Tiles of a work tile."""
        return 1 if self.shared_tile else _CONSUMERS

    @property
    def streams(self) -> int:
        """Streams of weights."""
        return _CONSUMERS if self.shared_tile else 1

    @property
    def stage_bytes(self) -> int:
        return self.terms * BLOCK_M * self.chunk_bytes

    @property
    def products(self) -> int:
        """Multiplies of a tap: of terms i and j with i + j below ``terms``."""
        return products_of(self.terms)


@dataclass(frozen=True)
class Vertical:
    """Rows as the kernel counts them: lines of residue classes, or (flat) rows of planes."""

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


class Memory(NamedTuple):
    """How a block cuts up its shared memory: slots of a ring, stages of a stream, bytes of all that is in it.

    ``y_buffers`` are of a consumer (by filters) or a warp (by pixels); ``raw_depth`` are raw tiles of a warp.
    """

    ring: int
    stages: int
    smem_bytes: int
    y_buffers: int
    raw_depth: int


def line_warps(shape: TileShape, storage: Storage) -> int:
    """Warps that stage lines: one where TMA fills slots, else as many as there are registers for."""
    return 3 if shape.sum_registers > 64 or (shape.boxes and storage.x_inner) else 7


def threads(shape: TileShape, storage: Storage) -> int:
    """Threads of a block."""
    return 32 * (_CONSUMER_WARPS + line_warps(shape, storage) + 1)


def joined_planes(shape: TileShape, storage: Storage) -> int:
    """Channels whose planes boxes take as one long row (families/halo_sm90/pack.cu orders weights by it)."""
    return max(1, storage.x_joined) if shape.boxes else 1


def slot_bytes(slot_px: int, shape: TileShape) -> int:
    """Shared memory of a slot."""
    return shape.terms * ceil_div(slot_px * shape.chunk_bytes, 1024) * 1024


def leaves_by_stages(shape: TileShape, storage: Storage) -> bool:
    """Whether the sums of a tile leave through the stage of its last tap, which is a buffer for each of four warps."""
    whole = shape.terms == 1 and shape.stage_bytes == 4 * 16 * 128
    return shape.shared_tile and not storage.y_inner and whole


def buffer_bytes(shape: TileShape, storage: Storage, buffers: int) -> int:
    """Shared memory of the consumers' output buffers (halo_sm90/write.cuh)."""
    if leaves_by_stages(shape, storage):
        return 0
    if storage.y_inner:
        return _CONSUMERS * buffers * BLOCK_M * 128
    return _CONSUMER_WARPS * buffers * 16 * 128


def raw_bytes(shape: TileShape, storage: Storage, depth: int) -> int:
    """Shared memory of the raw tiles, and in 16 bits of what is spare for pixels that are not a row's."""
    spare = 512 if depth and storage.elem_bytes == 2 else 0
    return line_warps(shape, storage) * (depth * UNIT_PX * shape.chunk_bytes + spare)


def cut_memory(
    shape: TileShape, storage: Storage, vertical: Vertical, chunks: int, slot_px: int, y_boxes: bool
) -> Memory | str:
    """Two output buffers and two raw tiles of a warp while that leaves enough stages; a sentence if nothing fits."""
    found: Memory | str = ""
    transposes = shape.boxes and not storage.x_inner  # families/halo_sm90/conv/transpose.cuh
    for raw_depth in (2, 1) if transposes else (0,):
        for y_buffers in _buffers(shape, storage, y_boxes):
            besides = buffer_bytes(shape, storage, y_buffers) + raw_bytes(shape, storage, raw_depth)
            rings = _fit_rings(shape, storage, vertical, chunks, slot_px, besides)
            found = rings if isinstance(rings, str) else Memory(*rings, y_buffers, raw_depth)
            if isinstance(found, Memory) and found.stages >= _STAGES_BESIDE:
                return found
        if isinstance(found, Memory):
            break
    return found


def _buffers(shape: TileShape, storage: Storage, y_boxes: bool) -> tuple[int, ...]:
    """How many output buffers a tiling may have, best first."""
    if storage.y_inner:
        return (2,)
    return (2, 1) if y_boxes and not leaves_by_stages(shape, storage) else (1,)


def _fit_rings(
    shape: TileShape, storage: Storage, vertical: Vertical, chunks: int, slot_px: int, besides: int
) -> tuple[int, int, int] | str:
    """Slots of a ring, stages, and bytes of all: what a work tile needs, then weights, then more lines ahead.

    ``besides`` are bytes of shared memory that are taken already. A sentence if nothing fits.
    """
    size = slot_bytes(slot_px, shape)
    room = _SMEM_BYTES - besides - _CONTROL_BYTES
    rings = chunks if shape.keeps else 1
    below = shape.tiles * shape.runs * vertical.stride
    stage = shape.streams * shape.stage_bytes
    lines = below - vertical.stride + vertical.taps
    if shape.flat:
        least, most = 2, 3
    elif shape.keeps:
        least, most = lines, lines + below
    else:
        least, most = min(lines, below - vertical.stride + 3), 2 * lines
    if not (shape.boxes and storage.x_inner):
        # A warp that waits for a slot must not be two rounds ahead of it: barriers tell two rounds apart, not three.
        least = max(least, ceil_div(line_warps(shape, storage), ceil_div(slot_px, UNIT_PX)))
    most = max(most, least)
    fitting = min((room - 3 * stage) // (rings * size), _MAX_SLOTS // rings)
    if fitting < least:
        return f"{rings * least} lines of {size} bytes do not fit shared memory"
    wanted_stages = 8 if shape.stage_bytes >= 8192 else 12
    ring = min(most, fitting, max(least, (room - wanted_stages * stage) // (rings * size)))
    stages = min((room - rings * ring * size) // stage, 16)
    used = rings * ring * size + stages * stage + besides + _CONTROL_BYTES
    return ring, stages, used
