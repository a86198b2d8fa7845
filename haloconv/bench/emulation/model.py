"""What the cost model of halo_sm90/conv says that its launches do, to be held against what the emulator counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from haloconv.families.halo_sm90.conv import conv
from haloconv.families.halo_sm90.conv.shape import BLOCK_M, UNIT_PX
from haloconv.families.halo_sm90.conv.tile import Tiling
from haloconv.problem import Problem, TensorForm, dense_request

MODELLED_KERNEL = conv.KERNEL


class Modelled(NamedTuple):
    """Multiplies on tensor cores, and bytes that TMA brings, in the launches of one direction.

    The bytes are those of packed weights and of boxes of the input, with what of a box is outside the tensor.
    """

    multiplies: int
    copied_bytes: int


def modelled(problem: Problem, gathered: torch.Tensor) -> Modelled:
    """The model's figures for the tiling that ``problem`` gets. ``gathered`` is x in fprop, dy in dgrad."""
    form = TensorForm(gathered.stride(), gathered.data_ptr() % 16 == 0)
    request = replace(dense_request(problem, gathered.device), first=form)
    multiplies = copied_bytes = 0
    for tiling in conv.configs(request)[0].derived.launches:
        shape, taps = tiling.shape, tiling.taps * tiling.chunks
        chunk_elems = shape.chunk_bytes // tiling.storage.elem_bytes
        multiplies += 2 * tiling.total * taps * BLOCK_M * shape.tile_px * chunk_elems
        copied_bytes += sum(_copied(tiling, work_tiles) for work_tiles in _segments(tiling, request.facts.sm_count))
    return Modelled(multiplies, copied_bytes)


def _segments(tiling: Tiling, sm_count: int) -> Iterator[int]:
    """Work tiles of each segment of each block (``Segments`` in families/halo_sm90/conv/scheduler.cuh)."""
    for begin, end in tiling.schedule(sm_count).ranges(tiling.total, tiling.all_strips):
        while begin < end:
            work_tiles = min(tiling.columns.work_tiles - begin % tiling.columns.work_tiles, end - begin)
            yield work_tiles
            begin += work_tiles


def _copied(tiling: Tiling, work_tiles: int) -> int:
    """Bytes of weights and boxes of a segment."""
    shape, storage, phases = tiling.shape, tiling.storage, tiling.phases
    weights = (work_tiles * tiling.taps * tiling.chunks + tiling.middle_tap) * shape.streams * shape.stage_bytes
    if not shape.boxes:
        return weights
    stride, runs, taps_r = tiling.vertical.stride, shape.runs, tiling.vertical.taps
    boxes = 0
    for work, phase in ((work, phase) for work in range(work_tiles + 1) for phase in range(phases.first, 2)):
        if work == work_tiles and phase == 1:
            continue
        first, end = (phases.begin, (tiling.chunks, taps_r)) if phase else ((0, 0), phases.middle)
        tiles = shape.tiles if phase or 0 < work < work_tiles else 1
        lines = 1 if shape.flat else (tiles * runs - 1) * stride + end[1] - first[1]
        whole = not storage.x_inner or tiles == shape.tiles  # raw tiles of all boxes are asked for
        boxes += (end[0] - first[0]) * lines * (tiling.line.boxes if whole else tiling.line.single_boxes)
    if shape.keeps:
        boxes = tiling.chunks * ((shape.tiles * work_tiles * runs - 1) * stride + taps_r) * tiling.line.boxes
    box_px = tiling.line.box_px if storage.x_inner else tiling.line.box_units * UNIT_PX
    return weights + boxes * box_px * shape.chunk_bytes
