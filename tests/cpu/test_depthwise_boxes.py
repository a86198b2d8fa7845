"""How planes are cut to boxes: everything is covered, threads read other banks, and which layers are taken. No GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from haloconv.device import DeviceFacts
from haloconv.families.depthwise import box, box_wgrad
from haloconv.families.depthwise.boxes import COLS, Cut, Tiling
from haloconv.families.depthwise.layer import lead, shapes
from haloconv.layout import strides_of
from haloconv.problem import Direction, Problem, Request, TensorForm, dense_request
from tests.sources import why_refused

CPU = torch.device("cpu")
H200 = DeviceFacts("NVIDIA H200", "sm_90a", 132, (9, 0), 141 << 30, 227 << 10, "580")
BANKS, QUARTER = 8, 8  # of 16 bytes; lanes that read at a time


def layer(direction: Direction, n: int, h: int, w: int, taps: int = 7, channels: int = 4) -> Problem:
    return Problem(
        direction, n=n, c=channels, h=h, w=w, k=channels, r=taps, s=taps, stride=(1, 1), padding=(taps // 2,) * 4,
        groups=channels, bias=False, dtype=torch.float32, layout="nchw",
    )  # fmt: skip


def refusal(request: Request, facts: DeviceFacts = H200) -> str | None:
    return why_refused(box_wgrad if request.problem.direction == "wgrad" else box, request, facts)


def dense_refusal(problem: Problem, facts: DeviceFacts = H200) -> str | None:
    return refusal(dense_request(problem, CPU), facts)


def tiling_of(problem: Problem) -> Tiling | None:
    module = box_wgrad if problem.direction == "wgrad" else box
    return module.best_tiling(problem)


@given(
    st.sampled_from(("fprop", "dgrad", "wgrad")), st.integers(1, 70), st.integers(1, 260), st.integers(5, 65),
    st.sampled_from((1, 3, 5, 6, 7)),
)  # fmt: skip
def test_units_cover_every_pixel_and_fit(direction: Direction, n: int, h: int, groups: int, taps: int) -> None:
    problem = layer(direction, n, h, groups * COLS, taps)
    tiling = tiling_of(problem)
    if tiling is None:
        assert groups > 48, "only wide rows do not fit"
        return
    cut, (_, _, rows, cols) = Cut(problem, tiling), shapes(problem)[1]
    assert cut.rows * (cut.strips - 1) < rows <= cut.rows * cut.strips and cut.rows % tiling.rows == 0
    assert cut.images * (cut.image_groups - 1) < n <= cut.images * cut.image_groups
    assert cut.groups * COLS >= cols
    assert cut.groups * (cut.rows // tiling.rows) * cut.images <= tiling.threads, "a tile for each thread, not two"
    assert max(*cut.in_box, *cut.out_box) <= 256
    assert cut.in_box[0] >= (cut.groups - 1) * COLS + lead(problem, COLS) + COLS + taps - 1
    assert tiling.buffers * cut.buffer_bytes <= cut.smem_bytes <= H200.max_smem_bytes
    assert cut.out_offset % 128 == cut.buffer_bytes % 128 == 0
    assert cut.box_bytes <= cut.buffer_bytes


@pytest.mark.parametrize(("size", "rows"), [(56, 7), (112, 7), (28, 7), (64, 8), (96, 8), (128, 8), (224, 8)])
def test_lanes_that_read_at_a_time_read_different_banks(size: int, rows: int) -> None:
    """Of the first row of each window; later rows are as far from each other."""
    cut = Cut(layer("fprop", 8, size, size), Tiling(rows, 2, 3, 4))
    pitch = cut.in_box[0] // COLS
    tiles = cut.rows // rows
    pieces = [line // tiles * cut.in_box[1] * pitch + line % tiles * rows * pitch + group
              for line in range(tiles * cut.images) for group in range(cut.groups)]  # fmt: skip
    same_image = [pieces[at : at + QUARTER] for at in range(0, cut.groups * tiles - QUARTER + 1, QUARTER)]
    crowded = [read for read in same_image if len({piece % BANKS for piece in read}) < QUARTER]
    assert not crowded or (rows * pitch - cut.groups) % BANKS, "rows could be set apart, and are not"
    assert rows % 2 == 0 or not crowded


def test_small_maps_share_a_block() -> None:
    cut = Cut(layer("fprop", 64, 28, 28), Tiling(7, 2, 3, 4))
    assert (cut.images, cut.strips, cut.rows) == (4, 1, 28)
    assert cut.groups * (cut.rows // 7) * cut.images == 112


@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
def test_what_is_taken(direction: Direction) -> None:
    good = layer(direction, 16, 56, 56)
    assert dense_refusal(good) is None
    assert "Hopper" in str(dense_refusal(good, replace(H200, capability=(8, 0))))
    assert "fp32" in str(dense_refusal(replace(good, dtype=torch.float16)))
    assert "dilation" in str(dense_refusal(replace(good, dilation=(2, 2), padding=(6,) * 4)))
    assert "columns" in str(dense_refusal(layer(direction, 16, 56, 16)))
    assert "box" in str(dense_refusal(layer(direction, 16, 56, 400)))
    assert "16 bytes" in str(dense_refusal(layer(direction, 16, 57, 57))) or "pieces" in str(
        dense_refusal(layer(direction, 16, 57, 57))
    )


def test_few_taps_stay_with_other_kernels() -> None:
    assert "taps" in str(dense_refusal(layer("fprop", 16, 56, 56, taps=5)))
    assert dense_refusal(layer("wgrad", 16, 56, 56, taps=5)) is None
    assert "marches" in str(dense_refusal(layer("wgrad", 16, 56, 56, taps=3)))
    assert dense_refusal(layer("wgrad", 16, 224, 224, taps=3)) is None


def test_an_image_that_is_several_is_refused() -> None:
    """A stride of zero, as ``expand`` gives: TMA takes none."""
    problem = layer("wgrad", 4, 56, 56)
    seen = TensorForm((0, *strides_of(problem.x_shape, "nchw")[1:]), True)
    request = replace(dense_request(problem, CPU), second=seen)
    assert "neighbours" in str(refusal(request))
