"""How small planes are cut to strips and blocks, which layers are taken, and that no source spills. No GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from haloconv.device import DeviceFacts
from haloconv.families import FAMILIES
from haloconv.families.common import ceil_div
from haloconv.families.depthwise import plane, plane_wgrad
from haloconv.families.depthwise.layer import shapes
from haloconv.families.depthwise.small_planes import MOST_COLS, MOST_PIXELS, Tiling, pitch_bytes, unit_planes
from haloconv.jit import get_kernel
from haloconv.layout import strides_of
from haloconv.problem import DIRECTIONS, Direction, Problem, Request, TensorForm, dense_request
from tests.sources import compile_all, noted_sources, why_refused

CPU = torch.device("cpu")
H200 = DeviceFacts("NVIDIA H200", "sm_90a", 132, (9, 0), 141 << 30, 227 << 10, "580")
A100 = DeviceFacts("NVIDIA A100", "sm_80", 108, (8, 0), 80 << 30, 163 << 10, "580")
BANKS = 32  # of four bytes


def layer(direction: Direction, size: int, taps: int, dtype: torch.dtype = torch.float16, stride: int = 1) -> Problem:
    return Problem(
        direction, n=128, c=1152, h=size, w=size, k=1152, r=taps, s=taps, stride=(stride, stride),
        padding=(taps // 2,) * 4, groups=1152, dtype=dtype,
    )  # fmt: skip


def refusal(request: Request, facts: DeviceFacts = H200) -> str | None:
    return why_refused(plane_wgrad if request.problem.direction == "wgrad" else plane, request, facts)


def dense_refusal(problem: Problem, facts: DeviceFacts = H200) -> str | None:
    return refusal(dense_request(problem, CPU), facts)


def tiling_of(problem: Problem) -> Tiling | None:
    return (plane_wgrad if problem.direction == "wgrad" else plane).best_tiling(problem)


@given(
    st.sampled_from(DIRECTIONS), st.integers(1, 20), st.integers(1, 20), st.sampled_from((1, 2, 3, 5, 7)),
    st.integers(1, 3), st.integers(1, 3),
)  # fmt: skip
def test_strips_and_blocks(direction: Direction, h: int, w: int, taps: int, stride: int, multiplier: int) -> None:
    """Strips cover the rows, strips of dx begin in one residue class, and runs of a block begin at 16 bytes."""
    multiplier = 1 if direction == "dgrad" else multiplier
    problem = replace(layer(direction, 7, taps, stride=stride), h=h, w=w, k=1152 * multiplier)
    if min(problem.p, problem.q) < 1 or problem.q > MOST_COLS or problem.p * problem.q > MOST_PIXELS:
        return
    tiling, (_, _, rows, _) = tiling_of(problem), shapes(problem)[1]
    if tiling is None:
        return
    strips = ceil_div(rows, tiling.rows)
    assert direction != "dgrad" or strips == 1 or tiling.rows % stride == 0
    assert tiling.planes % unit_planes(problem) == 0 and unit_planes(problem) % 32 == 0
    assert unit_planes(problem) // multiplier % 8 == 0
    assert tiling.planes * strips <= 1024 and tiling.planes * strips * tiling.min_blocks <= 1024


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_common_layers_have_enough_threads(direction: Direction) -> None:
    for size, taps, dtype in product((7, 14), (3, 5, 7), (torch.float32, torch.float16)):
        tiling = tiling_of(layer(direction, size, taps, dtype))
        assert tiling is not None
        assert tiling.planes * ceil_div(size, tiling.rows) * tiling.min_blocks >= 448, (size, taps, dtype)


@pytest.mark.parametrize(("size", "words"), [(7, 1), (14, 4), (8, 4), (16, 4)])
def test_lanes_read_different_banks(size: int, words: int) -> None:
    """Of fp32 at the same place of neighbouring planes: so many words of a bank; 16-byte reads of whole pieces, one."""
    pitch = pitch_bytes(layer("fprop", size, 3, torch.float32), (1, 1, size, size)) // 4
    lanes = [lane * pitch % BANKS for lane in range(BANKS)]
    assert max(lanes.count(bank) for bank in lanes) == words
    assert words == 1 or len({lane * pitch // 4 % 8 for lane in range(8)}) == 8


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_is_taken(direction: Direction) -> None:
    good = layer(direction, 7, 5)
    assert dense_refusal(good) is None and dense_refusal(good, A100) is None
    assert "copies" in str(dense_refusal(good, replace(A100, capability=(7, 5))))
    assert "columns" in str(dense_refusal(layer(direction, 28, 5)))
    assert "pixels" in str(dense_refusal(replace(good, h=60)))
    assert "reaches" in str(dense_refusal(replace(good, h=60, w=3, dilation=(8, 1), padding=(16, 16, 2, 2))))
    assert dense_refusal(replace(good, n=127, c=1144, k=1144, groups=1144, stride=(2, 2))) is None
    nhwc = dense_request(replace(good, layout="nhwc"), CPU)
    assert "nchw" in str(refusal(nhwc)) or "follow" in str(refusal(nhwc))


def test_what_tensors_are_taken() -> None:
    problem = layer("fprop", 7, 5)
    good = dense_request(problem, CPU)
    assert refusal(replace(good, first=good.first._replace(aligned=False))) is not None
    assert refusal(replace(good, second=good.second._replace(aligned=False))) is None
    rows_apart = TensorForm((1152 * 56, 56, 8, 1), True)
    assert "follow" in str(refusal(replace(good, first=rows_apart)))
    images_apart = TensorForm((2 * 1152 * 49, 49, 7, 1), True)
    assert "follow" in str(refusal(replace(good, first=images_apart)))
    taps_apart = TensorForm((50, 50, 5, 1), True)
    assert "filters" in str(refusal(replace(good, second=taps_apart)))
    any_stride = TensorForm((25, 12345, 5, 1), True)  # of an axis of one element
    assert refusal(replace(good, second=any_stride)) is None


def test_filter_gradients_need_images_that_begin_at_16_bytes() -> None:
    odd = replace(layer("wgrad", 7, 5), c=13, k=13, groups=13)
    assert "image" in str(dense_refusal(odd))
    assert dense_refusal(replace(odd, n=1)) is None
    assert dense_refusal(replace(odd, direction="fprop")) is None
    request = dense_request(layer("wgrad", 7, 5), CPU)
    for image in (2 * 1152 * 49, 0):
        apart = TensorForm((image, *strides_of(request.problem.x_shape, "nchw")[1:]), True)
        assert refusal(replace(request, second=apart)) is None
    apart = TensorForm((1152 * 49 + 4, *strides_of(request.problem.x_shape, "nchw")[1:]), True)
    assert "image" in str(refusal(replace(request, second=apart)))


def test_they_come_before_the_march_and_behind_all_others() -> None:
    with noted_sources(H200):
        for direction, of_march in (("fprop", "march"), ("dgrad", "march"), ("wgrad", "march_wgrad")):
            own = "plane_wgrad" if direction == "wgrad" else "plane"
            offered = FAMILIES["depthwise"].configs(dense_request(layer(direction, 14, 7), CPU))
            assert [each.kernel for each in offered][:2] == [f"depthwise/{own}", f"depthwise/{of_march}"]


@pytest.mark.parametrize("images", [1, 32, 128, 4096])
def test_parts_bound_the_products_of_a_sum(images: int) -> None:
    """And have as many images as are left, without a part that has none."""
    for size, taps in product((1, 7, 14), (3, 7)):
        problem = replace(layer("wgrad", size, taps), n=images)
        with noted_sources(H200):
            tiling, cut = plane_wgrad.configs(dense_request(problem, CPU))[0].derived
        each = plane_wgrad.part_images(problem, tiling, cut, ceil_div(problem.k, unit_planes(problem)))
        assert each % cut.images == 0 and each // cut.images * tiling.rows * problem.q <= 4096


def test_no_source_spills() -> None:
    """Layers of networks on planes of 7x7 and 14x14 on Hopper; others may."""
    problems = [
        layer(direction, size, taps, dtype, stride)
        for direction, size, taps, dtype in product(DIRECTIONS, (7, 14), (3, 5, 7), (torch.float32, torch.float16))
        for stride in ((1, 2) if size == 14 else (1,))
    ]
    modules = {"wgrad": plane_wgrad}
    sources = [(modules.get(each.direction, plane)).source(each, tiling_of(each)) for each in problems]
    compile_all(sources, H200.arch)
    assert not [each.constants for each in sources if get_kernel(each, H200.arch).spill_bytes]
