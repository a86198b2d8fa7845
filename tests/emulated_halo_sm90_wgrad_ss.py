"""The runs of halo_sm90's weight gradient with both operands by descriptor: its cases, and tiles of larger layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from pytest import MonkeyPatch

from haloconv.families.halo_sm90.wgrad import wgrad
from haloconv.families.halo_sm90.wgrad_ss import wgrad_ss
from haloconv.families.halo_sm90.wgrad_ss.tile import Tiling
from haloconv.problem import Request
from tests.cases import case as any_case

_NHWC = "channels_last"
_BOTH = (torch.float16, torch.bfloat16)
case = partial(any_case, dtypes=_BOTH)
CASES = (
    case("sm90_wgrad_ss_of_7", "rows of 7 pixels, 8 apart", (3, 64, 7, 7), (72, 3, 3), padding=1, storage=_NHWC),
    case("sm90_wgrad_ss_of_14", "two blocks of channels, the last one short", (2, 72, 14, 14), (64, 3, 3), padding=1,
         storage=_NHWC),
    case("sm90_wgrad_ss_of_28", "several boxes an image, the last one lower, whose steps are fewer", (1, 32, 29, 28),
         (40, 3, 3), padding=1, storage=_NHWC),
    case("sm90_wgrad_ss_sides", "padding that differs on every side, dilation, taps that fill no whole tile",
         (2, 40, 9, 11), (72, 3, 5), padding=(2, 1, 3, 1), dilation=(2, 1), storage=_NHWC),
    case("sm90_wgrad_ss_strips", "several strips of columns, as wide", (1, 24, 5, 296), (32, 3, 3), padding=1,
         storage=_NHWC),
    case("sm90_wgrad_ss_planes", "pixels are neighbours: both tensors are copied", (2, 24, 6, 10), (136, 3, 3),
         padding=1),
    case("sm90_wgrad_ss_large_planes", "the same, pixels of a plane by several blocks", (1, 40, 32, 33), (24, 3, 3),
         padding=1),
    case("sm90_wgrad_ss_odd_planes", "the same, of planes that begin anywhere", (2, 40, 5, 7), (72, 3, 2), padding=1),
    case("sm90_wgrad_ss_pointwise", "1x1: the batch is one row", (2, 40, 16, 17), (136, 1, 1), storage=_NHWC),
    case("sm90_wgrad_ss_pointwise_planes", "1x1 where pixels are neighbours: copied", (2, 72, 6, 7), (72, 1, 1)),
    case("sm90_wgrad_ss_pointwise_stride", "1x1 of every few pixels", (2, 40, 7, 15), (72, 1, 1), stride=(3, 2),
         storage=_NHWC),
    case("sm90_wgrad_ss_pointwise_stride_planes", "the same where pixels are neighbours: small planes, copied whole",
         (2, 72, 13, 9), (72, 1, 1), stride=(2, 3)),
    case("sm90_wgrad_ss_pointwise_stride_rows", "the same: rows of large planes", (1, 72, 53, 40), (72, 1, 1),
         stride=2),
    case("sm90_wgrad_ss_pixel", "one pixel, and the taps that meet it", (3, 32, 1, 1), (32, 3, 3), padding=1,
         storage=_NHWC),
    case("sm90_wgrad_ss_beyond", "padding beyond the filter and the image", (1, 16, 4, 8), (16, 2, 2),
         padding=(3, 4, 6, 7), storage=_NHWC),
    case("sm90_wgrad_ss_long_sum", "more steps than wgmma sums at a time", (1, 24, 300, 128), (72, 1, 1),
         storage=_NHWC),
    case("sm90_wgrad_ss_loose", "pixels of x that meet no output, in a row's gap and below it", (3, 16, 7, 7),
         (24, 3, 3), padding=(0, 0, 1, 1), storage=_NHWC),
    case("sm90_wgrad_ss_loose_planes", "the same in copies", (3, 16, 7, 9), (24, 3, 3), padding=(0, 0, 1, 1)),
    case("sm90_wgrad_ss_loose_strips", "the same behind strips", (1, 16, 5, 288), (24, 3, 3), padding=(0, 1, 1, 1),
         storage=_NHWC),
)  # fmt: skip

KERNELS = {"halo_sm90/wgrad_ss", "halo_sm90/wgrad_ss_sum", "halo_sm90/nchw_to_nhwc"}
FIRST = "wgrad by descriptor"
CLUSTER = "wgrad by descriptor, a cluster"
CLUSTERS = "wgrad by descriptor, several clusters"
ALL_TAPS, ALL_TAPS_OF_PARTS = "wgrad by descriptor, all taps in a cluster", "wgrad by descriptor, all taps of parts"
SHAPES: dict[str, Callable[[Tiling], bool]] = {
    FIRST: lambda each: each.cluster == 1,
    "wgrad by descriptor, taps shared": lambda each: each.tile.split[2] == 3,
    "wgrad by descriptor, channels shared": lambda each: each.tile.split[1] == 2,
    "wgrad by descriptor, filters shared": lambda each: each.tile.split[0] == 2,
    "wgrad by descriptor, blocks of filters": lambda each: each.tile.m_blocks == 2,
    "wgrad by descriptor, many channels": lambda each: each.tile.columns == 128,
    "wgrad by descriptor, one part": lambda each: each.cluster == 1,
    "wgrad by descriptor, many parts": lambda each: each.cluster == 1,
    CLUSTER: lambda each: each.cluster == 2,
    CLUSTERS: lambda each: each.cluster == 2,
    ALL_TAPS: lambda each: each.cluster == 2 and each.tile.extents[2] >= 9,
    ALL_TAPS_OF_PARTS: lambda each: each.cluster == 1 and each.tile.extents[2] >= 9,
}
_PARTS = {
    **{"wgrad by descriptor, one part": 1, "wgrad by descriptor, many parts": 9},
    **{CLUSTER: 2, CLUSTERS: 4, ALL_TAPS: 2, ALL_TAPS_OF_PARTS: 9},
}
SHAPED: dict[str, tuple[str, ...]] = {
    FIRST: tuple(one.name for one in CASES if one.name != "sm90_wgrad_ss_long_sum"),
    "wgrad by descriptor, taps shared": ("sm90_wgrad_ss_of_7", "sm90_wgrad_ss_sides"),
    "wgrad by descriptor, channels shared": ("sm90_wgrad_ss_of_14",),
    "wgrad by descriptor, filters shared": ("sm90_wgrad_ss_of_7", "sm90_wgrad_ss_planes"),
    "wgrad by descriptor, blocks of filters": ("sm90_wgrad_ss_of_7", "sm90_wgrad_ss_planes"),
    "wgrad by descriptor, many channels": ("sm90_wgrad_ss_of_14", "sm90_wgrad_ss_pointwise_planes"),
    "wgrad by descriptor, one part": ("sm90_wgrad_ss_of_7", "sm90_wgrad_ss_of_28", "sm90_wgrad_ss_long_sum"),
    "wgrad by descriptor, many parts": ("sm90_wgrad_ss_of_28", "sm90_wgrad_ss_pointwise"),
    ALL_TAPS: ("sm90_wgrad_ss_large_planes",),
    ALL_TAPS_OF_PARTS: ("sm90_wgrad_ss_large_planes",),
    CLUSTER: ("sm90_wgrad_ss_of_7", "sm90_wgrad_ss_sides", "sm90_wgrad_ss_pixel", "sm90_wgrad_ss_planes"),
    CLUSTERS: ("sm90_wgrad_ss_of_14", "sm90_wgrad_ss_pointwise", "sm90_wgrad_ss_odd_planes"),
}
SANITIZED = tuple(  # case, results, shape: what compute-sanitizer is to see
    (name, ("wgrad",), shape)
    for shape in (FIRST, CLUSTER, CLUSTERS)
    for name in SHAPED[shape]
    if name not in ("sm90_wgrad_ss_strips", "sm90_wgrad_ss_pointwise")
)
NOT_FINITE = (
    "sm90_wgrad_ss_loose", "sm90_wgrad_ss_loose_planes", "sm90_wgrad_ss_loose_strips", "sm90_wgrad_ss_sides",
    "sm90_wgrad_ss_of_28",
)  # fmt: skip


def runs() -> Iterator[tuple[str, torch.dtype, str, str, bool]]:
    """Case, dtype, result, shape, and whether all inputs are finite."""
    for shape, names in SHAPED.items():
        yield from ((name, dtype, "wgrad", shape, True) for name in names for dtype in _BOTH)
    for shape in (FIRST, CLUSTER):
        yield from ((name, dtype, "wgrad", shape, False) for name in NOT_FINITE for dtype in _BOTH)


@contextmanager
def forced(shape: str) -> Iterator[None]:
    """While active, the weight gradient takes the best each of that shape, whatever its cost model prefers."""
    tilings = wgrad_ss.tilings

    def only(request: Request) -> list[Tiling]:
        one = request if (copied := wgrad_ss.seen(request)) is None else copied.request
        found = [(each.box.boxes(one.problem), each) for each in tilings(request) if SHAPES[shape](each)]
        wanted = _PARTS.get(shape)
        found.sort(key=lambda pair: wanted is not None and pair[0] < wanted)  # first those with a box for each part
        return [each._replace(parts=min(wanted or each.parts, boxes)) for boxes, each in found[:1]]

    with MonkeyPatch.context() as patch:
        patch.setattr(wgrad_ss, "tilings", only)
        patch.setattr(wgrad, "configs", lambda request: [])
        yield


@contextmanager
def left_out() -> Iterator[None]:
    """While active, the other kernel of weight gradients takes every layer."""
    with MonkeyPatch.context() as patch:
        patch.setattr(wgrad_ss, "configs", lambda request: [])
        yield
