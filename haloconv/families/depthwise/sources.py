"""The sources of the ``depthwise`` family that CI compiles: layers that differ in what the threads of a kernel hold."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import torch

from haloconv.families.depthwise import (
    band,
    band_wgrad,
    box,
    box_wgrad,
    lanes,
    lanes_wgrad,
    march,
    march_wgrad,
    pairs,
    pairs_wgrad,
    patch,
    patch_wgrad,
    plane,
    plane_wgrad,
    tile,
    tile_sm90,
)
from haloconv.families.depthwise.march_form import best_tiling
from haloconv.jit import KernelSource
from haloconv.layout import Layout
from haloconv.problem import DIRECTIONS, Direction, Epilogue, Problem, dense_request

_NO_DEVICE = torch.device("cpu")  # no source depends on one
_FPROP: tuple[Direction, ...] = ("fprop",)
_DENSE: tuple[Direction, ...] = ("fprop", "dgrad")
_WGRAD: tuple[Direction, ...] = ("wgrad",)
_Layer = tuple[torch.dtype, Layout, int, int]
_MARCHED: tuple[tuple[_Layer, tuple[Direction, ...]], ...] = (  # dtype, layout, taps along an axis, stride, directions
    ((torch.float32, "nchw", 3, 1), DIRECTIONS),
    ((torch.float16, "nhwc", 3, 2), DIRECTIONS),
    ((torch.bfloat16, "nchw", 5, 2), DIRECTIONS),
    ((torch.float32, "nhwc", 5, 1), ("dgrad",)),
    ((torch.float32, "nchw", 7, 1), ("fprop", "wgrad")),
    ((torch.float16, "nhwc", 7, 1), _FPROP),
)
_OtherLayer = tuple[torch.dtype, int, tuple[Direction, ...]]  # dtype, taps along an axis, directions
_HALVES = ((torch.float16, 3), (torch.bfloat16, 5), (torch.float16, 7))
_OTHERS: tuple[tuple[ModuleType, Layout, tuple[_OtherLayer, ...]], ...] = (  # no stride
    (band, "nchw", ((torch.float16, 5, _DENSE), (torch.bfloat16, 7, _FPROP))),
    (band_wgrad, "nchw", ((torch.float16, 5, _WGRAD), (torch.bfloat16, 7, _WGRAD))),
    (tile, "nchw", ((torch.float32, 5, _FPROP), (torch.float32, 7, ("dgrad",)))),
    (patch, "nchw", tuple((*each, _DENSE) for each in _HALVES)),
    (patch_wgrad, "nchw", tuple((*each, _WGRAD) for each in _HALVES)),
    (tile_sm90, "nchw", tuple((torch.float32, taps, _DENSE) for taps in (3, 5))),
    (box, "nchw", ((torch.float32, 7, _DENSE),)),
    (box_wgrad, "nchw", tuple((torch.float32, taps, _WGRAD) for taps in (5, 7))),
    (lanes, "nhwc", tuple((torch.float32, taps, _DENSE) for taps in (3, 5, 7))),
    (lanes_wgrad, "nhwc", tuple((torch.float32, taps, _WGRAD) for taps in (3, 5, 7))),
    (pairs, "nhwc", ((torch.float16, 3, _FPROP), (torch.bfloat16, 5, _FPROP), (torch.float16, 5, ("dgrad",)),
                     (torch.bfloat16, 7, _FPROP))),
    (pairs_wgrad, "nhwc", tuple((*each, _WGRAD) for each in _HALVES)),
)  # fmt: skip
_SMALL: tuple[tuple[ModuleType, _Layer, int, tuple[Direction, ...]], ...] = (  # rows and columns of x
    (plane, (torch.float16, "nchw", 3, 1), 14, _DENSE),
    (plane, (torch.bfloat16, "nchw", 5, 1), 7, _DENSE),
    (plane, (torch.float16, "nchw", 7, 1), 7, _FPROP),
    (plane, (torch.float32, "nchw", 7, 1), 14, _FPROP),
    (plane, (torch.float32, "nchw", 5, 2), 14, _DENSE),
    (plane_wgrad, (torch.float16, "nchw", 3, 2), 14, _WGRAD),
    (plane_wgrad, (torch.bfloat16, "nchw", 5, 1), 7, _WGRAD),
    (plane_wgrad, (torch.float16, "nchw", 7, 1), 14, _WGRAD),
    (plane_wgrad, (torch.float32, "nchw", 7, 1), 7, _WGRAD),
)  # fmt: skip
_SILU, _RELU, _ADDED = Epilogue(True, "silu"), Epilogue(activation="relu"), Epilogue(True, "relu", True)
_FOLLOWED: tuple[tuple[ModuleType, _Layer, tuple[Epilogue, ...]], ...] = (
    (march, (torch.bfloat16, "nhwc", 3, 1), (_SILU, _ADDED)),
    (march, (torch.bfloat16, "nhwc", 5, 2), (_SILU,)),
    (march, (torch.float32, "nchw", 3, 1), (_RELU, _ADDED)),
    (pairs, (torch.bfloat16, "nhwc", 3, 1), (_SILU, _ADDED)),
    (pairs, (torch.float16, "nhwc", 7, 1), (_RELU,)),
    (patch, (torch.float16, "nchw", 3, 1), (_SILU, _ADDED)),
    (band, (torch.float16, "nchw", 5, 1), (_ADDED,)),
    (tile, (torch.float32, "nchw", 5, 1), (_ADDED,)),
    (tile_sm90, (torch.float32, "nchw", 3, 1), (_ADDED,)),
    (box, (torch.float32, "nchw", 7, 1), (_ADDED,)),
    (lanes, (torch.float32, "nhwc", 3, 1), (_ADDED,)),
    (lanes, (torch.float32, "nhwc", 5, 1), (_SILU,)),
)
_SMALL_FOLLOWED: tuple[tuple[_Layer, int, Epilogue], ...] = (  # of plane
    ((torch.float16, "nchw", 5, 1), 7, _SILU),
    ((torch.bfloat16, "nchw", 3, 1), 14, _ADDED),
    ((torch.float32, "nchw", 7, 1), 7, _ADDED),
)


def sources() -> list[KernelSource]:
    """One source for each layer of each kernel, and some with an epilogue; none twice."""
    found = [_march_source(_layer(direction, *layer)) for layer, directions in _MARCHED for direction in directions]
    for twin, layer, epilogues in _FOLLOWED:
        for epilogue in epilogues:
            problem = replace(_layer("fprop", *layer), bias=not epilogue.scale, epilogue=epilogue)
            found.append(_march_source(problem) if twin is march else twin.source(problem, twin.best_tiling(problem)))
    for twin, layout, layers in _OTHERS:
        problems = (
            _layer(direction, dtype, layout, taps) for dtype, taps, directions in layers for direction in directions
        )
        found += [twin.source(problem, twin.best_tiling(problem)) for problem in problems]
    for twin, layer, size, directions in _SMALL:
        found += [_small_source(twin, _layer(direction, *layer), size) for direction in directions]
    for layer, size, epilogue in _SMALL_FOLLOWED:
        problem = replace(_layer("fprop", *layer), bias=not epilogue.scale, epilogue=epilogue)
        found.append(_small_source(plane, problem, size))
    return list({source.digest: source for source in found}.values())


def _march_source(problem: Problem) -> KernelSource:
    twin = march_wgrad if problem.direction == "wgrad" else march
    form = twin.form_of(dense_request(problem, _NO_DEVICE))
    source: KernelSource = twin.source(form, best_tiling(form))
    return source


def _small_source(twin: ModuleType, problem: Problem, size: int) -> KernelSource:
    on_small_maps = replace(problem, h=size, w=size)
    source: KernelSource = twin.source(on_small_maps, twin.best_tiling(on_small_maps))
    return source


def _layer(direction: Direction, dtype: torch.dtype, layout: Layout, taps: int, stride: int = 1) -> Problem:
    return Problem(
        direction, n=2, c=96, h=56, w=56, k=96, r=taps, s=taps, stride=(stride,) * 2, padding=(taps // 2,) * 4,
        groups=96, bias=direction == "fprop", dtype=dtype, layout=layout,
    )  # fmt: skip
