"""Host half of families/grouped_sm90/conv.cu: fprop and dgrad of grouped channels_last layers, marching down rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from haloconv.env import DeviceFacts, device_facts
from haloconv.families.base import BoundCall
from haloconv.families.common import ELEMENTS, dense_call
from haloconv.families.grouped_sm90 import slab as group_march
from haloconv.families.grouped_sm90.slab import Cut
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import PositionalLaunch
from haloconv.layout import strides_of
from haloconv.problem import Problem, TensorForm

_PARAMS_FORMAT = "4Q6q11i"
_X_POINTER, _Y_POINTER = 0, 3
_Y_BUFFERS = 2
_OTHER_WARPS = 2  # one asks for x, one sends y
_REGISTERS_BESIDE = 26  # of a thread, beside its filter, sums and fragments


@dataclass(frozen=True)
class Config:
    """Rows of a stage, fragments of a warp, warps beside each other, ring of stages, blocks of a multiprocessor."""

    rows: int
    m_tiles: int
    n_tiles: int
    warps_m: int
    stages: int
    min_blocks: int


def why_not(problem: Problem, x: TensorForm, result_layout: str, facts: DeviceFacts) -> str | None:
    """None if the kernel takes the problem with ``x`` (dy in dgrad) on the device, else why not."""
    reason = group_march.why_not(problem, (x,), result_layout, facts)
    if reason is None and not configs(problem, facts.max_smem_bytes):
        reason = "the filter does not fit registers, or a stage shared memory"
    return reason


def configs(problem: Problem, max_smem_bytes: int) -> list[Config]:
    """The configs that fit registers and shared memory, best first by a sweep on an NVIDIA H200 (2026-11-22)."""
    cols = problem.q if problem.direction == "fprop" else problem.w
    single = problem.dtype == torch.float32
    wide = cols > 16
    warp = (1, 2 if wide else 1) if single else (2 if wide else 1, 1)  # fragments, warps beside each other
    found = (_config(problem, max_smem_bytes, rows, *warp, blocks) for rows, blocks in ((2, 2), (2, 1), (1, 1)))
    return list(dict.fromkeys(each for each in found if each is not None))


def _config(problem: Problem, max_smem_bytes: int, rows: int, m_tiles: int, warps_m: int, blocks: int) -> Config | None:
    """With as many stages as fit; None if the registers or the memory for ``blocks`` blocks do not suffice."""
    cut = Cut(problem, rows, 16 * m_tiles * warps_m)
    atoms = problem.s * group_march.atoms(problem)
    registers = problem.r * atoms + 4 * problem.r * m_tiles + 2 * rows * atoms * m_tiles + _REGISTERS_BESIDE
    if registers > group_march.registers(_warps(problem, Config(rows, m_tiles, 1, warps_m, 0, blocks)), blocks):
        return None
    y_bytes = _Y_BUFFERS * (cut.box_bytes(cut.strip_cols) + 16)
    stages = group_march.stages(max_smem_bytes, blocks, cut.box_bytes(cut.x_cols), y_bytes)
    return Config(rows, m_tiles, 1, warps_m, stages, blocks) if stages > 1 else None


def _warps(problem: Problem, config: Config) -> int:
    """Of a block."""
    groups = group_march.Cut(problem, config.rows, 16).slab_groups
    return groups * group_march.group_tiles(problem) // config.n_tiles * config.warps_m + _OTHER_WARPS


def source(problem: Problem, config: Config) -> KernelSource:
    """The text of the kernel: extents of images are run-time values."""
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[problem.dtype],
        "R": problem.r,
        "S": problem.s,
        "ATOMS": group_march.atoms(problem),
        "ROWS": config.rows,
        "M_TILES": config.m_tiles,
        "N_TILES": config.n_tiles,
        "WARPS_M": config.warps_m,
        "MIN_BLOCKS": config.min_blocks,
        "HAS_BIAS": int(problem.bias),
    }
    return kernel_source("grouped_sm90/conv", "halo_sm80_march", constants)


def bind(
    problem: Problem, x: TensorForm, w: TensorForm, result_layout: str, device: torch.device, config: Config
) -> BoundCall:
    """fprop(x, w, b) -> y or dgrad(dy, w) -> dx."""
    facts = device_facts(device.index)
    forward = problem.direction == "fprop"
    x_shape, y_shape = (problem.x_shape, problem.y_shape) if forward else (problem.y_shape, problem.x_shape)
    y_strides = strides_of(y_shape, result_layout)
    cut = Cut(problem, config.rows, 16 * config.m_tiles * config.warps_m)
    parts = cut.parts(facts.sm_count * config.min_blocks)
    top, left = problem.padding[0], problem.padding[2]
    if not forward:
        top, left = problem.r - 1 - top, problem.s - 1 - left
    lead = -(problem.r - 1) % config.rows
    fields = (*_filter_fields(problem, w), *cut.fields(parts, top + lead, left, config.stages))
    maps = (
        cut.boxes(x_shape, x.strides, cut.x_cols, _X_POINTER, False),
        cut.boxes(y_shape, y_strides, cut.strip_cols, _Y_POINTER, True),
    )
    smem_bytes = group_march.smem_bytes(
        config.stages, cut.box_bytes(cut.x_cols), _Y_BUFFERS, cut.box_bytes(cut.strip_cols)
    )
    text, grid = source(problem, config), cut.slabs * parts
    launch = PositionalLaunch(
        text, device, grid, 32 * _warps(problem, config), smem_bytes, _PARAMS_FORMAT, fields, maps
    )
    return dense_call(launch, problem, y_shape, y_strides)


def _filter_fields(problem: Problem, w: TensorForm) -> tuple[int, ...]:
    """The first tap's place, and the strides of Params in halo_sm80_march.cu; dgrad turns the filter round."""
    w_k, w_c, w_r, w_s = w.strides
    w_group = problem.k_per_group * w_k
    if problem.direction == "fprop":
        return (0, w_group, w_k, w_c, w_r, w_s)
    return ((problem.r - 1) * w_r + (problem.s - 1) * w_s, w_group, w_c, w_k, -w_r, -w_s)
