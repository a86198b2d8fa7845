"""Host half of families/grouped_sm90/wgrad.cu: weight gradients of grouped channels_last layers in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from haloconv.env import DeviceFacts, device_facts
from haloconv.families.base import BoundCall
from haloconv.families.common import ELEMENTS, ceil_div, summed_call
from haloconv.families.grouped_sm90 import slab as group_march
from haloconv.families.grouped_sm90.slab import Cut
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import PositionalLaunch
from haloconv.layout import strides_of
from haloconv.problem import Problem, TensorForm

_PARAMS_FORMAT, _SUM_FORMAT = "3Q13i", "2Q4q3i"
_X_POINTER, _Y_POINTER = 0, 1
_REGISTERS_BESIDE = 52  # of a thread, beside its sums and fragments
_PART_WARPS = 8  # that share the parts of a sum


@dataclass(frozen=True)
class Config:
    """Rows of a stage, steps of 16 columns and eights of filters of a warp, stages, blocks of a multiprocessor."""

    rows: int
    k_steps: int
    n_tiles: int
    stages: int
    min_blocks: int


def why_not(problem: Problem, dy: TensorForm, x: TensorForm, facts: DeviceFacts) -> str | None:
    """None if the kernel takes the problem with tensors of these forms on the device, else why not."""
    if problem.dtype.itemsize != 2:
        return "fp32 cannot be turned by ldmatrix"
    reason = group_march.why_not(problem, (dy, x), "nhwc", facts)
    if reason is None and best_config(problem, facts.max_smem_bytes) is None:
        reason = "the sums do not fit registers, or a stage shared memory"
    return reason


def best_config(problem: Problem, max_smem_bytes: int) -> Config | None:
    """The config that is fastest by a sweep on an NVIDIA H200 (2026-11-22); None where it does not fit."""
    rows, k_steps, n_tiles, blocks = 2, 2 if problem.q > 16 else 1, 1, 1
    cut = Cut(problem, rows, 16 * k_steps)
    pairs = _pairs(problem)
    registers = 4 * problem.r * pairs + 2 * problem.r * k_steps + 4 * k_steps * pairs + _REGISTERS_BESIDE
    if registers > group_march.registers(_warps(problem, Config(rows, k_steps, n_tiles, 0, blocks)), blocks):
        return None
    stages = group_march.stages(max_smem_bytes, blocks, cut.box_bytes(cut.x_cols + cut.strip_cols), 0)
    return Config(rows, k_steps, n_tiles, stages, blocks) if stages > 1 else None


def _pairs(problem: Problem) -> int:
    """Products that a step of a row takes for each vertical tap: of two atoms each."""
    return ceil_div(problem.s * group_march.atoms(problem), 2)


def _consumers(problem: Problem, config: Config) -> int:
    """Warps of a block that multiply."""
    return Cut(problem, config.rows, 16).slab_groups * group_march.group_tiles(problem) // config.n_tiles


def _warps(problem: Problem, config: Config) -> int:
    """Of a block: one asks for rows."""
    return _consumers(problem, config) + 1


def source(problem: Problem, config: Config) -> KernelSource:
    """The text of the kernel: extents of images are run-time values."""
    constants = {
        **_sum_order(problem, config),
        "ROWS": config.rows,
        "K_STEPS": config.k_steps,
        "MIN_BLOCKS": config.min_blocks,
    }
    return kernel_source("grouped_sm90/wgrad", "halo_sm80_wgrad_march", constants)


def sum_source(problem: Problem, config: Config) -> KernelSource:
    """The text of the kernel that adds the parts."""
    constants = {**_sum_order(problem, config), "PART_WARPS": _PART_WARPS}
    return kernel_source("grouped_sm90/wgrad_sum", "halo_sm80_wgrad_march_sum", constants)


def _sum_order(problem: Problem, config: Config) -> dict[str, int | str]:
    """The constants that the order of partial sums depends on."""
    return {
        "ELEM": ELEMENTS[problem.dtype],
        "R": problem.r,
        "S": problem.s,
        "ATOMS": group_march.atoms(problem),
        "N_TILES": config.n_tiles,
    }


def bind(
    problem: Problem, dy: TensorForm, x: TensorForm, result_layout: str, device: torch.device, config: Config
) -> BoundCall:
    """wgrad(dy, x) -> dw."""
    facts = device_facts(device.index)
    cut = Cut(problem, config.rows, 16 * config.k_steps)
    parts = cut.parts(facts.sm_count * config.min_blocks)
    stage_bytes = cut.box_bytes(cut.x_cols + cut.strip_cols)
    maps = (
        cut.boxes(problem.x_shape, x.strides, cut.x_cols, _X_POINTER, False),
        cut.boxes(problem.y_shape, dy.strides, cut.strip_cols, _Y_POINTER, False),
    )
    top, left = problem.padding[0], problem.padding[2]
    fields = (*cut.fields(parts, top, left, config.stages), problem.p, problem.q)
    launch = PositionalLaunch(
        source(problem, config), device, cut.slabs * parts, 32 * _warps(problem, config),
        group_march.smem_bytes(config.stages, stage_bytes, 0, 0), _PARAMS_FORMAT, fields, maps,
    )  # fmt: skip
    strides = strides_of(problem.w_shape, result_layout)
    sums = cut.slabs * _consumers(problem, config) * 4 * problem.r * _pairs(problem) * config.n_tiles  # of a lane
    sum_parts = PositionalLaunch(
        sum_source(problem, config), device, sums, 32 * _PART_WARPS, 0, _SUM_FORMAT,
        (*strides, problem.groups, cut.slabs, parts),
    )  # fmt: skip
    return summed_call(launch, sum_parts, parts * sums * 32, problem.w_shape, strides)
