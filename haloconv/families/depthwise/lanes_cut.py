"""What the kernels share whose lanes are channels (families/depthwise/lanes.cuh): tiles of a thread, warps, rings."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from haloconv.families.common import ceil_div
from haloconv.families.depthwise.layer import NO_HOPPER, Extents, in_boxes, is_hopper, padding, shapes
from haloconv.jit import BoxMap, DataType, Swizzle
from haloconv.problem import Problem, Request

LANES, ELEM_BYTES = 32, 4
LEAST_COLS, LEAST_COLS_OVER_25_TAPS = 14, 28  # of a map; on narrower ones marches were measured as fast, or faster
LEAST_ELEMS = 1 << 23  # of the tensors: the same
MARCHED_TAPS = 9  # of fprop: the same
_PIECE_ELEMS = 4  # of 16 bytes, TMA's
_MOST_SLAB_WARPS = 8  # 256 elements: most of a box along an axis
_COLS, ROWS = (7, 8), (4, 2)  # of a thread: maps are mostly multiples of these
_HALO_COST = 0.5  # of a column that is read beside those that are computed
_HALF_ROWS_COST = 1.1  # of threads of two rows: they read more of the window for a multiply
_MOST_STAGES = 64
_SMEM_BYTES, _BARRIER_BYTES = 227 << 10, 1280  # of shared memory, that a block may have; of its barriers, at most
_REGISTERS, _MOST_REGISTERS, _WARP_STEP = 1 << 16, 255, 4  # of a multiprocessor, of a thread; warps come in fours
_REGISTERS_BESIDE = 20  # of a thread
_MOST_ROWS = (1 << 31) - 1  # of all images


@dataclass(frozen=True)
class Tiling:
    """``rows`` by ``cols`` pixels of a thread; warps of a block beside each other in columns, channels and rows."""

    rows: int
    cols: int
    warps_q: int
    warps_c: int
    warps_r: int

    @property
    def warps(self) -> int:
        """Warps of a block that multiply."""
        return self.warps_q * self.warps_c * self.warps_r

    @property
    def threads(self) -> int:
        """Threads of a block: one warp more asks for rows."""
        return LANES * (self.warps + 1)

    @property
    def slab(self) -> int:
        """Channels of a block."""
        return LANES * self.warps_c

    @property
    def step_rows(self) -> int:
        """Rows of a block at a time."""
        return self.rows * self.warps_r

    @property
    def strip_cols(self) -> int:
        """Columns of a block."""
        return self.cols * self.warps_q


def why_not(request: Request) -> str | None:
    """None if rows of the tensors can land and be multiplied on the device, else a sentence that says why not."""
    problem = request.problem
    if not is_hopper(request):
        return NO_HOPPER
    if problem.dtype != torch.float32 or problem.stride != (1, 1) or problem.dilation != (1, 1):
        return "lanes of channels are for fp32 without stride and dilation"
    if problem.k_per_group != 1:
        return "a channel has several filters"
    if problem.c % _PIECE_ELEMS or not in_boxes(request, 1, _PIECE_ELEMS):
        return "channels are no neighbours at multiples of 16 bytes"
    if problem.n * max(problem.h * problem.w, problem.p * problem.q) > _MOST_ROWS:
        return "rows of all images cannot be counted in 32 bits"
    return _too_small(problem)


def over_25_taps(problem: Problem) -> bool:
    """Whether a filter has more than 25 taps, which take so many registers that blocks have fewer warps."""
    return problem.r * problem.s > 25


def _too_small(problem: Problem) -> str | None:
    """Why marches are as fast on such maps, if they are."""
    n, c, h, w = shapes(problem)[1]
    if w < (LEAST_COLS_OVER_25_TAPS if over_25_taps(problem) else LEAST_COLS) or n * c * h * w < LEAST_ELEMS:
        return "the map is narrow, or there are few pixels"
    if problem.direction == "fprop" and problem.r * problem.s <= MARCHED_TAPS:
        return f"marches are as fast with up to {MARCHED_TAPS} taps in fprop"
    return None


def columns(width: int, taps: int, most_warps: int) -> tuple[int, int]:
    """``cols`` of a thread and warps beside each other: those whose strips compute and read the fewest columns."""

    def cost(choice: tuple[int, int]) -> float:
        strip = choice[0] * choice[1]
        return ceil_div(width, strip) * (strip + _HALO_COST * (taps - 1))

    return min(((cols, warps) for cols in _COLS for warps in range(1, most_warps + 1)), key=cost)


def channel_warps(channels: int, most_warps: int) -> int:
    """Warps beside each other in channels that leave the fewest lanes idle, the most of these."""

    def cost(warps: int) -> tuple[int, int]:
        return ceil_div(channels, warps * LANES) * warps, -warps

    return min(range(1, min(most_warps, _MOST_SLAB_WARPS) + 1), key=cost)


def fits(tiling: Tiling, problem: Problem) -> bool:
    """Whether a thread's filter, sums (in wgrad dy and sums) and window fit registers, one block a multiprocessor."""
    needed = problem.r * problem.s + tiling.rows * tiling.cols + tiling.cols + problem.s - 1 + _REGISTERS_BESIDE
    warps = ceil_div(tiling.warps + 1, _WARP_STEP) * _WARP_STEP
    return needed <= min(_MOST_REGISTERS, _REGISTERS // (LANES * warps) // 8 * 8)


def idle_rows_cost(tiling: Tiling, height: int) -> float:
    """Rows computed for a map of ``height`` rows in whole steps, times what smaller thread tiles cost more."""
    return ceil_div(height, tiling.step_rows) * tiling.step_rows * (1.0 if tiling.rows == ROWS[0] else _HALF_ROWS_COST)


@dataclass(frozen=True)
class Cut:
    """``Cut`` of lanes.cuh: slabs, and images, strips and rows of each, which ``parts`` blocks share.

    What is cut is the output; in wgrad dy, which lands beside the rows of x.
    """

    problem: Problem
    tiling: Tiling

    @property
    def extents(self) -> Extents:
        """(N, C, H, W) of the output; in wgrad of dy."""
        return shapes(self.problem)[1]

    @property
    def x_cols(self) -> int:
        """Columns that land of a row whose halo is read."""
        return self.tiling.strip_cols + self.problem.s - 1

    @property
    def stage_bytes(self) -> int:
        cols = self.x_cols + (self.tiling.strip_cols if self.problem.direction == "wgrad" else 0)
        return cols * self.tiling.slab * ELEM_BYTES

    @property
    def slabs(self) -> int:
        return ceil_div(self.extents[1], self.tiling.slab)

    @property
    def strips(self) -> int:
        return ceil_div(self.extents[3], self.tiling.strip_cols)

    @property
    def steps(self) -> int:
        """Steps of a slab."""
        return ceil_div(self.extents[0] * self.strips * self.extents[2], self.tiling.step_rows)

    @property
    def window_rows(self) -> int:
        """Rows of the input that a step reads."""
        return self.tiling.step_rows + self.problem.r - 1

    @property
    def stages(self) -> int:
        """Rows that shared memory has room for."""
        return min(_MOST_STAGES, (_SMEM_BYTES - _BARRIER_BYTES) // self.stage_bytes)

    def parts(self, sm_count: int, most_rows: int = 0) -> int:
        """Blocks per slab: as many as run at once; more if a block would get over ``most_rows`` rows (0: no limit)."""
        running = min(self.steps, sm_count // self.slabs)
        return max(1, running, ceil_div(self.steps, most_rows // self.tiling.step_rows) if most_rows else 0)

    def fields(self, parts: int) -> dict[str, int]:
        """``Cut`` in lanes.cuh."""
        (n, _, rows, cols), (top, left) = self.extents, padding(self.problem)
        per_block, longer = divmod(self.steps, parts)
        return {
            **{"slabs": self.slabs, "images": n, "strips": self.strips, "rows": rows},
            **{"per_block": per_block, "longer": longer, "cols": cols, "in_rows": shapes(self.problem)[0][2]},
            **{"top": top, "left": left, "warps_q": self.tiling.warps_q},
            **{"stages": self.stages, "stage_bytes": self.stage_bytes},
        }

    def box_map(self, shape: Extents, strides: tuple[int, ...], cols: int, pointer: int) -> BoxMap:
        """Boxes of ``cols`` columns of a row of a tensor."""
        n, c, h, w = shape
        steps = (strides[3] * ELEM_BYTES, strides[2] * ELEM_BYTES, strides[0] * ELEM_BYTES)
        return BoxMap(DataType.FLOAT32, (c, w, h, n), steps, (self.tiling.slab, cols, 1, 1), Swizzle.NONE, pointer)


def constants(problem: Problem, tiling: Tiling) -> dict[str, int | str]:
    """What both kernels' sources are specialised by."""
    return {
        "R": problem.r,
        "S": problem.s,
        "ROWS": tiling.rows,
        "COLS": tiling.cols,
        "WARPS_C": tiling.warps_c,
        "WARPS_R": tiling.warps_r,
        "CHANNELS": problem.c,
        "THREADS": tiling.threads,
    }
