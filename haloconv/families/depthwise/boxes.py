"""What the kernels share whose planes come as boxes (boxes.cuh): tiles of a thread, units, blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch

from haloconv.env import DeviceFacts
from haloconv.families.common import ceil_div
from haloconv.families.depthwise.strips import padding, shapes, share, strips
from haloconv.jit import BoxMap, DataType, Swizzle
from haloconv.problem import Problem, TensorForm

Extents = tuple[int, int, int, int]
COLS, ELEM_BYTES = 4, 4  # columns of a tile, which are a piece of 16 bytes
CUT_FORMAT = "11i"
MOST_TAPS = 49  # that stand in registers
_CAPABILITY = (9, 0)
_BANKS = 8  # pieces side by side in shared memory
_BOX_ALIGNMENT = 128
_MOST_BOX = 256  # elements of a box along an axis
_SMEM_BYTES, _RESERVED_BYTES = 227 << 10, 1 << 10  # of shared memory, that a block may have; of that for the system
_LEAST_WARPS = 8  # of a multiprocessor


@dataclass(frozen=True)
class Config:
    """``rows`` of a tile; ``buffers`` and ``warps`` of a block; blocks that must fit a multiprocessor.

    ``weight``: what a tile's row takes, against that of other configs.
    """

    rows: int
    buffers: int
    min_blocks: int
    warps: int
    weight: float = 1.0

    @property
    def threads(self) -> int:
        return 32 * self.warps


def why_not(problem: Problem, sides: tuple[TensorForm, ...], facts: DeviceFacts) -> str | None:
    """None if planes of these tensors can come as boxes on the device, else a sentence that says why not."""
    if facts.capability != _CAPABILITY:
        return "the device is no Hopper GPU (compute capability 9.0)"
    if problem.dtype != torch.float32:
        return "this is for fp32"
    if problem.stride != (1, 1) or problem.dilation != (1, 1) or problem.r * problem.s > MOST_TAPS:
        return "the filter has a stride or a dilation, or does not fit registers"
    if not all(_has_boxes(side) for side in sides):
        return "columns are no neighbours in memory, or rows begin at no multiples of 16 bytes"
    return None


def _has_boxes(side: TensorForm) -> bool:
    steps = side.strides[:3]
    whole = min(steps) > 0 and not any(step % COLS for step in steps)  # 0: one image seen as several
    return side.aligned and side.strides[3] == 1 and whole


def lead(problem: Problem) -> int:
    """Columns of the first 16 bytes of a window before the first one that the filter meets."""
    return -padding(problem)[1] % COLS


def constants(problem: Problem, config: Config) -> dict[str, int | str]:
    """What both kernels' texts are specialised by."""
    return {
        "R": problem.r,
        "S": problem.s,
        "MULTIPLIER": problem.k_per_group,
        "ROWS": config.rows,
        "LEAD": lead(problem),
        "BUFFERS": config.buffers,
        "THREADS": config.threads,
        "MIN_BLOCKS": config.min_blocks,
    }


class Cut:
    """Units of the output (in wgrad dy): ``images`` neighbours of a strip of ``rows`` rows; and their boxes.

    ``output_lands``: dy does, beside x. ``end_bytes`` of shared memory take the place of units in the end.
    """

    def __init__(self, problem: Problem, config: Config, output_lands: bool = False, end_bytes: int = 0) -> None:
        n, self.channels, out_rows, out_cols = shapes(problem)[1]
        self.pads, self.groups = padding(problem), ceil_div(out_cols, COLS)
        lines = max(1, config.threads // self.groups)  # of tiles
        self.strips, self.rows = strips(out_rows, lines * config.rows, config.rows)
        self.images = max(1, min(n, lines // (self.rows // config.rows)))
        self.image_groups = ceil_div(n, self.images)
        vectors = ceil_div(lead(problem) + COLS + problem.s - 1, COLS)  # of a thread's window
        pitch = _apart(self.groups - 1 + vectors, config.rows, self.groups)
        self.in_box = (pitch * COLS, self.rows + problem.r - 1, 1, self.images)
        self.out_box = (self.groups * COLS, self.rows, 1, self.images)
        self.box_bytes = _bytes(self.in_box) + (_bytes(self.out_box) if output_lands else 0)
        self.out_offset = _aligned(_bytes(self.in_box))
        self.buffer_bytes = self.out_offset + (_aligned(_bytes(self.out_box)) if output_lands else 0)
        self.smem_bytes = max(config.buffers * self.buffer_bytes, end_bytes)
        fit = (_SMEM_BYTES + _RESERVED_BYTES) // (self.smem_bytes + _RESERVED_BYTES)
        self.resident = min(config.min_blocks, fit)  # blocks of a multiprocessor
        self.fits = (
            self.groups <= config.threads
            and max(*self.in_box, *self.out_box) <= _MOST_BOX
            and self.resident * config.warps >= _LEAST_WARPS
        )
        lanes = config.threads * self.strips * self.image_groups / n  # of an image
        read = (self.rows + problem.r - 1) / self.rows  # of a row that is multiplied
        self.cost = config.weight * lanes * config.rows * read

    def parts(self, facts: DeviceFacts, most_units: int = 0) -> int:
        """Blocks of a channel."""
        slots = self.resident * facts.sm_count
        cut = (self.strips, self.rows)
        return share(self.channels, self.image_groups, cut, self.buffer_bytes, slots, most_units).parts

    def fields(self, parts: int) -> tuple[int, ...]:
        """``Cut`` in the kernels."""
        units = self.image_groups * self.strips
        boxes = (self.in_box[0] * ELEM_BYTES, self.box_bytes, self.buffer_bytes)
        return (units, parts, self.images, self.strips, self.rows, self.groups, *self.pads, *boxes)


def best(problem: Problem, cuts: Iterable[tuple[Config, Cut]]) -> Config | None:
    """The first config of the least cost: rows that lanes multiply, times those that are read; None if none fits."""
    return min((each for each in cuts if each[1].fits), key=lambda each: each[1].cost, default=(None,))[0]


def boxes(shape: Extents, side: TensorForm, box: Extents, pointer: int) -> BoxMap:
    """Boxes of a tensor (N, C, H, W) of ``shape``."""
    n, c, h, w = shape
    steps = (side.strides[2] * ELEM_BYTES, side.strides[1] * ELEM_BYTES, side.strides[0] * ELEM_BYTES)
    return BoxMap(DataType.FLOAT32, (w, h, c, n), steps, box, Swizzle.NONE, pointer)


def _bytes(box: Extents) -> int:
    return prod(box) * ELEM_BYTES


def _aligned(box_bytes: int) -> int:
    return ceil_div(box_bytes, _BOX_ALIGNMENT) * _BOX_ALIGNMENT


def _apart(pieces: int, rows: int, groups: int) -> int:
    """Pieces from row to row, so that those that neighbouring lanes read lie in different banks, if that can be.

    The thread after the last of a line is ``rows`` rows down.
    """
    apart = (each for each in range(pieces, pieces + _BANKS) if (rows * each - groups) % _BANKS == 0)
    return next(apart, pieces | 1)
