"""What results of halo_sm90's weight gradient do not show: which rows are joined, and what orders loaded lines."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from haloconv import emulator
from haloconv.families.halo_sm90.wgrad import arrange, wgrad
from haloconv.families.halo_sm90.wgrad.operand import Operand
from haloconv.families.halo_sm90.wgrad.tile import Tile, stage_of
from haloconv.problem import Layout, Problem, dense_request
from tests import oracle
from tests.cases import case
from tests.emulated import Run, execute
from tests.emulated_halo_sm90_wgrad import AS_THEY_ARE
from tests.exact import make_exact
from tests.mutations.mutation import Mutation
from tests.mutations.runner import judge

MISSING = emulator.available()
ONE_LANE = "    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive"


CPU = torch.device("cpu")
POINTWISE = Problem("wgrad", 4, 64, 14, 14, 32, 1, 1, precision="tf32")


@pytest.mark.parametrize("layout, images, pixel", [("nchw", 4, 1), ("nhwc", 1, 64)])
def test_a_pointwise_layer_is_one_of_long_rows(layout: str, images: int, pixel: int) -> None:
    """Rows of 14 pixels begin in the middle of 16 bytes; those of whole images, or of the batch, do not."""
    request = wgrad.joined(dense_request(replace(POINTWISE, layout=layout), CPU))
    pixels = 4 * 14 * 14
    assert (request.problem.n, request.problem.h, request.problem.w) == (images, 1, pixels // images)
    assert request.second.strides[3] == pixel
    best = wgrad._tilings(request, 227 << 10, 132)[0]
    assert best.stage.x.loads == 0
    assert best.cut.column_strips == -(-pixels // images // best.stage.strip)


@pytest.mark.parametrize("width", [72, 100])
def test_boxes_have_the_pixels_of_whole_steps(width: int, emulator_cache: None) -> None:
    """Several lines to a box of more than a span, channels as neighbours: boxes of dy of whole spans never ended.

    Not among the emulator's runs, so that what stands in for a GPU run of the kernel does not hang on it.
    """
    one = case("steps", "rows of dy of a span and a step or more", (1, 16, 5, width), (40, 3, 3), padding=1,
               storage="channels_last")  # fmt: skip
    run = Run("halo_sm90", one, torch.float16, "wgrad", AS_THEY_ARE)
    exact = make_exact(run.forced, run.dtype)
    oracle.check_exact("wgrad", execute(run, exact, seed=0), exact, run.forced.spec)


def test_rows_that_do_not_follow_one_another_are_not_joined() -> None:
    dense = dense_request(POINTWISE, CPU)
    sliced = dense.second._replace(strides=(64 * 14 * 16, 14 * 16, 16, 1))
    for request in (
        replace(dense, second=sliced),
        dense_request(replace(POINTWISE, padding=(0, 0, 1, 1)), CPU),
        dense_request(replace(POINTWISE, r=3), CPU),
        dense_request(replace(POINTWISE, h=1 << 20, w=1 << 11), CPU),
    ):
        seen = wgrad.joined(request)
        assert (seen.problem, seen.first, seen.second) == (request.problem, request.first, request.second)


def test_columns_of_one_pixel_are_joined() -> None:
    request = wgrad.joined(dense_request(replace(POINTWISE, w=1), CPU))
    assert (request.problem.h, request.problem.w) == (1, 14) and request.second.strides == (64 * 14, 14, 14, 1)


@pytest.mark.parametrize(
    "channels, width, dtype, planes",
    [(64, 14, torch.float32, 1), (64, 14, torch.float16, 2), (64, 7, torch.float16, 8), (63, 14, torch.float16, 0)],
)
def test_planes_of_which_some_begin_at_16_bytes_are_shifted(
    channels: int, width: int, dtype: torch.dtype, planes: int
) -> None:
    one = replace(POINTWISE, c=channels, h=width, w=width, r=3, s=3, padding=(1, 1, 1, 1), dtype=dtype)
    x = wgrad._tilings(dense_request(one, CPU), 227 << 10, 132)[0].stage.x
    assert (x.planes, x.loads == 0) == (planes, planes > 0)


def test_lines_are_loaded_where_raw_ones_have_no_room() -> None:
    request = dense_request(replace(POINTWISE, h=65, w=191, r=3, s=3, dtype=torch.float16), CPU)
    much, little = (wgrad._tilings(request, smem_bytes, 132)[0].stage.x for smem_bytes in (227 << 10, 24 << 10))
    assert (much.planes, much.loads) == (8, 0) and (little.planes, little.loads) == (0, 1)


@pytest.mark.parametrize("width, rows, strip", [(512, 1, 64), (14, 5, 32)])
def test_transposed_lines_are_shorter_where_long_ones_have_room_for_two(width: int, rows: int, strip: int) -> None:
    """Lines of 96 pixels have room for two; boxes of several short lines stay as tall as two of them may be."""
    one = Problem("wgrad", 8, 64, width, width, 128, 3, 3, padding=(1, 1, 1, 1), layout="nhwc", precision="tf32")
    tile = Tile(3, 64, 64, 1, (3, 1, 1, 1))
    dense = dense_request(one, CPU)
    x = Operand.of(one, dense.second, one.x_shape, one.c)
    dy = Operand.of(one, dense.first, one.y_shape, one.k, is_dy=True)
    stage = stage_of(one, tile, x, dy, 227 << 10)
    assert stage is not None and dy.transposed
    assert (stage.box_rows, stage.strip, stage.stages) == (rows, strip, 4 if rows == 1 else 2)


@pytest.mark.skipif(MISSING is not None, reason=f"no emulator: {MISSING}")
@pytest.mark.usefixtures("emulator_cache")
def test_loaded_lines_are_ordered_by_mbarriers_alone() -> None:
    """compute-sanitizer's racecheck does not see what __syncwarp orders before one lane's arrival for its warp."""
    edit = ("    __syncwarp();\n" + ONE_LANE, ONE_LANE)
    where = {"family": "halo_sm90", "shape": AS_THEY_ARE}
    without = Mutation("no __syncwarp", "halo_sm90/wgrad", "", (edit,), "sm90_wgrad_pairs", "wgrad", **where)
    verdict = judge(without)
    assert not verdict.caught and verdict.how.startswith("clean"), verdict


SMALL = Problem("wgrad", 32, 512, 7, 7, 512, 3, 3, padding=(1, 1, 1, 1), dtype=torch.float16)


@pytest.mark.parametrize("pixels, images", [(7, [8, 4]), (14, [4, 2]), (28, [2, 1]), (8, []), (40, [])])
def test_small_images_lie_side_by_side(pixels: int, images: list[int]) -> None:
    """Rows of 8 pixels begin at multiples of 16 bytes, and with their padding no cell of 8 has room for them."""
    one = replace(SMALL, h=pixels, w=pixels)
    assert [each.images for each in arrange.arrangements(one)] == images
    assert not list(arrange.arrangements(replace(one, stride=(2, 2))))
    for how in arrange.arrangements(one):
        request = arrange.arranged(dense_request(one, CPU), how)
        assert (request.problem.n * how.images, request.problem.q) == (32, how.images * how.cell)
        assert request.second.strides[1] == 1 and request.problem.p == pixels


def test_copies_are_at_most_64_mb() -> None:
    batches = [n for n in (512, 1024) if list(arrange.arrangements(replace(SMALL, n=n)))]
    assert batches == [512]  # 29.4 MB each, with the gaps, and twice as many


@pytest.mark.parametrize("dtype, pixel", [(torch.float32, 1), (torch.float16, 64)])
def test_a_copy_of_a_pointwise_layer_is_one_row(dtype: torch.dtype, pixel: int) -> None:
    one = replace(POINTWISE, h=7, w=7, dtype=dtype)
    (how,) = arrange.arrangements(one)
    request = wgrad._multiplied(dense_request(one, CPU), how)
    assert (request.problem.n, request.problem.h, request.problem.w) == (1, 1, 4 * 7 * 7)
    assert request.second.strides[3] == pixel


@pytest.mark.parametrize("layout, pixels", [("nchw", 14), ("nchw", 7), ("nhwc", 7)])
def test_copies_are_multiplied_where_short_rows_are_slow(layout: Layout, pixels: int) -> None:
    one = replace(SMALL, h=pixels, w=pixels, layout=layout)
    best, *_ = wgrad._every_tiling(dense_request(one, CPU), 227 << 10, 132)
    assert best.arrangement is not None and str(best).endswith(f"images{best.arrangement.images}")
    aligned, *_ = wgrad._every_tiling(dense_request(replace(one, h=56, w=56), CPU), 227 << 10, 132)
    assert aligned.arrangement is None
