"""Host half of families/depthwise/lanes_wgrad.cu: filter gradients of depthwise layers in fp32 and channels_last."""

from __future__ import annotations

import torch

from haloconv.env import DeviceFacts, device_facts
from haloconv.families.base import BoundCall
from haloconv.families.common import summed_call
from haloconv.families.depthwise import lanes_cut as lanes
from haloconv.families.depthwise import nhwc_wgrad_sum as depthwise_nhwc_wgrad_sum
from haloconv.families.depthwise.lanes_cut import Config, Cut
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import PositionalLaunch
from haloconv.layout import strides_of
from haloconv.problem import Problem, TensorForm

_PARAMS_FORMAT = f"3Q{lanes.CUT_FORMAT}"
_X_POINTER, _DY_POINTER = 0, 1
_MOST_PRODUCTS = 4096  # of one fp32 sum: what bounds its rounding
_MOST_Q, _MOST_QC, _MOST_QC_OF_MANY_TAPS = 8, 8, 4  # warps beside each other in columns; there and in channels
_WARPS = 16  # of a block, at most
_ORDER = ((2, 4), (1, 4), (2, 2), (1, 2))  # warps beside each other in rows, rows of each


def why_not(problem: Problem, dy: TensorForm, x: TensorForm, facts: DeviceFacts) -> str | None:
    """None if the kernel takes the problem on the device, else a sentence that says why not."""
    if problem.direction != "wgrad":
        return "this is for wgrad"
    reason = lanes.why_not(problem, (dy, x), facts)
    reason = reason or lanes.too_small(problem, problem.y_shape)
    if reason is None and best_config(problem) is None:
        reason = "the sums do not fit registers, or the rows that they take shared memory"
    return reason


def best_config(problem: Problem) -> Config | None:
    """The best config that fits, by a sweep on an NVIDIA H200 (2026-11-22); None if none does.

    Rows of dy land, too: what shared memory then has room for is few rows of many columns, or of many channels.
    """
    _, channels, height, width = problem.y_shape
    cols, warps_q = lanes.columns(width, problem.s, _MOST_Q)
    most_qc = _MOST_QC_OF_MANY_TAPS if lanes.has_many_taps(problem) else _MOST_QC
    warps_c = lanes.channel_warps(channels, max(1, most_qc // warps_q))
    whole = [rows for rows in lanes.ROWS if height % rows == 0] or lanes.ROWS
    found = (Config(rows, cols, warps_q, warps_c, warps_r) for warps_r, rows in _ORDER if rows in whole)
    return next((each for each in found if _fits(problem, each)), None)


def _fits(problem: Problem, config: Config) -> bool:
    cut = Cut(problem, config, problem.y_shape, cut_lands=True)
    ahead = cut.stages - cut.window_rows
    return config.warps <= _WARPS and lanes.fits(config, problem) and ahead > config.band // 2


def source(problem: Problem, config: Config) -> KernelSource:
    """The specialised text of the kernel. No extent of the image takes part."""
    return kernel_source("depthwise/lanes_wgrad", "depthwise_lanes_wgrad", lanes.constants(problem, config))


def bind(problem: Problem, dy: TensorForm, x: TensorForm, result_layout: str, device: torch.device) -> BoundCall:
    """wgrad(dy, x) -> dw."""
    facts = device_facts(device.index)
    config = best_config(problem)
    assert config is not None
    cut = Cut(problem, config, problem.y_shape, cut_lands=True)
    parts = cut.parts(facts, _MOST_PRODUCTS // config.cols)
    taps = problem.r * problem.s
    smem_bytes = max(cut.stages * cut.stage_bytes, config.warps * lanes.LANES * taps * lanes.ELEM_BYTES)
    top, _, left, _ = problem.padding
    launch = PositionalLaunch(
        source(problem, config), device, cut.slabs * parts, config.threads, smem_bytes, _PARAMS_FORMAT,
        cut.fields(parts, top, left, problem.h),
        (
            cut.boxes(problem.x_shape, x.strides, cut.x_cols, _X_POINTER),
            cut.boxes(problem.y_shape, dy.strides, config.strip_cols, _DY_POINTER),
        ),
    )  # fmt: skip
    strides = strides_of(problem.w_shape, result_layout)
    sum_parts = depthwise_nhwc_wgrad_sum.bind(problem, strides, 1, problem.c, parts, device)
    return summed_call(launch, sum_parts, parts * taps * problem.c, problem.w_shape, strides)
