"""Host half of families/depthwise/march.cu: fprop and dgrad of depthwise layers of few taps, in registers alone."""

from __future__ import annotations

from typing import NamedTuple

import torch

from haloconv.env import device_facts
from haloconv.families.base import BoundCall
from haloconv.families.common import ceil_div, dense_call
from haloconv.families.depthwise import march_form as depthwise_march_form
from haloconv.families.depthwise.march_form import Config, Form, column_constant, common_constants, vectors
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import PositionalLaunch
from haloconv.layout import strides_of
from haloconv.problem import Problem, TensorForm

_START_ROWS = 4  # what starting a strip costs, in rows
_FEWEST_ROWS = 4
_LAST_WAVE = 0.5  # blocks do not end at the same time: waves that the last ones cost
_SHORT_ROWS, _SHORT_PAIR_ROWS = 8, 14  # of a strip that is cut short; the latter in nhwc and 16 bits
_BEYOND_L2_BYTES = 96 << 20  # of input and output
_PARAMS_FORMAT = "4Q14q11i"


def source(form: Form, config: Config) -> KernelSource:
    """The specialised text of the kernel. No extent of the image takes part."""
    constants: dict[str, int | str] = {
        **common_constants(form, config),
        "DGRAD": int(form.scatters),
        "PHASE_W": form.phase,
        "OUT_VEC": vectors(form, config).output,
        "OUT_COL": column_constant(form, form.output, form.out_shape[1]),
        "CHANNEL_LANES": int(form.channel_lanes),
        "HAS_BIAS": int(form.problem.bias),
    }
    return kernel_source("depthwise/march", "depthwise_march", constants)


class Strips(NamedTuple):
    """How the rows of a class are cut: into how many strips, of how many rows."""

    count: int
    rows: int


def class_rows(form: Form) -> int:
    """Output rows of the longest class; in dgrad with those above the image that its first step completes."""
    (dil, _), (step, _) = form.problem.dilation, form.problem.stride
    if not form.scatters:
        return ceil_div(form.out_shape[2], dil)
    above = [form.problem.padding[0] - cls for cls in range(dil)]  # rows, of which class row 0 lies above the image
    return max(ceil_div(form.out_shape[2] + each, dil) - max(each, 0) // dil // step * step for each in above)


def cuts_short(form: Form) -> bool:
    """Whether strips are short, whatever a wave holds: neighbouring blocks then move memory page by page.

    Measured on an H200 (2026-11-22, 3x3 on maps of 14 to 224 beyond the L2): 1 to 22 % faster, but in nhwc and 16 bits
    without a stride, where whole columns are.
    """
    problem = form.problem
    few = problem.r * problem.s <= 9 and problem.dilation == (1, 1)
    pairs = form.channel_lanes and problem.dtype.itemsize == 2 and max(problem.stride) == 1
    return few and not pairs and beyond_l2(problem)


def beyond_l2(problem: Problem) -> bool:
    """Whether input and output are far larger than the L2 of an H200."""
    elems = problem.n * (problem.c * problem.h * problem.w + problem.k * problem.p * problem.q)
    return elems * problem.dtype.itemsize >= _BEYOND_L2_BYTES


def strips(form: Form, config: Config, blocks: int, sm_count: int) -> Strips:
    """The cut that ends first: waves of blocks times the rows that a strip reads, halo and start included.

    ``blocks`` are those of one strip of one class.
    """
    rows, step = class_rows(form), form.problem.stride[0] if form.scatters else 1
    short = _SHORT_PAIR_ROWS if form.channel_lanes and form.problem.dtype.itemsize == 2 else _SHORT_ROWS
    wanted = config.strip_rows or (short if cuts_short(form) else 0)
    if wanted:
        each = ceil_div(wanted, step) * step
        return Strips(ceil_div(rows, each), each)
    slots = sm_count * config.min_blocks

    def cost(cut: Strips) -> float:
        waves = blocks * cut.count * form.problem.dilation[0] / slots
        return (max(1.0, waves) + _LAST_WAVE) * (cut.rows + form.problem.r - 1 + _START_ROWS)

    cuts = []
    for count in range(1, max(1, rows // max(step, _FEWEST_ROWS)) + 1):
        each = ceil_div(ceil_div(rows, count), step) * step
        cuts.append(Strips(ceil_div(rows, each), each))
    return min(cuts, key=cost)


def form_of(problem: Problem, first: TensorForm, w: TensorForm, result_layout: str) -> Form:
    """What is marched over, and the result, which is dense and aligned."""
    out_shape = problem.x_shape if problem.direction == "dgrad" else problem.y_shape
    return Form(problem, first, TensorForm(strides_of(out_shape, result_layout), True), result_layout == "nhwc")


def bind(
    problem: Problem,
    first: TensorForm,
    w: TensorForm,
    result_layout: str,
    device: torch.device,
    config: Config | None = None,
) -> BoundCall:
    """fprop(x, w, b) -> y or dgrad(dy, w) -> dx; without a config with the best."""
    form = form_of(problem, first, w, result_layout)
    out_shape, out_strides = form.out_shape, form.output.strides
    config = config or depthwise_march_form.best_config(form)
    n, channels, rows, cols = out_shape
    groups = (channels // config.channels, ceil_div(cols, config.cols))
    threads = n * groups[0] * groups[1]
    blocks = ceil_div(threads, config.threads)
    cut = strips(form, config, blocks, device_facts(device.index).sm_count)
    dil, elem_bytes = problem.dilation[0], problem.dtype.itemsize
    fields = (
        *(*first.strides, w.strides[0], *w.strides[2:], *out_strides),
        *(dil * first.strides[2] * elem_bytes, dil * out_strides[2] * elem_bytes, threads),
        *(*form.in_shape[2:], rows, cols, problem.padding[0], problem.padding[2], dil, *groups, *cut),
    )
    grid = blocks * cut.count * dil
    launch = PositionalLaunch(source(form, config), device, grid, config.threads, 0, _PARAMS_FORMAT, fields)
    return dense_call(launch, problem, out_shape, out_strides)
