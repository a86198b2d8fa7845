"""What the cost model of halo_sm90 says that its launches do, to be held against what the emulator counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from haloconv.env import device_facts
from haloconv.families.halo_sm90.configs import configs, storage_of
from haloconv.families.halo_sm90.form import forms
from haloconv.families.halo_sm90.shape import BLOCK_M, UNIT_PX, Storage
from haloconv.families.halo_sm90.tile import Tiling
from haloconv.layout import strides_of
from haloconv.problem import Problem, TensorForm


class Modelled(NamedTuple):
    """Of all launches of one direction: multiplies on tensor cores, and bytes that the copy engine brings.

    These are packed weights and boxes of the input, with what of a box is outside the tensor.
    """

    multiplies: int
    copied_bytes: int


def modelled(problem: Problem, gathered: torch.Tensor) -> Modelled:
    """The model's figures for the tilings that ``problem`` gets. ``gathered`` is x in fprop, dy in dgrad."""
    form = TensorForm(gathered.stride(), gathered.data_ptr() % 16 == 0)
    result = problem.y_shape if problem.direction == "fprop" else problem.x_shape
    storage = storage_of(problem, form, strides_of(result, problem.layout), problem.layout)
    sm_count = device_facts(gathered.device.index).sm_count
    multiplies = copied_bytes = 0
    for launch in forms(problem):
        if launch.taps == 0:
            continue
        tiling = configs(launch, storage, sm_count)[0]
        config, taps = tiling.config, tiling.taps * tiling.chunks
        chunk_elems = config.chunk_bytes // storage.elem_bytes
        multiplies += 2 * tiling.total * taps * BLOCK_M * config.tile_px * chunk_elems
        copied_bytes += sum(_copied(tiling, steps, storage) for steps in _segments(tiling, sm_count))
    return Modelled(multiplies, copied_bytes)


def _segments(tiling: Tiling, sm_count: int) -> Iterator[int]:
    """Steps of each segment of each block (``Segments`` in families/halo_sm90/tile.cuh)."""
    for begin, end in tiling.share(sm_count).runs(tiling.total, tiling.strips * tiling.form.groups):
        while begin < end:
            steps = min(tiling.steps - begin % tiling.steps, end - begin)
            yield steps
            begin += steps


def _copied(tiling: Tiling, steps: int, storage: Storage) -> int:
    """Bytes of weights and boxes of a segment."""
    config, phases = tiling.config, tiling.phases
    weights = (steps * tiling.taps * tiling.chunks + tiling.middle_tap) * config.streams * config.stage_bytes
    if not config.boxes:
        return weights
    stride, runs, taps_r = tiling.vertical.stride, config.runs, tiling.vertical.taps
    boxes = 0
    for step, phase in ((step, phase) for step in range(steps + 1) for phase in range(phases.first, 2)):
        if step == steps and phase == 1:
            continue
        first, end = (phases.begin, (tiling.chunks, taps_r)) if phase else ((0, 0), phases.middle)
        tiles = config.step_tiles if phase or 0 < step < steps else 1
        lines = 1 if config.flat else (tiles * runs - 1) * stride + end[1] - first[1]
        whole = not storage.x_inner or tiles == config.step_tiles  # raw tiles of all boxes are asked for
        boxes += (end[0] - first[0]) * lines * (tiling.boxes if whole else tiling.single_boxes)
    if config.keeps:
        boxes = tiling.chunks * ((config.step_tiles * steps * runs - 1) * stride + taps_r) * tiling.boxes
    box_px = tiling.box_px if storage.x_inner else tiling.box_units * UNIT_PX
    return weights + boxes * box_px * config.chunk_bytes
