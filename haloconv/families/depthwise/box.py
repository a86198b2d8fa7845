"""Host half of families/depthwise/box.cu: fprop and dgrad of depthwise layers of many taps, fp32, nchw, on Hopper."""

from __future__ import annotations

import torch

from haloconv.env import DeviceFacts, device_facts
from haloconv.families.base import BoundCall
from haloconv.families.common import dense_call
from haloconv.families.depthwise import boxes as depthwise_boxes
from haloconv.families.depthwise.boxes import COLS, CUT_FORMAT, Config, Cut
from haloconv.families.depthwise.strips import shapes
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import PositionalLaunch
from haloconv.layout import strides_of
from haloconv.problem import Problem, TensorForm

LEAST_TAPS, LEAST_COLS = 26, 20  # on others other kernels were measured as fast, or faster
_MOST_TAP_ROWS = 15  # the same: of a filter of 31 rows
_PARAMS_FORMAT = f"4Q6q{CUT_FORMAT}3i"
_IN_POINTER = 0


def why_not(problem: Problem, side: TensorForm, result_layout: str, facts: DeviceFacts) -> str | None:
    """None if the kernel takes the problem on the device, else a sentence that says why not."""
    if problem.direction == "wgrad" or result_layout != "nchw":
        return "this is for fprop and dgrad in nchw"
    cols = shapes(problem)[1][3]
    if problem.r * problem.s < LEAST_TAPS or cols < LEAST_COLS:
        return f"other kernels are as fast with fewer than {LEAST_TAPS} taps or {LEAST_COLS} columns"
    if problem.r > _MOST_TAP_ROWS:
        return f"depthwise_tile is faster with more than {_MOST_TAP_ROWS} rows of taps"
    if cols % COLS:
        return f"rows of the result do not come in pieces of {COLS}"
    refused = depthwise_boxes.why_not(problem, (side,), facts)
    if refused is None and best_config(problem) is None:
        refused = "the rows that a block needs do not fit a box or shared memory"
    return refused


def best_config(problem: Problem) -> Config | None:
    """By a sweep on an NVIDIA H200 (2026-11-22, 7x7 on maps of 20 to 224); None if none fits."""
    configs = (Config(7, 2, 3, 4), Config(8, 2, 3, 4), Config(7, 2, 2, 8, weight=1.3))
    return depthwise_boxes.best(problem, ((each, Cut(problem, each)) for each in configs))


def source(problem: Problem, config: Config) -> KernelSource:
    """The specialised text of the kernel. No extent of the image takes part."""
    own: dict[str, int | str] = {"DGRAD": int(problem.direction == "dgrad"), "HAS_BIAS": int(problem.bias)}
    constants = depthwise_boxes.constants(problem, config)
    return kernel_source("depthwise/box", "depthwise_box", {**constants, **own})


def bind(
    problem: Problem,
    first: TensorForm,
    w: TensorForm,
    result_layout: str,
    device: torch.device,
    config: Config | None = None,
) -> BoundCall:
    """fprop(x, w, b) -> y or dgrad(dy, w) -> dx; without a config with the best."""
    config = config or best_config(problem)
    assert config is not None
    in_shape, out_shape = shapes(problem)
    cut, out_strides = Cut(problem, config), strides_of(out_shape, result_layout)
    parts = cut.parts(device_facts(device.index))
    fields = (
        *(w.strides[0], *w.strides[2:], *out_strides[:3], *cut.fields(parts)),
        *(out_shape[1], out_shape[0], out_shape[2]),
    )
    boxes = (depthwise_boxes.boxes(in_shape, first, cut.in_box, _IN_POINTER),)
    text, grid = source(problem, config), out_shape[1] * parts
    launch = PositionalLaunch(text, device, grid, config.threads, cut.smem_bytes, _PARAMS_FORMAT, fields, boxes)
    return dense_call(launch, problem, out_shape, out_strides)
