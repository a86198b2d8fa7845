"""Host half of halo_sm80_f64/conv.cu: fprop and dgrad in double precision on tensor cores.

A small kernel (halo_sm80_f64/pack.cu) packs the filter at every call.
"""

from __future__ import annotations

from math import gcd

import torch

from haloconv.families.base import BoundCall, Config
from haloconv.families.common import ceil_div, dense_call, divisor, extents_fields, few_apart, named, why_not_direction
from haloconv.families.halo_sm80_f64.tile import OCTET, Layer, Tiling, copy_elems, fits, tilings
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape, Value
from haloconv.problem import Problem, Request

KERNEL = "halo_sm80_f64/conv"
_PACK_THREADS = 256


def why_not(request: Request) -> str | None:
    """None if some tile takes the request, else a sentence that says why not."""
    problem = request.problem
    reason = why_not_direction(problem, "fprop", "dgrad")
    if reason is not None:
        return reason
    if problem.groups > 1 and min(problem.c_per_group, problem.k_per_group) < OCTET:
        return "halo_sm80_f64 takes groups of at least 8 channels and 8 filters"
    if not fits(layer_of(problem), request.facts.max_smem_bytes):
        return "no tile of halo_sm80_f64 fits shared memory"
    return None


def configs(request: Request) -> list[Config]:
    """The best tiling of each number of filters and each warp tile."""
    facts = request.facts
    ranked = tilings(layer_of(request.problem), facts.sm_count, facts.max_smem_bytes)
    found = few_apart(ranked, lambda each: (each.shape.filters, each.shape.m_tiles))
    return [Config(KERNEL, str(each), each) for each in found]


def layer_of(problem: Problem) -> Layer:
    """The layer of a problem, the same however its tensors are stored."""
    if problem.direction == "fprop":
        return Layer(
            n=problem.n, channels=problem.c_per_group, filters=problem.k_per_group, groups=problem.groups, classes=1,
            rows=problem.p, cols=problem.q, move_h=problem.stride[0], move_w=problem.stride[1],
            reach_h=(problem.r - 1) * problem.dilation[0], reach_w=(problem.s - 1) * problem.dilation[1],
            most_taps=problem.r * problem.s, fewest_taps=problem.r * problem.s,
        )  # fmt: skip
    (most_r, fewest_r, reach_h), (most_s, fewest_s, reach_w) = (
        _class_taps(taps, stride, dil)
        for taps, stride, dil in zip((problem.r, problem.s), problem.stride, problem.dilation, strict=True)
    )
    return Layer(
        n=problem.n, channels=problem.k_per_group, filters=problem.c_per_group, groups=problem.groups,
        classes=min(problem.stride[0], problem.h) * min(problem.stride[1], problem.w),
        rows=ceil_div(problem.h, problem.stride[0]), cols=ceil_div(problem.w, problem.stride[1]), move_h=1, move_w=1,
        reach_h=reach_h, reach_w=reach_w, most_taps=most_r * most_s, fewest_taps=fewest_r * fewest_s,
    )  # fmt: skip


def _class_taps(taps: int, stride: int, dil: int) -> tuple[int, int, int]:
    """How many taps reach one residue of dgrad, at most and at least (1 if none); how far apart their pixels are."""
    step = stride // gcd(stride, dil)
    most = ceil_div(taps, step)
    return most, max(1, taps // step), (most - 1) * (step * dil // stride)


def bind(request: Request, config: Config) -> BoundCall:
    """fprop(x, w, b) -> y or dgrad(dy, w) -> dx."""
    problem, device, tiling = request.problem, request.device, config.derived
    shape = LaunchShape(tiling.blocks, tiling.shape.threads, tiling.smem_bytes)
    launch = Launch(source(request, tiling), device, shape, _fields(request, tiling))
    pairs = _pairs(tiling)
    pack_shape = LaunchShape(ceil_div(pairs, _PACK_THREADS), _PACK_THREADS)
    pack = Launch(pack_source(problem, tiling), device, pack_shape, _pack_fields(request, tiling))

    def run(x: int, w: int, bias: int, y: int) -> None:
        packed = torch.empty(2 * pairs, dtype=torch.float64, device=device)
        pack(w, packed.data_ptr())
        launch(x, packed.data_ptr(), y, bias)

    return dense_call(run, problem, request.result_shape, request.result_strides)


def _pairs(tiling: Tiling) -> int:
    """Pairs of channels in the packed filter."""
    layer = tiling.layer
    steps = layer.classes * layer.groups * tiling.filter_tiles * tiling.chunks * layer.most_taps
    return steps * tiling.shape.weight_bytes // 16


def pack_source(problem: Problem, tiling: Tiling) -> KernelSource:
    """The specialised source of the packing kernel."""
    constants = {"DGRAD": int(problem.direction == "dgrad"), "OCTETS": tiling.shape.octets}
    return kernel_source("halo_sm80_f64/pack", "halo_sm80_f64_pack", constants)


def source(request: Request, tiling: Tiling) -> KernelSource:
    """The specialised source: extents of images and filters are run-time values."""
    problem, shape = request.problem, tiling.shape
    copy = copy_elems(request.first, tiling.layer.channels)
    constants: dict[str, int | str] = {
        "DGRAD": int(problem.direction == "dgrad"),
        "X_COPY": copy,
        "M_TILES": shape.m_tiles,
        "N_TILES": shape.n_tiles,
        "WARPS_M": shape.warps_m,
        "WARPS_N": shape.warps_n,
        "OCTETS": shape.octets,
        "MMA_K": shape.mma_k,
        "STAGES": shape.stages,
        "MIN_BLOCKS": shape.min_blocks,
        "HAS_BIAS": int(problem.bias),
    }
    return kernel_source(KERNEL, "halo_sm80_f64", constants)


def _shared_fields(request: Request, tiling: Tiling) -> dict[str, Value]:
    """The scalars that the structs of both kernels have."""
    layer = tiling.layer
    return {
        "extents": extents_fields(request),
        **{"channels": layer.channels, "filters": layer.filters, "groups": layer.groups},
        **{"filter_tiles": tiling.filter_tiles, "chunks": tiling.chunks, "most_taps": layer.most_taps},
    }


def _pack_fields(request: Request, tiling: Tiling) -> dict[str, Value]:
    """The scalars of ``Params`` in halo_sm80_f64/pack.cu."""
    problem = request.problem
    w_k, w_c, w_r, w_s = request.second.strides
    w_filter, w_channel = (w_k, w_c) if problem.direction == "fprop" else (w_c, w_k)
    return {
        **_shared_fields(request, tiling),
        **{"w_group": problem.k_per_group * w_k, "w_filter": w_filter, "w_channel": w_channel, "w_r": w_r, "w_s": w_s},
        **{"total": _pairs(tiling), "tile_eights": tiling.shape.filters // 8},
    }


def _fields(request: Request, tiling: Tiling) -> dict[str, Value]:
    """The scalars of ``Params`` in halo_sm80_f64/stage.cuh."""
    problem, layer = request.problem, tiling.layer
    height, width = (problem.h, problem.w) if problem.direction == "fprop" else (problem.p, problem.q)
    return {
        **named("x", "nchw", request.first.strides),
        **named("y", "nkhw", request.result_strides),
        **_shared_fields(request, tiling),
        **{"pixels": tiling.pixels, "n": problem.n, "h": height, "width": width},
        **{"tiles": tiling.tiles, "strips": tiling.strips, "rows": layer.rows, "strip_cols": tiling.strip_cols},
        **{"staged_cols": divisor(tiling.staged_cols), "reach_rows": layer.reach_h + 1},
        "image_rows": divisor((layer.rows - 1) * layer.move_h + layer.reach_h + 1),
        **{"octet_bytes": tiling.octet_bytes, "x_bytes": tiling.x_bytes, "x_buffers": tiling.x_buffers},
    }
