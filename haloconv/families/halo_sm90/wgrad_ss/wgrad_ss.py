"""Host half of families/halo_sm90/wgrad_ss/wgrad_ss.cu: the weight gradient in 16 bits, both operands by descriptor.

Sums are fp32, in an order that the problem and the number of multiprocessors fix. Channels must be neighbours: dense
planes are copied first, if they are small.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch

from haloconv import support
from haloconv.families.base import MOST_CONFIGS, BoundCall, Config
from haloconv.families.common import ELEMENTS, few_apart, why_not_direction
from haloconv.families.halo_sm90.wgrad.arrange import Copies
from haloconv.families.halo_sm90.wgrad_ss import nchw_to_nhwc, wgrad_ss_sum
from haloconv.families.halo_sm90.wgrad_ss.operands import Seen, seen
from haloconv.families.halo_sm90.wgrad_ss.tile import SPAN, Box, Tile, Tiling
from haloconv.families.halo_sm90.wgrad_ss.tile import tilings as tilings_of
from haloconv.jit import BoxMap, DataType, KernelSource, Swizzle, kernel_source
from haloconv.jit.launch import Launch, LaunchShape, Value
from haloconv.problem import Direction, Problem, Request

KERNEL = "halo_sm90/wgrad_ss"
DIRECTIONS: tuple[Direction, ...] = ("wgrad",)
_ARCH = "sm_90a"
_SHIPPED_SMEM_BYTES, _SHIPPED_SM_COUNT = 227 << 10, 132  # of a block; of an NVIDIA H200
_LEAST_CHANNELS = 16  # and filters: of fewer most of a product would be zeros
_X_POINTER, _Y_POINTER = 0, 1  # of a launch
_MAP_TYPES = {torch.float16: DataType.FLOAT16, torch.bfloat16: DataType.BFLOAT16}


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, else a sentence that says why not."""
    problem, facts = request.problem, request.facts
    reason = why_not_direction(problem, *DIRECTIONS) or support.why_no_tensor_core_products(problem, ())
    if reason is not None:
        return reason
    if problem.dtype not in _MAP_TYPES:
        return "taps of fp32 operands in shared memory cannot be shifted: TF32 must be K-major"
    if facts.arch != _ARCH:
        return "the device is no Hopper GPU (compute capability 9.0)"
    if problem.groups > 1 or min(problem.c, problem.k) < _LEAST_CHANNELS:
        return f"the layer has groups, or fewer than {_LEAST_CHANNELS} channels or filters"
    if seen(request) is None:
        return "channels are not neighbours at multiples of 16 bytes, and they are no dense planes of at most 64 MB"
    if not tilings(request):
        return "a tile would be mostly empty, no box with its halo fits shared memory, or no strips are as wide"
    return None


def configs(request: Request) -> list[Config]:
    """The best tiles by the cost model, best first; none for a request that the kernel does not take."""
    if why_not(request) is not None:
        return []
    found = few_apart(tilings(request), lambda each: (each.tile.extents, each.cluster > 1), MOST_CONFIGS)
    return [Config(KERNEL, str(each), each) for each in found]


def tilings(request: Request) -> list[Tiling]:
    """The best tiling of each tile, best first; cycles count copies, too."""
    facts = request.facts
    return _every_tiling(request, facts.max_smem_bytes, facts.sm_count)


@lru_cache(maxsize=256)
def _every_tiling(request: Request, max_smem_bytes: int, sm_count: int) -> list[Tiling]:
    one = seen(request)
    if one is None:
        return []
    more = nchw_to_nhwc.cycles(request.problem) if one.copied else 0
    found = [
        each._replace(cycles=each.cycles + more + wgrad_ss_sum.scatter_cycles(one.request, each.tile))
        for each in tilings_of(one.request.problem, max_smem_bytes, sm_count)
    ]
    return sorted(found, key=lambda each: each.cycles)


def _order(problem: Problem, tile: Tile) -> dict[str, int | str]:
    """The constants that the order of partial sums depends on."""
    return {
        "ELEM": ELEMENTS[problem.dtype],
        **{"M_BLOCKS": tile.m_blocks, "COLUMNS": tile.columns, "TAPS": tile.taps},
        **dict(zip(("SPLIT_K", "SPLIT_C", "SPLIT_T"), tile.split, strict=True)),
    }


def source(request: Request, one: Tiling) -> KernelSource:
    """The specialised source: of the layer's own extents none takes part but through the tile, and taps of whole dw."""
    taps = 1 if one.sums else wgrad_ss_sum.result_taps(request, one.tile)
    constants = {"STAGES": one.stages, "CLUSTER": one.cluster, "RESULT_TAPS": taps}
    return kernel_source(KERNEL, "halo_sm90_wgrad_ss", {**_order(request.problem, one.tile), **constants})


def sources(request: Request) -> Iterator[KernelSource]:
    """The sources that the request would choose on an NVIDIA H200; none for one that the kernel does not take."""
    one = seen(request)
    if one is None:
        return
    for each in _every_tiling(request, _SHIPPED_SMEM_BYTES, _SHIPPED_SM_COUNT)[:1]:
        yield source(one.request, each)
        if each.sums:
            taps, lanes, _ = wgrad_ss_sum.adding(one.request, each.tile, each.sums, _SHIPPED_SM_COUNT)
            yield wgrad_ss_sum.source(_order(request.problem, each.tile), taps, lanes)
        if one.copied:
            yield nchw_to_nhwc.source(request.problem)


def bind(request: Request, config: Config) -> BoundCall:
    """wgrad(dy, x) -> dw."""
    one: Tiling = config.derived
    of = seen(request)
    if of is None:
        raise ValueError(f"{KERNEL} does not take the request")
    return _call(of, one, nchw_to_nhwc.bind(request) if of.copied else None)


def _call(of: Seen, one: Tiling, copies: Copies | None) -> BoundCall:
    """wgrad(dy, x) -> dw. Copies' room is PyTorch's again when the launches are in the stream."""
    request = of.request
    problem, tile = request.problem, one.tile
    maps = {"x_map": _x_map(request, one.box), "y_map": _y_map(request, one.box)}
    shape = LaunchShape(tile.blocks(problem) * one.parts, tile.threads, one.smem_bytes, one.cluster)
    multiply = Launch(source(request, one), request.device, shape, _fields(request, one), maps)
    add = wgrad_ss_sum.bind(request, tile, one.sums, _order(problem, tile)) if one.sums else None
    partials, result, strides = one.sums * tile.sums(problem), request.result_shape, request.result_strides

    def wgrad(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x_from, dy_from, _room = (x.data_ptr(), dy.data_ptr(), None) if copies is None else copies(dy, x)
        dw = x.new_empty_strided(result, strides)
        if add is None:
            multiply(x_from, dy_from, 0, dw.data_ptr())
            return dw
        sums = x.new_empty(partials, dtype=torch.float32)
        multiply(x_from, dy_from, sums.data_ptr(), 0)
        add(dw.data_ptr(), sums.data_ptr(), x_from, dy_from)
        return dw

    return wgrad


def _fields(request: Request, one: Tiling) -> dict[str, Value]:
    problem, box, strips = request.problem, one.box, one.box.strips
    x_filled, y_filled = box.filled
    per_block, longer = divmod(box.boxes(problem), one.parts)
    return {
        **{"taps": problem.r * problem.s, "taps_s": problem.s, "rows": problem.p},
        **{"dil_h": problem.dilation[0], "dil_w": problem.dilation[1]},
        **{"pad_top": problem.padding[0], "pad_left": problem.padding[2]},
        **{"pitch": strips.pitch, "box_rows": box.rows, "strip_cols": strips.cols},
        **{"y_column": 0 if strips.apart else strips.cols, "y_strip": int(strips.apart)},
        **{"x_pixels": box.x_pixels, "y_pixels": box.y_pixels, "x_filled": x_filled, "y_filled": y_filled},
        "blocks": one.tile.blocks_of(problem)._asdict(),
        "cut": {
            "slabs": one.tile.blocks(problem),
            "strips": strips.number,
            "bands": -(-problem.p // box.rows),
            "per_block": per_block,
            "longer": longer,
        },
        "result": wgrad_ss_sum.result_fields(request, wgrad_ss_sum.result_taps(request, one.tile)),
    }


def _map(request: Request, axes: tuple[int, ...], steps: tuple[int, ...], box: tuple[int, ...], at: int) -> BoxMap:
    """A tensor map of channels, or filters, and other axes, ``steps`` elements apart: one element may have any step."""
    kind = _MAP_TYPES[request.problem.dtype]
    strides = tuple(2 * step if extent > 1 else 16 for extent, step in zip(axes[1:], steps, strict=True))
    return BoxMap(kind, axes, strides, (SPAN, *box), Swizzle.B128, at)


def _x_map(request: Request, box: Box) -> BoxMap:
    n, c, h, w = request.problem.x_shape
    x_n, _, x_h, x_w = request.second.strides
    return _map(request, (c, w, h, n), (x_w, x_h, x_n), (box.strips.pitch, box.x_rows, 1), _X_POINTER)


def _y_map(request: Request, box: Box) -> BoxMap:
    """Columns of a strip are an axis of their own: those behind its last one are outside, and zero."""
    n, k, p, q = request.problem.y_shape
    y_n, _, y_h, y_w = request.first.strides
    strips = box.strips
    cols, count = (strips.cols, strips.number) if strips.apart else (q, 1)
    steps = (y_w, cols * y_w, y_h, y_n)
    return _map(request, (k, cols, count, p, n), steps, (strips.pitch, 1, box.rows, 1), _Y_POINTER)
