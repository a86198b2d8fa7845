"""Host half of families/halo_sm90/wgrad/wgrad.cu: the weight gradient on Hopper's tensor cores.

fp32 tensors are multiplied in TF32, or as sums of two TF32 values, fp16 and bf16 in their own type; sums are fp32, in
an order that the problem and the number of multiprocessors fix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from haloconv import support
from haloconv.families.base import MOST_CONFIGS, BoundCall, Config
from haloconv.families.common import ELEMENTS, ceil_div, few_apart, named, why_not_direction
from haloconv.families.halo_sm90.edges import edge_constants
from haloconv.families.halo_sm90.terms import TERMS
from haloconv.families.halo_sm90.wgrad import arrange
from haloconv.families.halo_sm90.wgrad.arrange import Arrangement, Copies
from haloconv.families.halo_sm90.wgrad.cut import Cut, Layer, classes_of, cut_of
from haloconv.families.halo_sm90.wgrad.operand import LOADED, Operand, summed
from haloconv.families.halo_sm90.wgrad.tile import Stage, Tile, lines_of, row_steps, stage_of, tiles
from haloconv.jit import BoxMap, DataType, KernelSource, Swizzle, kernel_source
from haloconv.jit.launch import Launch, LaunchShape, Value
from haloconv.problem import ZEROS, Direction, Problem, Request, TensorForm

KERNEL = "halo_sm90/wgrad"
DIRECTIONS: tuple[Direction, ...] = ("wgrad",)
_ARCH = "sm_90a"
_SHIPPED_SMEM_BYTES, _SHIPPED_SM_COUNT = 227 << 10, 132  # of a block; of an NVIDIA H200
_LEAST_CHANNELS = 8  # and filters, of a group: of fewer most of a product would be zeros
_LONGEST_ROW = 1 << 30  # pixels: positions in a row are 32-bit sums of two terms
_X_POINTER, _Y_POINTER = 0, 1  # of a launch
_SUM_THREADS, _PART_LANES = 256, 8  # of wgrad_sum.cu: of a block, of a sum
_MAP_TYPES = {  # TMA rounds fp32 to TF32
    torch.float32: DataType.TFLOAT32,
    torch.float16: DataType.FLOAT16,
    torch.bfloat16: DataType.BFLOAT16,
}
_SWIZZLES = {16: Swizzle.NONE, 32: Swizzle.B32, 64: Swizzle.B64, 128: Swizzle.B128}


def why_not(request: Request) -> str | None:
    """None if the kernel takes the request, whatever its tensors' forms, else a sentence that says why not."""
    problem, facts = request.problem, request.facts
    reason = why_not_direction(problem, *DIRECTIONS) or support.why_no_tensor_core_products(problem, ("tf32", *TERMS))
    if reason is not None:
        return reason
    if facts.arch != _ARCH:
        return "the device is no Hopper GPU (compute capability 9.0)"
    if min(problem.c_per_group, problem.k_per_group) < _LEAST_CHANNELS:
        return f"the weight gradient of halo_sm90 takes groups of at least {_LEAST_CHANNELS} channels and filters"
    if not any(stage_of(problem, tile, LOADED, LOADED, facts.max_smem_bytes) for tile in tiles(problem)):
        return "no line with its halo fits shared memory"
    return None


class Tiling(NamedTuple):
    """A layer's tiles: what a block sums, how lines come, how they are dealt out; and the cost model's cycles.

    ``arrangement`` is that of the copies of x and dy that are multiplied in their place, None if there are none.
    """

    tile: Tile
    stage: Stage
    cut: Cut
    cycles: float
    arrangement: Arrangement | None = None

    def __str__(self) -> str:
        return str(self.tile) if self.arrangement is None else f"{self.tile} {self.arrangement}"


def configs(request: Request) -> list[Config]:
    """The best tilings by the cost model, best first, that differ by more than how warpgroups divide a tile."""
    return [Config(KERNEL, str(each), each) for each in best(tilings(request))]


def best(found: list[Tiling]) -> list[Tiling]:
    """The first of each kind."""
    return few_apart(found, _kind, MOST_CONFIGS)


def _kind(one: Tiling) -> tuple[int, int, int, bool]:
    return one.tile.rows, one.tile.filters, one.tile.columns, one.arrangement is None


def tilings(request: Request) -> list[Tiling]:
    """All of them, best first."""
    return _every_tiling(request, request.facts.max_smem_bytes, request.facts.sm_count)


@lru_cache(maxsize=256)
def _every_tiling(request: Request, max_smem_bytes: int, sm_count: int) -> list[Tiling]:
    """Every tiling, best first: of x and dy as they are, and of copies of them, which have zeros around images."""
    problem = request.problem
    found = _tilings(joined(request), max_smem_bytes, sm_count)
    for how in arrange.arrangements(problem) if request.modes == ZEROS else ():
        more = arrange.cycles(problem, how)
        for each in _tilings(_multiplied(request, how), max_smem_bytes, sm_count):
            stage = replace(each.stage, image_columns=how.columns)
            found.append(Tiling(each.tile, stage, each.cut, each.cycles + more, how))
    return sorted(found, key=lambda each: each.cycles)


def _multiplied(request: Request, how: Arrangement | None) -> Request:
    """The request of what is multiplied: of copies if there are any, of rows end to end."""
    return joined(request if how is None else arrange.arranged(request, how))


def joined(request: Request) -> Request:
    """The request of a 1x1 layer as a sum over longer rows: of whole images, or of the batch.

    Rows are joined where they follow one another in both tensors, and images too: then lines are full and begin at
    multiples of 16 bytes, however few columns the images have. Pixels that a stride leaves out are taken for what lies
    between two pixels, but those between neighbours in memory. Other layers stay as they are.
    """
    problem = request.problem
    if (problem.r, problem.s) != (1, 1) or any(problem.padding):
        return request
    one, x = _without_stride(replace(problem, dilation=(1, 1)), request.second)
    dy = request.first
    for axis in ("h", "n"):
        if one.stride != (1, 1) or not all(_follow_one_another(one, form, axis) for form in (dy, x)):
            break
        dy, x = (_joined_form(one, form, axis) for form in (dy, x))
        one = replace(one, **{axis: 1, "w": one.w * getattr(one, axis)})
    return replace(request, problem=one, first=dy, second=x)


def _without_stride(problem: Problem, x: TensorForm) -> tuple[Problem, TensorForm]:
    """A 1x1 layer that takes the rows, and if pixels are no neighbours the columns, that its outputs meet."""
    steps = list(x.strides)
    (down, across), cols = problem.stride, problem.w
    steps[2] *= down
    if steps[3] != 1:
        steps[3], across, cols = steps[3] * across, 1, problem.q
    return replace(problem, h=problem.p, w=cols, stride=(1, across)), x._replace(strides=tuple(steps))


def _follow_one_another(problem: Problem, form: TensorForm, axis: str) -> bool:
    """Whether the rows, or the images of one row, of a tensor are one row of pixels at a constant distance."""
    count, step = getattr(problem, axis), form.strides["nchw".index(axis)]
    return problem.w * count < _LONGEST_ROW and (1 in (count, problem.w) or step == problem.w * form.strides[3])


def _joined_form(problem: Problem, form: TensorForm, axis: str) -> TensorForm:
    """The form of the tensor whose rows, or images of one row, are joined."""
    at = "nchw".index(axis)
    steps = list(form.strides)
    if problem.w == 1:
        steps[3] = steps[at]
    steps[at] = steps[3] * problem.w * getattr(problem, axis)
    return form._replace(strides=tuple(steps))


def _tilings(request: Request, max_smem_bytes: int, sm_count: int) -> list[Tiling]:
    problem = request.problem
    x = replace(Operand.of(problem, request.second, problem.x_shape, problem.c_per_group), modes=request.modes)
    dy = Operand.of(problem, request.first, problem.y_shape, problem.k_per_group, is_dy=True)
    lines = summed(problem, request.modes)
    found = _staged(lines, x, dy, max_smem_bytes, sm_count)
    if not found:  # lines that are shifted need more room than loaded ones
        x = x.loaded(problem, request.second, problem.x_shape, problem.c_per_group)
        dy = dy.loaded(problem, request.first, problem.y_shape, problem.k_per_group)
        found = _staged(lines, x, dy, max_smem_bytes, sm_count)
    return sorted(found, key=lambda each: each.cycles)


def _staged(problem: Problem, x: Operand, dy: Operand, max_smem_bytes: int, sm_count: int) -> list[Tiling]:
    """Every tile whose lines fit shared memory when x and dy come like this."""
    stages = ((tile, stage_of(problem, tile, x, dy, max_smem_bytes)) for tile in tiles(problem))
    short, classes = any(True for _ in arrange.arrangements(problem)), classes_of(problem)
    lines, q = ceil_div(lines_of(problem), row_steps(problem)[1]), problem.q
    layer = Layer(problem, problem.n * classes, lines, q, sm_count, short)
    return [Tiling(tile, stage, *cut_of(layer, tile, stage)) for tile, stage in stages if stage]


def source(problem: Problem, tile: Tile, stage: Stage) -> KernelSource:
    """The specialised source: of the layer's own extents none takes part but through the tile."""
    constants = {
        **_sum_order(problem, tile),
        "SPLIT_P": tile.split[3],
        "STRIDE_W": problem.stride[1],
        "STRIP": _strip(problem, stage),
        "X_PITCH": stage.x_pitch,
        "BOX_ROWS": stage.box_rows,
        "STAGES": stage.stages,
        "X_LOADS": stage.x.loads,
        "Y_LOADS": stage.dy.loads,
        "X_PLANES": -1 if stage.x.inner else stage.x.planes,
        "Y_PLANES": -1 if stage.dy.transposed or stage.dy.inner else stage.dy.planes,
        "X_RAW": stage.raw[0],
        "Y_RAW": stage.raw[1],
        "IMAGE_COLUMNS": stage.image_columns,
        "OPERAND_TERMS": stage.terms,
    }
    if stage.x.modes == ZEROS:
        return kernel_source(KERNEL, "halo_sm90_wgrad", constants)
    constants |= edge_constants(stage.x.modes)
    return kernel_source("halo_sm90/wgrad_edges", "halo_sm90_wgrad", constants)


def _strip(problem: Problem, stage: Stage) -> int:
    """Pixels of a line of dy in shared memory: of several lines to a box those of the steps that all have."""
    return stage.strip if stage.box_rows == 1 else ceil_div(problem.q, stage.depth) * stage.depth


def sum_source(problem: Problem, tile: Tile, stage: Stage, part_lanes: int) -> KernelSource:
    """The source of the kernel that adds the parts."""
    constants = {**_sum_order(problem, tile), "SPREAD_ROWS": _spreads_rows(problem, stage), "PART_LANES": part_lanes}
    return kernel_source("halo_sm90/wgrad_sum", "halo_sm90_wgrad_sum", constants)


def _spreads_rows(problem: Problem, stage: Stage) -> int:
    """Whether channels of neighbouring rows of M are in different banks, as wgrad.cu has it."""
    return int(stage.x.inner and problem.dtype == torch.float32 and problem.stride[1] % 2 == 1)


def _sum_order(problem: Problem, tile: Tile) -> dict[str, int | str]:
    """The constants that the order of partial sums depends on."""
    return {
        "ELEM": ELEMENTS[problem.dtype],
        "ROWS": tile.rows,
        "CHANNELS": tile.channels,
        "FILTERS": tile.filters,
        "COLUMN_GROUPS": tile.column_groups,
        "SPLIT_S": tile.split[0],
        "SPLIT_C": tile.split[1],
        "SPLIT_K": tile.split[2],
    }


def sources(request: Request) -> Iterator[KernelSource]:
    """The sources that the request would choose on an NVIDIA H200."""
    for each in _every_tiling(request, _SHIPPED_SMEM_BYTES, _SHIPPED_SM_COUNT)[:1]:
        problem = _multiplied(request, each.arrangement).problem
        yield source(problem, each.tile, each.stage)
        yield sum_source(problem, each.tile, each.stage, _PART_LANES)
        if each.arrangement is not None:
            yield arrange.source(problem)


def bind(request: Request, config: Config) -> BoundCall:
    """wgrad(dy, x) -> dw."""
    tile, stage, cut, _, arrangement = config.derived
    copies = None if arrangement is None else arrange.bind(request, arrangement)
    request = _multiplied(request, arrangement)
    problem = request.problem
    maps = {"x_map": _x_map(request, tile, stage), "y_map": _y_map(request, tile, stage)}
    shape = LaunchShape(tile.blocks(problem) * cut.parts, tile.threads, stage.smem_bytes)
    launch = Launch(
        source(problem, tile, stage),
        request.device,
        shape,
        _fields(request, tile, cut),
        {name: each for name, each in maps.items() if each is not None},
    )
    part_sums, parts = tile.sums(problem), cut.parts * tile.split[3]
    lanes = _PART_LANES if parts >= _PART_LANES else 1
    sum_shape = LaunchShape(part_sums * lanes // _SUM_THREADS, _SUM_THREADS)
    fields = _sum_fields(request, tile, part_sums, parts)
    sum_parts = Launch(sum_source(problem, tile, stage, lanes), request.device, sum_shape, fields, pdl=True)
    return _call(launch, sum_parts, request, parts * part_sums, copies)


def _call(launch: Launch, sum_parts: Launch, request: Request, partials: int, copies: Copies | None) -> BoundCall:
    """wgrad(dy, x) -> dw of a launch that writes so many partial sums, and of one that adds them up.

    It reads the copies, if there are any. Their room is PyTorch's again when the launches are in the stream.
    """
    shape, strides = request.result_shape, request.result_strides

    def wgrad(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x_from, dy_from, _room = (x.data_ptr(), dy.data_ptr(), None) if copies is None else copies(dy, x)
        sums = x.new_empty(partials, dtype=torch.float32)
        launch(x_from, dy_from, sums.data_ptr())
        dw = x.new_empty_strided(shape, strides)
        sum_parts(dw.data_ptr(), sums.data_ptr())
        return dw

    return wgrad


def _sum_fields(request: Request, tile: Tile, part_sums: int, parts: int) -> dict[str, Value]:
    problem = request.problem
    return {
        **named("w", "kcrs", request.result_strides),
        **{"part_sums": part_sums, "parts": parts, "channels": problem.c_per_group, "filters": problem.k_per_group},
        **{"taps_r": problem.r, "taps_s": problem.s, "blocks": tile.blocks_of(problem)._asdict()},
    }


def _fields(request: Request, tile: Tile, cut: Cut) -> dict[str, Value]:
    problem = summed(request.problem, request.modes)
    strips = cut.column_strips * classes_of(problem)
    per_block, longer = divmod(problem.n * strips * cut.bands, cut.parts)
    return {
        **named("x", "nchw", request.second.strides),
        **named("y", "nkpq", request.first.strides),
        **{"h": problem.h, "w": problem.w, "rows": problem.p, "cols": problem.q},
        **{"channels": problem.c_per_group, "filters": problem.k_per_group},
        **{"taps_r": problem.r, "taps_s": problem.s, "stride_h": problem.stride[0]},
        **{"dil_h": problem.dilation[0], "dil_w": problem.dilation[1]},
        **{"pad_top": problem.padding[0], "pad_left": problem.padding[2], "line_step": row_steps(problem)[1]},
        "blocks": tile.blocks_of(problem)._asdict(),
        "column_strips": cut.column_strips,
        "cut": {
            "slabs": tile.blocks(problem),
            "strips": strips,
            "bands": cut.bands,
            "per_block": per_block,
            "longer": longer,
        },
        **_edge_fields(request),
    }


def _edge_fields(request: Request) -> dict[str, Value]:
    """The columns that outputs read, rows that count as x's above the image, and the image's."""
    problem = request.problem
    if request.modes == ZEROS:
        return {}
    reach = (problem.q - 1) * problem.stride[1] + (problem.s - 1) * problem.dilation[1] + 1
    top, _, left, _ = problem.padding
    of_rows = {"edge_top": 0 if request.modes[0] == "zeros" else top, "image_rows": problem.h}
    return {"edge_from": -left, "edge_to": reach - left, **of_rows}


def _map_type(problem: Problem) -> DataType:
    """What TMA takes elements for. With several terms they come as they are."""
    return DataType.FLOAT32 if problem.precision in TERMS else _MAP_TYPES[problem.dtype]


def _x_map(request: Request, tile: Tile, stage: Stage) -> BoxMap | None:
    problem, one = request.problem, stage.x
    if one.loads:
        return None
    size = problem.dtype.itemsize
    n, c, h, w = problem.x_shape
    x_n, x_c, x_h, x_w = (step * size for step in one.steps)
    kind, channels = _map_type(problem), tile.split[1] * tile.channels
    if one.planes:
        return _raw_map(problem, one, problem.x_shape, (channels, stage.raw[0]), _X_POINTER)
    if one.inner:
        span = min(tile.channels, 128 // size)
        extents, strides, box = (c, w, h, n), (x_w, x_h, x_n), (span, stage.x_pitch, stage.x_box_rows, 1)
        return BoxMap(kind, extents, strides, box, _SWIZZLES[span * size], _X_POINTER)
    extents, strides, box = (w, c, h, n), (x_c, x_h, x_n), (stage.x_pitch, channels, stage.x_box_rows, 1)
    return BoxMap(kind, extents, strides, box, Swizzle.NONE, _X_POINTER)


def _raw_map(
    problem: Problem, one: Operand, shape: tuple[int, int, int, int], raw: tuple[int, int], pointer: int
) -> BoxMap:
    """Boxes of every ``one.planes``-th channel, whose planes are one long row; ``raw``: their channels and pixels."""
    size = problem.dtype.itemsize
    (n, c, h, w), (rows, pixels) = shape, raw
    extents = (one.planes * h * w, c // one.planes, n)
    strides = (one.planes * h * w * size, one.steps[0] * size)
    box = (pixels, rows // one.planes, 1)
    return BoxMap(_map_type(problem), extents, strides, box, Swizzle.NONE, pointer)


def _y_map(request: Request, tile: Tile, stage: Stage) -> BoxMap | None:
    problem, one = request.problem, stage.dy
    if one.loads:
        return None
    size = problem.dtype.itemsize
    n, k, p, q = problem.y_shape
    y_n, y_k, y_p, y_q = (step * size for step in one.steps)
    kind = _map_type(problem)
    if one.planes:
        return _raw_map(problem, one, problem.y_shape, (tile.split[2] * tile.filters, stage.raw[1]), _Y_POINTER)
    if one.inner or one.transposed:
        span = 32 if one.transposed else min(tile.filters, 128 // size)
        pixels = stage.raw[1] if one.transposed else _strip(problem, stage)
        extents, strides, box = (k, q, p, n), (y_q, y_p, y_n), (span, pixels, stage.box_rows, 1)
        return BoxMap(kind, extents, strides, box, _SWIZZLES[span * size], _Y_POINTER)
    filters = tile.split[2] * tile.filters
    extents, strides, box = (q, k, p, n), (y_k, y_p, y_n), (128 // size, filters, stage.box_rows, 1)
    return BoxMap(kind, extents, strides, box, Swizzle.B128, _Y_POINTER)
