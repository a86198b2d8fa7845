"""Host half of families/depthwise/lanes.cu: fprop and dgrad of depthwise layers in fp32 and channels_last."""

from __future__ import annotations

import torch

from haloconv.env import DeviceFacts, device_facts
from haloconv.families.base import BoundCall
from haloconv.families.common import dense_call
from haloconv.families.depthwise import lanes_cut as lanes
from haloconv.families.depthwise.lanes_cut import Config, Cut
from haloconv.families.depthwise.strips import padding, shapes
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import PositionalLaunch
from haloconv.layout import strides_of
from haloconv.problem import Problem, TensorForm

_PARAMS_FORMAT = f"4Q3q{lanes.CUT_FORMAT}"
_IN_POINTER = 0
_WARPS, _WARPS_OF_MANY_TAPS = 20, 12  # of a block, at most
_MOST_Q, _MOST_Q_OF_FEW_CHANNELS = 4, 8  # of them beside each other in columns: the others take channels
_FEW_ROWS_WARPS = 16  # of more warps a thread has two rows


def why_not(problem: Problem, side: TensorForm, result_layout: str, facts: DeviceFacts) -> str | None:
    """None if the kernel takes the problem on the device, else a sentence that says why not."""
    if problem.direction == "wgrad" or result_layout != "nhwc":
        return "this is for fprop and dgrad in nhwc"
    reason = lanes.why_not(problem, (side,), facts)
    reason = reason or lanes.too_small(problem, shapes(problem)[1])
    if reason is None and best_config(problem) is None:
        reason = "the filter does not fit registers, or the rows that it meets shared memory"
    return reason


def best_config(problem: Problem) -> Config | None:
    """The best config that fits, by a sweep on an NVIDIA H200 (2026-11-22); None if none does.

    Blocks take as many channels as they can, so that they read and write long pieces of memory.
    """
    extents = shapes(problem)[1]
    many_taps = lanes.has_many_taps(problem)
    most = _WARPS_OF_MANY_TAPS if many_taps else _WARPS
    few_channels = extents[1] <= lanes.LANES * (1 if many_taps else 2)
    cols, warps_q = lanes.columns(extents[3], problem.s, _MOST_Q_OF_FEW_CHANNELS if few_channels else _MOST_Q)
    warps_c = lanes.channel_warps(extents[1], most // warps_q)
    for warps_r in range(min(2, most // (warps_q * warps_c)), 0, -1):
        tiles = lanes.ROWS if warps_q * warps_c * warps_r <= _FEW_ROWS_WARPS else lanes.ROWS[1:]
        found = (Config(rows, cols, warps_q, warps_c, warps_r) for rows in tiles)
        fitting = [each for each in found if _fits(problem, each)]
        if fitting:
            return min(fitting, key=lambda each: lanes.idle_rows_cost(each, extents[2]))
    return None


def _fits(problem: Problem, config: Config) -> bool:
    cut = Cut(problem, config, shapes(problem)[1])
    return lanes.fits(config, problem) and cut.stages >= cut.window_rows + config.band


def source(problem: Problem, config: Config) -> KernelSource:
    """The specialised text of the kernel. No extent of the image takes part."""
    own = {"DGRAD": int(problem.direction == "dgrad"), "HAS_BIAS": int(problem.bias)}
    return kernel_source("depthwise/lanes", "depthwise_lanes", {**lanes.constants(problem, config), **own})


def bind(problem: Problem, first: TensorForm, w: TensorForm, result_layout: str, device: torch.device) -> BoundCall:
    """fprop(x, w, b) -> y or dgrad(dy, w) -> dx."""
    facts = device_facts(device.index)
    config = best_config(problem)
    assert config is not None
    in_shape, out_shape = shapes(problem)
    cut = Cut(problem, config, out_shape)
    parts = cut.parts(facts)
    fields = (w.strides[0], *w.strides[2:], *cut.fields(parts, *padding(problem), in_shape[2]))
    text, grid, smem_bytes = source(problem, config), cut.slabs * parts, cut.stages * cut.stage_bytes
    maps = (cut.boxes(in_shape, first.strides, cut.x_cols, _IN_POINTER),)
    launch = PositionalLaunch(text, device, grid, config.threads, smem_bytes, _PARAMS_FORMAT, fields, maps)
    return dense_call(launch, problem, out_shape, strides_of(out_shape, result_layout))
