"""Host half of the ``depthwise_window`` family: depthwise layers with filters of any size on CUDA cores.

One input channel per group, any number of filters per channel, stride, dilation and four-sided padding; fp32, fp16 and
bf16 with fp32 sums. Device halves: families/depthwise_window/window.cu and families/depthwise_window/wgrad.cu.
"""

from __future__ import annotations

from itertools import product

import torch

from haloconv import support
from haloconv.env import device_facts
from haloconv.families.base import MOST_CANDIDATES, BoundCall
from haloconv.families.common import ELEMENTS
from haloconv.families.depthwise_window import wgrad as depthwise_window_wgrad
from haloconv.families.depthwise_window.axes import axes
from haloconv.families.depthwise_window.cut import (
    CONFIGS,
    Config,
    Cut,
    Planes,
    axis_fields,
    best_cut,
    blocks,
    cost,
    groups,
    layout,
    smem_bytes,
    totals_words,
    window_fields,
)
from haloconv.families.depthwise_window.wgrad import DTYPES, Plan, bind_wgrad, channels_inner
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import PositionalLaunch
from haloconv.layout import strides_of
from haloconv.problem import Problem, TensorForm

_MOST_STEPS = 96  # each takes at least 256 bytes of a plane; a block of the smallest GPUs has 48 KiB
_PARAMS_FORMAT = "4Q11q44i"
_DIRECTION_NUMBERS = {"fprop": 0, "dgrad": 1}


def result_planes(problem: Problem) -> Planes:
    """Planes of the result of fprop or dgrad."""
    if problem.direction == "dgrad":
        return Planes(problem.n, problem.c, problem.k_per_group)
    return Planes(problem.n, problem.k, 1)


def choose(problem: Problem, result_layout: str, limits: tuple[int, int]) -> tuple[Config, Cut]:
    """What is compiled and how the launch is cut. ``limits`` are multiprocessors and bytes of shared memory.

    Raises RuntimeError if nothing fits.
    """
    best = best_cut(CONFIGS, axes(problem), result_planes(problem), result_layout == "nhwc", limits)
    if best is None:
        raise RuntimeError(f"no cut of depthwise_window fits {limits[1]} bytes of shared memory for {problem}")
    return best


def good_cuts(problem: Problem, result_layout: str, limits: tuple[int, int]) -> list[tuple[Config, Cut]]:
    """The best cut with each config that has one, best first. ``limits`` as in ``choose``."""
    inner, both, planes = result_layout == "nhwc", axes(problem), result_planes(problem)
    found = [best_cut((config,), both, planes, inner, limits) for config in CONFIGS]
    fitting = [each for each in found if each is not None]
    return sorted(fitting, key=lambda each: cost(*each, both, planes, inner, limits))


def source(problem: Problem, config: Config, result_layout: str) -> KernelSource:
    """The specialised text. No extent of image, filter, stride or dilation takes part."""
    constants: dict[str, int | str] = {
        "DIRECTION": _DIRECTION_NUMBERS[problem.direction],
        "ELEM": ELEMENTS[problem.dtype],
        "TILE_I": config.tile_i,
        "THREADS": config.threads,
        "MIN_BLOCKS": config.min_blocks,
        "CHANNELS_INNER": int(result_layout == "nhwc"),
    }
    return kernel_source("depthwise_window/window", "depthwise_window", constants)


class DepthwiseWindowFamily:
    """CUDA-core kernels for depthwise layers: planes and filters in shared memory."""

    name = "depthwise_window"

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        reason = support.why_not(problem, device)
        if reason is not None:
            return reason
        if problem.dtype not in DTYPES:
            return f"depthwise_window does not take {problem.dtype}"
        if problem.c_per_group != 1:
            return f"each group has {problem.c_per_group} input channels; depthwise_window takes one"
        both = depthwise_window_wgrad.axes(problem) if problem.direction == "wgrad" else axes(problem)
        if both[0].steps * both[1].steps > _MOST_STEPS:
            return f"{both[0].steps} x {both[1].steps} residues of the stride do not fit shared memory"
        return None

    def candidates(
        self, problem: Problem, first: TensorForm, second: TensorForm, result_layout: str, device: torch.device
    ) -> list[tuple[Config, Cut] | Plan]:
        """The best cut for each size of a block, best first."""
        facts = device_facts(device.index)
        limits = (facts.sm_count, facts.max_smem_bytes)
        if problem.direction == "wgrad":
            return depthwise_window_wgrad.good_plans(problem, channels_inner(second), limits)
        return good_cuts(problem, result_layout, limits)[:MOST_CANDIDATES]

    def bind(
        self,
        problem: Problem,
        first: TensorForm,
        second: TensorForm,
        result_layout: str,
        device: torch.device,
        config: tuple[Config, Cut] | Plan | None = None,
    ) -> BoundCall:
        if problem.direction == "wgrad":
            return bind_wgrad(problem, first, second, result_layout, device, config)
        return _bind(problem, first, second, result_layout, device, config)


def _fields(
    problem: Problem, chosen: tuple[Config, Cut], strides: tuple[int, ...], channels_inner: bool, wave: int
) -> tuple[int, ...]:
    """The fields of ``Params`` in depthwise_window.cu behind its pointers."""
    config, cut = chosen
    both = axes(problem)
    places = layout(config, cut, both)
    planes = result_planes(problem)
    return (
        *strides,
        *(planes.images, planes.channels, problem.k_per_group, groups(planes, cut, channels_inner)[1], wave),
        totals_words(cut, places) if cut.promotes else 0,
        *axis_fields(both[0], cut.tile_p, cut.chunk_r, places.lines_h),
        *axis_fields(both[1], cut.tile_q, cut.chunk_s, places.lines_w),
        *window_fields(config, cut, places, both, channels_inner),
    )


def _bind(
    problem: Problem,
    first: TensorForm,
    w: TensorForm,
    result_layout: str,
    device: torch.device,
    wanted: tuple[Config, Cut] | None,
) -> BoundCall:
    facts = device_facts(device.index)
    chosen = config, cut = wanted or choose(problem, result_layout, (facts.sm_count, facts.max_smem_bytes))
    channels_inner = result_layout == "nhwc"
    shape = problem.y_shape if problem.direction == "fprop" else problem.x_shape
    out_strides = strides_of(shape, result_layout)
    filter_strides = (w.strides[0], w.strides[2], w.strides[3])
    fields = _fields(problem, chosen, (*first.strides, *filter_strides, *out_strides), channels_inner, facts.sm_count)
    both = axes(problem)
    grid = blocks(result_planes(problem), cut, both, channels_inner)
    smem = smem_bytes(config, cut, layout(config, cut, both), channels_inner)
    text = source(problem, config, result_layout)
    launch = PositionalLaunch(text, device, grid, config.threads, smem, _PARAMS_FORMAT, fields)

    def fprop(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        y = x.new_empty_strided(shape, out_strides)
        if b is None:
            launch(x.data_ptr(), w.data_ptr(), y.data_ptr(), 0)
        else:
            b = b if b.is_contiguous() else b.contiguous()
            launch(x.data_ptr(), w.data_ptr(), y.data_ptr(), b.data_ptr())
        return y

    def dgrad(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        dx = dy.new_empty_strided(shape, out_strides)
        launch(dy.data_ptr(), w.data_ptr(), dx.data_ptr(), 0)
        return dx

    return fprop if problem.direction == "fprop" else dgrad


def shipped_sources() -> list[KernelSource]:
    """Every config in both directions, in fp32 and `nchw` or in 16 bits and `nhwc`."""
    sources = []
    stored = {"fprop": (torch.float32, "nchw"), "dgrad": (torch.float16, "nhwc")}
    for (direction, (dtype, order)), config in product(stored.items(), CONFIGS):
        like = Problem(direction, 1, 8, 8, 8, 8, 3, 3, groups=8, dtype=dtype, layout=order)
        sources.append(source(like, config, order))
    return [*sources, *depthwise_window_wgrad.shipped_sources()]
