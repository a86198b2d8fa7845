"""What the host halves of both depthwise/tile kernels share: the tile of a thread (register_tile.cuh), constants."""

from __future__ import annotations

from dataclasses import dataclass

from haloconv.families.depthwise import finish
from haloconv.families.depthwise.layer import lead
from haloconv.problem import Problem

COLS = 4
"""Columns of a thread, and of 16 bytes of fp32."""


@dataclass(frozen=True)
class Tiling:
    """``rows`` of a thread's outputs; ``buffers`` and ``warps`` of a block.

    ``min_blocks`` blocks must fit a multiprocessor.
    """

    rows: int
    buffers: int
    min_blocks: int
    warps: int


def constants(problem: Problem, tiling: Tiling) -> dict[str, int | str]:
    """What both kernels' sources are specialised by. No extent of the image takes part."""
    return {
        "DGRAD": int(problem.direction == "dgrad"),
        "R": problem.r,
        "S": problem.s,
        "MULTIPLIER": problem.k_per_group,
        "ROWS": tiling.rows,
        "LEAD": lead(problem, COLS),
        "BUFFERS": tiling.buffers,
        "THREADS": 32 * tiling.warps,
        "MIN_BLOCKS": tiling.min_blocks,
        "HAS_BIAS": int(problem.bias),
        **finish.constants(problem),
    }
