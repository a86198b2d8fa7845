"""Host half of families/halo_sm90/wgrad.cu: the weight gradient of layers without stride on Hopper's tensor cores.

fp32 tensors are multiplied in TF32, fp16 and bf16 in their own type; sums are fp32, in an order that the problem and
the number of multiprocessors fix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from haloconv.families.base import MOST_CONFIGS, BoundCall, Config, config_key
from haloconv.families.common import ELEMENTS, ceil_div, few_apart, named, summed_call
from haloconv.families.halo_sm90.wgrad_tile import Operand, Stage, Tile, stage_of, tiles
from haloconv.families.reduce.sums import bind_sum
from haloconv.jit import BoxMap, DataType, KernelSource, Swizzle, kernel_source
from haloconv.jit.launch import Launch, LaunchShape
from haloconv.problem import Problem, Request

KERNEL = "halo_sm90/wgrad"
_LEAST_CHANNELS = 8  # and filters, of a group: of fewer most of a product would be zeros
_MOST_PARTIAL_BYTES = 64 << 20
_MOST_WAVES = 4
_X_POINTER, _Y_POINTER = 0, 1  # of a launch
_LINE_CYCLES = 120  # between the products of two lines, by a fit to an NVIDIA H200's times
_BLOCK_CYCLES = 6000  # the first lines and the sums of a block, by the same fit
_MAP_TYPES = {  # fp32 is rounded on its way into shared memory
    torch.float32: DataType.TFLOAT32,
    torch.float16: DataType.FLOAT16,
    torch.bfloat16: DataType.BFLOAT16,
}
_SWIZZLES = {16: Swizzle.NONE, 32: Swizzle.B32, 64: Swizzle.B64, 128: Swizzle.B128}


class Cut(NamedTuple):
    """How the lines of x are dealt out: strips of columns, lines of each class of rows, blocks of each tile."""

    column_strips: int
    bands: int
    parts: int


def refusal(problem: Problem) -> str | None:
    """None if the kernel takes the problem on a Hopper GPU, else a sentence that says why not."""
    if problem.stride != (1, 1):
        return "the layer is strided"
    if min(problem.c_per_group, problem.k_per_group) < _LEAST_CHANNELS:
        return f"a group has fewer than {_LEAST_CHANNELS} channels or filters"
    return None


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, else a sentence that says why not."""
    reason = refusal(request.problem)
    return reason if reason or configs(request) else "no line of x with its halo fits shared memory"


def configs(request: Request) -> list[Config]:
    """The best tiles by a cost model, best first; none if the kernel does not take the request."""
    problem, facts = request.problem, request.facts
    if refusal(problem) is not None:
        return []
    x, dy = (
        Operand.of(problem, form, shape, channels)
        for form, shape, channels in (
            (request.second, problem.x_shape, problem.c_per_group),
            (request.first, problem.y_shape, problem.k_per_group),
        )
    )
    found = []
    for tile in tiles(problem):
        stage = stage_of(problem, tile, x, dy, facts.max_smem_bytes)
        if stage is not None:
            cut, cycles = _cut(problem, tile, stage, facts.sm_count)
            found.append((cycles, tile, stage, cut))
    found.sort(key=lambda each: each[0])
    best = few_apart(found, lambda each: (each[1].rows, each[1].filters, each[1].split), MOST_CONFIGS)
    return [Config(KERNEL, config_key(tile), (tile, stage, cut)) for _, tile, stage, cut in best]


def _cut(problem: Problem, tile: Tile, stage: Stage, sm_count: int) -> tuple[Cut, float]:
    """The parts of a tile that take least time by the model, and that time in cycles of a multiprocessor."""
    dil = problem.dilation[0]
    rows = min(problem.h, problem.p + (problem.r - 1) * dil - problem.padding[0])  # those below meet no output
    bands, strips = ceil_div(rows, dil), ceil_div(problem.q, stage.strip)
    lines, blocks = problem.n * min(dil, rows) * strips * bands, tile.blocks(problem)
    steps = ceil_div(problem.q, stage.depth) / strips
    line_cycles = steps * tile.step_cycles(stage.fragment_cycles) + _LINE_CYCLES
    elems = problem.k * problem.c_per_group * problem.r * problem.s
    most = max(1, min(lines, _MOST_WAVES * sm_count // blocks, _MOST_PARTIAL_BYTES // (4 * elems)))

    def cycles(parts: int) -> float:
        of_block = (ceil_div(lines, parts) + tile.rows - 1) * line_cycles + _BLOCK_CYCLES
        return ceil_div(blocks * parts, sm_count) * of_block + parts * elems / sm_count / 8

    best = min(range(1, most + 1), key=cycles)
    return Cut(strips, bands, best), cycles(best)


def source(problem: Problem, tile: Tile, stage: Stage) -> KernelSource:
    """The specialised source: of the layer's own extents none takes part but through the tile."""
    constants = {
        "ELEM": ELEMENTS[problem.dtype],
        "ROWS": tile.rows,
        "CHANNELS": tile.channels,
        "FILTERS": tile.filters,
        "COLUMN_GROUPS": tile.column_groups,
        "SPLIT_S": tile.split[0],
        "SPLIT_C": tile.split[1],
        "SPLIT_K": tile.split[2],
        "STRIP": stage.strip,
        "X_PITCH": stage.x_pitch,
        "X_STAGES": stage.x_stages,
        "Y_STAGES": stage.y_stages,
        "X_INNER": int(stage.x.inner),
        "Y_INNER": int(stage.dy.inner),
        "X_LOADS": stage.x.loads,
        "Y_LOADS": stage.dy.loads,
    }
    return kernel_source(KERNEL, "halo_sm90_wgrad", constants)


def bind(request: Request, config: Config) -> BoundCall:
    """wgrad(dy, x) -> dw."""
    problem, (tile, stage, cut) = request.problem, config.derived
    maps = {"x_map": _x_map(request, tile, stage), "y_map": _y_map(request, tile, stage)}
    shape = LaunchShape(tile.blocks(problem) * cut.parts, tile.threads, stage.smem_bytes)
    launch = Launch(
        source(problem, tile, stage),
        request.device,
        shape,
        _fields(request, tile, cut),
        {name: each for name, each in maps.items() if each is not None},
    )
    k, c, r, s = problem.w_shape
    w_k, w_c, w_r, w_s = request.result_strides
    sums = (problem.groups, r * s, c, problem.k_per_group)
    sum_parts = bind_sum(
        problem.dtype, sums, (problem.k_per_group * w_k, w_s if s > 1 else w_r, w_c, w_k), cut.parts, request.device
    )
    return summed_call(launch, sum_parts, cut.parts * k * c * r * s, problem.w_shape, request.result_strides)


def _fields(request: Request, tile: Tile, cut: Cut) -> dict[str, object]:
    problem = request.problem
    rows_of_lines = min(problem.dilation[0], problem.h)
    strips = cut.column_strips * rows_of_lines
    share, longer = divmod(problem.n * strips * cut.bands, cut.parts)
    of_k, of_c, of_r, of_s = tile.blocks_of(problem)
    return {
        **named("x", "nchw", request.second.strides),
        **named("y", "nkpq", request.first.strides),
        **{"h": problem.h, "w": problem.w, "rows": problem.p, "cols": problem.q},
        **{"channels": problem.c_per_group, "filters": problem.k_per_group},
        **{"taps_r": problem.r, "taps_s": problem.s, "dil_h": problem.dilation[0], "dil_w": problem.dilation[1]},
        **{"pad_top": problem.padding[0], "pad_left": problem.padding[2], "groups": problem.groups},
        **{"c_blocks": of_c, "k_blocks": of_k, "r_blocks": of_r, "s_blocks": of_s},
        "column_strips": cut.column_strips,
        "cut": {
            "slabs": tile.blocks(problem),
            "strips": strips,
            "bands": cut.bands,
            "share": share,
            "longer": longer,
        },
    }


def _x_map(request: Request, tile: Tile, stage: Stage) -> BoxMap | None:
    problem, one = request.problem, stage.x
    if one.loads:
        return None
    size = problem.dtype.itemsize
    n, c, h, w = problem.x_shape
    x_n, x_c, x_h, x_w = (step * size for step in one.steps)
    kind, channels = _MAP_TYPES[problem.dtype], tile.split[1] * tile.channels
    if one.inner:
        span = min(tile.channels, 128 // size)
        extents, strides, box = (c, w, h, n), (x_w, x_h, x_n), (span, stage.x_pitch, 1, 1)
        return BoxMap(kind, extents, strides, box, _SWIZZLES[span * size], _X_POINTER)
    extents, strides, box = (w, h, c, n), (x_h, x_c, x_n), (stage.x_pitch, 1, channels, 1)
    return BoxMap(kind, extents, strides, box, Swizzle.NONE, _X_POINTER)


def _y_map(request: Request, tile: Tile, stage: Stage) -> BoxMap | None:
    problem, one = request.problem, stage.dy
    if one.loads:
        return None
    size = problem.dtype.itemsize
    n, k, p, q = problem.y_shape
    y_n, y_k, y_p, y_q = (step * size for step in one.steps)
    kind = _MAP_TYPES[problem.dtype]
    if one.inner:
        span = min(tile.filters, 128 // size)
        extents, strides, box = (k, q, p, n), (y_q, y_p, y_n), (span, stage.strip, 1, 1)
        return BoxMap(kind, extents, strides, box, _SWIZZLES[span * size], _Y_POINTER)
    extents, strides, box = (q, p, k, n), (y_p, y_k, y_n), (128 // size, 1, tile.split[2] * tile.filters, 1)
    return BoxMap(kind, extents, strides, box, Swizzle.B128, _Y_POINTER)
