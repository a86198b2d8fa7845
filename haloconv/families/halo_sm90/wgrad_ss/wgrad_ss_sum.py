"""Host half of families/halo_sm90/wgrad_ss/wgrad_ss_sum.cu: dw from the partial sums of wgrad_ss.cu."""

from __future__ import annotations

import math
from typing import NamedTuple

from haloconv.families.common import named
from haloconv.families.halo_sm90.wgrad_ss.tile import Tile
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape, Value
from haloconv.problem import Request

KERNEL = "halo_sm90/wgrad_ss_sum"
_THREADS, _ITEM = 256, 8  # of a block; sums of an item
_SCATTERED_OF_CYCLE = 37  # elements that all multiprocessors write at a time, by the times of 14x14 and 7x7 on an H200
_MOST_RESULT_TAPS = 9  # a thread has registers for their results
_MANY_LANES = (8, 4, 2)  # threads that may add an item's parts, where items are few


class Adding(NamedTuple):
    """What a thread adds: items of so many taps, and of their parts one of ``lanes``. ``threads`` of all blocks."""

    taps: int
    lanes: int
    threads: int


def adding(request: Request, tile: Tile, parts: int, sm_count: int) -> Adding:
    """Several threads add an item where there are parts for them and multiprocessors have fewer than two blocks."""
    taps = result_taps(request, tile)
    items = tile.sums(request.problem) // (_ITEM * (tile.extents[2] if taps > 1 else 1))
    most = min(parts, 2 * sm_count * _THREADS // items)
    lanes = next((lanes for lanes in _MANY_LANES if lanes <= most), 1)
    return Adding(taps, lanes, items * lanes)


def result_taps(request: Request, tile: Tile) -> int:
    """RESULT_TAPS of sum.cuh: all of the layer where a tile has them, and in dw they are neighbours as channels are."""
    problem, (of_k, *others) = request.problem, request.result_strides
    taps = problem.r * problem.s
    in_planes = tuple(others) == (taps, problem.s, 1) and of_k == problem.c * taps
    return taps if in_planes and problem.c % _ITEM == 0 and taps <= min(tile.extents[2], _MOST_RESULT_TAPS) else 1


def scatter_cycles(request: Request, tile: Tile) -> float:
    """What it costs by the model that neighbours in dw are written by different threads."""
    problem = request.problem
    is_whole = result_taps(request, tile) > 1 or request.result_strides[1] == 1
    return 0 if is_whole else math.prod(problem.w_shape) / _SCATTERED_OF_CYCLE


def source(order: dict[str, int | str], taps: int, lanes: int) -> KernelSource:
    """The specialised source; ``order``: the constants that the order of partial sums depends on."""
    return kernel_source(KERNEL, "halo_sm90_wgrad_ss_sum", {**order, "RESULT_TAPS": taps, "PART_LANES": lanes})


def result_fields(request: Request, taps: int) -> dict[str, Value]:
    """Fields of Result in sum.cuh, of a request as it is multiplied; ``taps``: RESULT_TAPS."""
    problem = request.problem
    return {
        **named("w", "kcrs", request.result_strides),
        **{"filters": problem.k, "channels": problem.c, "taps": problem.r * problem.s},
        "whole": int(taps > 1 or (request.result_strides[1] == 1 and problem.c % _ITEM == 0)),
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
    problem, (taps, lanes, threads) = request.problem, adding(request, tile, parts, request.facts.sm_count)
    fields: dict[str, Value] = {
        **{"part_sums": tile.sums(problem), "parts": parts, "blocks": tile.blocks_of(problem)._asdict()},
        "result": result_fields(request, taps),
    }
    shape = LaunchShape(threads // _THREADS, _THREADS)
    return Launch(source(order, taps, lanes), request.device, shape, fields, pdl=True)
