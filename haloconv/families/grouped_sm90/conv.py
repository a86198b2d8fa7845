"""Host half of grouped_sm90/conv.cu: fprop and dgrad of grouped channels_last layers, marching down rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from haloconv.families.base import BoundCall, Config, config_key
from haloconv.families.common import ELEMENTS, dense_call, why_not_direction
from haloconv.families.grouped_sm90 import slab
from haloconv.families.grouped_sm90.slab import Cut
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape, Value
from haloconv.problem import Problem, Request, TensorForm

KERNEL = "grouped_sm90/conv"
_X_POINTER, _Y_POINTER = 0, 3
_Y_BUFFERS = 2
_OTHER_WARPS = 2  # one asks for x, one sends y
_REGISTERS_BESIDE = 26  # of a thread, beside its filter, sums and fragments


@dataclass(frozen=True)
class Tiling:
    """Rows of a stage, fragments of a warp, warps beside each other, ring of stages, blocks of a multiprocessor."""

    rows: int
    m_tiles: int
    n_tiles: int
    warps_m: int
    stages: int
    min_blocks: int

    @property
    def strip_cols(self) -> int:
        """Columns of a strip."""
        return 16 * self.m_tiles * self.warps_m


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, else a sentence that says why not."""
    reason = why_not_direction(request.problem, "fprop", "dgrad") or slab.why_no_slab(request, request.first)
    if reason is None and request.result_layout != "nhwc":
        reason = "the channels of the result are no neighbours"
    if reason is None and best_tiling(request.problem, request.facts.max_smem_bytes) is None:
        reason = "the filter does not fit registers, or a stage shared memory"
    return reason


def configs(request: Request) -> list[Config]:
    """The one of a request that the kernel takes."""
    if why_not(request) is not None:
        return []
    tiling = best_tiling(request.problem, request.facts.max_smem_bytes)
    return [Config(KERNEL, config_key(tiling), tiling)]


def best_tiling(problem: Problem, max_smem_bytes: int) -> Tiling | None:
    """The best by a sweep on an NVIDIA H200 (2026-11-22) that fits registers and shared memory; None if none does."""
    cols = problem.q if problem.direction == "fprop" else problem.w
    single = problem.dtype == torch.float32
    wide = cols > 16
    warp = (1, 2 if wide else 1) if single else (2 if wide else 1, 1)  # fragments, warps beside each other
    found = (_tiling(problem, max_smem_bytes, rows, *warp, blocks) for rows, blocks in ((2, 2), (2, 1), (1, 1)))
    return next((each for each in found if each is not None), None)


def _tiling(problem: Problem, max_smem_bytes: int, rows: int, m_tiles: int, warps_m: int, blocks: int) -> Tiling | None:
    """With as many stages as fit; None if the registers or the memory for ``blocks`` blocks do not suffice."""
    cut = Cut(problem, rows, 16 * m_tiles * warps_m)
    atoms = problem.s * slab.atoms(problem)
    registers = problem.r * atoms + 4 * problem.r * m_tiles + 2 * rows * atoms * m_tiles + _REGISTERS_BESIDE
    if registers > slab.registers(_warps(problem, Tiling(rows, m_tiles, 1, warps_m, 0, blocks)), blocks):
        return None
    y_bytes = _Y_BUFFERS * (cut.box_bytes(cut.strip_cols) + 16)
    stages = slab.stages(max_smem_bytes, blocks, cut.box_bytes(cut.x_cols), y_bytes)
    return Tiling(rows, m_tiles, 1, warps_m, stages, blocks) if stages > 1 else None


def _warps(problem: Problem, tiling: Tiling) -> int:
    """Warps of a block."""
    groups = Cut(problem, tiling.rows, 16).slab_groups
    return groups * slab.group_tiles(problem) // tiling.n_tiles * tiling.warps_m + _OTHER_WARPS


def source(problem: Problem, tiling: Tiling) -> KernelSource:
    """The specialised source: extents of images are run-time values."""
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[problem.dtype],
        "R": problem.r,
        "S": problem.s,
        "ATOMS": slab.atoms(problem),
        "ROWS": tiling.rows,
        "M_TILES": tiling.m_tiles,
        "N_TILES": tiling.n_tiles,
        "WARPS_M": tiling.warps_m,
        "MIN_BLOCKS": tiling.min_blocks,
        "HAS_BIAS": int(problem.bias),
    }
    return kernel_source("grouped_sm90/conv", "grouped_sm90_conv", constants)


def bind(request: Request, config: Config) -> BoundCall:
    """fprop(x, w, b) -> y or dgrad(dy, w) -> dx."""
    problem, tiling = request.problem, config.derived
    x_shape = problem.x_shape if problem.direction == "fprop" else problem.y_shape
    cut = Cut(problem, tiling.rows, tiling.strip_cols)
    parts = cut.parts(request.facts.sm_count * tiling.min_blocks)
    x_bytes, y_bytes = cut.box_bytes(cut.x_cols), cut.box_bytes(cut.strip_cols)
    maps = {
        "x_map": cut.boxes(x_shape, request.first.strides, cut.x_cols, _X_POINTER),
        "y_map": cut.boxes(request.result_shape, request.result_strides, cut.strip_cols, _Y_POINTER, stored=True),
    }
    shape = LaunchShape(
        cut.slabs * parts,
        32 * _warps(problem, tiling),
        slab.smem_bytes(tiling.stages, x_bytes, _Y_BUFFERS, y_bytes),
    )
    launch = Launch(source(problem, tiling), request.device, shape, _fields(request, tiling, cut, parts), maps)
    return dense_call(launch, problem, request.result_shape, request.result_strides)


def _fields(request: Request, tiling: Tiling, cut: Cut, parts: int) -> dict[str, Value]:
    """The scalars of ``Params`` in grouped_sm90/conv.cu."""
    problem = request.problem
    top, left = problem.padding[0], problem.padding[2]
    if problem.direction == "dgrad":
        top, left = problem.r - 1 - top, problem.s - 1 - left
    lead = -(problem.r - 1) % tiling.rows
    return {**_filter_fields(problem, request.second), "cut": cut.fields(parts, top + lead, left, tiling.stages)}


def _filter_fields(problem: Problem, w: TensorForm) -> dict[str, int]:
    """The first tap's place, and the strides of the filter; dgrad flips it."""
    w_k, w_c, w_r, w_s = w.strides
    group = problem.k_per_group * w_k
    if problem.direction == "fprop":
        first, strides = 0, (group, w_k, w_c, w_r, w_s)
    else:
        first, strides = (problem.r - 1) * w_r + (problem.s - 1) * w_s, (group, w_c, w_k, -w_r, -w_s)
    return dict(zip(("w_first", "w_group", "w_filter", "w_channel", "w_r", "w_s"), (first, *strides), strict=True))
