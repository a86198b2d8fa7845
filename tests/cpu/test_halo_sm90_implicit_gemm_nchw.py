"""halo_sm90/implicit_gemm in nchw and in clusters: what is copied, how lanes store, which tiles two blocks share."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from haloconv.emulator import emulated_device
from haloconv.families import FAMILIES
from haloconv.families.base import MOST_CONFIGS, Config
from haloconv.families.halo_sm90 import family
from haloconv.families.halo_sm90.conv import conv
from haloconv.families.halo_sm90.conv.copy_of_dy import MOST_BYTES, cycles_of
from haloconv.families.halo_sm90.pointwise import implicit_gemm, pointwise
from haloconv.families.halo_sm90.pointwise.tile import Tile, tiles
from haloconv.jit import compile as compiler
from haloconv.layout import strides_of
from haloconv.problem import Epilogue, Problem, Request, TensorForm, dense_request

CPU = torch.device("cpu")
LAYER = Problem("fprop", 2, 64, 14, 14, 128, 3, 3, (1, 1), (1, 1, 1, 1), dtype=torch.float16, layout="nchw")
DEEP = replace(LAYER, n=16, c=512, k=512, h=7, w=7, layout="nhwc")  # ResNet's last maps
SMEM_BYTES, SM_COUNT = 227 << 10, 132
SERIALIZED = "wgmma.mma_async instructions are serialized"
DTYPES, DIRECTIONS, LAYOUTS = (torch.float32, torch.float16), ("fprop", "dgrad"), ("nchw", "nhwc")
NOT_WHOLE, NOT_DENSE = "not at multiples of 16 bytes", "planes of the result are not dense, or there is a residual"


def requested(problem: Problem, **changes: object) -> Request:
    return replace(dense_request(problem, CPU), **changes)


def tiles_of(request: Request) -> tuple[Tile, ...]:
    return tiles(implicit_gemm.product_of(request), SMEM_BYTES, SM_COUNT)


def why_not(problem: Problem, **changes: object) -> str | None:
    with emulated_device():
        return implicit_gemm.why_not(requested(problem, **changes))


# nchw -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("x_layout", LAYOUTS)
@pytest.mark.parametrize("result_layout", LAYOUTS)
def test_x_without_neighbouring_channels_is_copied_and_planes_are_stored_by_lanes(
    direction: str, x_layout: str, result_layout: str
) -> None:
    one = replace(LAYER, direction=direction)
    shape = one.x_shape if direction == "fprop" else one.y_shape
    request = requested(one, first=TensorForm(strides_of(shape, x_layout), True), result_layout=result_layout)
    found = implicit_gemm.product_of(request)
    assert (found.copied, found.by_lanes) == (x_layout == "nchw", result_layout == "nchw")
    assert found.x_inner and (found.x.col_step, found.x.channel_step) == (shape[1], 1)  # of the copy, too
    assert found.y_inner == found.pixels_m == (result_layout == "nhwc")
    assert why_not(one, first=request.first, result_layout=result_layout) is None
    constants = dict(implicit_gemm.source(found, tiles_of(request)[0]).constants)
    assert ("BY_LANES" in constants) == found.by_lanes and str(constants["Y_INNER"]) == str(int(found.y_inner))


@pytest.mark.parametrize(
    "strides",
    [(64 * 14 * 16, 14 * 16, 16, 1), (64 * 196, 196, 1, 14), (0, 196, 14, 1), (64 * 400, 400, 28, 2)],
    ids=["rows apart", "transposed", "expanded", "every other pixel"],
)
@pytest.mark.parametrize("aligned", [True, False])
def test_a_copy_has_any_strides_and_begins_anywhere(strides: tuple[int, ...], aligned: bool) -> None:
    assert why_not(LAYER, first=TensorForm(strides, aligned)) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"c": 12}, NOT_WHOLE),  # of the copy
        ({"k": 13}, None),  # lanes store any filter
        ({"direction": "dgrad", "k": 12}, NOT_WHOLE),
        ({"direction": "dgrad", "c": 13}, None),
        ({"h": 7, "w": 7}, None),
        ({"stride": (2, 2)}, None),
        ({"direction": "dgrad", "stride": (2, 2)}, "residue classes"),
        ({"n": 2, "h": 512, "w": 512}, None),
        ({"n": 2, "h": 513, "w": 512}, "at most"),
        ({"direction": "dgrad", "n": 2, "h": 256, "w": 512}, None),  # dy, of twice as many channels
        ({"direction": "dgrad", "n": 2, "h": 257, "w": 512}, "at most"),
        ({"epilogue": Epilogue(scale=True, activation="relu"), "bias": True}, None),
        ({"epilogue": Epilogue(residual=True)}, NOT_DENSE),
        ({"epilogue": Epilogue(residual=True), "layout": "nhwc"}, None),
        ({"layout": "nhwc", "h": 513, "w": 512}, None),  # no copy
    ],
    ids=str,
)
def test_what_of_planes_it_takes(changes: dict, why: str | None) -> None:
    reason = why_not(replace(LAYER, **changes))
    assert reason is None if why is None else reason is not None and why in reason


def test_the_copy_s_limit_is_that_of_conv_s() -> None:
    assert MOST_BYTES == 2 * 512 * 512 * 64 * 2 == 64 << 20


def test_a_residual_is_refused_where_the_result_alone_is_nchw() -> None:
    one = replace(LAYER, layout="nhwc", epilogue=Epilogue(residual=True))
    assert NOT_DENSE in (why_not(one, result_layout="nchw") or "")


def test_planes_of_the_result_are_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes know how far images and planes are apart, and of rows nothing."""
    n_c, plane = (128 * 14 * 16, 14 * 16), (16, 1)
    monkeypatch.setattr(Request, "result_strides", (*n_c, *plane))
    assert NOT_DENSE in (why_not(LAYER) or "")
    monkeypatch.setattr(Request, "result_strides", (*n_c, 28, 2))
    assert NOT_DENSE in (why_not(LAYER) or "")
    monkeypatch.setattr(Request, "result_strides", (*n_c, 14, 1))
    assert why_not(LAYER) is None
    implicit_gemm.product_of.cache_clear()
    one = implicit_gemm.product_of(requested(LAYER))
    fields = pointwise._plane_fields(one, next(tile for tile in tiles_of(requested(LAYER)) if tile.parts == 1))
    implicit_gemm.product_of.cache_clear()
    assert (fields["y_image"], fields["y_plane"]) == n_c


def test_the_copy_takes_time() -> None:
    with emulated_device(sm_count=SM_COUNT):
        request = requested(LAYER)
        config = implicit_gemm.configs(request)[0]
        found = implicit_gemm.cycles(request, config) - config.derived.cycles(
            implicit_gemm.product_of(request), SM_COUNT
        )
        assert found == pytest.approx(cycles_of(2 * 64 * 14 * 14 * 2)) and found > 1000
        of_nhwc = requested(replace(LAYER, layout="nhwc"))
        config = implicit_gemm.configs(of_nhwc)[0]
        assert implicit_gemm.cycles(of_nhwc, config) == config.derived.cycles(
            implicit_gemm.product_of(of_nhwc), SM_COUNT
        )


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("x_layout", "result_layout"), [("nchw", "nchw"), ("nchw", "nhwc"), ("nhwc", "nchw")])
@pytest.mark.parametrize(("share", "is_first"), [(0.94, True), (0.96, False)])
def test_copies_and_lanes_that_store_must_be_ahead_by_a_twentieth(
    share: float, is_first: bool, direction: str, x_layout: str, result_layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the cost models: where they are nearer conv was ahead as often."""
    monkeypatch.setattr(implicit_gemm, "cycles", lambda *_: share * 100_000)
    monkeypatch.setattr(family, "cost", lambda *_: 100_000 - family._CONV_MORE)
    one = replace(LAYER, direction=direction)
    shape = one.x_shape if direction == "fprop" else one.y_shape
    with emulated_device(sm_count=SM_COUNT):
        request = requested(one, first=TensorForm(strides_of(shape, x_layout), True), result_layout=result_layout)
        found = FAMILIES["halo_sm90"].configs(request)
        of_conv, by_taps = conv.configs(request), family._clusters_first(implicit_gemm.configs(request))
    first, other = (by_taps, of_conv) if is_first else (of_conv, by_taps)
    assert found[: len(first[: MOST_CONFIGS - 1]) + 1] == [*first[: MOST_CONFIGS - 1], other[0]]
    assert sorted(map(str, found)) == sorted(map(str, [*of_conv, *by_taps]))


@pytest.mark.parametrize(("handed", "is_first"), [(32 << 10, True), (33 << 10, False)])
def test_a_cluster_that_hands_over_few_sums_is_first(handed: int, is_first: bool) -> None:
    alone, shared = (
        Config(implicit_gemm.KERNEL, name, SimpleNamespace(in_cluster=name == "shared", handed_bytes=handed))
        for name in ("alone", "shared")
    )
    assert family._clusters_first([alone, shared]) == ([shared, alone] if is_first else [alone, shared])
    assert family._clusters_first([alone, alone]) == [alone, alone] and family._clusters_first([shared]) == [shared]


@pytest.mark.parametrize("residual", [False, True])
def test_conv_pays_for_a_residual(residual: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """2.5 cycles an element, by a VAE decoder's layers: it loads them one by one."""
    one = replace(LAYER, layout="nhwc", epilogue=Epilogue(residual=residual))
    monkeypatch.setattr(family, "cost", lambda *_: 0)
    with emulated_device(sm_count=SM_COUNT):
        request = requested(one)
        taken = 2.4 * one.n * one.k * one.p * one.q / SM_COUNT + family._CONV_MORE
        monkeypatch.setattr(implicit_gemm, "cycles", lambda *_: taken)
        first = FAMILIES["halo_sm90"].configs(request)[0]
    assert first.kernel == (implicit_gemm.KERNEL if residual else conv.KERNEL)


# Clusters -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_clusters_have_a_tile_each_and_all_run_at_a_time(dtype: torch.dtype, direction: str, layout: str) -> None:
    request = requested(replace(DEEP, dtype=dtype, direction=direction, layout=layout))
    one = implicit_gemm.product_of(request)
    found = [tile for tile in tiles_of(request) if tile.in_cluster]
    assert {tile.split_n for tile in found} == {False, True}
    for tile in found:
        assert (tile.cluster, tile.parts, tile.splits) == (2, 1, 2) and not tile.keeps_w
        assert tile.grid(one, SM_COUNT) == 2 * tile.count(one) <= SM_COUNT
        alone = replace(tile, in_cluster=False, splits=1)
        assert tile.count(one) == alone.count(one) and 2 * tile.range_chunks(one) >= one.chunks
        assert tile.handed_bytes == tile.pixels * tile.filters * 4 // 2  # sums of one of two consumers
        assert tile.handed_bytes <= tile.stages * (tile.pixels * 128 + tile.w_bytes(one))  # where stages were
    few = {(tile.pixels, tile.filters) for tile in found}
    every = {(tile.pixels, tile.filters): tile for tile in tiles_of(request) if tile.splits == 1}
    assert all((2 * tile.count(one) <= SM_COUNT) == (size in few) for size, tile in every.items())


@pytest.mark.parametrize(
    ("changes", "has_clusters"),
    [
        ({"c": 64}, False),  # one chunk
        ({"c": 72}, True),  # two, one of which is not full
        ({"c": 32, "dtype": torch.float32, "precision": "tf32"}, False),
        ({"c": 40, "dtype": torch.float32, "precision": "tf32"}, True),
        ({"n": 64, "h": 56, "w": 56}, False),  # many tiles
        ({"epilogue": Epilogue(residual=True)}, False),
        ({"epilogue": Epilogue(scale=True, activation="relu"), "bias": True}, True),
        ({"layout": "nchw"}, True),
    ],
    ids=str,
)
def test_which_layers_have_clusters(changes: dict, has_clusters: bool) -> None:
    request = requested(replace(DEEP, **changes))
    assert any(tile.in_cluster for tile in tiles_of(request)) == has_clusters


def test_layers_of_1x1_have_no_clusters() -> None:
    one = replace(DEEP, r=1, s=1, padding=(0,) * 4)
    found = tiles(pointwise.product_of(requested(one)), SMEM_BYTES, SM_COUNT)
    assert found and not any(tile.in_cluster for tile in found)


def test_the_best_tile_in_clusters_is_second_of_the_kernel() -> None:
    with emulated_device(sm_count=SM_COUNT):
        request = requested(DEEP)
        every, found = implicit_gemm.all_tiles(request), implicit_gemm.configs(request)
        assert every[0].in_cluster
        alone = next(tile for tile in every if not tile.in_cluster)
        assert [found[0].derived, found[1].derived] == [alone, every[0]] and len(found) == MOST_CONFIGS
        assert len({each.key for each in found}) == len(found) and "in_cluster" in found[1].key
        assert not any(each.derived.in_cluster for each in (found[0], *found[2:]))


def test_where_another_tile_is_the_model_s_first_no_config_is_in_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated_device(sm_count=SM_COUNT):
        request = requested(DEEP)
        every = sorted(implicit_gemm.all_tiles(request), key=lambda tile: tile.in_cluster)
        monkeypatch.setattr(implicit_gemm, "all_tiles", lambda _: tuple(every))
        found = implicit_gemm.configs(request)
    assert len(found) == MOST_CONFIGS and not any(each.derived.in_cluster for each in found)


@pytest.mark.parametrize("w_layout", LAYOUTS)
def test_a_launch_is_of_clusters_and_waits_for_packed_filters(w_layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster does not begin before filters are packed: it has no programmatic launch."""
    request = requested(DEEP, second=TensorForm(strides_of(DEEP.w_shape, w_layout), True))
    one, launched = implicit_gemm.product_of(request), []
    monkeypatch.setattr(pointwise, "Launch", lambda *args, pdl: launched.append((args[2], pdl)))
    with emulated_device(sm_count=SM_COUNT):
        for inside in (True, False):
            tile = next(each for each in tiles_of(request) if each.in_cluster == inside)
            pointwise.multiply_launch(request, one, tile, implicit_gemm.source(one, tile))
            shape, pdl = launched.pop()
            assert (shape.grid, shape.cluster) == (tile.grid(one, SM_COUNT), 2 if inside else 1)
            assert pdl == (w_layout == "nchw" and not inside)


# Sources --------------------------------------------------------------------------------------------------------------


@pytest.mark.of_kernel("halo_sm90/implicit_gemm")
@pytest.mark.parametrize("in_cluster", [False, True], ids=["alone", "in cluster"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_widest_tiles_do_not_spill(
    dtype: torch.dtype, direction: str, layout: str, in_cluster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of 128 registers of sums, with a bias; TF32's and fp16's in clusters are short of registers."""
    one = replace(DEEP, direction=direction, dtype=dtype, layout=layout, bias=direction == "fprop")
    request = requested(one)
    logs, parse = [], compiler.parse_resources
    monkeypatch.setattr(compiler, "parse_resources", lambda log, entry: logs.append(log) or parse(log, entry))
    widest = {
        (tile.m_blocks, tile.split_n): tile
        for tile in tiles_of(request)
        if tile.n * tile.m_blocks == 256 and tile.parts == 1 and tile.in_cluster == in_cluster
    }
    assert {split_n for _, split_n in widest} == {False, True} or in_cluster
    for tile in widest.values():
        source = implicit_gemm.source(implicit_gemm.product_of(request), tile)
        names = set(dict(source.constants))
        assert ("BY_LANES" in names, "CLUSTER" in names) == (layout == "nchw", in_cluster)
        cubin = compiler.compile_source(source, "sm_90a")
        assert cubin.spill_bytes == cubin.stack_bytes == 0
    assert len(logs) == len(widest) >= 2
    for log in logs:
        assert "Compiling entry function 'halo_sm90_implicit_gemm'" in log and SERIALIZED not in log
