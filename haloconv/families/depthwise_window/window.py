"""Host half of depthwise_window/window.cu: fprop and dgrad of depthwise layers with filters of any size."""

from __future__ import annotations

from typing import NamedTuple

import torch

from haloconv.device import DeviceFacts
from haloconv.families.base import BoundCall, Config, config_key
from haloconv.families.common import ELEMENTS, named, why_not_direction
from haloconv.families.depthwise_window.axes import axes, why_too_many_steps
from haloconv.families.depthwise_window.cut import (
    BLOCKS,
    Block,
    Layer,
    Layout,
    Planes,
    Tiling,
    best_cut,
    cost,
    cut_fields,
    grid,
    groups,
    layout,
    smem_bytes,
    totals_words,
)
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape, Value
from haloconv.problem import Request

KERNEL = "depthwise_window/window"
_DIRECTION_NUMBERS = {"fprop": 0, "dgrad": 1}


class _Derived(NamedTuple):
    """A tiling of a layer, where things stand in shared memory, and the launch."""

    tiling: Tiling
    layer: Layer
    places: Layout
    shape: LaunchShape


def layer_of(request: Request) -> Layer:
    """What fprop or dgrad cuts."""
    problem = request.problem
    planes = Planes(problem.n, problem.k, 1)
    if problem.direction == "dgrad":
        planes = Planes(problem.n, problem.c, problem.k_per_group)
    return Layer(axes(problem), planes, request.result_layout == "nhwc")


def tilings(layer: Layer, facts: DeviceFacts) -> list[Tiling]:
    """The best cut with each block that has one, best first: classes of columns side by side, then by cost."""
    found = [(block, best_cut(block, layer, facts)) for block in BLOCKS]
    fitting = [Tiling(block, cut) for block, cut in found if cut is not None]
    return sorted(fitting, key=lambda each: (-each.cut.classes_w, cost(each, layer, facts)))


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, whatever its tensors' forms, else a sentence that says why not."""
    problem = request.problem
    return why_not_direction(problem, "fprop", "dgrad") or why_too_many_steps(axes(problem))


def configs(request: Request) -> list[Config]:
    """One for each of ``tilings``, best first."""
    layer = layer_of(request)
    found = [_derived(tiling, layer) for tiling in tilings(layer, request.facts)]
    return [Config(KERNEL, config_key(each.tiling), each) for each in found]


def _derived(tiling: Tiling, layer: Layer) -> _Derived:
    block, cut = tiling
    places = layout(block, cut, layer.axes)
    smem = smem_bytes(tiling, places, layer.channels_inner)
    return _Derived(tiling, layer, places, LaunchShape(grid(layer, cut), block.threads, smem))


def source(request: Request, block: Block) -> KernelSource:
    """The specialised source. No extent of image, filter, stride or dilation takes part."""
    constants: dict[str, int | str] = {
        "DIRECTION": _DIRECTION_NUMBERS[request.problem.direction],
        "ELEM": ELEMENTS[request.problem.dtype],
        "TILE_I": block.tile_i,
        "THREADS": block.threads,
        "MIN_BLOCKS": block.min_blocks,
        "CHANNELS_INNER": int(request.result_layout == "nhwc"),
    }
    return kernel_source(KERNEL, "depthwise_window", constants)


def _fields(request: Request, derived: _Derived) -> dict[str, Value]:
    """The scalars of ``Params`` in window.cu."""
    (_, cut), layer, places, _ = derived
    w_k, _, w_r, w_s = request.second.strides
    return {
        **named("source", "nchw", request.first.strides),
        **named("w", "krs", (w_k, w_r, w_s)),
        **named("out", "nchw", request.result_strides),
        "n": layer.planes.images,
        "channels": layer.planes.channels,
        "multiplier": request.problem.k_per_group,
        "c_groups": groups(layer, cut)[1],
        "wave": request.facts.sm_count,
        "totals_words": totals_words(cut, places) if cut.promotes else 0,
        **cut_fields(cut, places, layer),
    }


def bind(request: Request, config: Config) -> BoundCall:
    """fprop(x, w, b) -> y or dgrad(dy, w) -> dx."""
    derived: _Derived = config.derived
    kernel = source(request, derived.tiling.block)
    launch = Launch(kernel, request.device, derived.shape, _fields(request, derived))
    shape, strides = request.result_shape, request.result_strides

    def fprop(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        y = x.new_empty_strided(shape, strides)
        if b is None:
            launch(x.data_ptr(), w.data_ptr(), y.data_ptr(), 0)
        else:
            b = b if b.is_contiguous() else b.contiguous()
            launch(x.data_ptr(), w.data_ptr(), y.data_ptr(), b.data_ptr())
        return y

    def dgrad(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        dx = dy.new_empty_strided(shape, strides)
        launch(dy.data_ptr(), w.data_ptr(), dx.data_ptr(), 0)
        return dx

    return fprop if request.problem.direction == "fprop" else dgrad
