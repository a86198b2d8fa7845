"""Which tilings a launch of halo_sm90 may have, and the cost model that orders them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import gcd

from haloconv.families.common import ceil_div, few_apart
from haloconv.families.halo_sm90.conv import copy_of_dy
from haloconv.families.halo_sm90.conv.classes import classes_of, rows_of_m
from haloconv.families.halo_sm90.conv.form import Form
from haloconv.families.halo_sm90.conv.shape import BLOCK_M, UNIT_PX, Storage, TileShape, line_warps
from haloconv.families.halo_sm90.conv.tile import Tiling, tile
from haloconv.families.halo_sm90.terms import TERMS
from haloconv.layout import neighbours_of
from haloconv.problem import Request

_CANDIDATES = 8
_SPLITS = (2, 4, 8, 16)
_RUNS = (64, 128, 256)
_AHEAD_CYCLES = 7000.0  # of products with lines staged ahead, from which on taps do not wait: by probes on an H200
_LAUNCH = 4000  # cycles
_SM_COUNT = 132  # of an H200, for which few columns are cut
_COORDINATES = 1 << 31  # pixels that TMA numbers along one axis


@lru_cache(maxsize=4096)
def best_tilings(form: Form, storage: Storage, sm_count: int, may_split: bool = True) -> tuple[Tiling, ...]:
    """At most eight tilings of a launch, best first by the cost model; split-K only where it ``may_split``.

    The best one that reads a copy and the best one that reads none come first, since the model compares them poorly.
    """
    every = [*tilings(form, storage), *copied_tilings(form, storage)]
    found = sorted(every, key=lambda each: _order(each, sm_count))
    # with two work tiles a multiprocessor split-K has nothing to gain
    if may_split and found and found[0].total < 2 * sm_count:
        found = sorted([*found, *split_tilings(form, storage)], key=lambda each: _order(each, sm_count))
    best: dict[TileShape, Tiling] = {}
    for each in (*few_apart(found, lambda each: each.shape.copied), *found):  # a shape is named once
        best.setdefault(each.shape, each)
    return tuple(best.values())[:_CANDIDATES]


def tilings(form: Form, storage: Storage) -> list[Tiling]:
    """Every tiling that fits, with all channels in one sum.

    Boxes that begin at aligned places may take one more strip. Where it has few columns these may have a launch of
    their own, and where filters are dealt out to blocks for boxes, lanes may store the same tiles.
    """
    shapes = [shape for shape in all_shapes(form, storage) if _leaves_registers(form, shape, storage)]
    found = [tile(form, shape, storage) for shape in shapes]
    by_lanes = replace(storage, y_joined=0)
    if storage.y_joined > 1:
        found += [tile(form, each.shape, by_lanes) for each in found if isinstance(each, Tiling) and each.lead]
    fitting = [each for each in found if isinstance(each, Tiling)]
    return [*fitting, *(cut for each in fitting if (cut := _cut(each)))]


def _cut(tiling: Tiling) -> Tiling | None:
    """Tiles of the same shape without the last strip if it has few columns, which a launch of their own computes."""
    form, storage, lead = tiling.form, tiling.storage, tiling.lead
    cols = (tiling.columns.strips - 1) * tiling.columns.strip_cols - lead
    if not 0 < cols < form.horizontal.out_extent <= cols + 2 * lead or storage.partial:
        return None
    first, left = form.cut(cols)
    cut, rest = tile(first, tiling.shape, storage), _best_by_lanes(left, replace(storage, y_joined=0))
    return replace(cut, rest=rest) if isinstance(cut, Tiling) and rest else None


@lru_cache(maxsize=256)
def _best_by_lanes(form: Form, storage: Storage) -> Tiling | None:
    found = tilings(form, storage)
    return min(found, key=lambda each: _order(each, _SM_COUNT), default=None)


def _leaves_registers(form: Form, shape: TileShape, storage: Storage) -> bool:
    """Whether the sums of a tile leave a thread registers for where they or a residual are: others spill (sm_90a)."""
    if form.interleaves and shape.run == 256 and classes_of(form, storage).across > 1:
        return False
    if not storage.residual:
        return True
    most = 256 if shape.boxes else 128
    if shape.shared_tile and (not shape.boxes or (storage.elem_bytes == 4 and not storage.x_inner)):
        most //= 2
    return shape.tile_px <= most


def split_tilings(form: Form, storage: Storage) -> list[Tiling]:
    """Every tiling of split-K that fits, with ranges of whole chunks of 128 bytes, for layers of one group.

    Not for output packs and for several terms, whose outputs may need the nonfinite fix-up. Tiles are small, because
    split-K is for layers of which few work tiles can be made.
    """
    if form.groups > 1 or form.interleaves or form.filters <= BLOCK_M // 2 or storage.terms > 1:
        return []
    whole = [splits for splits in _SPLITS if form.channels * storage.elem_bytes % (128 * splits) == 0]
    found = (each for splits in whole for each in tilings(form.split(splits), partial_storage(form, storage)))
    return [each for each in found if each.shape.tile_px <= 128]


def copied_tilings(form: Form, storage: Storage) -> list[Tiling]:
    """Every tiling of a strided dgrad whose dy is copied first, so that its channels are neighbours.

    All classes' rows of M gather the same pixels. Where pixels are neighbours, warps transpose them once for each pair
    of blocks of rows, in flat tiles each row by itself, however short. TMA brings those of the copy.
    """
    if storage.x_inner or storage.terms > 1 or copy_of_dy.why_no_copy(form, storage.elem_bytes):
        return []
    of_copy = replace(storage, x_inner=True, x_whole=True, x_joined=0)
    return [replace(each, shape=replace(each.shape, copied=True)) for each in tilings(form, of_copy)]


def partial_storage(form: Form, storage: Storage) -> Storage:
    """The storage with a dense fp32 tensor of partial sums as the result."""
    rows, cols = form.vertical.out_extent, form.horizontal.out_extent
    whole = (form.filters if storage.y_inner else cols) % 4 == 0
    joined = int(not storage.y_inner and not whole and rows * cols % 4 == 0 and rows * cols < _COORDINATES)
    return replace(storage, partial=True, y_whole=whole, y_joined=joined, residual=False)


def _order(tiling: Tiling, sm_count: int) -> tuple[float, bool, int]:
    # Of tilings that cost the same the first is, where threads store the output, one with a stream of weights for each
    # consumer (shared_tile), of which one multiplies while the other stores, which takes threads long; where TMA stores
    # it, one with a single stream. With several terms, then the one with the most stages.
    stages = tiling.memory.stages if tiling.shape.terms > 1 else 0
    return cost(tiling, tiling.storage, sm_count), tiling.shape.shared_tile == tiling.y_boxes, -stages


def all_shapes(form: Form, storage: Storage) -> list[TileShape]:
    """Every tile shape, with what fills M, and the cuts of rows and columns, that make sense for the form."""
    channel_bytes = form.channels * storage.elem_bytes
    widest_chunk = next((size for size in (32, 64) if channel_bytes <= size), 128)
    # Pixels of several terms take so much shared memory that lines of 128 of them may fit in chunks of 64 bytes alone.
    chunks = (128, 64) if widest_chunk == 128 and storage.terms > 1 else (widest_chunk,)
    may_pack = form.filters <= 32 and not (form.interleaves or storage.has_halo)  # which the fix-up has not
    packs = [(1, 1), (1, 2), (2, 1)] if may_pack else [(1, 1)]
    result: dict[TileShape, None] = {}
    sums = 1 if storage.terms == 1 else 2  # of a pixel, in registers
    for chunk_bytes, (pack_h, pack_w) in product(chunks, packs):
        cols = ceil_div(form.horizontal.places, pack_w)
        sides = (False, True) if rows_of_m(form, storage) > BLOCK_M else (False,)
        boxes = storage.x_whole or (storage.x_joined > 0 and chunk_bytes // storage.elem_bytes >= 8 * storage.x_joined)
        boxes = boxes and pack_w * form.horizontal.stride == 1 and (storage.terms == 1 or not storage.x_inner)
        if storage.has_edges:  # which a warp writes over what boxes brought, or loads: rows by themselves
            boxes = boxes and storage.x_joined <= 1
        if storage.has_halo and (not boxes or storage.x_joined):
            continue  # TMA brings its rows
        for most, runs in ((128, 2), (256, 1), (128, 1), (64, 2), (64, 1)):
            run = _run(ceil_div(cols, ceil_div(cols, most)))
            cut = (chunk_bytes, pack_h, pack_w)
            # Both two blocks of filters in one tile and the transpose of fp32 lines take too many registers.
            one_block = run == 256 and boxes and not storage.x_inner and storage.elem_bytes == 4
            # So do loads of two rows, if lines are staged once for each phase, and both sums of several terms.
            only_kept = storage.terms > 1 and runs == 2 and not boxes
            for keeps, shared in product((True,) if only_kept else (True, False), (False,) if one_block else sides):
                one = TileShape(False, run, runs, *cut, boxes=boxes, keeps=keeps, shared_tile=shared)
                result[replace(one, splits=form.splits, terms=storage.terms)] = None
            if storage.has_edges or (boxes and not storage.x_inner and most * runs * sums > 128):
                continue  # flat tiles that are transposed leave too few registers
            for strips in sorted({ceil_div(cols, width) for width in (cols, 126, 62, 30)}):
                strip_cols = 0 if strips == 1 else ceil_div(cols, strips)
                for shared in sides:
                    widest = TileShape(True, most, runs, *cut, strip_cols=strip_cols, boxes=boxes, shared_tile=shared)
                    widest = replace(widest, splits=form.splits, terms=storage.terms)
                    result[_flat_shape(form, widest, storage)] = None
    return list(result)


def _run(pixels: int) -> int:
    """The narrowest run for so many pixels."""
    return next(run for run in _RUNS if run >= pixels)


def _flat_shape(form: Form, widest: TileShape, storage: Storage) -> TileShape:
    """``widest`` with no longer runs than its whole rows fill."""
    tiling = tile(form, widest, storage)
    if isinstance(tiling, str):
        return widest
    pixels = (tiling.columns.rows - 1) * tiling.columns.pitch + tiling.columns.strip_cols
    return replace(widest, run=_run(ceil_div(pixels, widest.tiles * tiling.columns.work_tiles * widest.runs)))


def cost(tiling: Tiling, storage: Storage, sm_count: int) -> float:
    """Cycles of the busiest multiprocessor: its work tiles times the slowest of what works side by side.

    The tensor cores, each consumer, the L2 and the warps that stage work side by side. Rates are from probes on an
    H200. ``wgmma`` runs near its peak at 256 pixels with more than three stages; with fewer pixels it reads more of
    shared memory. It is slower in flat tiles and where few lines are staged ahead. A consumer loses 340 cycles between
    two taps, most of them waiting for weights, and 600 a tile. The L2 gives weights and boxes at 30 bytes a cycle.
    """
    shape, rest = tiling.shape, tiling.rest
    if rest:
        return cost(replace(tiling, rest=None), storage, sm_count) + cost(rest, rest.storage, sm_count) + 2 * _LAUNCH
    if shape.terms > 1:
        return tiling.schedule(sm_count).most * _cycles_of_terms(tiling, storage)
    taps = tiling.taps * tiling.chunks
    fast = shape.run == 256 and tiling.memory.stages > 3
    multiplies = shape.chunk_bytes // 32  # wgmma of a tap and a run
    tap = multiplies * shape.tile_px // 2 * (1.03 if fast else 1.35 if shape.run == 64 else 1.1)
    tap *= 1.3 if shape.flat else _waiting(tiling, tap)
    writing = _writing(tiling, storage)
    # With one stream of weights the other consumer is ahead by its stages, and multiplies while this one writes.
    hidden = 0 if tiling.phases.first else tiling.memory.stages * tap
    multiply = 2 * taps * tap + (0 if shape.shared_tile else max(0, writing - hidden))
    consumer = taps * (tap + 340) + writing + 600
    staging = _staged_units(tiling) * _unit_cycles(shape, storage)
    adding = _adding(tiling) / sm_count if shape.splits > 1 else 0
    copying = copy_of_dy.cycles(tiling.form, storage.elem_bytes) if shape.copied else 0
    slowest = max(multiply, consumer, _streaming(tiling), staging)
    return tiling.schedule(sm_count).most * slowest * _sharing(tiling) + adding + copying


def _cycles_of_terms(tiling: Tiling, storage: Storage) -> float:
    """Cycles of a work tile of several terms. Rates are from a probe of 122 tilings on an H200, 7 % off on average.

    Three products keep shared memory, which moves 128 bytes a cycle, as busy as the tensor cores: each ``wgmma`` reads
    32 bytes of 64 filters and of its run, so that runs of 64 wait for it, those of 128 do not. A tap takes 150 cycles
    more; partial sums seem to cost none, as the other consumer multiplies while one adds. A warp takes 1800 cycles to
    transpose 32 pixels of 128 bytes, 4000 to load them and 8000 to load single elements. Consumers lose four tenths of
    what all warps that stage take together, as those take registers' and shared memory's time from them. In flat tiles
    5 % are lost; where consumers share them, 25 %, because a line stays until the one that is half a tile behind ends.
    """
    shape, taps, units = tiling.shape, tiling.taps * tiling.chunks, _staged_units(tiling)
    wgmmas = 2 * taps * shape.products * shape.chunk_bytes // 32 * shape.runs
    multiplying = wgmmas * shape.run // 2
    # transposed pixels are written and read once more than those that are loaded
    staged = units * UNIT_PX * shape.chunk_bytes * (shape.terms + (2 if shape.boxes else 0))
    leaving = 2 * 2 * BLOCK_M * shape.tile_px * storage.y_bytes  # sums of two consumers, written and read
    moved = wgmmas * 32 * (BLOCK_M + shape.run) + taps * shape.streams * shape.stage_bytes + staged + leaving
    vector = storage.x_inner and storage.x_whole
    of_a_warp = units * shape.chunk_bytes / 128 * (1800 if shape.boxes else 4000 if vector else 8000)
    staging, writing = of_a_warp / line_warps(shape, storage), _writing(tiling, storage)
    both = max(multiplying, moved / 128) + 150 * taps + writing + 0.4 * staging
    if shape.flat:
        both *= 1.25 if shape.shared_tile else 1.05
    consumer = multiplying / 2 + 340 * taps + writing + 600
    return max(both, consumer, staging, _streaming(tiling))


def _writing(tiling: Tiling, storage: Storage) -> int:
    """Cycles in which a consumer writes its sums."""
    return tiling.shape.tile_px * (storage.y_bytes * 4 if tiling.y_boxes else 20)


def _streaming(tiling: Tiling) -> float:
    """Cycles in which the L2 gives weights and lines of a work tile."""
    shape = tiling.shape
    weights = tiling.taps * tiling.chunks * shape.streams * shape.stage_bytes
    return (weights + tiling.staged_lines * tiling.line.slot_px * shape.chunk_bytes) / 30


def _staged_units(tiling: Tiling) -> int:
    """Times that a warp stages 32 pixels for a work tile."""
    line, boxes = tiling.line, tiling.shape.boxes
    return tiling.staged_lines * (line.boxes * line.box_units if boxes else ceil_div(line.slot_px, UNIT_PX))


def _adding(tiling: Tiling) -> float:
    """Cycles of all multiprocessors to add partial sums: a launch, and 4 bytes of each split at 8 a cycle."""
    form = tiling.form
    outputs = form.n * form.filters * form.vertical.out_extent * form.horizontal.out_extent
    return 132 * _LAUNCH + outputs * form.splits / 2


def _sharing(tiling: Tiling) -> float:
    """Time of a tile of two blocks of filters, relative to two tiles of one block; 1 unless TMA stores it."""
    if not (tiling.shape.shared_tile and tiling.y_boxes):
        return 1.0
    return 0.95 if tiling.shape.keeps and tiling.memory.stages > 3 else 1.05


def _waiting(tiling: Tiling, tap: float) -> float:
    """How many times longer a tap takes because few lines are staged ahead of those that consumers read."""
    shape, stride = tiling.shape, tiling.vertical.stride
    in_sight = (shape.tiles * shape.runs - 1) * stride + 1
    ahead = tiling.memory.ring - in_sight
    if shape.keeps:
        return 1.0
    if 2 * ahead < in_sight or (tiling.memory.stages == 3 and not shape.shared_tile):
        return 1.25
    if ahead * tiling.horizontal.taps * 2 * tap >= _AHEAD_CYCLES:
        return 1.0
    return 1.1 if tiling.chunks > 2 else 1.03


def _unit_cycles(shape: TileShape, storage: Storage) -> float:
    """Cycles in which all warps together stage 32 pixels while the tensor cores run (stage.cuh, transpose.cuh)."""
    warps = line_warps(shape, storage)
    if shape.boxes:
        return 0 if storage.x_inner else 1500 / warps
    if storage.x_inner:  # these wait for memory, however many warps stage
        return (700 if storage.elem_bytes == 2 else 930) if storage.x_whole else 2700
    return 1500


def storage_of(request: Request) -> Storage:
    """How the tensors of a request lie in memory: what fprop or dgrad gathers, and its result."""
    problem, x, y = request.problem, request.first, request.result_strides
    forward = problem.direction == "fprop"
    channels, filters = problem.c_per_group, problem.k_per_group
    if not forward:
        channels, filters = filters, channels
    group = 16 // problem.dtype.itemsize

    def whole(strides: tuple[int, ...], inner: bool, count: int) -> bool:
        axes = (0, 2, 3) if inner else (0, 1, 2)
        neighbours = strides[1 if inner else 3] == 1
        return neighbours and all(strides[axis] % group == 0 for axis in axes) and (not inner or count % group == 0)

    x_inner = neighbours_of(x.strides) == "nhwc"
    y_inner = request.result_layout == "nhwc"
    x_whole = x.aligned and whole(x.strides, x_inner, channels)
    width = problem.w if forward else problem.q
    in_rows = x.aligned and not (x_inner or x_whole) and x.strides[2] == width
    x_joined, y_whole = _joined(x.strides, channels, group) if in_rows else 0, whole(y, y_inner, filters)
    y_joined = 0 if y_inner or y_whole else _joined(y, filters, group)
    terms = TERMS.get(problem.precision, 1)
    return Storage(
        problem.dtype.itemsize, x_inner, x_whole, y_inner, y_whole, x_joined, y_joined,
        terms=terms, residual=problem.epilogue.residual, modes=request.modes,
    )  # fmt: skip


def _joined(strides: Sequence[int], channels: int, group: int) -> int:
    """``x_joined`` or ``y_joined`` of a tensor whose rows have no gap between them; ``group`` pixels are 16 bytes."""
    image, plane, _, pixel = strides
    planes = group // gcd(plane, group)
    aligned = pixel == 1 and image % group == 0 and channels % planes == 0
    return planes if aligned and planes * plane < _COORDINATES else 0
