"""Host half of grouped_sm90/wgrad.cu: weight gradients of grouped channels_last layers in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass

from haloconv.families.base import BoundCall, Config, config_key
from haloconv.families.common import ELEMENTS, ceil_div, why_not_direction
from haloconv.families.grouped_sm90 import slab
from haloconv.families.grouped_sm90.slab import Cut
from haloconv.families.reduce.partials import Axis, Partials, wgrad_call
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape, Value
from haloconv.problem import Problem, Request

KERNEL = "grouped_sm90/wgrad"
_X_POINTER, _Y_POINTER = 0, 1
_REGISTERS_BESIDE = 52  # of a thread, beside its sums and fragments


@dataclass(frozen=True)
class Tiling:
    """Rows of a stage, steps of 16 columns and eights of filters of a warp, stages, blocks of a multiprocessor."""

    rows: int
    k_steps: int
    n_tiles: int
    stages: int
    min_blocks: int


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, else a sentence that says why not."""
    reason = why_not_direction(request.problem, "wgrad")
    if reason is None and request.problem.dtype.itemsize != 2:
        reason = "ldmatrix does not transpose fp32"
    reason = reason or slab.why_no_slab(request, request.first, request.second)
    if reason is None and best_tiling(request.problem, request.facts.max_smem_bytes) is None:
        reason = "the sums do not fit registers, or a stage shared memory"
    return reason


def configs(request: Request) -> list[Config]:
    """The one of a request that the kernel takes."""
    if why_not(request) is not None:
        return []
    tiling = best_tiling(request.problem, request.facts.max_smem_bytes)
    return [Config(KERNEL, config_key(tiling), tiling)]


def best_tiling(problem: Problem, max_smem_bytes: int) -> Tiling | None:
    """The one that is fastest by a sweep on an NVIDIA H200 (2026-11-22); None where it does not fit."""
    rows, k_steps, n_tiles, blocks = 2, 2 if problem.q > 16 else 1, 1, 1
    cut = Cut(problem, rows, 16 * k_steps)
    pairs = _pairs(problem)
    registers = 4 * problem.r * pairs + 2 * problem.r * k_steps + 4 * k_steps * pairs + _REGISTERS_BESIDE
    if registers > slab.registers(_warps(problem, Tiling(rows, k_steps, n_tiles, 0, blocks)), blocks):
        return None
    stages = slab.stages(max_smem_bytes, blocks, cut.box_bytes(cut.x_cols + cut.strip_cols), 0)
    return Tiling(rows, k_steps, n_tiles, stages, blocks) if stages > 1 else None


def _pairs(problem: Problem) -> int:
    """Products that a step of a row takes for each vertical tap: of two atoms each."""
    return ceil_div(problem.s * slab.atoms(problem), 2)


def _consumers(problem: Problem, tiling: Tiling) -> int:
    """Warps of a block that multiply."""
    return Cut(problem, tiling.rows, 16).slab_groups * slab.group_tiles(problem) // tiling.n_tiles


def _warps(problem: Problem, tiling: Tiling) -> int:
    """Warps of a block: those that multiply, and one that asks for rows."""
    return _consumers(problem, tiling) + 1


def source(problem: Problem, tiling: Tiling) -> KernelSource:
    """The specialised source: extents of images are run-time values."""
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[problem.dtype],
        "R": problem.r,
        "S": problem.s,
        "ATOMS": slab.atoms(problem),
        "N_TILES": tiling.n_tiles,
        "ROWS": tiling.rows,
        "K_STEPS": tiling.k_steps,
        "MIN_BLOCKS": tiling.min_blocks,
    }
    return kernel_source("grouped_sm90/wgrad", "grouped_sm90_wgrad", constants)


def _partials(problem: Problem, strides: tuple[int, ...], cut: Cut, parts: int) -> Partials:
    """The partial sums as warps leave them: [part][slab][warp][sum of a lane][lane].

    The sums of a lane are [row][atom of a row][filter of two], those of an odd last atom are padding; its eights of
    channels and filters are those of ``mma``. A warp has eight filters.
    """
    (w_k, w_c, w_r, w_s), atoms, pairs = strides, slab.atoms(problem), _pairs(problem)
    axes = (
        Axis(problem.groups * atoms, 8 * w_k),
        Axis(problem.r, w_r),
        Axis(2 * pairs // atoms, w_s, counts=1),
        Axis(atoms, 8 * w_c),
        Axis(2, w_k),
        Axis(8, w_c),
        Axis(4, 2 * w_k),
    )
    part_elems = cut.slabs * cut.slab_groups * atoms * problem.r * pairs * 4 * 32
    return Partials(problem.dtype, axes, parts, part_elems, limit=problem.s)


def bind(request: Request, config: Config) -> BoundCall:
    """wgrad(dy, x) -> dw."""
    problem, tiling = request.problem, config.derived
    cut = Cut(problem, tiling.rows, 16 * tiling.k_steps)
    parts = cut.parts(request.facts.sm_count * tiling.min_blocks)
    stage_bytes = cut.box_bytes(cut.x_cols + cut.strip_cols)
    maps = {
        "x_map": cut.boxes(problem.x_shape, request.second.strides, cut.x_cols, _X_POINTER),
        "y_map": cut.boxes(problem.y_shape, request.first.strides, cut.strip_cols, _Y_POINTER),
    }
    fields: dict[str, Value] = {
        "cut": cut.fields(parts, problem.padding[0], problem.padding[2], tiling.stages),
        **{"rows": problem.p, "cols": problem.q},
    }
    smem_bytes = slab.smem_bytes(tiling.stages, stage_bytes, 0, 0)
    shape = LaunchShape(cut.slabs * parts, 32 * _warps(problem, tiling), smem_bytes)
    launch = Launch(source(problem, tiling), request.device, shape, fields, maps)
    return wgrad_call(launch, request, _partials(problem, request.result_strides, cut, parts))
