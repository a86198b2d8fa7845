"""Host half of families/depthwise/march_wgrad.cu: the filter gradient of depthwise layers of few taps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from haloconv.env import device_facts
from haloconv.families.base import BoundCall
from haloconv.families.common import ceil_div, summed_call
from haloconv.families.depthwise import march_form as depthwise_march_form
from haloconv.families.depthwise.march_form import Config, Form, column_constant, common_constants, vectors
from haloconv.families.reduce.sums import bind_sum
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import PositionalLaunch
from haloconv.layout import strides_of
from haloconv.problem import Problem, TensorForm

_START_ROWS = 6  # what starting an item costs, in rows
_END_ROWS = 12  # what adding a block's sums and the parts costs
_FEWEST_ROWS = 4
_MOST_ROWS = 512  # with _MOST_PRODUCTS what bounds the rounding of one fp32 sum
_MOST_PRODUCTS = 2048
_LAST_WAVE = 0.5  # blocks do not end at the same time: waves that the last ones cost
_IDLE_LANES = 1.15  # lanes without filters that wide groups of lanes may have
_PARAMS_FORMAT = "3Q11q14i"


def lanes(form: Form, config: Config) -> int:
    """Neighbouring lanes that have neighbouring filters: as many as leave few lanes idle."""
    if not form.channel_lanes:
        return 1
    groups = form.out_shape[1] // config.channels
    return next(each for each in (32, 16, 8, 4, 2, 1) if ceil_div(groups, each) * each <= _IDLE_LANES * groups)


def source(form: Form, config: Config) -> KernelSource:
    """The specialised text of the kernel. No extent of the image takes part."""
    constants: dict[str, int | str] = {
        **common_constants(form, config),
        "LANES": lanes(form, config),
        "DY_VEC": vectors(form, config).output,
        "DY_COL": column_constant(form, form.output, form.out_shape[1]),
    }
    return kernel_source("depthwise/march_wgrad", "depthwise_march_wgrad", constants)


class Cut(NamedTuple):
    """How the work is cut: strips of a class and their rows, strips that a thread does, parts, blocks of a part."""

    strips: int
    rows: int
    items: int
    items_per_thread: int
    parts: int
    lane_groups: int


def _cuts(form: Form, config: Config) -> Iterator[Cut]:
    n, filters, rows, cols = form.out_shape
    dil, side = form.problem.dilation[0], lanes(form, config)
    slots, lane_groups = config.threads // side, ceil_div(filters, side * config.channels)
    rows = ceil_div(rows, dil)
    fewest = ceil_div(rows, _MOST_ROWS)
    for count in range(fewest, max(fewest, rows // _FEWEST_ROWS) + 1):
        each = config.strip_rows or ceil_div(rows, count)
        strips = ceil_div(rows, each)
        items = strips * dil * n * ceil_div(cols, config.cols)
        most = max(1, min(_MOST_PRODUCTS // (config.cols * each), ceil_div(items, slots)))
        for per_thread in range(1, most + 1):
            yield Cut(strips, each, items, per_thread, ceil_div(items, slots * per_thread), lane_groups)


def cut(form: Form, config: Config, sm_count: int) -> Cut:
    """The cut that ends first: waves of blocks times the rows that a thread reads, halos, starts and ends included."""
    slots = sm_count * config.min_blocks

    def cost(each: Cut) -> float:
        waves = each.parts * each.lane_groups / slots
        rows = each.items_per_thread * (each.rows + form.problem.r - 1 + _START_ROWS) + _END_ROWS
        return (max(1.0, waves) + _LAST_WAVE) * rows

    return min(_cuts(form, config), key=cost)


def form_of(problem: Problem, dy: TensorForm, x: TensorForm, result_layout: str) -> Form:
    """What is marched over. The filter's memory order takes no part."""
    return Form(problem, x, dy, problem.layout == "nhwc")


def bind(
    problem: Problem,
    dy: TensorForm,
    x: TensorForm,
    result_layout: str,
    device: torch.device,
    config: Config | None = None,
) -> BoundCall:
    """wgrad(dy, x) -> dw; without a config with the best."""
    form = form_of(problem, dy, x, result_layout)
    config = config or depthwise_march_form.best_config(form)
    work = cut(form, config, device_facts(device.index).sm_count)
    dil, elem_bytes = problem.dilation[0], problem.dtype.itemsize
    fields = (
        *(*x.strides, *dy.strides, dil * x.strides[2] * elem_bytes, dil * dy.strides[2] * elem_bytes, work.items),
        *(problem.n, problem.h, problem.w, problem.p, problem.q, problem.padding[0], problem.padding[2], dil),
        *(problem.k, ceil_div(problem.q, config.cols), work.strips, work.rows, work.lane_groups, work.items_per_thread),
    )
    grid = work.parts * work.lane_groups
    launch = PositionalLaunch(source(form, config), device, grid, config.threads, 0, _PARAMS_FORMAT, fields)
    dw_shape, dw_strides = problem.w_shape, strides_of(problem.w_shape, result_layout)
    sum_parts = bind_sum(problem.dtype, dw_shape, dw_strides, work.parts, device)
    partial_elems = work.parts * problem.k * problem.r * problem.s
    return summed_call(launch, sum_parts, partial_elems, dw_shape, dw_strides)
