"""Host half of families/depthwise/march_wgrad.cu: the filter gradient of depthwise layers of few taps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from haloconv.families.base import MOST_CONFIGS, BoundCall, Config, config_key
from haloconv.families.common import ceil_div, named
from haloconv.families.depthwise import march_form
from haloconv.families.depthwise.march_form import THREADS, Form, Tiling, column_constant, common_constants, vectors
from haloconv.families.reduce.partials import of_filter, wgrad_call
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape
from haloconv.problem import Request

KERNEL = "depthwise/march_wgrad"
_START_ROWS = 6  # what starting an item costs, in rows
_END_ROWS = 12  # what adding a block's sums and the parts costs
_FEWEST_ROWS = 4
_MOST_ROWS = 512  # with _MOST_PRODUCTS what bounds the rounding of one fp32 sum
_MOST_PRODUCTS = 2048
_LAST_WAVE = 0.5  # blocks do not end at the same time: waves that the last ones cost
_IDLE_LANES = 1.15  # lanes without filters that wide groups of lanes may have


def form_of(request: Request) -> Form:
    """What is marched over. The filter's memory order takes no part."""
    return Form(request.problem, request.second, request.first, request.problem.layout == "nhwc")


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, else a sentence that says why not."""
    if request.problem.direction != "wgrad":
        return "this is for filter gradients"
    return march_form.why_not(request)


def configs(request: Request) -> list[Config]:
    """The configs that compute few idle columns, best first; none if the kernel does not take the request."""
    if why_not(request) is not None:
        return []
    form = form_of(request)
    return [Config(KERNEL, config_key(each), (form, each)) for each in march_form.good_tilings(form)][:MOST_CONFIGS]


def lanes(form: Form, tiling: Tiling) -> int:
    """Neighbouring lanes that have neighbouring filters: as many as leave few lanes idle."""
    if not form.channel_lanes:
        return 1
    groups = form.out_shape[1] // tiling.channels
    return next(each for each in (32, 16, 8, 4, 2, 1) if ceil_div(groups, each) * each <= _IDLE_LANES * groups)


class Cut(NamedTuple):
    """How the work is cut: strips of a class and their rows, strips that a thread does, parts, blocks of a part."""

    strips: int
    rows: int
    items: int
    items_per_thread: int
    parts: int
    lane_groups: int


def _cuts(form: Form, tiling: Tiling) -> Iterator[Cut]:
    n, filters, rows, cols = form.out_shape
    dil, side = form.problem.dilation[0], lanes(form, tiling)
    slots, lane_groups = THREADS // side, ceil_div(filters, side * tiling.channels)
    rows = ceil_div(rows, dil)
    fewest = ceil_div(rows, _MOST_ROWS)
    for count in range(fewest, max(fewest, rows // _FEWEST_ROWS) + 1):
        each = tiling.strip_rows or ceil_div(rows, count)
        strips = ceil_div(rows, each)
        items = strips * dil * n * ceil_div(cols, tiling.cols)
        most = max(1, min(_MOST_PRODUCTS // (tiling.cols * each), ceil_div(items, slots)))
        for per_thread in range(1, most + 1):
            yield Cut(strips, each, items, per_thread, ceil_div(items, slots * per_thread), lane_groups)


def cut(form: Form, tiling: Tiling, sm_count: int) -> Cut:
    """The cut that ends first: waves of blocks times the rows that a thread reads, halos, starts and ends included."""
    slots = sm_count * tiling.min_blocks

    def cost(each: Cut) -> float:
        waves = each.parts * each.lane_groups / slots
        rows = each.items_per_thread * (each.rows + form.problem.r - 1 + _START_ROWS) + _END_ROWS
        return (max(1.0, waves) + _LAST_WAVE) * rows

    return min(_cuts(form, tiling), key=cost)


def source(form: Form, tiling: Tiling) -> KernelSource:
    """The specialised source of the kernel. No extent of the image takes part."""
    constants: dict[str, int | str] = {
        **common_constants(form, tiling),
        "LANES": lanes(form, tiling),
        "DY_VEC": vectors(form, tiling).output,
        "DY_COL": column_constant(form, form.output, form.out_shape[1]),
    }
    return kernel_source(KERNEL, "depthwise_march_wgrad", constants)


def bind(request: Request, config: Config) -> BoundCall:
    """wgrad(dy, x) -> dw."""
    problem, dy, x, (form, tiling) = request.problem, request.first, request.second, config.derived
    work = cut(form, tiling, request.facts.sm_count)
    dil = problem.dilation[0]
    step_bytes = dil * problem.dtype.itemsize
    fields = {
        **named("x", "nchw", x.strides),
        **named("y", "nkpq", dy.strides),
        "x_step_bytes": step_bytes * x.strides[2],
        "y_step_bytes": step_bytes * dy.strides[2],
        "items": work.items,
        **{"n": problem.n, "h": problem.h, "w": problem.w, "p": problem.p, "q": problem.q},
        **{"pad_top": problem.padding[0], "pad_left": problem.padding[2], "dil_h": dil},
        **{"filters": problem.k, "col_groups": ceil_div(problem.q, tiling.cols)},
        **{"strips": work.strips, "strip_rows": work.rows},
        **{"lane_groups": work.lane_groups, "items_per_thread": work.items_per_thread},
    }
    shape = LaunchShape(work.parts * work.lane_groups, THREADS)
    launch = Launch(source(form, tiling), request.device, shape, fields)
    return wgrad_call(launch, request, of_filter(request, work.parts))
