"""The runs of halo_sm90/pointwise on the emulator: its own cases, and tiles that only larger layers choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from pytest import MonkeyPatch

from haloconv.families.halo_sm90.pointwise import pointwise
from haloconv.families.halo_sm90.pointwise.tile import Tile
from haloconv.problem import Request
from tests.cases import case

CASES = (
    case("sm90_pointwise", "images whose pixels fill no whole boxes, chunks of channels that are not full",
         (3, 72, 10, 12), (136, 1, 1)),
    case("sm90_pointwise_nhwc", "the same where channels are neighbours: one row of all pixels", (3, 72, 10, 12),
         (136, 1, 1), storage="channels_last"),
    case("sm90_pointwise_to_nhwc", "pixels are neighbours in x and filters in the result", (2, 72, 8, 12), (136, 1, 1),
         w_storage="channels_last"),
    case("sm90_pointwise_deep", "more chunks of channels than stages", (1, 680, 4, 16), (72, 1, 1)),
    case("sm90_pointwise_deep_nhwc", "the same where channels are neighbours", (1, 680, 4, 16), (72, 1, 1),
         storage="channels_last"),
    case("sm90_pointwise_many", "several tiles of a block of threads", (5, 40, 16, 16), (72, 1, 1)),
    case("sm90_pointwise_many_nhwc", "the same where channels are neighbours", (5, 40, 16, 16), (72, 1, 1),
         storage="channels_last"),
    case("sm90_pointwise_packed", "filters that are no multiple of 16 bytes apart", (2, 37, 4, 16), (24, 1, 1)),
    case("sm90_pointwise_spaced", "pixels of a larger tensor", (2, 36, 9, 7), (24, 1, 1),
         storage="channels_last_spaced"),
    case("sm90_pointwise_stride", "boxes of rows of every second pixel, some of which no row fills", (3, 40, 13, 15),
         (48, 1, 1), stride=2, storage="channels_last"),
    case("sm90_pointwise_stride_joined", "the same where rows of neighbouring images follow one another",
         (3, 40, 14, 28), (48, 1, 1), stride=2, storage="channels_last"),
    case("sm90_pointwise_stride_long", "rows that are longer than a box", (2, 40, 5, 150), (48, 1, 1), stride=(1, 2),
         storage="channels_last"),
    case("sm90_pointwise_stride_rows", "every second row, where pixels are neighbours", (2, 16, 7, 48), (24, 1, 1),
         stride=(2, 1)),
    case("sm90_pointwise_stride_deep", "a stride, and more chunks of filters than stages", (1, 40, 7, 10), (680, 1, 1),
         stride=(3, 2), storage="channels_last"),
    case("sm90_pointwise_column", "images of one column", (3, 24, 40, 1), (40, 1, 1)),
    case("sm90_pointwise_pixel", "one pixel", (1, 8, 1, 1), (8, 1, 1), storage="channels_last"),
)  # fmt: skip

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
_EVERY, _BOTH, _DENSE = (FP32, FP16, BF16), (FP32, FP16), ("fprop", "dgrad")

SHAPES: dict[str, Callable[[Tile], bool]] = {
    "pointwise": lambda tile: True,
    "pointwise kept": lambda tile: tile.keeps_w and tile.splits == 1,
    "pointwise streamed": lambda tile: not tile.keeps_w and tile.splits == 1,
    "pointwise two blocks": lambda tile: tile.m_blocks == 2,
    "pointwise columns shared": lambda tile: tile.split_n and tile.splits == 1,
    "pointwise 256 columns": lambda tile: tile.n == 256,
    "pointwise split-K": lambda tile: tile.splits > 1 and not tile.keeps_w,
    "pointwise split-K kept": lambda tile: tile.splits > 1 and tile.keeps_w,
}
_OWN = tuple(one.name for one in CASES)
_PAIR = ("sm90_pointwise", "sm90_pointwise_nhwc")
# shape, cases, dtypes, results
_RUNS: tuple[tuple[str, tuple[str, ...], tuple[torch.dtype, ...], tuple[str, ...]], ...] = (
    ("pointwise", _PAIR, _EVERY, (*_DENSE, "relu", "scale_relu")),
    ("pointwise", ("sm90_pointwise",), _BOTH, ("residual_relu",)),
    ("pointwise", ("sm90_pointwise_stride",), (FP16,), ("scale_residual",)),
    ("pointwise", ("sm90_pointwise_to_nhwc",), _BOTH, ("fprop",)),
    ("pointwise", tuple(name for name in _OWN[3:] if name != "sm90_pointwise_spaced"), _BOTH, _DENSE),
    ("pointwise", ("sm90_pointwise_spaced",), (FP32,), _DENSE),
    ("pointwise", ("sm90_pointwise_spaced",), (FP16,), ("fprop",)),
    ("pointwise kept", ("sm90_pointwise_many", "sm90_pointwise_many_nhwc"), _BOTH, _DENSE),
    ("pointwise kept", ("sm90_pointwise",), (FP16,), ("fprop",)),
    ("pointwise streamed", ("sm90_pointwise_many", "sm90_pointwise_many_nhwc"), _BOTH, _DENSE),
    ("pointwise two blocks", _PAIR, _BOTH, _DENSE),
    ("pointwise columns shared", _PAIR, _BOTH, _DENSE),
    ("pointwise 256 columns", _PAIR, _BOTH, _DENSE),
    ("pointwise split-K", ("sm90_pointwise_deep", "sm90_pointwise_deep_nhwc"), _BOTH, ("fprop", "relu")),
    ("pointwise split-K", ("sm90_pointwise_deep",), (FP32,), ("dgrad", "residual_relu")),
    ("pointwise split-K", ("sm90_pointwise_stride_deep",), _BOTH, ("dgrad",)),
    ("pointwise split-K kept", ("sm90_pointwise_deep",), _BOTH, ("fprop",)),
)  # fmt: skip
SANITIZED = (  # case, results, shape: what compute-sanitizer is to see
    ("sm90_pointwise", (*_DENSE, "scale_relu", "residual_relu"), "pointwise"),
    ("sm90_pointwise_nhwc", _DENSE, "pointwise two blocks"),
    ("sm90_pointwise_to_nhwc", ("fprop",), "pointwise"),
    ("sm90_pointwise_many", _DENSE, "pointwise kept"),
    ("sm90_pointwise_many_nhwc", _DENSE, "pointwise kept"),
    ("sm90_pointwise_deep", _DENSE, "pointwise streamed"),
    ("sm90_pointwise_deep_nhwc", ("fprop",), "pointwise split-K"),
    ("sm90_pointwise_packed", _DENSE, "pointwise"),
    ("sm90_pointwise_stride", _DENSE, "pointwise"),
)


def runs() -> Iterator[tuple[str, torch.dtype, str, str, bool]]:
    """Case, dtype, result, shape, and whether all inputs are finite."""
    for shape, names, dtypes, results in _RUNS:
        for name in names:
            yield from ((name, dtype, result, shape, True) for dtype in dtypes for result in results)
    for name in _PAIR:
        yield from ((name, dtype, result, "pointwise", False) for dtype in _BOTH for result in _DENSE)


@contextmanager
def forced(shape: str) -> Iterator[None]:
    """While active, the kernel takes the smallest tile of that shape, whatever its cost model prefers."""
    all_tiles = pointwise.all_tiles

    def only(request: Request) -> tuple[Tile, ...]:
        found = (tile for tile in all_tiles(request) if SHAPES[shape](tile))
        return tuple(sorted(found, key=lambda tile: (tile.split_n, tile.pixels * tile.filters, str(tile))))[:1]

    with MonkeyPatch.context() as patch:
        patch.setattr(pointwise, "all_tiles", only)
        yield
