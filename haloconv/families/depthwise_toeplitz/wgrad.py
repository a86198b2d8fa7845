"""Host half of families/depthwise_toeplitz/wgrad.cu: filter gradients of depthwise layers with large filters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from haloconv.env import device_facts
from haloconv.families.base import MOST_CANDIDATES, BoundCall
from haloconv.families.common import ELEMENTS, ceil_div, summed_call
from haloconv.families.depthwise.strips import share, slots
from haloconv.families.depthwise_toeplitz.planes import (
    STAGED_FORMAT,
    Planes,
    blocks_that_fit,
    copy_bytes,
    groups_of,
    planes,
)
from haloconv.families.reduce.sums import bind_sum
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import PositionalLaunch
from haloconv.layout import strides_of
from haloconv.problem import Problem, TensorForm

_BESIDE = 12  # columns of zeros beside dy, in whole groups: a group that meets dy, and the taps of a tile
_MOST_PRODUCTS = 4096  # of one fp32 sum: bounds its rounding
_MOST_SUMS = 16  # tiles of 16 x 8 taps: four registers each
_MOST_WARPS = 16  # of a multiprocessor
_UNIT_ROWS = 56  # of dy, in several images if they are small
_SOME_FORM = TensorForm((1, 1, 1, 1), True)  # how planes are copied does not change their place
_PARAMS_FORMAT = f"3Q{STAGED_FORMAT}{STAGED_FORMAT}6i6i"


@dataclass(frozen=True)
class Config:
    """``images`` are staged at a time, in ``buffers``; ``min_blocks`` blocks of ``warps`` must fit a multiprocessor.

    A strip has ``rows`` rows of dy (0: all).
    """

    images: int
    min_blocks: int
    buffers: int = 2
    warps: int = 4
    rows: int = 0


def source(problem: Problem, config: Config, dy: TensorForm, x: TensorForm) -> KernelSource:
    """The text of the kernel: images, channels and rows of the planes are run-time values."""
    itemsize = problem.dtype.itemsize
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[problem.dtype],
        "R": problem.r,
        "S": problem.s,
        "PAD_LEFT": problem.padding[2],
        "MULTIPLIER": problem.k_per_group,
        "X_GROUPS": groups_of(problem.w, itemsize),
        "DY_COLS": problem.q,
        "X_COPY": copy_bytes(x, problem.w, itemsize),
        "DY_COPY": copy_bytes(dy, problem.q, itemsize),
        "IMAGES": config.images,
        "BUFFERS": config.buffers,
        "THREADS": 32 * config.warps,
        "MIN_BLOCKS": config.min_blocks,
    }
    return kernel_source("depthwise_toeplitz/wgrad", "depthwise_toeplitz_wgrad", constants)


class _Cut(NamedTuple):
    """Strips of dy, and planes in shared memory."""

    strips: tuple[int, int]
    x: Planes
    dy: Planes


def _cut(problem: Problem, dy: TensorForm, x: TensorForm, config: Config) -> _Cut:
    itemsize, top = problem.dtype.itemsize, problem.padding[0]
    each = config.rows or problem.p
    rows = each + ceil_div(problem.r, 16) * 16 - 1
    inside = (top, problem.h + top) if each == problem.p else (0, rows)
    beside = groups_of(_BESIDE, itemsize)
    return _Cut(
        (ceil_div(problem.p, each), each),
        planes(x, problem.x_shape, rows, inside, 0, groups_of(problem.w, itemsize) | 1, itemsize),
        planes(dy, problem.y_shape, each, (0, each), beside, groups_of(problem.q, itemsize) + 2 * beside, itemsize),
    )


def _smem_bytes(problem: Problem, config: Config) -> int:
    """Of a block: planes and the copy of dy, later the sums of all warps."""
    cut = _cut(problem, _SOME_FORM, _SOME_FORM, config)
    dy_bytes = config.images * cut.dy.plane_bytes
    sums = config.warps * ceil_div(problem.r, 16) * 16 * ceil_div(problem.s, 8) * 8 * 4
    copied = dy_bytes if problem.dtype.itemsize == 2 else 0
    return max(config.buffers * (config.images * cut.x.plane_bytes + dy_bytes) + copied, sums)


def good_configs(problem: Problem, max_smem: int) -> list[Config]:
    """Configs that run, best first by sweeps on an NVIDIA H200 (2026-11-22, maps of 14, 28, 56 and 112)."""
    images = min(problem.n, ceil_div(_UNIT_ROWS, problem.p))
    found: list[Config] = []
    for strips in range(1, problem.p + 1):
        rows = ceil_div(problem.p, strips)
        for warps, fewest in ((4, 3), (8, 2), (8, 1)):
            config = Config(images, 1, warps=warps, rows=rows if strips > 1 else 0)
            blocks = min(_MOST_WARPS // warps, blocks_that_fit(_smem_bytes(problem, config), max_smem))
            if blocks >= fewest and not (fewest == 1 and (found or rows > 1)):
                found.append(replace(config, min_blocks=blocks))
                break
        if found and found[-1].warps == 4:
            break
    return found[:MOST_CANDIDATES]


def why_not(problem: Problem, max_smem: int) -> str | None:
    """None if the gradient runs, else a sentence that says why not."""
    if ceil_div(problem.r, 16) * ceil_div(problem.s, 8) > _MOST_SUMS:
        return f"{problem.r} x {problem.s} sums do not fit registers"
    return None if good_configs(problem, max_smem) else "the rows that a strip needs do not fit shared memory"


def bind(
    problem: Problem,
    dy: TensorForm,
    x: TensorForm,
    result_layout: str,
    device: torch.device,
    wanted: Config | None = None,
) -> BoundCall:
    """wgrad(dy, x) -> dw."""
    facts = device_facts(device.index)
    config = wanted or good_configs(problem, facts.max_smem_bytes)[0]
    cut, smem = _cut(problem, dy, x, config), _smem_bytes(problem, config)
    x_bytes, dy_bytes = config.images * cut.x.plane_bytes, config.images * cut.dy.plane_bytes
    running = slots(facts, smem, config.min_blocks)
    products = ceil_div(config.images * cut.strips[1], config.warps) * min(problem.w, problem.q)
    most_units = max(1, _MOST_PRODUCTS // products)
    shared = share(problem.k, ceil_div(problem.n, config.images), cut.strips, x_bytes + dy_bytes, running, most_units)
    fields = (
        *(*cut.x, *cut.dy, *shared, x_bytes, dy_bytes),
        *(problem.h, problem.w, problem.p, problem.padding[0]),
    )
    grid = problem.k * shared.parts
    text = source(problem, config, dy, x)
    launch = PositionalLaunch(text, device, grid, 32 * config.warps, smem, _PARAMS_FORMAT, fields)
    dw_shape, dw_strides = problem.w_shape, strides_of(problem.w_shape, result_layout)
    sum_parts = bind_sum(problem.dtype, dw_shape, dw_strides, shared.parts, device)
    partial_elems = shared.parts * problem.k * problem.r * problem.s
    return summed_call(launch, sum_parts, partial_elems, dw_shape, dw_strides)
