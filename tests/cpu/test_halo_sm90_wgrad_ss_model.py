"""The cost model of weight gradients by descriptor beside what an NVIDIA H200 took (docs/notebook.md)."""

from __future__ import annotations

import pytest
import torch

from haloconv.families.halo_sm90.wgrad_ss.tile import tilings
from haloconv.problem import Problem

_SMEM_BYTES, _SM_COUNT, _CYCLES_OF_US = 227 << 10, 132, 1700

# Images, channels, rows, columns, filters, taps of a side; the fastest extents and parts, and their us.
_FASTEST = {
    "3x3 at 14": ((32, 256, 14, 14, 256, 3), (64, 64, 9), 8, 27.0),
    "3x3 at 7": ((32, 512, 7, 7, 512, 3), (64, 64, 9), 2, 30.9),
    "3x3 at 28": ((32, 128, 28, 28, 128, 3), (64, 64, 3), 11, 28.3),
    "C, padded": ((8, 64, 512, 1024, 128, 3), (64, 64, 9), 66, 988.3),
}


def _problem(extents: tuple[int, ...]) -> Problem:
    n, c, h, w, k, side = extents
    pad = (side // 2,) * 4
    sizes = {"n": n, "c": c, "h": h, "w": w, "k": k, "r": side, "s": side}
    return Problem("wgrad", layout="nhwc", **sizes, stride=(1, 1), padding=pad, dilation=(1, 1), dtype=torch.float16)


@pytest.mark.parametrize("name", _FASTEST)
def test_the_fastest_tile_is_first_and_its_time_is_near(name: str) -> None:
    extents, tile, parts, us = _FASTEST[name]
    first = next(each for each in tilings(_problem(extents), _SMEM_BYTES, _SM_COUNT) if each.cluster == 1)
    assert (first.tile.extents, first.parts) == (tile, parts)
    assert first.cycles / _CYCLES_OF_US == pytest.approx(us, rel=0.12)
