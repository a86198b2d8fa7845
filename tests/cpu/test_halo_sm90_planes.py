"""halo_sm90/pointwise_planes: what it takes, which tiles it has, what it compiles to, and who is offered it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from haloconv.device import watched
from haloconv.emulator import available, emulated_device
from haloconv.families import FAMILIES
from haloconv.families.base import MOST_CONFIGS
from haloconv.families.halo_sm90.pointwise import pointwise, pointwise_planes
from haloconv.families.halo_sm90.pointwise.planes_tile import ORDERS, Tile, planes_of, tiles
from haloconv.jit import compile as compiler
from haloconv.problem import Problem, Request, TensorForm, dense_request
from tests import emulated_halo_sm90_planes
from tests.emulated import BY_NAME

MISSING = available()
CPU = torch.device("cpu")
LAYER = Problem("fprop", 32, 128, 7, 7, 192, 1, 1, dtype=torch.float16)
SMEM_BYTES, SM_COUNT = 227 << 10, 132
SERIALIZED = "wgmma.mma_async instructions are serialized"
DTYPES = (torch.float32, torch.float16)
DIRECTIONS = ("fprop", "dgrad")


def requested(problem: Problem, **changes: object) -> Request:
    if problem.dtype == torch.float32:
        problem = replace(problem, precision="tf32")
    return replace(dense_request(problem, CPU), **changes)


def tiles_of(request: Request) -> tuple[Tile, ...]:
    return tiles(planes_of(request), SMEM_BYTES, SM_COUNT)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (requested(replace(LAYER, r=3, padding=(1, 1, 0, 0))), "1x1"),
        (requested(replace(LAYER, groups=2)), "groups"),
        (requested(replace(LAYER, h=8, w=8)), "TMA reaches"),
        (requested(replace(LAYER, layout="nhwc")), "TMA reaches"),
        (requested(replace(LAYER, c=12, layout="nhwc")), "neighbours in dense planes"),
        (requested(LAYER, result_layout="nhwc"), "neighbours in dense planes"),
        (requested(LAYER, first=TensorForm((6272, 49, 1, 7), True)), "neighbours in dense planes"),
        (requested(LAYER, first=TensorForm((0, 49, 7, 1), True)), "neighbours in dense planes"),
        (requested(LAYER, first=TensorForm((6272, 49, 7, 1), False)), "multiples of 16 bytes"),
        (requested(LAYER, first=TensorForm((6274, 49, 7, 1), True)), "multiples of 16 bytes"),
        (requested(replace(LAYER, c=12)), "multiples of 16 bytes"),
        (requested(replace(LAYER, k=12)), "multiples of 16 bytes"),
        (requested(replace(LAYER, direction="dgrad", h=28, w=28, stride=(2, 2), bias=True)), "no bias is added"),
        (requested(replace(LAYER, h=17, w=17)), "no tile fits"),
        (requested(replace(LAYER, n=1, h=1, w=3)), "no tile fits"),
        (requested(replace(LAYER, h=61, w=61, stride=(4, 4))), "no tile fits"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_kernel_does_not_take_it_says(request_: Request, why: str) -> None:
    with emulated_device():
        assert pointwise_planes.why_not(requested(LAYER)) is None
        assert why in (pointwise_planes.why_not(request_) or "") and pointwise_planes.configs(request_) == []


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("width", "stride", "kernel"),
    [(7, 1, pointwise_planes), (28, 1, pointwise), (28, 2, pointwise_planes), (56, 2, pointwise_planes), (17, 1, None)],
)
def test_the_family_offers_the_kernel_that_takes_the_layer_and_the_best_of_conv(
    width: int, stride: int, kernel: object, direction: str
) -> None:
    one = replace(LAYER, direction=direction, h=width, w=width, stride=(stride, stride))
    with emulated_device():
        found = FAMILIES["halo_sm90"].configs(requested(one))
        special = [] if kernel is None else kernel.configs(requested(one))[: MOST_CONFIGS - 1]
    assert found[: len(special)] == special and len(found) <= MOST_CONFIGS
    assert {each.kernel for each in found[len(special) :]} == {"halo_sm90/conv"}


def test_a_weight_gradient_is_none_of_theirs() -> None:
    with emulated_device():
        found = FAMILIES["halo_sm90"].configs(requested(replace(LAYER, direction="wgrad")))
    assert {each.kernel for each in found} <= {"halo_sm90/wgrad", "halo_sm90/wgrad_ss"}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("c", "k", "width", "stride"), [(2048, 512, 7, 1), (24, 40, 5, 1), (512, 1024, 28, 2), (48, 120, 64, 2)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tile_fits(c: int, k: int, width: int, stride: int, dtype: torch.dtype, direction: str) -> None:
    size = {"c": c, "k": k, "h": width, "w": width, "stride": (stride, stride)}
    request = requested(replace(LAYER, direction=direction, dtype=dtype, **size))
    one, found = planes_of(request), tiles_of(request)
    assert found
    for tile in found:
        assert tile.smem_bytes(one) <= SMEM_BYTES and tile.stages >= 3
        assert tile.images * tile.pixels(one) <= 64 * tile.m_blocks * (1 if tile.split_n else 2)
        assert tile.images == 1 or tile.band == one.rows
        assert tile.m_blocks * tile.n <= 256 and tile.filters == tile.n * (2 if tile.split_n else 1)
        assert tile.chunk_bytes == 128 or not one.product.packs


@pytest.mark.parametrize(
    ("changes", "x_boxes", "y_boxes", "banded"),
    [
        ({}, False, False, False),
        ({"h": 14, "w": 14, "stride": (2, 2)}, False, False, False),
        ({"h": 28, "w": 28, "stride": (2, 2)}, False, False, False),
        ({"h": 28, "w": 28, "stride": (2, 2), "direction": "dgrad"}, False, False, False),
        ({"h": 56, "w": 56, "stride": (2, 2)}, True, True, True),
        ({"h": 56, "w": 56, "stride": (2, 2), "direction": "dgrad"}, True, True, True),
    ],
)
def test_boxes_bring_rows_with_a_stride_and_take_bands(
    changes: dict, x_boxes: bool, y_boxes: bool, banded: bool
) -> None:
    """Whole planes leave by copies, which need no rows at multiples of 16 bytes."""
    request = requested(replace(LAYER, **changes))
    tile = tiles_of(request)[0]
    assert (tile.x_cols > 0, tile.y_boxes, tile.bands(planes_of(request)) > 1) == (x_boxes, y_boxes, banded)


def test_rows_of_small_planes_come_in_boxes_too() -> None:
    """Boxes have fewer bytes than copies, but many short rows, which TMA takes one by one."""
    request = requested(replace(LAYER, h=28, w=28, stride=(2, 2)))
    one = planes_of(request)
    whole = [tile for tile in tiles_of(request) if tile.bands(one) == 1]
    assert {tile.x_cols > 0 for tile in whole} == {True, False} and not whole[0].x_cols


def test_pairs_of_pixels_are_words_of_dense_planes() -> None:
    """Of planes of an odd size only those of even channels."""

    def pairs(**changes: object) -> tuple[str, bool]:
        request = requested(replace(LAYER, **changes))
        one, tile = planes_of(request), tiles_of(request)[0]
        return tile.x_pairs(one), tile.y_pairs(one)

    assert pairs(h=14, w=14) == ("ALL_PAIRS", True)
    assert pairs() == ("EVEN_PAIRS", False)
    assert pairs(h=5, w=5) == pairs(h=14, w=14, dtype=torch.float32) == ("NO_PAIRS", False)
    assert pairs(h=28, w=28, stride=(2, 2)) == ("NO_PAIRS", False)
    assert pairs(h=28, w=28, stride=(2, 2), direction="dgrad") == ("ALL_PAIRS", False)


def test_orders_of_rows_give_each_row_to_one_lane() -> None:
    places = [(i % 4, i // 4, warp, half) for i in range(8) for warp in range(4) for half in range(2)]
    for order in ORDERS:
        rows = [sum(count * step for count, step in zip(place, order, strict=True)) for place in places]
        assert sorted(rows) == list(range(64))
    assert len(set(ORDERS)) == 24


@pytest.mark.parametrize(
    ("changes", "rounds"),
    [
        ({}, 1),
        ({"dtype": torch.float32}, 1),
        ({"h": 14, "w": 14}, 1),
        ({"h": 14, "w": 14, "stride": (2, 2)}, 2),
        ({"h": 28, "w": 28, "stride": (2, 2)}, 2),
        ({"h": 56, "w": 56, "stride": (2, 2)}, 1),
        ({"h": 56, "w": 56, "stride": (2, 2), "direction": "dgrad"}, 1),
    ],
)
def test_lanes_of_a_load_meet_different_banks(changes: dict, rounds: int) -> None:
    """With a stride, in planes that copies bring as they are, some meet in one bank."""
    request = requested(replace(LAYER, **changes))
    assert tiles_of(request)[0].x_rounds(planes_of(request)) == rounds


def test_rows_of_boxes_come_after_the_filters_of_their_stage() -> None:
    """On an NVIDIA H200 boxes of seven short rows took 59.4 us beside 512 filters, copies of planes 40.8 beside 256."""
    request = requested(Problem("fprop", 32, 1024, 14, 14, 2048, 1, 1, (2, 2), dtype=torch.float32))
    one, (first, *others) = planes_of(request), tiles_of(request)
    boxes = next(tile for tile in others if tile.x_cols and tile.filters == 512)
    assert first.x_cols == 0 and boxes.cycles(one, SM_COUNT) > 1.2 * first.cycles(one, SM_COUNT)


@pytest.mark.of_kernel("halo_sm90/pointwise_planes")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_wgmma_is_not_serialized(dtype: torch.dtype, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    request = requested(replace(LAYER, direction=direction, dtype=dtype, bias=direction == "fprop"))
    widest = next(tile for tile in tiles_of(request) if tile.n * tile.m_blocks == 256)
    logs, parse = [], compiler.parse_resources
    monkeypatch.setattr(compiler, "parse_resources", lambda log, entry: logs.append(log) or parse(log, entry))
    cubin = compiler.compile_source(pointwise_planes.source(planes_of(request), widest), "sm_90a")
    assert cubin.spill_bytes == cubin.stack_bytes == 0
    assert "Compiling entry function 'halo_sm90_pointwise_planes'" in logs[0] and SERIALIZED not in logs[0]


@pytest.mark.parametrize(("name", "dtype", "result", "shape", "finite"), tuple(emulated_halo_sm90_planes.runs()))
def test_the_runs_are_this_kernels(name: str, dtype: torch.dtype, result: str, shape: str, finite: bool) -> None:
    """What the emulator runs elsewhere would pass with another kernel, too."""
    one = BY_NAME[name].problem("fprop", dtype).toward("dgrad" if result == "dgrad" else "fprop")
    with emulated_device(sm_count=4), emulated_halo_sm90_planes.forced(shape):
        found = FAMILIES["halo_sm90"].configs(requested(one))
    assert found[0].kernel == pointwise_planes.KERNEL


@pytest.mark.usefixtures("emulator_cache")
@pytest.mark.skipif(MISSING is not None, reason=f"no emulator: {MISSING}")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_images_may_be_apart(direction: str) -> None:
    """Every second image of a tensor, with what is between them not finite."""
    one = Problem(direction, 3, 40, 5, 7, 24, 1, 1, dtype=torch.float16)
    shape = one.x_shape if direction == "fprop" else one.y_shape
    generator = torch.Generator().manual_seed(0)
    whole = torch.full((6, *shape[1:]), float("nan"), dtype=torch.float16)
    x, w = whole[::2], torch.randint(-3, 4, one.w_shape, generator=generator).half()
    x.copy_(torch.randint(-3, 4, shape, generator=generator))
    matrix = w[:, :, 0, 0].double() if direction == "fprop" else w[:, :, 0, 0].double().T
    with emulated_device(sm_count=4):
        request = requested(one, first=TensorForm(x.stride(), True))
        call = watched(pointwise_planes.bind(request, pointwise_planes.configs(request)[0]), CPU)
        got = call(x, w, None) if direction == "fprop" else call(x, w)
    assert torch.equal(got, torch.einsum("kc,nchw->nkhw", matrix, x.double()).half())
