"""Host half of families/halo_sm90/wgrad_ss/wgrad_ss_sum.cu: dw from the partial sums of wgrad_ss.cu."""

from __future__ import annotations

from haloconv.families.common import named
from haloconv.families.halo_sm90.wgrad_ss.tile import Tile
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape, Value
from haloconv.problem import Request

KERNEL = "halo_sm90/wgrad_ss_sum"
_THREADS, _ITEM = 256, 8  # of a block; sums of an item
_MANY_LANES = 8  # threads that add an item's parts, where items are few


def part_lanes(items: int, parts: int, sm_count: int) -> int:
    """Threads that add the parts of an item: several where one of each would leave multiprocessors idle."""
    return _MANY_LANES if parts >= _MANY_LANES and items < 2 * sm_count * _THREADS else 1


def source(order: dict[str, int | str], lanes: int) -> KernelSource:
    """The specialised source; ``order``: the constants that the order of partial sums depends on."""
    return kernel_source(KERNEL, "halo_sm90_wgrad_ss_sum", {**order, "PART_LANES": lanes})


def result_fields(request: Request) -> dict[str, Value]:
    """Fields of Result in sum.cuh, of a request as it is multiplied."""
    problem = request.problem
    return {
        **named("w", "kcrs", request.result_strides),
        **{"filters": problem.k, "channels": problem.c, "taps": problem.r * problem.s},
        "whole": int(request.result_strides[1] == 1 and problem.c % _ITEM == 0),
        "layer": {
            "x": dict(zip("nchw", request.second.strides, strict=True)),
            "dy": dict(zip("nchw", request.first.strides, strict=True)),
            **{"images": problem.n, "h": problem.h, "w": problem.w, "rows": problem.p, "cols": problem.q},
            **{"taps_s": problem.s, "dil_h": problem.dilation[0], "dil_w": problem.dilation[1]},
            **{"pad_top": problem.padding[0], "pad_left": problem.padding[2]},
        },
    }


def bind(request: Request, tile: Tile, parts: int, order: dict[str, int | str]) -> Launch:
    """``launch(dw, partial sums, x, dy)`` of a request as it is multiplied."""
    sums = tile.sums(request.problem)
    items = sums // _ITEM
    lanes = part_lanes(items, parts, request.facts.sm_count)
    fields: dict[str, Value] = {
        **{"part_sums": sums, "parts": parts, "blocks": tile.blocks_of(request.problem)._asdict()},
        "result": result_fields(request),
    }
    shape = LaunchShape(items * lanes // _THREADS, _THREADS)
    return Launch(source(order, lanes), request.device, shape, fields, pdl=True)
