"""What the kernels share whose planes come as boxes (boxes.cuh): tiles of a thread, units, blocks."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from haloconv.families.common import ceil_div
from haloconv.families.depthwise.layer import NO_HOPPER, Extents, in_boxes, is_hopper, lead, padding, shapes
from haloconv.families.depthwise.strips import cut_rows, partition
from haloconv.jit import BoxMap, DataType, Swizzle
from haloconv.problem import Problem, Request, TensorForm

COLS, ELEM_BYTES = 4, 4  # columns of a tile, which are a piece of 16 bytes
NO_ROOM = "the rows that a block needs do not fit a box or shared memory"
_MOST_TAPS = 49  # that stand in registers
_BANKS = 8  # pieces side by side in shared memory
_BOX_ALIGNMENT = 128
_MOST_BOX = 256  # elements of a box along an axis
_SMEM_BYTES, _RESERVED_BYTES = 227 << 10, 1 << 10  # of shared memory, that a block may have; of that for the system
_LEAST_WARPS = 8  # of a multiprocessor


@dataclass(frozen=True)
class Tiling:
    """``rows`` of a tile; ``buffers`` and ``warps`` of a block; blocks that must fit a multiprocessor."""

    rows: int
    buffers: int
    min_blocks: int
    warps: int

    @property
    def threads(self) -> int:
        return 32 * self.warps


def why_not(request: Request) -> str | None:
    """None if planes of the tensors can come as boxes on the device, else a sentence that says why not."""
    problem = request.problem
    if not is_hopper(request):
        return NO_HOPPER
    if problem.dtype != torch.float32:
        return "this is for fp32"
    if problem.stride != (1, 1) or problem.dilation != (1, 1) or problem.r * problem.s > _MOST_TAPS:
        return "the filter has a stride or a dilation, or does not fit registers"
    if not in_boxes(request, 3, COLS):
        return "columns are no neighbours in memory, or rows begin at no multiples of 16 bytes"
    return None


def constants(problem: Problem, tiling: Tiling) -> dict[str, int | str]:
    """What both kernels' sources are specialised by."""
    return {
        "R": problem.r,
        "S": problem.s,
        "MULTIPLIER": problem.k_per_group,
        "ROWS": tiling.rows,
        "LEAD": lead(problem, COLS),
        "BUFFERS": tiling.buffers,
        "THREADS": tiling.threads,
        "MIN_BLOCKS": tiling.min_blocks,
    }


class Cut:
    """Units of the output (in wgrad dy): ``images`` neighbours of a strip of ``rows`` rows; and their boxes.

    In wgrad dy lands beside x, and sums of threads take the place of units in the end.
    """

    def __init__(self, problem: Problem, tiling: Tiling) -> None:
        self.tiling = tiling
        n, self.channels, out_rows, out_cols = shapes(problem)[1]
        self.pads, self.groups = padding(problem), ceil_div(out_cols, COLS)
        lines = max(1, tiling.threads // self.groups)  # of tiles
        self.strips, self.rows = cut_rows(out_rows, lines * tiling.rows, tiling.rows)
        self.images = max(1, min(n, lines // (self.rows // tiling.rows)))
        self.image_groups = ceil_div(n, self.images)
        vectors = ceil_div(lead(problem, COLS) + COLS + problem.s - 1, COLS)  # of a thread's window
        pitch = _apart(self.groups - 1 + vectors, tiling.rows, self.groups)
        self.in_box = (pitch * COLS, self.rows + problem.r - 1, 1, self.images)
        self.out_box = (self.groups * COLS, self.rows, 1, self.images)
        self.out_offset = self.buffer_bytes = _aligned(_bytes(self.in_box))
        self.box_bytes, end_bytes = _bytes(self.in_box), 0
        if problem.direction == "wgrad":
            self.box_bytes += _bytes(self.out_box)
            self.buffer_bytes += _aligned(_bytes(self.out_box))
            end_bytes = problem.r * problem.s * tiling.threads * ELEM_BYTES
        self.smem_bytes = max(tiling.buffers * self.buffer_bytes, end_bytes)
        fit = (_SMEM_BYTES + _RESERVED_BYTES) // (self.smem_bytes + _RESERVED_BYTES)
        self.resident = min(tiling.min_blocks, fit)  # blocks of a multiprocessor
        self.fits = (
            self.groups <= tiling.threads
            and max(*self.in_box, *self.out_box) <= _MOST_BOX
            and self.resident * tiling.warps >= _LEAST_WARPS
        )
        lanes = tiling.threads * self.strips * self.image_groups / n  # of an image
        read = (self.rows + problem.r - 1) / self.rows  # of a row that is multiplied
        self.cost = lanes * tiling.rows * read

    def parts(self, sm_count: int, most_units: int = 0) -> int:
        """Blocks of a channel."""
        slots = self.resident * sm_count
        cut = (self.strips, self.rows)
        return partition(self.channels, self.image_groups, cut, self.buffer_bytes, slots, most_units).parts

    def fields(self, parts: int) -> dict[str, int]:
        """``Cut`` in boxes.cuh."""
        return {
            **{"units": self.image_groups * self.strips, "parts": parts},
            **{"images": self.images, "strips": self.strips, "rows": self.rows, "groups": self.groups},
            **{"top": self.pads[0], "left": self.pads[1], "row_bytes": self.in_box[0] * ELEM_BYTES},
            **{"box_bytes": self.box_bytes, "buffer_bytes": self.buffer_bytes},
        }


def best(problem: Problem, weights: dict[Tiling, float]) -> Tiling | None:
    """The tiling of least cost: rows multiplied, times rows read per output row, times the tiling's measured weight.

    A weight is the time of a row of a tile relative to the others. None if no tiling fits; a tie goes to the first.
    """
    cuts = {tiling: Cut(problem, tiling) for tiling in weights}
    fitting = (tiling for tiling, cut in cuts.items() if cut.fits)
    return min(fitting, key=lambda tiling: weights[tiling] * cuts[tiling].cost, default=None)


def box_map(shape: Extents, side: TensorForm, box: Extents, pointer: int) -> BoxMap:
    """Boxes of a tensor (N, C, H, W) of ``shape``."""
    n, c, h, w = shape
    steps = (side.strides[2] * ELEM_BYTES, side.strides[1] * ELEM_BYTES, side.strides[0] * ELEM_BYTES)
    return BoxMap(DataType.FLOAT32, (w, h, c, n), steps, box, Swizzle.NONE, pointer)


def _bytes(box: Extents) -> int:
    return prod(box) * ELEM_BYTES


def _aligned(box_bytes: int) -> int:
    return ceil_div(box_bytes, _BOX_ALIGNMENT) * _BOX_ALIGNMENT


def _apart(pieces: int, rows: int, groups: int) -> int:
    """Row pitch in 16-byte pieces, at least ``pieces``.

    If some pitch does so, the lane after a line's last, ``rows`` rows down, continues the bank sequence; else
    ``pieces`` is made odd.
    """
    apart = (each for each in range(pieces, pieces + _BANKS) if (rows * each - groups) % _BANKS == 0)
    return next(apart, pieces | 1)
