"""halo_sm90/implicit_gemm: what it takes, which taps it multiplies, its tiles, and who is offered it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product as combinations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from haloconv import emulator
from haloconv.device import watched
from haloconv.emulator import emulated_device
from haloconv.emulator.tensor_map import encode_tiled
from haloconv.families import FAMILIES
from haloconv.families.base import MOST_CONFIGS
from haloconv.families.halo_sm90 import family
from haloconv.families.halo_sm90.conv import conv
from haloconv.families.halo_sm90.pointwise import implicit_gemm, pointwise
from haloconv.families.halo_sm90.pointwise.product import Product, Taps
from haloconv.families.halo_sm90.pointwise.tile import Tile, tiles
from haloconv.jit import compile as compiler
from haloconv.layout import strides_of
from haloconv.problem import Problem, Request, TensorForm, dense_request, output_extent
from tests import emulated_halo_sm90_implicit_gemm
from tests.emulated import BY_NAME

MISSING = emulator.available()
needs_emulator = pytest.mark.skipif(MISSING is not None, reason=f"no emulator: {MISSING}")
CPU = torch.device("cpu")
LAYER = Problem("fprop", 2, 64, 16, 28, 128, 3, 3, (1, 1), (1, 1, 1, 1), dtype=torch.float16, layout="nhwc")
FAR = replace(LAYER, padding=(127,) * 4, dilation=(127, 127))
SMEM_BYTES, SM_COUNT = 227 << 10, 132
SERIALIZED = "wgmma.mma_async instructions are serialized"
DTYPES, DIRECTIONS = (torch.float32, torch.float16), ("fprop", "dgrad")
UNREACHED, TOO_FAR = "pixels are not at multiples of 16 bytes", "further from an output than im2col reaches"


def requested(problem: Problem, **changes: object) -> Request:
    return replace(dense_request(problem, CPU), **changes)


def tiles_of(request: Request) -> tuple[Tile, ...]:
    return tiles(implicit_gemm.product_of(request), SMEM_BYTES, SM_COUNT)


# What it takes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (requested(replace(LAYER, r=1, s=1)), "one tap"),
        (requested(replace(LAYER, direction="dgrad", stride=(1, 2))), "residue classes"),
        (requested(replace(LAYER, groups=2)), "groups"),
        (requested(replace(LAYER, c=4)), "fewer than 8"),
        (requested(replace(LAYER, k=4)), "fewer than 8"),
        (requested(replace(LAYER, dtype=torch.float32)), "fp32 products"),
        (requested(replace(LAYER, c=12)), UNREACHED),
        (requested(replace(LAYER, k=12)), UNREACHED),
        (requested(LAYER, first=TensorForm(strides_of(LAYER.x_shape, "nhwc"), False)), UNREACHED),
        (requested(LAYER, first=TensorForm((0, *strides_of(LAYER.x_shape, "nhwc")[1:]), True)), UNREACHED),
        (requested(LAYER, first=TensorForm((28 * 16 * 68, 1, 28 * 68, 68), True)), UNREACHED),  # 136 bytes
        (requested(replace(LAYER, stride=(9, 1))), TOO_FAR),
        (requested(replace(LAYER, stride=(1, 9))), TOO_FAR),
        (requested(replace(LAYER, padding=(129, 0, 0, 0))), TOO_FAR),
        (requested(replace(LAYER, padding=(0, 0, 129, 0))), TOO_FAR),
        (requested(replace(LAYER, padding=(0, 130, 0, 0))), TOO_FAR),
        (requested(replace(LAYER, padding=(0, 0, 0, 130))), TOO_FAR),
        (requested(replace(LAYER, h=300, dilation=(128, 1))), TOO_FAR),
        (requested(replace(LAYER, w=300, dilation=(1, 128))), TOO_FAR),
        (requested(replace(LAYER, h=131, r=2, s=1, dilation=(129, 1), padding=(0,) * 4)), TOO_FAR),
        (requested(replace(LAYER, h=280, direction="dgrad", padding=(1, 1, 1, 1), dilation=(65, 1))), TOO_FAR),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_kernel_does_not_take_it_says(request_: Request, why: str) -> None:
    with emulated_device():
        assert implicit_gemm.why_not(requested(LAYER)) is None
        assert why in (implicit_gemm.why_not(request_) or "") and implicit_gemm.configs(request_) == []


@pytest.mark.parametrize(
    "problem",
    [
        LAYER,
        replace(LAYER, direction="dgrad"),
        replace(LAYER, stride=(8, 8)),
        FAR,
        replace(FAR, direction="dgrad"),
        replace(LAYER, padding=(128, 129, 128, 129)),
        replace(LAYER, h=130, r=2, s=1, dilation=(128, 1), padding=(0,) * 4),
        replace(LAYER, w=280, direction="dgrad", dilation=(1, 64), padding=(0,) * 4),
        replace(LAYER, direction="dgrad", padding=(5, 0, 9, 2)),
        replace(LAYER, dtype=torch.float32, precision="tf32", c=12, k=20),
    ],
    ids=str,
)
def test_what_im2col_just_reaches_it_takes(problem: Problem) -> None:
    with emulated_device():
        request = requested(problem)
        assert implicit_gemm.why_not(request) is None
        one, config = implicit_gemm.product_of(request), implicit_gemm.configs(request)[0]
        m = pointwise._pixel_map(one, config.derived)
        encode_tiled(m.data_type, 4096, m.extents, m.strides, m.box, swizzle=m.swizzle, pixels=m.pixels)


def test_it_takes_hopper_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated_device():
        other = replace(requested(LAYER).facts, arch="sm_100a")
        monkeypatch.setattr(Request, "facts", other)
        assert "Hopper" in (implicit_gemm.why_not(requested(LAYER)) or "")


@pytest.mark.parametrize(
    ("direction", "dtype", "w_layout", "w_loads"),
    [
        ("fprop", torch.float16, "nhwc", "W_ROWS"),
        ("fprop", torch.float32, "nhwc", "W_ROWS"),
        ("dgrad", torch.float16, "nhwc", "W_COLUMNS"),
        ("dgrad", torch.float32, "nhwc", "W_PACKED"),
        ("fprop", torch.float16, "nchw", "W_PACKED"),
        ("dgrad", torch.float16, "nchw", "W_PACKED"),
    ],
)
@pytest.mark.parametrize(("r", "s"), [(3, 3), (1, 3), (3, 1)])
def test_filters_come_as_they_lie_where_tma_reaches_them(
    r: int, s: int, direction: str, dtype: torch.dtype, w_layout: str, w_loads: str
) -> None:
    one = replace(LAYER, direction=direction, dtype=dtype, r=r, s=s)
    request = requested(one, second=TensorForm(strides_of(one.w_shape, w_layout), True))
    assert implicit_gemm.product_of(request).w_loads == w_loads


@pytest.mark.parametrize(
    "strides",
    [(64, 1, 0, 0), (64 * 9, 1, 64, 64 * 3), (64 * 12, 1, 64 * 4, 64), (68 * 9, 1, 68 * 3, 68), (9 * 64, 1, 3, 1)],
    ids=["expanded", "transposed", "rows apart", "136 bytes", "overlapping"],
)
def test_taps_that_are_not_in_a_row_are_packed(strides: tuple[int, ...]) -> None:
    assert implicit_gemm.product_of(requested(LAYER, second=TensorForm(strides, True))).w_loads == "W_PACKED"


# Taps -----------------------------------------------------------------------------------------------------------------


def _met(taps: Taps, axis: int, extent: int, first: int, last: int) -> int:
    """Taps that are over x for an output from the first to the last, or between two of these."""
    stride, dil, pad = taps.stride[axis], taps.dil[axis], taps.pad[axis]
    reached = (
        (first * stride + tap * dil - pad, last * stride + tap * dil - pad) for tap in range((taps.r, taps.s)[axis])
    )
    return max(sum(end >= 0 and begin < extent for begin, end in reached), 1)


@given(
    st.integers(1, 6), st.integers(1, 40), st.integers(1, 4), st.integers(1, 30), st.integers(-10, 40),
    st.integers(0, 60), st.integers(0, 60),
)  # fmt: skip
def test_taps_that_meet_x_are_those_of_a_count(
    count: int, extent: int, stride: int, dil: int, pad: int, first: int, more: int
) -> None:
    taps = Taps(count, 1, (200, 1), (stride, 1), (dil, 1), (pad, 0), False, 1, 1)
    assert taps.met(0, extent, first, first + more) == _met(taps, 0, extent, first, first + more)
    of_columns = Taps(1, count, (1, 200), (1, stride), (1, dil), (0, pad), False, 1, 1)
    assert of_columns.met(1, extent, first, first + more) == taps.met(0, extent, first, first + more)


def _taps_of_tile(one: Product, first: int, last: int) -> int:
    """What the kernel multiplies from the first pixel to the last: exact rows in an image, exact columns in a row."""
    assert one.taps is not None
    rows, cols = one.taps.outputs
    (image, row, col), (last_image, last_row, last_col) = (
        (pixel // (rows * cols), pixel // cols % rows, pixel % cols) for pixel in (first, last)
    )
    if image != last_image:
        row, last_row = 0, rows - 1
    if image != last_image or row != last_row:
        col, last_col = 0, cols - 1
    return _met(one.taps, 0, one.x.rows, row, last_row) * _met(one.taps, 1, one.x.cols, col, last_col)


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 30), st.integers(1, 40)),
    st.tuples(st.integers(1, 4), st.integers(2, 4)),
    st.tuples(st.integers(1, 24), st.integers(1, 24)),
    st.tuples(st.integers(0, 30), st.integers(0, 30)),
    st.integers(1, 2),
)
@settings(deadline=None)
def test_the_model_counts_the_taps_of_tiles(
    images: tuple[int, int, int], taps: tuple[int, int], dil: tuple[int, int], pad: tuple[int, int], stride: int
) -> None:
    """Those of a row, and of whole images; of tiles between it counts no more than some tile has."""
    (n, h, w), (r, s), sides = images, taps, (pad[0], pad[0], pad[1], pad[1])
    p, q = (output_extent(e, 2 * a, t, stride, d) for e, a, t, d in zip((h, w), pad, taps, dil, strict=True))
    assume(min(p, q) > 0)
    layer = Problem("fprop", n, 16, h, w, 16, r, s, (stride, stride), sides, dil, dtype=torch.float16, layout="nhwc")
    one = implicit_gemm.product_of(requested(layer))
    for pixels in (q, q + 1, 2 * q, 64 + q, p * q, p * q + 7):
        counts = [_taps_of_tile(one, at, min(at + pixels, n * p * q) - 1) for at in range(0, n * p * q, pixels)]
        exact = pixels in (q, p * q) or pixels > p * q
        assert one.most_taps(pixels) == max(counts) if exact else one.most_taps(pixels) <= max(counts)


@pytest.mark.usefixtures("emulator_cache")
@needs_emulator
@pytest.mark.parametrize(
    ("changes", "met"),
    [
        ({"h": 6, "w": 9, "padding": (12,) * 4, "dilation": (12, 12)}, {(1, 1): {0, 1, 2, 3, 4, 5}}),
        (  # tiles of four rows
            {"h": 8, "w": 16, "padding": (4, 4, 1, 1), "dilation": (4, 1)},
            {(r, s): rows for r, rows in enumerate(({4, 5, 6, 7}, {*range(8)}, {0, 1, 2, 3})) for s in range(3)},
        ),
        (  # tiles of one row
            {"h": 2, "w": 64, "padding": (1, 1, 64, 64), "dilation": (1, 64)},
            {(0, 1): {1}, (1, 1): {0, 1}, (2, 1): {0}},
        ),
    ],
    ids=["centre", "rows", "column"],
)
def test_taps_that_meet_no_pixel_are_left_out(changes: dict, met: dict[tuple[int, int], set[int]]) -> None:
    """Filters that are not finite show in which rows a tap is multiplied, be it by zeros."""
    one = replace(LAYER, c=16, k=24, n=1, **changes)
    x = torch.ones(one.x_shape, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    found = {}
    with emulated_device(sm_count=4), emulated_halo_sm90_implicit_gemm.forced("taps, columns shared"):
        request = requested(one, second=TensorForm(strides_of(one.w_shape, "nhwc"), True))
        call = watched(implicit_gemm.bind(request, implicit_gemm.configs(request)[0]), CPU)
        for r, s in combinations(range(one.r), range(one.s)):
            w = torch.ones(one.w_shape, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
            w[:, :, r, s] = float("nan")
            found[r, s] = set(call(x, w, None)[0, 0].isnan().nonzero()[:, 0].tolist())
    assert {tap: rows for tap, rows in found.items() if rows} == met


# Tiles ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("c", "k", "pixels"), [(64, 256, 56), (2048, 512, 8), (24, 40, 112), (512, 2048, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tile_fits(c: int, k: int, pixels: int, dtype: torch.dtype, direction: str) -> None:
    request = requested(replace(LAYER, c=c, k=k, h=pixels, w=pixels, dtype=dtype, direction=direction))
    one, found = implicit_gemm.product_of(request), tiles_of(request)
    assert found
    for tile in found:
        assert tile.smem_bytes(one) <= SMEM_BYTES and tile.stages >= 3 and tile.buffers >= 2
        assert tile.m_blocks in (1, 2) and tile.m_blocks * tile.n <= 256 and not tile.keeps_w
        assert tile.pixels == 64 * tile.m_blocks * (1 if tile.split_n else 2) <= 256
        blocks = tile.count(one) * tile.cluster  # of a cluster all run at a time
        assert tile.grid(one, SM_COUNT) == (blocks if tile.in_cluster else min(SM_COUNT, blocks)) <= SM_COUNT
        assert (tile.splits - 1) * tile.range_chunks(one) < one.chunks  # no range is empty
        if tile.parts > 1:
            assert 4 * tile.splits * one.outputs <= 64 << 20


def test_a_tile_has_time_for_the_taps_that_it_multiplies() -> None:
    """Nine times as many products as where only the centre meets the image."""
    far = replace(LAYER, h=8, w=8, c=2048, padding=(12,) * 4, dilation=(12, 12))
    near = replace(far, padding=(1,) * 4, dilation=(1, 1))
    one, other = (implicit_gemm.product_of(requested(each)) for each in (far, near))
    assert (one.most_taps(128), other.most_taps(128)) == (1, 9)
    tile = tiles_of(requested(far))[0]
    assert tile.cycles(one, SM_COUNT) < tile.cycles(other, SM_COUNT)


def test_configs_are_few_and_have_names_of_their_own() -> None:
    with emulated_device():
        found = implicit_gemm.configs(requested(LAYER))
    assert 1 < len(found) <= MOST_CONFIGS and len({each.key for each in found}) == len(found)
    assert {each.kernel for each in found} == {implicit_gemm.KERNEL}


@pytest.mark.of_kernel("halo_sm90/implicit_gemm")
@pytest.mark.parametrize("w_layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_wgmma_is_not_serialized(
    dtype: torch.dtype, direction: str, w_layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = replace(LAYER, direction=direction, dtype=dtype, bias=direction == "fprop")
    request = requested(one, second=TensorForm(strides_of(one.w_shape, w_layout), True))
    logs, parse = [], compiler.parse_resources
    monkeypatch.setattr(compiler, "parse_resources", lambda log, entry: logs.append(log) or parse(log, entry))
    for split_n in (False, True):
        widest = next(tile for tile in tiles_of(request) if tile.n * tile.m_blocks == 256 and tile.split_n == split_n)
        source = implicit_gemm.source(implicit_gemm.product_of(request), widest)
        cubin = compiler.compile_source(source, "sm_90a")
        assert cubin.spill_bytes == cubin.stack_bytes == 0
    assert len(logs) == 2
    for log in logs:
        assert "Compiling entry function 'halo_sm90_implicit_gemm'" in log and SERIALIZED not in log


# Who is offered it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cycles", "first", "last"), [
    (0.0, implicit_gemm.KERNEL, conv.KERNEL), (1e12, conv.KERNEL, implicit_gemm.KERNEL),
])  # fmt: skip
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_family_offers_two_of_the_kernel_that_is_ahead_and_one_of_the_other(
    direction: str, cycles: float, first: str, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implicit_gemm, "cycles", lambda *_: cycles)
    with emulated_device(sm_count=SM_COUNT):
        request = requested(replace(LAYER, direction=direction))
        found = FAMILIES["halo_sm90"].configs(request)
        of_taps = family._clusters_first(implicit_gemm.configs(request))
        best = {implicit_gemm.KERNEL: of_taps, conv.KERNEL: conv.configs(request)}
    measured, more = found[:MOST_CONFIGS], found[MOST_CONFIGS:]
    assert [each.kernel for each in measured] == [first, first, last] and more
    assert measured == [*best[first][: MOST_CONFIGS - 1], best[last][0]]
    assert more == [*best[first][MOST_CONFIGS - 1 :], *best[last][1:]]  # which a record may name


@pytest.mark.parametrize(
    "changes",
    [{"layout": "nchw", "c": 12}, {"groups": 2}, {"direction": "dgrad", "stride": (2, 2)}, {"stride": (9, 9)}],
)
def test_what_the_kernel_does_not_take_is_convs_alone(changes: dict) -> None:
    with emulated_device():
        request = requested(replace(LAYER, **changes))
        assert FAMILIES["halo_sm90"].configs(request) == conv.configs(request)


def test_layers_of_1x1_and_weight_gradients_are_none_of_its() -> None:
    with emulated_device():
        for changes in ({"r": 1, "s": 1, "padding": (0,) * 4}, {"direction": "wgrad"}):
            found = FAMILIES["halo_sm90"].configs(requested(replace(LAYER, **changes)))
            assert found and implicit_gemm.KERNEL not in {each.kernel for each in found}


def test_it_is_ahead_where_taps_leave_most_of_conv_idle() -> None:
    """Twelve pixels between taps, maps of 64 x 64: conv stages the whole image for few of its rows."""
    far = replace(LAYER, n=4, c=2048, k=256, h=64, w=64, padding=(12,) * 4, dilation=(12, 12))
    with emulated_device(sm_count=SM_COUNT):
        assert FAMILIES["halo_sm90"].configs(requested(far))[0].kernel == implicit_gemm.KERNEL


@pytest.mark.parametrize(("name", "dtype", "result", "shape", "finite"), tuple(emulated_halo_sm90_implicit_gemm.runs()))
def test_the_runs_are_this_kernels(name: str, dtype: torch.dtype, result: str, shape: str, finite: bool) -> None:
    """What the emulator runs elsewhere would pass with another kernel, too."""
    one = BY_NAME[name].problem("fprop", dtype).toward("dgrad" if result == "dgrad" else "fprop")
    one = replace(one, precision="tf32" if dtype == torch.float32 else "ieee")
    with emulated_device(sm_count=4), emulated_halo_sm90_implicit_gemm.forced(shape):
        found = FAMILIES["halo_sm90"].configs(requested(one))
    assert [each.kernel for each in found] == [implicit_gemm.KERNEL]
