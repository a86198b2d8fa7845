"""Host half of families/depthwise/march.cu: fprop and dgrad of depthwise layers of few taps, in registers alone."""

from __future__ import annotations

from typing import NamedTuple

from haloconv.families.base import MOST_CONFIGS, BoundCall, Config, config_key
from haloconv.families.common import ceil_div, named
from haloconv.families.depthwise import finish, march_form
from haloconv.families.depthwise.layer import beyond_l2
from haloconv.families.depthwise.march_form import THREADS, Form, Tiling, column_constant, common_constants, vectors
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape
from haloconv.problem import Request, TensorForm

KERNEL = "depthwise/march"
_START_ROWS = 4  # what starting a strip costs, in rows
_FEWEST_ROWS = 4
_LAST_WAVE = 0.5  # blocks do not end at the same time: waves that the last ones cost


def form_of(request: Request) -> Form:
    """What is marched over, and the result, which is dense and aligned."""
    result = TensorForm(request.result_strides, True)
    return Form(request.problem, request.first, result, request.result_layout == "nhwc")


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, else a sentence that says why not."""
    if request.problem.direction == "wgrad":
        return "this is for fprop and dgrad"
    return march_form.why_not(request)


def configs(request: Request) -> list[Config]:
    """The configs that compute few idle columns, best first; none if the kernel does not take the request."""
    if why_not(request) is not None:
        return []
    form = form_of(request)
    return [Config(KERNEL, config_key(each), (form, each)) for each in march_form.good_tilings(form)][:MOST_CONFIGS]


class Strips(NamedTuple):
    """How the rows of a class are cut: into how many strips, of how many rows."""

    number: int
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


def strips(form: Form, tiling: Tiling, blocks: int, sm_count: int) -> Strips:
    """The cut that ends first: waves of blocks times the rows that a strip reads, halo and start included.

    ``blocks`` are those of one strip of one class.
    """
    rows, step = class_rows(form), form.problem.stride[0] if form.scatters else 1
    short = 14 if form.channel_lanes and form.problem.dtype.itemsize == 2 else 8  # rows, measured as in cuts_short
    wanted = tiling.strip_rows or (short if cuts_short(form) else 0)
    if wanted:
        each = ceil_div(wanted, step) * step
        return Strips(ceil_div(rows, each), each)
    slots = sm_count * tiling.min_blocks

    def cost(cut: Strips) -> float:
        waves = blocks * cut.number * form.problem.dilation[0] / slots
        return (max(1.0, waves) + _LAST_WAVE) * (cut.rows + form.problem.r - 1 + _START_ROWS)

    cuts = []
    for count in range(1, max(1, rows // max(step, _FEWEST_ROWS)) + 1):
        each = ceil_div(ceil_div(rows, count), step) * step
        cuts.append(Strips(ceil_div(rows, each), each))
    return min(cuts, key=cost)


def source(form: Form, tiling: Tiling) -> KernelSource:
    """The specialised source of the kernel. No extent of the image takes part."""
    epilogue = finish.constants(form.problem)  # of fprop alone, which says what the others are
    constants: dict[str, int | str] = {
        **common_constants(form, tiling),
        **({} if epilogue else {"DGRAD": int(form.scatters), "PHASE_W": form.phase}),
        "OUT_VEC": vectors(form, tiling).output,
        "OUT_COL": column_constant(form, form.output, form.out_shape[1]),
        "CHANNEL_LANES": int(form.channel_lanes),
        **(epilogue or {"HAS_BIAS": int(form.problem.bias)}),
    }
    return kernel_source(KERNEL, "depthwise_march", constants)


def bind(request: Request, config: Config) -> BoundCall:
    """fprop(x, w, b) -> y, with an epilogue, or dgrad(dy, w) -> dx, with a bias: ``finish.call``."""
    problem, form, (_, tiling) = request.problem, form_of(request), config.derived  # chosen without dgrad's bias
    (n, channels, rows, cols), (_, _, in_rows, in_cols) = form.out_shape, form.in_shape
    channel_groups, col_groups = channels // tiling.channels, ceil_div(cols, tiling.cols)
    threads = n * channel_groups * col_groups
    blocks = ceil_div(threads, THREADS)
    cut = strips(form, tiling, blocks, request.facts.sm_count)
    dil = problem.dilation[0]
    step_bytes = dil * problem.dtype.itemsize
    fields = {
        **named("in", "nchw", form.input.strides),
        **named("w", "k.rs", request.second.strides),
        **named("out", "nchw", form.output.strides),
        "in_step_bytes": step_bytes * form.input.strides[2],
        "out_step_bytes": step_bytes * form.output.strides[2],
        "threads": threads,
        **{"in_rows": in_rows, "in_cols": in_cols, "out_rows": rows, "out_cols": cols},
        **{"pad_top": problem.padding[0], "pad_left": problem.padding[2], "dil_h": dil},
        **{"channel_groups": channel_groups, "col_groups": col_groups},
        **{"strips": cut.number, "strip_rows": cut.rows},
    }
    shape = LaunchShape(blocks * cut.number * dil, THREADS)
    launch = Launch(source(form, tiling), request.device, shape, fields)
    return finish.call(launch, request)
