"""halo_sm90/pointwise: which pixels are one row, what it takes, which tiles it has, and results in another layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from haloconv import emulator
from haloconv.device import watched
from haloconv.emulator import emulated_device
from haloconv.families.base import MOST_CONFIGS, Config
from haloconv.families.halo_sm90.pointwise import pointwise
from haloconv.families.halo_sm90.pointwise.product import Boxes
from haloconv.families.halo_sm90.pointwise.tile import Tile, product_of, tiles
from haloconv.jit import compile as compiler
from haloconv.layout import Layout
from haloconv.problem import Problem, Request, TensorForm, dense_request

MISSING = emulator.available()
CPU = torch.device("cpu")
LAYER = Problem("fprop", 4, 64, 16, 28, 128, 1, 1, dtype=torch.float16)
SMEM_BYTES, SM_COUNT = 227 << 10, 132
SERIALIZED = "wgmma.mma_async instructions are serialized"
DTYPES = (torch.float32, torch.float16)
MEMORY = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}


def requested(problem: Problem, **changes: object) -> Request:
    return replace(dense_request(problem, CPU), **changes)


def tiles_of(request: Request) -> tuple[Tile, ...]:
    return tiles(product_of(request), SMEM_BYTES, SM_COUNT)


@pytest.mark.parametrize(
    ("layout", "changes", "cols", "rows", "images"),
    [
        ("nhwc", {}, 4 * 16 * 28, 1, 1),
        ("nchw", {}, 16 * 28, 4, 1),
        ("nhwc", {"stride": (2, 2)}, 14, 4 * 8, 1),
        ("nhwc", {"stride": (2, 2), "h": 15}, 14, 8, 4),
        ("nhwc", {"h": 1, "w": 1}, 4, 1, 1),
        ("nhwc", {"n": 1 << 21, "h": 1 << 5}, 28 << 5, 1 << 21, 1),
    ],
)
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_pixels_that_follow_one_another_are_one_row(
    direction: str, layout: Layout, changes: dict, cols: int, rows: int, images: int
) -> None:
    one = product_of(requested(replace(LAYER, direction=direction, layout=layout, **changes)))
    assert one.x[:3] == one.y[:3] == (cols, rows, images)


def test_boxes_are_filled_by_whole_rows() -> None:
    strided = replace(LAYER, layout="nhwc", stride=(2, 2))
    assert product_of(requested(replace(strided, w=28))).boxes == Boxes(14, 4, 1, 8)
    assert product_of(requested(replace(strided, w=200))).boxes == Boxes(50, 1, 2, 32)
    assert product_of(requested(LAYER)).boxes == Boxes(64, 1, 7, 4)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (requested(replace(LAYER, r=3)), "1x1"),
        (requested(replace(LAYER, padding=(0, 0, 1, 1))), "padded"),
        (requested(replace(LAYER, groups=2)), "groups"),
        (requested(replace(LAYER, c=4)), "fewer than 8"),
        (requested(replace(LAYER, dtype=torch.float32)), "fp32 products"),
        (requested(replace(LAYER, h=14, w=14)), "multiples of 16 bytes"),
        (requested(replace(LAYER, k=12, layout="nhwc")), "multiples of 16 bytes"),
        (requested(replace(LAYER, stride=(1, 2))), "multiples of 16 bytes"),
        (requested(replace(LAYER, direction="dgrad", n=1, c=20, h=1, w=1)), "multiples of 16 bytes"),  # one row of y
        (requested(replace(LAYER, n=64, h=2, w=8)), "most of a tile empty"),
        (requested(LAYER, first=TensorForm((64 * 448, 448, 28, 1), False)), "multiples of 16 bytes"),
        (requested(LAYER, first=TensorForm((0, 448, 28, 1), True)), "multiples of 16 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_kernel_does_not_take_it_says(request_: Request, why: str) -> None:
    with emulated_device():
        assert pointwise.why_not(requested(LAYER)) is None
        assert why in (pointwise.why_not(request_) or "") and pointwise.configs(request_) == []


def test_it_takes_hopper_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated_device():
        other = replace(requested(LAYER).facts, arch="sm_100a")
        monkeypatch.setattr(Request, "facts", other)
        assert "Hopper" in (pointwise.why_not(requested(LAYER)) or "")


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize(("c", "k", "pixels"), [(64, 256, 56), (2048, 512, 8), (24, 40, 112), (512, 2048, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tile_fits(layout: Layout, c: int, k: int, pixels: int, dtype: torch.dtype) -> None:
    request = requested(replace(LAYER, c=c, k=k, h=pixels, w=pixels, layout=layout, dtype=dtype))
    product, found = product_of(request), tiles_of(request)
    assert found
    for tile in found:
        assert tile.smem_bytes(product) <= SMEM_BYTES and tile.stages >= 3 and tile.buffers >= 2
        assert tile.m_blocks in (1, 2) and tile.m_blocks * tile.n <= 256
        assert tile.grid(product, SM_COUNT) <= min(SM_COUNT, tile.count(product))
        assert (tile.splits - 1) * tile.range_chunks(product) < product.chunks  # no range is empty
        if tile.keeps_w:
            assert tile.grid(product, SM_COUNT) % (tile.blocks(product) * tile.splits) == 0
        if tile.splits > 1:
            assert 4 * tile.splits * product.outputs <= 64 << 20


def test_configs_are_few_and_have_names_of_their_own() -> None:
    with emulated_device():
        found = pointwise.configs(requested(LAYER))
    assert 1 < len(found) <= MOST_CONFIGS and len({each.key for each in found}) == len(found)


def test_small_stages_cost_the_time_for_which_they_are_under_way() -> None:
    """Stages of 64 pixels beside kept filters took 29 us on an NVIDIA H200 where larger ones need about 20."""
    one = Problem("fprop", 32, 512, 28, 28, 256, 1, 1, dtype=torch.float16)
    product, found = product_of(requested(one)), tiles_of(requested(one))
    for tile in found:
        fewer = replace(tile, stages=tile.stages - 1)
        assert fewer.cycles(product, SM_COUNT) >= tile.cycles(product, SM_COUNT)
    small = next(tile for tile in found if tile.keeps_w and tile.pixels == 64)
    assert small.cycles(product, SM_COUNT) > 1.2 * found[0].cycles(product, SM_COUNT)


@pytest.mark.of_kernel("halo_sm90/pointwise")
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_wgmma_is_not_serialized(
    dtype: torch.dtype, layout: Layout, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = replace(LAYER, direction=direction, layout=layout, dtype=dtype, bias=direction == "fprop")
    product = product_of(requested(one))
    widest = next(tile for tile in tiles_of(requested(one)) if tile.n * tile.m_blocks == 256)
    logs, parse = [], compiler.parse_resources
    monkeypatch.setattr(compiler, "parse_resources", lambda log, entry: logs.append(log) or parse(log, entry))
    cubin = compiler.compile_source(pointwise.source(product, widest), "sm_90a")
    assert cubin.spill_bytes == cubin.stack_bytes == 0
    assert "Compiling entry function 'halo_sm90_pointwise'" in logs[0] and SERIALIZED not in logs[0]


@pytest.mark.of_kernel("halo_sm90/pointwise")
@pytest.mark.parametrize("dtype", DTYPES)
def test_clearing_gaps_spills_no_register(dtype: torch.dtype) -> None:
    one = replace(LAYER, direction="dgrad", layout="nhwc", dtype=dtype, stride=(2, 2))
    product = product_of(requested(one))
    widest = next(tile for tile in tiles_of(requested(one)) if tile.n * tile.m_blocks == 256)
    source = pointwise.source(product, widest)
    assert ("HAS_GAPS", 1) in source.constants
    assert compiler.compile_source(source, "sm_90a").spill_bytes == 0


@pytest.mark.usefixtures("emulator_cache")
@pytest.mark.skipif(MISSING is not None, reason=f"no emulator: {MISSING}")
def test_zeros_between_outputs_come_in_the_same_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Problem("dgrad", 2, 40, 7, 40, 24, 1, 1, (2, 3), dtype=torch.float16, layout="nhwc")
    dy, w = torch.ones(one.y_shape, dtype=torch.float16), torch.ones(one.w_shape, dtype=torch.float16)
    monkeypatch.setattr(torch.Tensor, "zero_", lambda _: pytest.fail("another kernel writes zeros"))
    with emulated_device(sm_count=4):
        request = requested(one)
        call = watched(pointwise.bind(request, pointwise.configs(request)[0]), CPU)
        dx = call(dy.contiguous(memory_format=torch.channels_last), w)
    monkeypatch.undo()
    expected = torch.zeros(one.x_shape, dtype=torch.float16)
    expected[:, :, ::2, ::3] = 24
    assert torch.equal(dx, expected)


@pytest.mark.usefixtures("emulator_cache")
@pytest.mark.skipif(MISSING is not None, reason=f"no emulator: {MISSING}")
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@pytest.mark.parametrize(("layout", "result"), [("nchw", "nhwc"), ("nhwc", "nchw")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_has_the_layout_that_is_asked_for(
    dtype: torch.dtype, layout: Layout, result: Layout, direction: str
) -> None:
    """Small integers: the reference's bits."""
    precision = "tf32" if dtype == torch.float32 else "ieee"
    one = Problem(direction, 2, 72, 8, 12, 40, 1, 1, dtype=dtype, layout=layout, precision=precision)
    generator = torch.Generator().manual_seed(0)
    shape = one.x_shape if direction == "fprop" else one.y_shape
    x, w = (torch.randint(-3, 4, extents, generator=generator).to(dtype) for extents in (shape, one.w_shape))
    x = x.contiguous(memory_format=MEMORY[layout])
    matrix = w[:, :, 0, 0].double() if direction == "fprop" else w[:, :, 0, 0].double().T
    with emulated_device(sm_count=4):
        request = requested(one, result_layout=result)
        config: Config = pointwise.configs(request)[0]
        call = watched(pointwise.bind(request, config), CPU)
        got = call(x, w, None) if direction == "fprop" else call(x, w)
    assert got.is_contiguous(memory_format=MEMORY[result])
    assert torch.equal(got, torch.einsum("kc,nchw->nkhw", matrix, x.double()).to(dtype))
