"""Host half of families/depthwise/patch.cu: fprop and dgrad of depthwise layers in 16 bits on Hopper's tensor cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from haloconv.env import DeviceFacts, device_facts
from haloconv.families.base import BoundCall
from haloconv.families.common import ELEMENTS, ceil_div, dense_call
from haloconv.families.depthwise import patches as depthwise_patches
from haloconv.families.depthwise.patches import (
    CUT_FORMAT,
    EDGE,
    ELEM_BYTES,
    SIDE_FORMAT,
    THREADS,
    Side,
    padded_pieces,
    shift,
    side,
    whole,
    window,
)
from haloconv.families.depthwise.strips import padding, shapes, slots
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import PositionalLaunch
from haloconv.layout import strides_of
from haloconv.problem import Problem, TensorForm

_MOST_SLICES = 16  # of A: four registers each
MOST_IDLE = 1.6  # pixels of patches for one of the result, up to which an NVIDIA H200 was faster with them
_PARAMS_FORMAT = f"4Q3q{SIDE_FORMAT}{CUT_FORMAT}5i"


@dataclass(frozen=True)
class Config:
    """``groups`` rows of patches at a time, ``steps`` of them in a strip; ``buffers`` that strips land in.

    ``min_blocks`` blocks must fit a multiprocessor.
    """

    groups: int
    steps: int
    buffers: int
    min_blocks: int


def why_not(problem: Problem, first: TensorForm, result_layout: str, facts: DeviceFacts) -> str | None:
    """None if the patches take the problem on the device, else a sentence that says why not."""
    if problem.direction == "wgrad" or result_layout != "nchw":
        return "this is for fprop and dgrad in nchw"
    if _slices(problem) > _MOST_SLICES:
        return "the windows of the filter do not fit registers"
    in_shape, out_shape = shapes(problem)
    if depthwise_patches.idle(_padded_rows(problem, best_config(problem)), out_shape) > MOST_IDLE:
        return "too many patches would lie outside the image"
    dense = TensorForm(strides_of(out_shape, result_layout), True)
    refused = depthwise_patches.why_not(problem, ((first, in_shape), (dense, out_shape)), facts)
    if refused is None and not _cut(problem, first, best_config(problem), facts).slots:
        refused = "the rows that a strip needs do not fit shared memory"
    return refused


def _slices(problem: Problem) -> int:
    """Steps of k (families/depthwise/patch.cu)."""
    view = window(problem)
    return view.height * (view.pieces // 2) + view.pieces % 2 * ceil_div(view.height, 2)


def best_config(problem: Problem) -> Config:
    """Eight or seven rows of patches, whichever leave fewer idle; the rest best of a sweep on an NVIDIA H200."""
    return min((Config(groups, 1, 2, 4) for groups in (8, 7)), key=lambda config: _padded_rows(problem, config))


def _padded_rows(problem: Problem, config: Config) -> int:
    rows = config.groups * config.steps * EDGE
    return ceil_div(shapes(problem)[1][2], rows) * rows


def source(problem: Problem, config: Config) -> KernelSource:
    """The specialised text of the kernel. No extent of the image takes part."""
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[problem.dtype],
        "DGRAD": int(problem.direction == "dgrad"),
        "R": problem.r,
        "S": problem.s,
        "DIL_H": problem.dilation[0],
        "DIL_W": problem.dilation[1],
        "MULTIPLIER": problem.k_per_group,
        "SHIFT": shift(problem),
        "GROUPS": config.groups,
        "BUFFERS": config.buffers,
        "MIN_BLOCKS": config.min_blocks,
        "HAS_BIAS": int(problem.bias),
    }
    return kernel_source("depthwise/patch", "depthwise_patch", constants)


class _Cut(NamedTuple):
    """Strips of a plane and the output's rows of one, how the input is padded, bytes of buffers, blocks at a time."""

    strips: int
    rows: int
    side: Side
    landing_bytes: int
    padded_bytes: int
    smem_bytes: int
    slots: int


def _cut(problem: Problem, first: TensorForm, config: Config, facts: DeviceFacts) -> _Cut:
    in_shape, (_, _, out_rows, out_cols) = shapes(problem)
    rows, view = config.groups * config.steps * EDGE, window(problem)
    padded_rows = rows + ceil_div(view.height - EDGE, 2) * 2
    of_in = side(first, in_shape, padded_rows, padded_pieces(out_cols, view.pieces), *padding(problem))
    landing, padded = whole(of_in.landing_bytes), whole(padded_rows * of_in.row_bytes)
    smem = config.buffers * landing + padded + whole(rows * out_cols * ELEM_BYTES)
    static = THREADS * 16 + 4 * (view.height + EDGE) * (10 + EDGE * view.pieces) + 64
    return _Cut(
        ceil_div(out_rows, rows), rows, of_in, landing, padded, smem, slots(facts, smem + static, config.min_blocks)
    )


def bind(problem: Problem, first: TensorForm, w: TensorForm, result_layout: str, device: torch.device) -> BoundCall:
    """fprop(x, w, b) -> y or dgrad(dy, w) -> dx."""
    out_shape, config = shapes(problem)[1], best_config(problem)
    cut = _cut(problem, first, config, device_facts(device.index))
    units = out_shape[0] * out_shape[1] * cut.strips
    fields = (
        *(w.strides[0], *w.strides[2:], *cut.side, units, out_shape[0], cut.strips, cut.rows),
        *(*out_shape[1:], cut.landing_bytes, cut.padded_bytes),
    )
    text, grid = source(problem, config), min(units, cut.slots)
    launch = PositionalLaunch(text, device, grid, THREADS, cut.smem_bytes, _PARAMS_FORMAT, fields)
    return dense_call(launch, problem, out_shape, strides_of(out_shape, result_layout))
