"""Host half of families/depthwise/box_wgrad.cu: the filter gradient of depthwise layers in fp32 and nchw on Hopper."""

from __future__ import annotations

import torch

from haloconv.env import DeviceFacts, device_facts
from haloconv.families.base import BoundCall
from haloconv.families.common import summed_call
from haloconv.families.depthwise import boxes as depthwise_boxes
from haloconv.families.depthwise.boxes import COLS, CUT_FORMAT, ELEM_BYTES, Config, Cut
from haloconv.families.reduce.sums import bind_sum
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import PositionalLaunch
from haloconv.layout import strides_of
from haloconv.problem import Problem, TensorForm

LEAST_TAPS, LEAST_COLS = 10, 20  # on others marches were measured as fast, or faster
_LEAST_COLS_OF_FEW_TAPS = 192  # with fewer taps: from there boxes were faster
_MANY_TAPS = 25  # more than these
_MOST_PRODUCTS = 2048  # of one fp32 sum: bounds its rounding
_PARAMS_FORMAT = f"3Q3q2i3q2i{CUT_FORMAT}4i"
_X_POINTER, _DY_POINTER = 0, 1


def why_not(problem: Problem, dy: TensorForm, x: TensorForm, facts: DeviceFacts) -> str | None:
    """None if the kernel takes the problem on the device, else a sentence that says why not."""
    if problem.direction != "wgrad":
        return "this is for filter gradients"
    least = LEAST_COLS if problem.r * problem.s >= LEAST_TAPS else _LEAST_COLS_OF_FEW_TAPS
    if problem.q < least:
        return f"marches are as fast with {problem.r * problem.s} taps and fewer than {least} columns"
    refused = depthwise_boxes.why_not(problem, (dy, x), facts)
    if refused is None and best_config(problem) is None:
        refused = "the rows that a block needs do not fit a box or shared memory"
    return refused


def best_config(problem: Problem) -> Config | None:
    """By a sweep on an NVIDIA H200 (2026-11-22, 5x5 and 7x7 on maps of 20 to 224); None if none fits."""
    many = problem.r * problem.s > _MANY_TAPS
    large = Config(7, 2, 1, 8, weight=1.05) if many else Config(14, 2, 3, 4)
    configs = (Config(7, 2, 3, 4), Config(8, 2, 3, 4), large)
    return depthwise_boxes.best(problem, ((each, _cut(problem, each)) for each in configs))


def _cut(problem: Problem, config: Config) -> Cut:
    return Cut(problem, config, True, problem.r * problem.s * config.threads * ELEM_BYTES)


def source(problem: Problem, config: Config) -> KernelSource:
    """The specialised text of the kernel. No extent of the image takes part."""
    constants = depthwise_boxes.constants(problem, config)
    return kernel_source("depthwise/box_wgrad", "depthwise_box_wgrad", constants)


def bind(
    problem: Problem,
    dy: TensorForm,
    x: TensorForm,
    result_layout: str,
    device: torch.device,
    config: Config | None = None,
) -> BoundCall:
    """wgrad(dy, x) -> dw; without a config with the best."""
    config = config or best_config(problem)
    assert config is not None
    cut = _cut(problem, config)
    parts = cut.parts(device_facts(device.index), _MOST_PRODUCTS // (config.rows * COLS))
    fields = (
        *(*x.strides[:3], problem.h, problem.w, *dy.strides[:3], problem.p, problem.q, *cut.fields(parts)),
        *(problem.n, problem.k, cut.out_offset, cut.out_box[0] * ELEM_BYTES),
    )
    boxes = (
        depthwise_boxes.boxes(problem.x_shape, x, cut.in_box, _X_POINTER),
        depthwise_boxes.boxes(problem.y_shape, dy, cut.out_box, _DY_POINTER),
    )
    grid = problem.k * parts
    launch = PositionalLaunch(
        source(problem, config), device, grid, config.threads, cut.smem_bytes, _PARAMS_FORMAT, fields, boxes
    )
    dw_shape, dw_strides = problem.w_shape, strides_of(problem.w_shape, result_layout)
    sum_parts = bind_sum(problem.dtype, dw_shape, dw_strides, parts, device)
    return summed_call(launch, sum_parts, parts * problem.k * problem.r * problem.s, dw_shape, dw_strides)
