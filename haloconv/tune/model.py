"""What the cost model of halo_sm90 says that its launches do, to be held against what the emulator counts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from haloconv.env import device_facts
from haloconv.families import halo_sm90
from haloconv.families.base import TensorForm
from haloconv.families.halo_sm90_form import forms
from haloconv.problem import Conv2dProblem

_CONSUMERS, _BLOCK_ROWS = 2, 64  # warpgroups that multiply, rows of M of each


class Modelled(NamedTuple):
    """Of all launches of one direction: multiplies on tensor cores, and bytes of packed weights that are streamed."""

    multiplies: int
    weight_bytes: int


def modelled(problem: Conv2dProblem, gathered: torch.Tensor) -> Modelled:
    """The model's figures for the tilings that ``problem`` gets. ``gathered`` is x in fprop, dy in dgrad."""
    form = TensorForm(gathered.stride(), gathered.data_ptr() % 16 == 0)
    storage = halo_sm90._storage(problem, form, problem.layout)
    sm_count = device_facts(gathered.device.index).sm_count
    multiplies = weight_bytes = 0
    for launch in forms(problem):
        if launch.taps == 0:
            continue
        tiling = halo_sm90.configs(launch, storage, sm_count)[0]
        config, steps = tiling.config, tiling.total * tiling.taps * tiling.chunks  # one tap of one chunk of one tile
        chunk_elems = config.chunk_bytes // storage.elem_bytes
        multiplies += steps * _CONSUMERS * _BLOCK_ROWS * config.runs * config.run * chunk_elems
        weight_bytes += steps * config.stage_bytes
    return Modelled(multiplies, weight_bytes)
