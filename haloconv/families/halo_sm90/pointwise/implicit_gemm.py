"""Host half of families/halo_sm90/pointwise/implicit_gemm.cu: fprop and dgrad in nhwc, one matrix product for each tap.

fp32 tensors are multiplied in TF32, fp16 and bf16 in their own type; sums are fp32. No pixel of x is staged for two
taps: so this is for layers whose taps are far apart, or whose images are small (docs/kernels/halo_sm90/pointwise.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod

from haloconv import support
from haloconv.families.base import MOST_CONFIGS, BoundCall, Config, config_key
from haloconv.families.common import few_apart
from haloconv.families.halo_sm90.conv.copy_of_dy import MOST_BYTES, copy_of, cycles_of
from haloconv.families.halo_sm90.pointwise.pointwise import bound, constants, pack_source
from haloconv.families.halo_sm90.pointwise.product import (
    ARCH,
    LEAST_CHANNELS,
    LONGEST_ROW,
    TMA_BYTES,
    Product,
    Side,
    Taps,
    dense,
    is_reached,
    joined,
    w_loads_of,
)
from haloconv.families.halo_sm90.pointwise.tile import Tile, shipped_tiles, tiles
from haloconv.jit import KernelSource, kernel_source
from haloconv.layout import strides_of
from haloconv.problem import Problem, Request

__all__ = ["DIRECTIONS", "KERNEL", "all_tiles", "bind", "configs", "sources", "why_not"]

KERNEL = "halo_sm90/implicit_gemm"
DIRECTIONS = ("fprop", "dgrad")
CORNER, MOST_STRIDE = 128, 8  # of im2col with four dimensions: corners from -CORNER to CORNER - 1


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, else a sentence that says why not."""
    problem = request.problem
    reason = support.why_no_tensor_cores(problem)
    if reason is not None:
        return reason
    if request.facts.arch != ARCH:
        return "the device is no Hopper GPU (compute capability 9.0)"
    if problem.r * problem.s == 1:
        return "the filter has one tap, which pointwise multiplies"
    if problem.direction == "dgrad" and problem.stride != (1, 1):
        return "the gradient has residue classes"
    if problem.groups > 1 or min(problem.c, problem.k) < LEAST_CHANNELS:
        return f"the layer has groups, or fewer than {LEAST_CHANNELS} channels or filters"
    one = product_of(request)
    if one.copied and prod(one.x[:3]) * one.channels * one.size > MOST_BYTES:
        return f"a copy of x, with channels as neighbours, has at most {MOST_BYTES} bytes"
    if one.by_lanes and (problem.epilogue.residual or not _has_dense_planes(request)):
        return "planes of the result are not dense, or there is a residual"
    aligned = one.copied or request.first.aligned
    if not (aligned and is_reached(one, one.x, True) and (one.by_lanes or is_reached(one, one.y, True))):
        return "pixels are not at multiples of 16 bytes"
    if one.pixels >= LONGEST_ROW or (one.y_inner and one.y.rows * one.y.images > 1):
        return f"pixels of the result do not follow one another, or are {LONGEST_ROW} or more"
    if not _in_reach(one):
        return "a tap, or the padding, is further from an output than im2col reaches"
    return None


def _has_dense_planes(request: Request) -> bool:
    """Whether a plane of the result is pixels that follow one another."""
    _, _, rows, cols = request.result_shape
    _, _, row, col = request.result_strides
    return (col == 1 or cols == 1) and (row == cols or rows == 1)


def _in_reach(product: Product) -> bool:
    """Whether corners and offsets of im2col are those of a tensor map of four dimensions, and strides those of one."""
    taps, extents = product.taps, (product.x.rows, product.x.cols)
    assert taps is not None
    for i, of_axis in enumerate((taps.r, taps.s)):
        last = (taps.outputs[i] - 1) * taps.stride[i] - taps.pad[i]
        corners = (-taps.pad[i], last - (extents[i] - 1))
        if not all(-CORNER <= each < CORNER for each in corners) or last < -taps.pad[i]:
            return False
        if (of_axis - 1) * taps.dil[i] >= 2 * CORNER or taps.stride[i] > MOST_STRIDE:
            return False
    return True


@lru_cache(maxsize=256)
def product_of(request: Request) -> Product:
    """The products of a layer of several taps."""
    problem, forward = request.problem, request.problem.direction == "fprop"
    x, y = request.first.strides, request.result_strides
    inputs, outputs = ((problem.h, problem.w), (problem.p, problem.q))
    if not forward:  # x is dy
        inputs, outputs = outputs, inputs
    filters, channels = (problem.k, problem.c) if forward else (problem.c, problem.k)
    copied = x[1] != 1
    if copied:
        x = strides_of((problem.n, channels, *inputs), "nhwc")
    one = Side(inputs[1], inputs[0], problem.n, x[3], x[2], x[0], x[1])
    _, other = joined((outputs[1], outputs[0], problem.n), (0, 0, 0, 0), (y[3], y[2], y[0], y[1]))
    if y[1] != 1:  # planes
        other = Side(prod(outputs), 1, problem.n, y[3], y[2] * outputs[0], y[0], y[1])
    w_k, w_c, w_r, w_s = request.second.strides
    w_filter, w_channel = (w_k, w_c) if forward else (w_c, w_k)
    loads = w_loads_of(problem.dtype, (filters, channels), (w_filter, w_channel), request.second.aligned)
    in_a_row = problem.r == 1 or w_r == problem.s * w_s
    if problem.s == 1 and problem.r > 1:
        w_s, in_a_row = w_r, True  # of a column the taps are rows
    if not in_a_row or w_s <= 0 or w_s * problem.dtype.itemsize % TMA_BYTES:
        loads = "W_PACKED"
    stride = problem.stride if forward else (1, 1)
    taps = Taps(problem.r, problem.s, outputs, stride, problem.dilation, _pad(request), not forward, w_r, w_s)
    return Product(
        problem, filters, channels, one, other, dense(other[:3], filters, "nhwc" if y[1] == 1 else "nchw"), True,
        y[1] == 1, w_filter, w_channel, loads, taps, copied,
    )  # fmt: skip


def _pad(request: Request) -> tuple[int, int]:
    """Rows of zeros above x and columns at its left, as taps count them; of dgrad around dy, perhaps below 0."""
    problem = request.problem
    (top, _, left, _), (dil_h, dil_w) = problem.padding, problem.dilation
    if problem.direction == "fprop":
        return top, left
    return (problem.r - 1) * dil_h - top, (problem.s - 1) * dil_w - left


def configs(request: Request) -> list[Config]:
    """The best tiles by the cost model, best first; none for a request that the kernel does not take.

    The best one in clusters is second where it is the model's first; the family puts it first where it was ahead.
    """
    if why_not(request) is not None:
        return []
    every = all_tiles(request)
    alone = [tile for tile in every if not tile.in_cluster]
    found = few_apart(alone, lambda tile: (tile.pixels, tile.filters, tile.splits), MOST_CONFIGS)
    if every[0].in_cluster:
        found = [*found[:1], every[0], *found[1:]][:MOST_CONFIGS]
    return [Config(KERNEL, config_key(tile), tile) for tile in found]


def all_tiles(request: Request) -> tuple[Tile, ...]:
    """Every tile that the request may have, best first."""
    return tiles(product_of(request), request.facts.max_smem_bytes, request.facts.sm_count)


def cycles(request: Request, config: Config) -> float:
    """What the cost model says of a config, in cycles."""
    tile: Tile = config.derived
    product = product_of(request)
    copying = cycles_of(prod(product.x[:3]) * product.channels * product.size) if product.copied else 0
    return tile.cycles(product, request.facts.sm_count) + copying


def source(product: Product, tile: Tile) -> KernelSource:
    """The specialised source: of the layer's own extents none takes part but through the tile."""
    return kernel_source("halo_sm90/implicit_gemm", "halo_sm90_implicit_gemm", constants_of(product, tile))


def constants_of(product: Product, tile: Tile) -> dict[str, int | str]:
    """The constants of a source."""
    own: dict[str, int | str] = {"TAPS": 1, **({"BY_LANES": 1} if product.by_lanes else {})}
    own |= {"CLUSTER": tile.cluster} if tile.in_cluster else {}
    return {**constants(product, tile), **own}


def bind(request: Request, config: Config) -> BoundCall:
    """fprop(x, w, b) -> y, or with a residual fprop(x, w, b, residual) -> y, or dgrad(dy, w) -> dx."""
    product, tile = product_of(request), config.derived
    copy = copy_of(request, _gathered_shape(request.problem)).__call__ if product.copied else None
    return bound(request, product, tile, source(product, tile), copy)


def _gathered_shape(problem: Problem) -> tuple[int, int, int, int]:
    """The shape of x, or of dy."""
    return problem.x_shape if problem.direction == "fprop" else problem.y_shape


def sources(request: Request) -> Iterator[KernelSource]:
    """The sources of a tile of each kind that the request may have on an NVIDIA H200, and of its packing."""
    product = product_of(request)
    found = shipped_tiles(product)
    for tile in few_apart(
        found, lambda tile: (tile.m_blocks, tile.split_n, tile.in_cluster, tile.parts > 1), len(found)
    ):
        yield source(product, tile)
        if product.packs:
            yield pack_source(product)
