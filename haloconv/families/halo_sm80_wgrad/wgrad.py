"""Host half of halo_sm80_wgrad/wgrad.cu: partial sums of the weight gradient on tensor cores, which are then added."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from haloconv.families.base import BoundCall, Config, config_key
from haloconv.families.common import ELEMENTS, ceil_div, few_apart, named, why_not_direction
from haloconv.families.halo_sm80.fold import fold, folded, has_folds
from haloconv.families.halo_sm80_wgrad.blocks import Block, pitches, ranked_blocks, smem_bytes
from haloconv.families.halo_sm80_wgrad.layer import Layer, layer_of
from haloconv.families.reduce.partials import Axis, Partials, bind_sum, of_filter, wgrad_call
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape, Value
from haloconv.problem import Problem, Request

KERNEL = "halo_sm80_wgrad/wgrad"
_MOST_WAVES = 4
_BUSY = 0.95  # of the blocks that run at a time: what the last wave may leave
_PARTS_AT_ONCE = 40  # more are summed in runs
_INT_LIMIT = 1 << 31


class _Derived(NamedTuple):
    """The request as the kernel sees it, folded or not; its layer and the block that runs it."""

    request: Request
    layer: Layer
    block: Block


def why_not(request: Request) -> str | None:
    """None if some block takes the request, else a sentence that says why not."""
    reason = why_not_direction(request.problem, "wgrad")
    return reason or (None if ranked(request)[1] else "no tile of halo_sm80_wgrad fits shared memory and registers")


def configs(request: Request) -> list[Config]:
    """The best block of each split among warps."""
    request = _folded(request)
    layer, blocks = ranked(request)
    found = few_apart(blocks, lambda each: (each.warps_m, each.warps_n, each.warps_e, each.tile_g))
    return [Config(KERNEL, config_key(each), _Derived(request, layer, each)) for each in found]


def ranked(request: Request) -> tuple[Layer, list[Block]]:
    """The layer and its blocks, best first.

    Raw copies if a block fits (they need two buffers), else words built from vector loads, else from single elements,
    which takes tensors of any form.
    """
    problem, dy, x = request.problem, request.first, request.second
    single = layer_of(problem, dy._replace(aligned=False), x._replace(aligned=False))
    layers = (layer_of(problem, dy, x), layer_of(problem, dy, x, copied=False), single)
    found = ((layer, ranked_blocks(problem, layer, request.facts.max_smem_bytes)) for layer in layers)
    return next((each for each in found if each[1]), (layers[-1], []))


def _folded(request: Request) -> Request:
    """A channels_last stem as one of a single channel, if that has tiles."""
    if request.result_layout != "nhwc" or not has_folds(request.problem, request.second):
        return request
    one = replace(request, problem=fold(request.problem), second=folded(request.second))
    return one if ranked(one)[1] else request


def bind(request: Request, config: Config) -> BoundCall:
    """wgrad(dy, x) -> dw."""
    derived: _Derived = config.derived
    one, layer, block = derived
    cut = Cut(one.problem, layer, block, request.facts.sm_count)
    shape = LaunchShape(cut.grid, 32 * block.warps, smem_bytes(block, layer))
    launch = Launch(source(one, layer, block), request.device, shape, cut.fields(one))
    return wgrad_call(launch, request, of_filter(one, cut.parts), _bind_sums(one, cut))


def _bind_sums(request: Request, cut: Cut) -> Callable[[int, int, int], None]:
    """``run(dw_pointer, partials_pointer, no_bias)``: adds the parts, many of them in runs, one after the other."""
    runs, device = of_filter(request, cut.runs), request.device
    sum_runs = bind_sum(runs, device)
    if cut.run_parts == 1:
        return sum_runs
    places = Axis(runs.total_elems, 1)  # of the parts at runs * i + j the sum goes to place j
    sum_parts = bind_sum(Partials(torch.float32, (places,), cut.run_parts), device)

    def sum_all(dw: int, partials: int, no_bias: int) -> None:
        sums = torch.empty(runs.total_elems, dtype=torch.float32, device=device)
        sum_parts(sums.data_ptr(), partials, no_bias)
        sum_runs(dw, sums.data_ptr(), no_bias)

    return sum_all


class Cut:
    """How a problem's sum is cut: stages of an image across and down, and parts of all stages, one for each block.

    Many parts are ``runs`` of ``run_parts``, which are summed first: one after the other would take long.
    """

    def __init__(self, problem: Problem, layer: Layer, block: Block, sm_count: int) -> None:
        self.layer = layer
        self.image_step = layer.halves if problem.n > 1 else 1
        self.row_tile_step = layer.halves // self.image_step
        self.strips = ceil_div(problem.q, block.tile_q)
        self.row_tiles = ceil_div(ceil_div(problem.p, block.tile_p), self.row_tile_step)
        self.stages = ceil_div(problem.n, self.image_step) * self.strips * self.row_tiles
        self.group_blocks = ceil_div(problem.groups, block.tile_g)
        c_blocks, k_blocks = ceil_div(layer.c, block.tile_c), ceil_div(layer.k, block.tile_k)
        blocks = self.group_blocks * c_blocks * k_blocks
        self.runs, self.run_parts = _runs(blocks, self.stages, sm_count * block.min_blocks)
        self.parts = self.runs * self.run_parts
        self.grid = blocks * self.parts

    def fields(self, request: Request) -> dict[str, Value]:
        """The scalars of ``Params`` in halo_sm80_wgrad/work.cuh."""
        one, reading = request.problem, self.layer.x
        return {
            **named("x", "nchw", request.second.strides),
            **named("y", "nkpq", request.first.strides),
            **{"stages": self.stages, "n": one.n, "h": one.h, "w": one.w, "p": one.p, "q": one.q},
            **{"pad_top": one.padding[0], "pad_left": one.padding[2]},
            "lead": 0 if reading.inner else -one.padding[2] % reading.vec,
            **{"groups": one.groups, "group_blocks": self.group_blocks, "parts": self.parts},
            **{"strips": self.strips, "row_tiles": self.row_tiles},
            **{"image_step": self.image_step, "row_tile_step": self.row_tile_step},
        }


def _runs(blocks: int, stages: int, resident: int) -> tuple[int, int]:
    """Runs and parts of a run that keep the device busy: ``blocks`` of each part, ``resident`` at a time.

    Of those that do, the fewest; else those that keep it busiest.
    """
    most = max(1, min(stages, _MOST_WAVES * resident // blocks))

    def busy(parts: int) -> float:
        return blocks * parts / (ceil_div(blocks * parts, resident) * resident)

    best = (1, 1)
    for parts in range(1, most + 1):
        run_parts = 1 if parts <= _PARTS_AT_ONCE else math.isqrt(parts)
        runs = parts // run_parts
        if busy(runs * run_parts) > busy(best[0] * best[1]):
            best = (runs, run_parts)
        if busy(runs * run_parts) >= _BUSY:
            break
    return best


def source(request: Request, layer: Layer, block: Block) -> KernelSource:
    """The specialised source. The image takes part through the columns of a tile alone."""
    at = pitches(block, layer)
    constants: dict[str, int | str] = {
        "ELEM": ELEMENTS[request.problem.dtype],
        "C_PER_GROUP": layer.c,
        "K_PER_GROUP": layer.k,
        "R": layer.r,
        "S": layer.s,
        "STRIDE_H": layer.stride[0],
        "STRIDE_W": layer.stride[1],
        "DIL_H": layer.dilation[0],
        "DIL_W": layer.dilation[1],
        "TILE_P": block.tile_p,
        "TILE_Q": block.tile_q,
        "TILE_C": block.tile_c,
        "TILE_K": block.tile_k,
        "TILE_G": block.tile_g,
        "WARPS_M": block.warps_m,
        "WARPS_N": block.warps_n,
        "WARPS_E": block.warps_e,
        "MIN_BLOCKS": block.min_blocks,
        "STAGED": layer.staged,
        "FIRST_HALF": layer.first_half,
        "X_INNER": int(layer.x.inner),
        "X_VEC": layer.x.vec,
        "Y_INNER": int(layer.y.inner),
        "Y_VEC": layer.y.vec,
        "PLANE_PITCH": at.plane,
        "LINE_PITCH": at.line,
        "X_PITCH": at.x,
        "Y_PITCH": at.y,
        "OFFSET": "int" if _spans_int(request, layer, block) else "hc::i64",
        "SMEM_BYTES": smem_bytes(block, layer),
    }
    return kernel_source("halo_sm80_wgrad/wgrad", "halo_sm80_wgrad", constants)


def _spans_int(request: Request, layer: Layer, block: Block) -> bool:
    """Whether 32 bits hold every distance inside a tile of x and of dy, in elements."""
    at, dy, x = pitches(block, layer), request.first, request.second
    x_span = block.tile_g * block.tile_c * x.strides[1] + at.x * max(x.strides[2:])
    y_span = block.tile_g * block.tile_k * dy.strides[1] + at.y * max(dy.strides[2:])
    return max(x_span, y_span) < _INT_LIMIT
