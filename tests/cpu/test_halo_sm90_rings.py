"""The rings of halo_sm90's tilings: a warp that stages lines never comes to a slot two rounds ahead of its consumers.

It waits for a slot's round by parity, and knows only that the slot of its ring's line that it staged last was free.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from haloconv.families.common import ceil_div
from haloconv.families.halo_sm90.conv.configs import storage_of
from haloconv.families.halo_sm90.conv.form import form_of
from haloconv.families.halo_sm90.conv.shape import UNIT_PX, Storage, line_warps
from haloconv.families.halo_sm90.conv.tile import Tiling
from haloconv.problem import Problem, dense_request
from tests.tilings import all_tilings

CPU = torch.device("cpu")
WIDTHS = (13, 20, 38, 64, 66, 150)
FILTERS = ((1, 1), (3, 3), (3, 2), (2, 9), (7, 7))
CHANNELS = ((8, 40), (66, 70), (160, 128))


def _problem(
    direction: str, layout: str, dtype: torch.dtype, width: int, taps: tuple[int, int], channels: int, filters: int,
    stride: int,
) -> Problem:  # fmt: skip
    precision = "tf32" if dtype == torch.float32 else "ieee"
    extents = {"n": 2, "c": channels, "h": 18, "w": width, "k": filters, "r": taps[0], "s": taps[1]}
    padding, strides = (1, 1, 1, 1), (stride, stride)
    return Problem(
        direction, **extents, padding=padding, stride=strides, dtype=dtype, layout=layout, precision=precision
    )


def _lines_ahead(tiling: Tiling, storage: Storage) -> int:
    """Lines of a ring from one that a warp stages to the next that it has a unit of, at most."""
    shape = tiling.shape
    if shape.boxes and storage.x_inner:
        return 1  # one warp stages all
    units = tiling.line.boxes * tiling.line.box_units if shape.boxes else ceil_div(tiling.line.slot_px, UNIT_PX)
    return ceil_div(line_warps(shape, storage), units)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_no_warp_is_two_rounds_ahead(direction: str, dtype: torch.dtype, layout: str) -> None:
    seen, short = 0, []
    for width, taps, (channels, filters), stride in product(WIDTHS, FILTERS, CHANNELS, (1, 2)):
        problem = _problem(direction, layout, dtype, width, taps, channels, filters, stride)
        storage = storage_of(dense_request(problem, CPU))
        for tiling in all_tilings(form_of(problem), storage):
            seen += 1
            if tiling.memory.ring < _lines_ahead(tiling, tiling.storage):
                short.append((width, taps, channels, filters, stride, tiling.shape, tiling.memory.ring))
    assert seen > 1000
    assert not short, f"{len(short)} of {seen} tilings, such as {short[0]}"


def test_planes_of_2_to_the_31_pixels_are_not_numbered_end_to_end() -> None:
    """Rows of the output that are not aligned: TMA's coordinates are 32-bit integers."""
    extents = {"n": 1, "c": 1, "k": 1, "r": 3, "s": 3, "dtype": torch.float16, "layout": "nchw"}
    for height, wanted in ((1024, True), (1 << 20, False)):  # 2^31 / 2^20 = 2048
        problem = Problem("fprop", h=height + 2, w=2048 + 6, **extents)
        request = dense_request(problem, CPU)
        assert problem.q % 8 and request.result_strides[1] % 8 == 0
        assert storage_of(request).y_joined == wanted
