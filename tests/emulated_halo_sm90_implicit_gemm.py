"""The runs of halo_sm90/implicit_gemm on the emulator: its own cases, and tiles that only larger layers choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from pytest import MonkeyPatch

from haloconv.families.halo_sm90.conv import conv
from haloconv.families.halo_sm90.pointwise import implicit_gemm
from haloconv.families.halo_sm90.pointwise.tile import Tile
from haloconv.problem import Request
from tests import cases

_case = partial(cases.case, storage="channels_last")  # filters as PyTorch makes them, which are packed
_rows = partial(_case, w_storage="channels_last")  # filters that TMA reaches
_planes = cases.case  # x in nchw, which is copied, and filters that are packed
_planes_rows = partial(_planes, w_storage="channels_last")  # of the forward the result is nhwc

CASES = (
    _rows("sm90_taps", "odd rows, whose ends and those of images tiles cross, chunks that are not full",
          (3, 72, 7, 13), (136, 3, 3), padding=1),
    _case("sm90_taps_packed", "filters that TMA does not reach", (2, 40, 9, 11), (72, 3, 3), padding=1),
    _rows("sm90_taps_images", "several images in a tile", (5, 40, 7, 7), (72, 3, 3), padding=1),
    _rows("sm90_taps_pixels", "images of one pixel, which only the centre meets", (70, 40, 1, 1), (24, 3, 3),
          padding=1),
    _rows("sm90_taps_far", "taps of which only the centre meets an image", (2, 72, 6, 9), (24, 3, 3), padding=12,
          dilation=12),
    _case("sm90_taps_far_packed", "the same with packed filters", (2, 40, 6, 9), (24, 3, 3), padding=(12, 13),
          dilation=(12, 13)),
    _rows("sm90_taps_rows_apart", "rows of taps that tiles of an image's first and last rows do not meet",
          (2, 40, 24, 16), (24, 3, 3), padding=7, dilation=7),
    _rows("sm90_taps_columns_apart", "columns of taps that tiles within a row do not meet", (1, 40, 3, 140),
          (24, 3, 3), padding=(1, 70), dilation=(1, 70)),
    _rows("sm90_taps_sides", "padding that differs on every side, and dilation by axis", (2, 40, 9, 11), (24, 3, 3),
          padding=(0, 3, 4, 1), dilation=(2, 3)),
    _rows("sm90_taps_stride", "every second pixel", (3, 40, 13, 15), (48, 3, 3), stride=2, padding=1),
    _case("sm90_taps_stride_uneven", "strides and padding that differ, pixels that no tap meets", (2, 40, 9, 26),
          (24, 3, 2), stride=(1, 3), padding=(2, 0, 1, 2), dilation=(2, 1)),
    _rows("sm90_taps_stride_rows", "a stride of rows alone, with rows of taps that some tiles do not meet",
          (1, 40, 40, 16), (24, 3, 3), stride=(2, 1), padding=(9, 1), dilation=(9, 1)),
    _rows("sm90_taps_row", "a row of taps, and one of pixels", (2, 40, 5, 13), (24, 1, 3), padding=(0, 1)),
    _rows("sm90_taps_column", "a column of taps", (2, 40, 5, 13), (24, 3, 1), padding=(1, 0)),
    _case("sm90_taps_column_packed", "the same with packed filters", (2, 40, 5, 13), (24, 3, 1), padding=(1, 0)),
    _rows("sm90_taps_even", "an even filter, padding at the bottom and the right alone", (2, 40, 6, 10), (24, 2, 2),
          padding=(0, 1, 0, 1)),
    _case("sm90_taps_5x3", "more rows of taps than columns", (1, 72, 9, 17), (40, 5, 3), padding=(2, 1)),
    _rows("sm90_taps_beyond", "padding beyond the filter, so that outputs meet none of the image", (2, 40, 5, 6),
          (24, 2, 2), padding=(3, 4, 5, 3)),
    _rows("sm90_taps_beyond_far", "the same with taps that are apart, and tiles that meet none of the image",
          (1, 40, 8, 9), (24, 2, 2), padding=(12, 14, 4, 5), dilation=(3, 2)),
    _rows("sm90_taps_between", "an image between two rows of taps that no output meets", (1, 40, 4, 16), (24, 2, 2),
          padding=(10, 10, 0, 1), dilation=(20, 1)),
    _rows("sm90_taps_deep", "few pixels of many channels", (1, 264, 5, 7), (40, 3, 3), padding=1),
    _case("sm90_taps_deep_packed", "few pixels of many filters, which a gradient sums", (1, 40, 5, 7), (264, 3, 3),
          padding=1),
    _rows("sm90_taps_wide", "several blocks of filters", (2, 40, 5, 9), (304, 3, 3), padding=1),
    _rows("sm90_taps_many", "several tiles of a block of threads", (5, 40, 16, 16), (72, 3, 3), padding=1),
    _rows("sm90_taps_long", "rows that are longer than a tile", (2, 40, 3, 150), (24, 3, 3), padding=1),
    _rows("sm90_taps_valid", "no padding, two rows of outputs", (2, 40, 4, 30), (24, 3, 3), bias=False),
    cases.case("sm90_taps_spaced", "pixels of a larger tensor", (2, 36, 9, 7), (24, 3, 3), padding=1,
               storage="channels_last_spaced"),
    _rows("sm90_taps_cluster", "two images of many channels, whose parts are of more chunks and of fewer",
          (2, 136, 7, 9), (72, 3, 3), padding=1),
    _case("sm90_taps_cluster_packed", "the same with packed filters, taps that some tiles do not meet",
          (1, 136, 9, 10), (72, 3, 3), padding=(5, 2), dilation=(5, 2)),
    _rows("sm90_taps_cluster_tiles", "a tile of each of two clusters", (2, 72, 8, 16), (40, 3, 3), padding=1),
    _planes("sm90_taps_planes", "planes of 7x7, whose ends lanes store across, words that are of two planes",
            (3, 72, 7, 7), (136, 3, 3), padding=1),
    _planes_rows("sm90_taps_planes_mixed", "planes, and filters in channels_last, so that the result is, too",
                 (3, 72, 7, 7), (136, 3, 3), padding=1),
    _planes("sm90_taps_planes_even", "planes of 14x14", (2, 40, 14, 14), (72, 3, 3), padding=1),
    _planes("sm90_taps_planes_stride", "every second pixel of planes", (3, 40, 13, 13), (48, 3, 3), stride=2,
                 padding=1),
    _planes("sm90_taps_planes_stride_uneven", "strides and padding of planes that differ", (2, 40, 9, 26), (24, 3, 2),
            stride=(1, 3), padding=(2, 0, 1, 2), dilation=(2, 1)),
    _planes("sm90_taps_planes_filters", "an odd number of filters, and of pixels", (3, 24, 5, 7), (21, 3, 3),
            padding=1),
    _planes("sm90_taps_planes_rows_apart", "rows of taps that tiles of planes do not meet", (2, 40, 24, 16),
            (24, 3, 3), padding=7, dilation=7),
    _planes("sm90_taps_planes_pixels", "planes of one row of three pixels, with two ends in a word and many in a tile",
            (47, 40, 1, 3), (24, 1, 3), padding=(0, 1)),
    _planes("sm90_taps_planes_many", "several tiles of a block of threads", (5, 40, 15, 15), (72, 3, 3), padding=1),
    _planes("sm90_taps_planes_deep", "few pixels of planes of many channels", (1, 264, 5, 7), (40, 3, 3),
                 padding=1),
    _planes("sm90_taps_planes_cluster", "two small images of planes of many channels", (2, 136, 7, 9), (72, 3, 3),
            padding=1),
    _planes("sm90_taps_planes_window", "a window of larger images", (2, 40, 7, 9), (24, 3, 3), padding=1,
            storage="sliced"),
    _planes("sm90_taps_planes_transposed", "columns that are neighbours", (2, 40, 7, 9), (24, 3, 3), padding=1,
            storage="transposed"),
    _planes("sm90_taps_planes_unaligned", "planes that begin anywhere", (2, 40, 8, 8), (24, 3, 3), padding=1,
            storage="unaligned", w_storage="unaligned"),
)  # fmt: skip

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
_EVERY, _BOTH, _DENSE = (FP32, FP16, BF16), (FP32, FP16), ("fprop", "dgrad")

SHAPES: dict[str, Callable[[Tile], bool]] = {
    "taps": lambda tile: tile.splits == 1,
    "taps, two blocks": lambda tile: tile.m_blocks == 2 and tile.splits == 1,
    "taps, columns shared": lambda tile: tile.split_n and tile.splits == 1,
    "taps, 256 columns": lambda tile: tile.n == 256 and tile.splits == 1,
    "taps, few columns": lambda tile: tile.n % 64 != 0 and tile.splits == 1,
    "taps, 128 pixels": lambda tile: tile.pixels == 128 and tile.splits == 1,
    "taps, split-K": lambda tile: tile.parts > 1,
    "taps, in cluster": lambda tile: tile.in_cluster and not tile.split_n,
    "taps, in cluster, columns shared": lambda tile: tile.in_cluster and tile.split_n,
    "taps, in cluster, two blocks": lambda tile: tile.in_cluster and tile.m_blocks == 2,
}
KERNELS = {"halo_sm90/implicit_gemm"}
_STRIDED = tuple(one.name for one in CASES if one.spec.stride != (1, 1))
_FORWARD = ("sm90_taps_planes_filters",)  # whose gradient has pixels that are no multiples of 16 bytes
_OTHERS = tuple(one.name for one in CASES[1:] if one.name not in (*_STRIDED, *_FORWARD, "sm90_taps_spaced"))
_PLANES = ("sm90_taps_planes", "sm90_taps_planes_even", "sm90_taps_planes_rows_apart", "sm90_taps_planes_pixels")
_CUT = ("sm90_taps", "sm90_taps_packed", "sm90_taps_rows_apart", "sm90_taps_columns_apart", "sm90_taps_images")
_NOT_FINITE = ("sm90_taps", "sm90_taps_packed", "sm90_taps_sides", "sm90_taps_rows_apart", "sm90_taps_beyond")
_NOT_FINITE_IN = (
    ("sm90_taps_planes", "taps"),
    ("sm90_taps_planes_even", "taps"),
    ("sm90_taps_planes_window", "taps"),
    ("sm90_taps_cluster", "taps, in cluster"),
    ("sm90_taps_planes_cluster", "taps, in cluster, columns shared"),
)
# shape, cases, dtypes, results
_RUNS: tuple[tuple[str, tuple[str, ...], tuple[torch.dtype, ...], tuple[str, ...]], ...] = (
    ("taps", ("sm90_taps",), _EVERY, (*_DENSE, "relu", "scale_relu")),
    ("taps", ("sm90_taps",), _BOTH, ("residual_relu", "scale_residual")),
    ("taps", ("sm90_taps_packed",), _EVERY, ("scale_residual",)),
    ("taps", ("sm90_taps_images",), (FP16,), ("residual_relu",)),
    ("taps", _OTHERS, _BOTH, _DENSE),
    ("taps", _STRIDED, _BOTH, ("fprop",)),
    ("taps", ("sm90_taps_stride",), (FP16,), ("scale_relu", "residual_relu")),
    ("taps", ("sm90_taps_spaced",), (FP32,), _DENSE),
    ("taps, two blocks", _CUT, _BOTH, _DENSE),
    ("taps, two blocks", ("sm90_taps",), (FP16,), ("residual_relu",)),
    ("taps, columns shared", (*_CUT, "sm90_taps_far", "sm90_taps_sides", "sm90_taps_beyond_far"), _BOTH, _DENSE),
    ("taps, columns shared", _STRIDED, _BOTH, ("fprop",)),
    ("taps, 256 columns", ("sm90_taps", "sm90_taps_packed", "sm90_taps_wide"), _BOTH, _DENSE),
    ("taps, few columns", ("sm90_taps_rows_apart",), (FP32,), ("fprop",)),
    ("taps, 128 pixels", ("sm90_taps_many", "sm90_taps_stride"), _BOTH, ("fprop",)),
    ("taps, split-K", ("sm90_taps_deep",), _EVERY, ("fprop", "relu")),
    ("taps, split-K", ("sm90_taps_deep",), _BOTH, ("residual_relu",)),
    ("taps, split-K", ("sm90_taps_deep_packed",), _BOTH, ("dgrad",)),
    ("taps", _FORWARD, _EVERY, ("fprop",)),
    ("taps", ("sm90_taps_planes",), (BF16,), _DENSE),
    ("taps", ("sm90_taps_planes",), _EVERY, ("relu", "scale_relu")),
    ("taps", ("sm90_taps_planes_stride",), (FP16,), ("scale_relu",)),
    ("taps, two blocks", _PLANES, _BOTH, _DENSE),
    ("taps, two blocks", ("sm90_taps_planes_stride", *_FORWARD), _BOTH, ("fprop",)),
    ("taps, columns shared", _PLANES, _BOTH, _DENSE),
    ("taps, columns shared", _FORWARD, _BOTH, ("fprop",)),
    ("taps", ("sm90_taps_planes_mixed",), (FP16,), ("scale_relu",)),
    ("taps, columns shared", ("sm90_taps_planes_mixed",), _BOTH, _DENSE),
    ("taps, 256 columns", ("sm90_taps_planes", "sm90_taps_planes_many"), _BOTH, ("fprop",)),
    ("taps, split-K", ("sm90_taps_planes_deep",), _EVERY, ("fprop", "relu")),
    ("taps, in cluster", ("sm90_taps_cluster",), _EVERY, (*_DENSE, "relu", "scale_relu")),
    ("taps, in cluster", ("sm90_taps_cluster_packed", "sm90_taps_cluster_tiles", "sm90_taps_deep"), _BOTH,
     ("fprop",)),
    ("taps, in cluster", ("sm90_taps_planes_cluster",), _EVERY, (*_DENSE, "scale_relu")),
    ("taps, in cluster, columns shared", ("sm90_taps_cluster", "sm90_taps_planes_cluster"), _BOTH, _DENSE),
    ("taps, in cluster, columns shared", ("sm90_taps_cluster",), (FP16,), ("scale_relu",)),
    ("taps, in cluster, columns shared", ("sm90_taps_cluster_packed", "sm90_taps_deep"), _BOTH, ("fprop",)),
    ("taps, in cluster, two blocks", ("sm90_taps_cluster", "sm90_taps_planes_cluster"), _BOTH, _DENSE),
)  # fmt: skip
SANITIZED = (  # case, results, shape: what compute-sanitizer is to see
    ("sm90_taps", (*_DENSE, "scale_relu", "residual_relu"), "taps"),
    ("sm90_taps", _DENSE, "taps, two blocks"),
    ("sm90_taps_packed", _DENSE, "taps, columns shared"),
    ("sm90_taps_images", _DENSE, "taps"),
    ("sm90_taps_far", _DENSE, "taps"),
    ("sm90_taps_beyond", _DENSE, "taps"),
    ("sm90_taps_stride_uneven", ("fprop",), "taps"),
    ("sm90_taps_columns_apart", _DENSE, "taps"),
    ("sm90_taps_column_packed", _DENSE, "taps"),
    ("sm90_taps_many", ("fprop",), "taps, 128 pixels"),
    ("sm90_taps_deep", ("fprop",), "taps, split-K"),
    ("sm90_taps_planes", (*_DENSE, "scale_relu"), "taps"),
    ("sm90_taps_planes", _DENSE, "taps, two blocks"),
    ("sm90_taps_planes", _DENSE, "taps, columns shared"),
    ("sm90_taps_planes_filters", ("fprop",), "taps"),
    ("sm90_taps_planes_pixels", _DENSE, "taps"),
    ("sm90_taps_planes_stride", ("fprop",), "taps"),
    ("sm90_taps_planes_window", _DENSE, "taps"),
    ("sm90_taps_planes_deep", ("fprop",), "taps, split-K"),
    ("sm90_taps_cluster", (*_DENSE, "scale_relu"), "taps, in cluster"),
    ("sm90_taps_cluster", _DENSE, "taps, in cluster, columns shared"),
    ("sm90_taps_cluster", _DENSE, "taps, in cluster, two blocks"),
    ("sm90_taps_planes_cluster", _DENSE, "taps, in cluster"),
    ("sm90_taps_planes_cluster", _DENSE, "taps, in cluster, columns shared"),
)


def runs() -> Iterator[tuple[str, torch.dtype, str, str, bool]]:
    """Case, dtype, result, shape, and whether all inputs are finite."""
    for shape, names, dtypes, results in _RUNS:
        for name in names:
            yield from ((name, dtype, result, shape, True) for dtype in dtypes for result in results)
    for name in _NOT_FINITE:
        yield from ((name, dtype, result, "taps", False) for dtype in _BOTH for result in _DENSE)
    yield from (("sm90_taps_stride", dtype, "fprop", "taps", False) for dtype in _BOTH)
    for name, shape in _NOT_FINITE_IN:
        yield from ((name, dtype, result, shape, False) for dtype in _BOTH for result in _DENSE)


@contextmanager
def forced(shape: str) -> Iterator[None]:
    """While active, the kernel takes the smallest tile of that shape, whatever its cost model and conv's prefer."""
    all_tiles = implicit_gemm.all_tiles

    def only(request: Request) -> tuple[Tile, ...]:
        found = (tile for tile in all_tiles(request) if SHAPES[shape](tile))
        return tuple(sorted(found, key=lambda tile: (tile.split_n, tile.pixels * tile.filters, str(tile))))[:1]

    with MonkeyPatch.context() as patch:
        patch.setattr(implicit_gemm, "all_tiles", only)
        patch.setattr(conv, "configs", lambda request: [])
        yield


@contextmanager
def left_out() -> Iterator[None]:
    """While active, conv takes every layer of several taps."""
    with MonkeyPatch.context() as patch:
        patch.setattr(implicit_gemm, "configs", lambda request: [])
        yield
