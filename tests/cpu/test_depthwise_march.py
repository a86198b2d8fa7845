"""depthwise: how a march cuts columns into strips, and when it is taken before planes that land whole."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from haloconv.device import DeviceFacts
from haloconv.families.depthwise import march, march_form, tile_sm90
from haloconv.families.depthwise.march_form import best_tiling
from haloconv.layout import strides_of
from haloconv.problem import Problem, TensorForm, dense_request
from tests.sources import noted_sources

CPU = torch.device("cpu")

H200 = DeviceFacts("NVIDIA H200", "sm_90a", 132, (9, 0), 141 << 30, 232448, "580")
BEYOND_L2, SMALL = 64, 4  # images of 144 x 56 x 56


def _problem(images: int, dtype: torch.dtype, layout: str, taps: int = 3, stride: int = 1) -> Problem:
    pad = (taps // 2,) * 4
    extents = (images, 144, 56, 56, 144, taps, taps, (stride, stride), pad, (1, 1), 144)
    return Problem("fprop", *extents, False, dtype, layout, "ieee")


def _rows(problem: Problem) -> int:
    form = march.form_of(dense_request(problem, CPU))
    return march.strips(form, best_tiling(form), 1000, H200.sm_count).rows


@pytest.mark.parametrize(
    ("images", "dtype", "layout", "taps", "stride", "rows"),
    [
        (BEYOND_L2, torch.float32, "nchw", 3, 1, 8),
        (BEYOND_L2, torch.float32, "nhwc", 3, 1, 8),
        (2 * BEYOND_L2, torch.float16, "nchw", 3, 2, 8),
        (2 * BEYOND_L2, torch.float16, "nhwc", 3, 2, 14),
        (BEYOND_L2, torch.float16, "nhwc", 3, 1, 28),
        (BEYOND_L2, torch.float32, "nchw", 5, 1, 56),
        (SMALL, torch.float32, "nchw", 3, 1, 28),
    ],
)
def test_strips_of_few_taps_beyond_the_l2_are_short(
    images: int, dtype: torch.dtype, layout: str, taps: int, stride: int, rows: int
) -> None:
    """The others are cut by waves of blocks."""
    assert _rows(_problem(images, dtype, layout, taps, stride)) == rows


@pytest.mark.parametrize(("images", "taps", "lands"), [(BEYOND_L2, 3, False), (SMALL, 3, True), (BEYOND_L2, 5, True)])
def test_planes_land_where_the_march_has_no_short_strips(images: int, taps: int, lands: bool) -> None:
    request = dense_request(_problem(images, torch.float32, "nchw", taps), CPU)
    with noted_sources(H200):
        reason = tile_sm90.why_not(request)
        assert len(tile_sm90.configs(request)) == lands
    assert (reason is None) == lands
    assert lands or "march" in reason


@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_what_is_taken_has_a_tiling(direction: str, layout: str) -> None:
    """Whatever the stride: a problem is taken before its tensors' orders are known."""
    taken = 0
    taps = ((1, 1), (3, 3), (1, 4), (5, 5), (7, 7), (1, 31), (1, 49))
    for dtype, (r, s), stride in product((torch.float32, torch.float16), taps, range(1, 17)):
        one = Problem(direction, 2, 8, 60, 60, 8, r, s, stride=(stride, stride), groups=8, dtype=dtype, layout=layout)
        if march_form.why_not(dense_request(one, CPU)) is None:
            taken += 1
            sides = [TensorForm(strides_of(shape, layout), True) for shape in (one.x_shape, one.y_shape)]
            assert march_form.good_tilings(march_form.Form(one, *sides, layout == "nhwc")), one
    assert taken > 50
