"""The cost model of weight gradients by descriptor beside what an NVIDIA H200 took (docs/notebook.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from haloconv.device import Device, set_stand_in
from haloconv.families import FAMILIES
from haloconv.families.halo_sm90.wgrad_ss.tile import tilings
from haloconv.jit import TENSOR_MAP_BYTES
from haloconv.problem import Problem, dense_request
from tests.cpu.test_paths import H200, Noting

_SMEM_BYTES, _SM_COUNT, _CYCLES_OF_US = 227 << 10, 132, 1700

# Images, channels, rows, columns, filters of a 3x3 layer; extents of tiles, blocks of a cluster, parts, and us.
_MEASURED = {
    "at 14": ((32, 256, 14, 14, 256),
              [((64, 128, 3), 1, 5, 23.5), ((64, 64, 9), 1, 8, 25.8), ((64, 64, 9), 2, 8, 26.5)]),
    "at 7": ((32, 512, 7, 7, 512), [((64, 64, 9), 2, 2, 26.3), ((64, 64, 10), 2, 2, 28.1), ((64, 64, 9), 1, 2, 28.8)]),
    "at 28": ((32, 128, 28, 28, 128), [((64, 64, 3), 1, 11, 21.0), ((64, 64, 3), 2, 10, 22.8)]),
    "at 56": ((32, 64, 56, 56, 64), [((64, 64, 3), 1, 44, 21.8), ((64, 64, 3), 2, 44, 24.4)]),
    "U-Net's": ((4, 128, 256, 256, 128), [((64, 64, 9), 1, 33, 105.5)]),
    "C": ((8, 64, 512, 1024, 128), [((64, 64, 9), 1, 66, 889.0)]),  # its row, without padding
}  # fmt: skip


def _problem(name: str, extents: tuple[int, ...]) -> Problem:
    n, c, h, w, k = extents
    sizes = {"n": n, "c": c, "h": h, "w": w, "k": k, "r": 3, "s": 3}
    pad = (0, 0, 0, 0) if name == "C" else (1, 1, 1, 1)
    return Problem("wgrad", layout="nhwc", **sizes, stride=(1, 1), padding=pad, dilation=(1, 1), dtype=torch.float16)


@pytest.mark.parametrize("name", _MEASURED)
def test_times_are_near_and_the_first_tile_is_hardly_slower_than_the_fastest(name: str) -> None:
    extents, measured = _MEASURED[name]
    every = tilings(_problem(name, extents), _SMEM_BYTES, _SM_COUNT)
    found = {(each.tile.extents, each.cluster): each for each in reversed(every)}
    times = []
    for tile, cluster, parts, us in measured:
        one = found[tile, cluster]
        assert one.parts == parts and one.cycles / _CYCLES_OF_US == pytest.approx(us, rel=0.2)
        times.append((one.cycles, us))
    assert min(times)[1] < 1.03 * min(us for _, us in times)


_AT_TWO_STAGES = {
    "enlarge.1": ((2, 512, 192, 192, 512), 573.0, 473.0),
    "enlarge.2": ((2, 256, 384, 384, 256), 593.0, 466.0),
}
"""The VAE decoder's upsampling layers in bf16 on an NVIDIA H200: us of ``wgrad_ss`` in nhwc, of ``wgrad`` in nchw."""


@pytest.mark.parametrize("name", _AT_TWO_STAGES)
def test_tiles_of_two_stages_are_slower_than_the_model_says_and_come_behind(name: str) -> None:
    extents, by_descriptor, shifted = _AT_TWO_STAGES[name]
    problem = replace(_problem(name, extents), dtype=torch.bfloat16)
    best = tilings(problem, _SMEM_BYTES, _SM_COUNT)[0]
    assert best.stages == 2 and by_descriptor > 1.3 * best.cycles / _CYCLES_OF_US and shifted < by_descriptor
    assert _first_kernel(problem) == "halo_sm90/wgrad"


def test_tiles_of_three_stages_come_first() -> None:
    assert _first_kernel(_problem("U-Net's", _MEASURED["U-Net's"][0])) == "halo_sm90/wgrad_ss"


def _first_kernel(problem: Problem) -> str:
    """That of the family's first config on an H200."""
    set_stand_in(Device(H200, lambda *_: Noting(), lambda *_, **__: bytes(TENSOR_MAP_BYTES)))
    try:
        return FAMILIES["halo_sm90"].configs(dense_request(problem, torch.device("cpu")))[0].kernel
    finally:
        set_stand_in(None)
