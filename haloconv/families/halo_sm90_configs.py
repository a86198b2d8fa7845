"""Which tilings a launch of halo_sm90 may have, and the cost model that orders them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from haloconv.families.base import TensorForm
from haloconv.families.halo_sm90_form import Form
from haloconv.families.halo_sm90_tile import LINE_WARPS, UNIT_PX, Config, Storage, Tiling, ceil_div, tile
from haloconv.problem import Conv2dProblem

_CANDIDATES = 8
_RUNS = (64, 128, 256)


@lru_cache(maxsize=4096)
def configs(form: Form, storage: Storage, sm_count: int) -> tuple[Tiling, ...]:
    """At most eight tilings of a launch, best first by the cost model."""
    found = [tile(form, config, storage) for config in all_configs(form, storage)]
    fitting = [each for each in found if isinstance(each, Tiling)]
    return tuple(sorted(fitting, key=lambda each: cost(each, storage, sm_count)))[:_CANDIDATES]


def all_configs(form: Form, storage: Storage) -> list[Config]:
    """Every tile shape, with the ways to fill M, to cut rows and to cut columns that make sense for the form."""
    channel_bytes = form.channels * storage.elem_bytes
    chunk_bytes = next((size for size in (32, 64) if channel_bytes <= size), 128)
    packs = [(1, 1), (1, 2), (2, 1)] if form.filters <= 32 else [(1, 1)]
    result = {}
    for pack_h, pack_w in packs:
        cols = ceil_div(form.horizontal.out_extent, pack_w)
        boxes = (storage.x_whole or storage.x_joined) and pack_w * form.horizontal.stride == 1
        for most, runs in ((128, 2), (256, 1), (128, 1), (64, 1)):
            run = _run(ceil_div(cols, ceil_div(cols, most)))
            shape = (chunk_bytes, pack_h, pack_w)
            for keeps in (True, False):
                result[Config(False, run, runs, *shape, boxes=boxes, keeps=keeps)] = None
            if boxes and not storage.x_inner and most * runs > 128 and storage.elem_bytes == 4:
                continue  # flat tiles that are turned leave too few registers
            for strips in sorted({ceil_div(cols, width) for width in (cols, 126, 62, 30)}):
                strip_cols = 0 if strips == 1 else ceil_div(cols, strips)
                flat = _flat_config(form, Config(True, most, runs, *shape, strip_cols=strip_cols, boxes=boxes), storage)
                result[flat] = None
    return list(result)


def _run(pixels: int) -> int:
    """The narrowest run for so many pixels."""
    return next(run for run in _RUNS if run >= pixels)


def _flat_config(form: Form, widest: Config, storage: Storage) -> Config:
    """``widest`` with no longer runs than its whole rows fill."""
    tiling = tile(form, widest, storage)
    if isinstance(tiling, str):
        return widest
    pixels = (tiling.column_rows - 1) * tiling.pitch + tiling.strip_cols
    return replace(widest, run=_run(ceil_div(pixels, 2 * tiling.steps * widest.runs)))


def cost(tiling: Tiling, storage: Storage, sm_count: int) -> float:
    """Cycles of a multiprocessor for its share of the launch: steps times the slowest of what works side by side.

    That is the tensor cores, each consumer by itself, the L2 and the warps that stage. The rates come from probes on an
    H200: ``wgmma`` runs near its peak at 256 pixels, with more than three stages, and reads more of shared memory
    below; from tap to tap a consumer loses 340 cycles, and 600 a tile; weights and boxes come from the L2 at 24 bytes a
    cycle.
    """
    config = tiling.config
    taps = tiling.taps * tiling.chunks
    tap = config.chunk_bytes // 32 * config.tile_px // 2 * (1.03 if config.run == 256 and tiling.stages > 3 else 1.1)
    writing = config.tile_px * (storage.elem_bytes * 4 if tiling.y_boxes else 20)
    multiply = 2 * taps * tap + (writing if tiling.phases.first else 0)
    consumer = taps * (tap + 340) + writing + 600
    streamed = taps * config.stage_bytes + tiling.staged_lines * tiling.slot_px * config.chunk_bytes
    units = tiling.boxes * tiling.box_units if config.boxes else ceil_div(tiling.slot_px, UNIT_PX)
    staging = tiling.staged_lines * units * _unit_cycles(config, storage) / LINE_WARPS
    return ceil_div(tiling.total, sm_count) * max(multiply, consumer, streamed / 24, staging)


def _unit_cycles(config: Config, storage: Storage) -> int:
    """Cycles in which a warp stages 32 pixels while the tensor cores run (halo_sm90/stage.cuh, turn.cuh)."""
    if config.boxes:
        return 0 if storage.x_inner else 1500
    if storage.x_inner:
        return (1500 if storage.elem_bytes == 2 else 2800) if storage.x_whole else 8000
    return 4500


def storage_of(problem: Conv2dProblem, x: TensorForm, y: tuple[int, ...], result_layout: str) -> Storage:
    """The storage of a problem whose gathered tensor has the form ``x`` and whose result has the strides ``y``."""
    forward = problem.direction == "fprop"
    channels, filters = problem.c_per_group, problem.k_per_group
    if not forward:
        channels, filters = filters, channels
    group = 16 // problem.dtype.itemsize

    def whole(strides: tuple[int, ...], inner: bool, count: int) -> bool:
        axes = (0, 2, 3) if inner else (0, 1, 2)
        neighbours = strides[1 if inner else 3] == 1
        return neighbours and all(strides[axis] % group == 0 for axis in axes) and (not inner or count % group == 0)

    x_inner = x.strides[1] == 1 and x.strides[3] != 1
    y_inner = result_layout == "nhwc"
    x_whole = x.aligned and whole(x.strides, x_inner, channels)
    width = problem.w if forward else problem.q
    apart = (x.strides[0], x.strides[1], group, x.strides[3])  # rows may be any distance apart if it is their length
    x_joined = not x_whole and not x_inner and x.aligned and x.strides[2] == width and whole(apart, False, channels)
    return Storage(problem.dtype.itemsize, x_inner, x_whole, y_inner, whole(y, y_inner, filters), x_joined)
