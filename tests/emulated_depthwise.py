"""Problems of the depthwise family on the emulator: what its paths differ by, beside the shared list of cases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import torch
from pytest import MonkeyPatch

from haloconv.families.depthwise import (
    box,
    box_wgrad,
    lanes_cut,
    pairs,
    patch,
    patch_wgrad,
    plane,
    plane_wgrad,
    tile_sm90,
)
from tests import emulated_depthwise_planes as planes
from tests.cases import Case, case, pick
from tests.emulated_depthwise_planes import PLANES

CASES = (
    case("march_3x3", "aligned rows, threads that lie half outside, padding that differs on every side", (2, 3, 9, 20),
         (3, 3, 3), padding=(2, 0, 1, 3), groups=3),
    case("march_strips", "strips of rows, of which the last is shorter", (1, 2, 67, 8), (2, 3, 3), padding=1, groups=2),
    case("march_large", "at least 10,000 outputs", (2, 12, 20, 24), (12, 3, 3), padding=1, groups=12),
    case("march_5x5", "a ring of five rows, and fewer rows than that", (2, 3, 4, 24), (3, 5, 5), padding=2, groups=3),
    case("march_stride", "stride 2: every other column of the input, and a gradient whose columns alternate",
         (2, 4, 16, 32), (4, 3, 3), padding=1, stride=2, groups=4),
    case("march_stride_even", "the same where the columns alternate the other way, in rows that are not aligned",
         (2, 3, 15, 23), (3, 4, 3), padding=(2, 1, 2, 1), stride=2, groups=3),
    case("march_stride_three", "columns of the gradient come in threes", (2, 4, 14, 21), (4, 3, 3), padding=1, stride=3,
         groups=4),
    case("march_nhwc_three", "the same, four channels of a thread", (2, 8, 10, 13), (8, 3, 3), padding=1, stride=3,
         groups=8, storage="channels_last"),
    case("march_stride_mixed", "strides that differ by axis, one beyond the filter", (2, 2, 13, 22), (2, 1, 5),
         padding=(0, 1, 1, 2), stride=(2, 1), groups=2),
    case("march_dilated", "classes of rows of different lengths", (1, 3, 13, 16), (3, 3, 3), padding=(3, 1, 4, 2),
         dilation=(3, 2), groups=3),
    case("march_storage", "a window of a larger image: rows that are not aligned", (2, 3, 9, 12), (3, 3, 3), padding=1,
         groups=3, storage="sliced", w_storage="sliced"),
    case("march_nhwc", "channels in pairs, 48 of them, which fill no warp", (2, 48, 7, 9), (48, 3, 3), padding=1,
         groups=48, storage="channels_last"),
    case("march_nhwc_stride", "channels in pairs, strided", (2, 16, 9, 13), (16, 3, 3), padding=1, stride=2, groups=16,
         storage="channels_last"),
    case("march_nhwc_odd", "channels one by one, two filters each", (2, 5, 9, 11), (10, 3, 3), padding=1, groups=5,
         storage="channels_last"),
    case("march_nhwc_storage", "a slice of channels: columns are further apart than there are channels", (2, 6, 7, 10),
         (6, 3, 3), padding=1, groups=6, storage="channels_last_sliced"),
    case("march_many_filters", "at least 10,000 filter elements, groups of lanes of which the last is not full",
         (1, 1120, 4, 5), (1120, 3, 3), padding=1, groups=1120, storage="channels_last"),
    case("band_3x5", "rows of seven pieces, at least 10,000 outputs", (2, 3, 40, 56), (3, 3, 5), padding=(1, 2),
         groups=3),
    case("band_7x7", "64 columns, several blocks of a channel", (5, 3, 21, 64), (3, 7, 7), padding=3, groups=3),
    case("band_5x5_multiplier", "several steps of columns, of which the last is not full; two filters of a channel",
         (1, 2, 11, 88), (4, 5, 5), padding=2, groups=2),
    case("band_strips", "a plane that does not fit a buffer: strips, of which the last is shorter", (3, 3, 70, 136),
         (3, 3, 5), padding=(1, 2), groups=3),
    case("band_many", "blocks of all images of a channel, and gradients of another extent", (3, 29, 10, 48),
         (29, 3, 5), padding=(0, 0, 2, 2), groups=29),
    case("band_sides", "even extents, dilation, and padding that differs on every side", (2, 2, 13, 56), (2, 4, 6),
         padding=(2, 5, 3, 7), dilation=(2, 2), groups=2),
    case("band_cut", "no padding on the left and more than the filter reaches on the right", (2, 2, 9, 48), (2, 5, 3),
         padding=(0, 0, 0, 10), groups=2),
    case("patch_3x3", "seven patches in a row of eight, blocks that go on to the next channel", (3, 5, 56, 56),
         (5, 3, 3), padding=1, groups=5),
    case("patch_7x7", "eight patches in a row, rows of patches that lie half outside", (2, 3, 21, 64), (3, 7, 7),
         padding=3, groups=3),
    case("patch_5x5_multiplier", "two steps of columns, of which the last is not full; two filters of a channel",
         (1, 2, 11, 88), (4, 5, 5), padding=2, groups=2),
    case("patch_strips", "strips of a plane, of which the last is shorter", (20, 1, 120, 48), (1, 3, 5),
         padding=(1, 2)),
    case("patch_many", "parts of a filter in several blocks, each of several planes", (13, 5, 20, 48), (5, 3, 5),
         padding=(0, 0, 2, 2), groups=5),
    case("patch_sides", "an even filter, dilation, and padding that differs on every side", (2, 2, 19, 56), (2, 3, 4),
         padding=(2, 3, 5, 9), dilation=(2, 2), groups=2),
    case("patch_border", "few rows, most of which meet the padding", (1, 40, 6, 48), (40, 7, 5),
         padding=(3, 5, 2, 2), groups=40),
    case("patch_wide", "windows of three pieces and of an odd number of rows", (1, 2, 10, 56), (2, 2, 11),
         padding=(1, 0, 5, 5), groups=2),
    case("patch_cut", "no padding on the left and more than the filter reaches on the right", (2, 2, 9, 48), (2, 5, 3),
         padding=(0, 0, 0, 10), groups=2),
    case("pairs_wgrad_3x3", "two strips, warps that share units, bands that end below the image", (2, 24, 20, 40),
         (24, 3, 3), padding=1, groups=24, storage="channels_last"),
    case("pairs_wgrad_5x5", "fragments beside each other", (2, 40, 13, 19), (40, 5, 5), padding=2, groups=40,
         storage="channels_last"),
    case("pairs_wgrad_7x7", "fragments of one row", (1, 16, 21, 24), (16, 7, 7), padding=3, groups=16,
         storage="channels_last"),
    case("pairs_wgrad_channels", "two blocks of channels, of which the last is not full", (1, 104, 10, 12), (104, 3, 3),
         padding=1, groups=104, storage="channels_last"),
    case("pairs_wgrad_long", "more bands than the rings have", (1, 16, 400, 8), (16, 3, 3), padding=1, groups=16,
         storage="channels_last"),
    case("pairs_wgrad_shift", "blocks that would meet the same strip of each image", (6, 8, 9, 40), (8, 3, 3),
         padding=1, groups=8, storage="channels_last"),
    case("pairs_wgrad_sides", "an even filter, padding that differs on every side", (2, 8, 11, 17), (8, 4, 6),
         padding=(2, 0, 5, 1), groups=8, storage="channels_last"),
    case("pairs_wgrad_row", "one row of taps: windows end in their band", (2, 16, 9, 17), (16, 1, 7), padding=(0, 3),
         groups=16, storage="channels_last"),
    case("pairs_wgrad_column", "one column of taps", (2, 16, 17, 9), (16, 7, 1), padding=(3, 0), groups=16,
         storage="channels_last"),
    case("pairs_wgrad_tiny", "an image smaller than the filter", (3, 8, 2, 3), (8, 5, 5), padding=3, groups=8,
         storage="channels_last"),
    case("box_7x7", "several images of a unit, fewer of the last one", (5, 3, 30, 28), (3, 7, 7), padding=3, groups=3),
    case("box_5x5", "strips of a plane, of which the last is shorter", (2, 2, 118, 64), (2, 5, 5), padding=2, groups=2),
    case("box_5x5_multiplier", "two filters of a channel", (2, 2, 11, 44), (4, 5, 5), padding=2, groups=2),
    case("box_many", "more units of a block than it has buffers, and rows that fill no tile", (70, 6, 9, 60),
         (6, 3, 5), padding=(1, 2), groups=6),
    case("box_sides", "an even filter, padding that differs on every side", (2, 3, 13, 32), (3, 4, 6),
         padding=(2, 5, 3, 6), groups=3),
    case("box_cut", "no padding on the left and more than the filter reaches on the right", (2, 2, 9, 20), (2, 5, 3),
         padding=(0, 0, 0, 10), groups=2),
    case("box_border", "strips of wide rows, of which many meet the padding", (1, 24, 30, 240), (24, 11, 3),
         padding=(5, 1), groups=24),
    case("box_row", "one row of taps, one tap of which is met by all", (3, 2, 1, 40), (2, 1, 7), padding=(0, 3),
         groups=2),
    case("box_column", "one column of taps", (2, 2, 30, 12), (2, 11, 1), padding=(5, 0), groups=2),
    case("lanes_3x3", "lanes without channels, two strips, rows and columns that fill no tile", (2, 36, 9, 61),
         (36, 3, 3), padding=1, groups=36, storage="channels_last"),
    case("lanes_5x5", "warps beside each other in channels and rows", (2, 64, 19, 14), (64, 5, 5), padding=2, groups=64,
         storage="channels_last"),
    case("lanes_7x7", "strips of half a map, three warps of channels", (1, 96, 22, 56), (96, 7, 7), padding=3,
         groups=96, storage="channels_last"),
    case("lanes_tall", "a ring that wraps, blocks that begin amid an image", (3, 8, 90, 6), (8, 7, 7), padding=3,
         groups=8, storage="channels_last"),
    case("lanes_sides", "an even filter, padding that differs on every side and is wider than the filter",
         (2, 40, 13, 17), (40, 4, 6), padding=(2, 5, 3, 7), groups=40, storage="channels_last"),
    case("lanes_cut", "no padding on the left and more than the filter reaches on the right", (2, 12, 9, 20),
         (12, 5, 3), padding=(0, 0, 0, 10), groups=12, storage="channels_last"),
    case("lanes_eights", "columns by eights", (3, 44, 10, 16), (44, 3, 3), padding=1, groups=44,
         storage="channels_last"),
    case("lanes_slabs", "two slabs, the last of which is not full", (2, 300, 5, 7), (300, 3, 3), padding=1, groups=300,
         storage="channels_last"),
    case("lanes_tiny", "an image that fills no tile", (1, 16, 5, 3), (16, 3, 3), padding=1, groups=16,
         storage="channels_last"),
    case("lanes_slice", "a slice of channels: columns are further apart than there are channels", (2, 32, 7, 10),
         (32, 3, 3), padding=1, groups=32, storage="channels_last_spaced"),
    case("pairs_3x3", "patches that lie half outside, and one that is not there", (2, 32, 9, 21), (32, 3, 3), padding=1,
         groups=32, storage="channels_last"),
    case("pairs_5x5", "blocks that begin in the middle of an image", (3, 32, 19, 37), (32, 5, 5), padding=2, groups=32,
         storage="channels_last"),
    case("pairs_7x7", "two strips of columns, of which the last one is narrower", (1, 32, 14, 71), (32, 7, 7),
         padding=3, groups=32, storage="channels_last"),
    case("pairs_48", "slabs without a swizzle", (2, 48, 10, 50), (48, 5, 5), padding=2, groups=48,
         storage="channels_last"),
    case("pairs_many", "four slabs, one image of a block after the other", (3, 256, 11, 12), (256, 3, 3), padding=1,
         groups=256, storage="channels_last"),
    case("pairs_sides", "an even filter, and padding that differs on every side", (2, 32, 9, 18), (32, 4, 6),
         padding=(2, 5, 3, 4), groups=32, storage="channels_last"),
    case("pairs_padding", "stages of padding alone at both ends", (2, 32, 3, 9), (32, 7, 3), padding=(6, 6, 2, 2),
         groups=32, storage="channels_last"),
    case("pairs_row", "a filter of one row", (1, 64, 7, 30), (64, 1, 7), padding=(0, 3), groups=64,
         storage="channels_last"),
    case("pairs_column", "a filter of one column, no padding", (1, 32, 13, 16), (32, 5, 1), groups=32,
         storage="channels_last"),
    case("pairs_lead", "a run of bands that begins a row of patches before its first window", (2, 32, 10, 34),
         (32, 3, 5), padding=(1, 2), groups=32, storage="channels_last"),
    *planes.CASES,
)  # fmt: skip
KERNELS_APART = {PLANES: planes.KERNELS}  # what runs of this shape alone launch

# Cases of the shared list that the family takes.
SHARED = pick("depthwise_multiplier", "one_by_one_everything")
# Those that run in 16 bits too, where vectors are wider and halves come in pairs or alone.
HALVES = {
    "march_large": (torch.float16, torch.bfloat16),
    "march_stride": (torch.float16,),
    "march_nhwc": (torch.bfloat16,),
}
OLDER = "older"
# Those whose planes are staged, by other kernels in 16 bits than in fp32; Hopper has others before these.
STAGED = ("band_3x5", "band_7x7", "band_5x5_multiplier", "band_strips", "band_many", "band_sides", "band_cut")
# Those whose planes land whole on Hopper, for other kernels in 16 bits than in fp32.
PATCHES = (
    "patch_3x3", "patch_7x7", "patch_5x5_multiplier", "patch_strips", "patch_many", "patch_sides", "patch_border",
    "patch_wide", "patch_cut",
)  # fmt: skip
# Filter gradients of pairs of channels, which are in 16 bits.
PAIRS_WGRAD = tuple(one.name for one in CASES if one.name.startswith("pairs_wgrad"))
# Those whose lanes are channels on Hopper, in fp32.
LANES = (
    "lanes_3x3", "lanes_5x5", "lanes_7x7", "lanes_tall", "lanes_sides", "lanes_cut", "lanes_eights", "lanes_slabs",
    "lanes_tiny", "lanes_slice",
)  # fmt: skip
# Those whose planes come as boxes on Hopper, in fp32.
BOXES = (
    "box_7x7", "box_5x5", "box_5x5_multiplier", "box_many", "box_sides", "box_cut", "box_border", "box_row",
    "box_column",
)  # fmt: skip
BOXES_LIMITS = ("LEAST_COLS", "LEAST_TAPS")
SMALL, LANES_LIMITS = "small", ("LEAST_COLS", "LEAST_COLS_OVER_25_TAPS", "LEAST_ELEMS", "MARCHED_TAPS")
# Those in nhwc that Hopper's tensor cores take in 16 bits.
PAIRS = (
    "pairs_3x3", "pairs_5x5", "pairs_7x7", "pairs_many", "pairs_sides", "pairs_padding", "pairs_row", "pairs_column",
    "pairs_lead", "pairs_48",
)  # fmt: skip
HALVES |= dict.fromkeys(PAIRS, (torch.float16, torch.bfloat16))
_FP32, _FP16, _BF16 = torch.float32, torch.float16, torch.bfloat16
EPILOGUES = (  # case, dtype, result, shape: every kernel, with a residual that lies as each of them writes
    *(("march_large", dtype, result, "") for dtype in (_FP32, _FP16)
      for result in ("relu", "scale_relu", "residual_relu", "scale_residual")),
    ("march_3x3", _FP32, "scale_residual", ""),
    ("march_strips", _FP32, "residual_relu", ""),
    ("march_stride", _FP16, "residual_relu", ""),
    ("march_stride_mixed", _FP32, "scale_residual", ""),
    ("march_dilated", _FP32, "residual_relu", ""),
    ("march_storage", _FP32, "scale_residual", ""),
    ("march_nhwc", _BF16, "scale_residual", ""),
    ("march_nhwc", _BF16, "relu", ""),
    ("march_nhwc_stride", _FP32, "scale_residual", ""),
    ("march_nhwc_odd", _FP32, "scale_residual", ""),
    ("pairs_3x3", _FP16, "scale_residual", ""),
    ("pairs_7x7", _BF16, "scale_residual", ""),
    ("pairs_many", _BF16, "scale_relu", ""),
    ("pairs_48", _FP16, "residual_relu", ""),
    ("pairs_padding", _BF16, "residual_relu", ""),
    ("patch_3x3", _FP16, "scale_residual", ""),
    ("patch_strips", _BF16, "residual_relu", ""),
    ("patch_5x5_multiplier", _BF16, "scale_residual", ""),
    ("patch_3x3", _FP32, "scale_residual", ""),
    ("patch_5x5_multiplier", _FP32, "residual_relu", ""),
    ("band_strips", _FP16, "scale_residual", OLDER),
    ("band_5x5_multiplier", _BF16, "residual_relu", OLDER),
    ("band_strips", _FP32, "scale_residual", OLDER),
    ("band_5x5_multiplier", _FP32, "residual_relu", OLDER),
    ("box_7x7", _FP32, "scale_residual", SMALL),
    ("box_5x5_multiplier", _FP32, "residual_relu", SMALL),
    ("lanes_3x3", _FP32, "scale_residual", SMALL),
    ("lanes_slabs", _FP32, "residual_relu", SMALL),
    *planes.EPILOGUES,
)  # fmt: skip
# Those that also run with values that are not finite.
NOT_FINITE = ("march_3x3", "march_stride_even", "march_nhwc")


def results_of(one: Case) -> tuple[str, ...]:
    """The results of a case that run: where a channel has several filters no input gradient."""
    if one in planes.CASES:
        return planes.results_of(one)
    if one.name == "march_many_filters" or one.name in PAIRS_WGRAD:
        return ("wgrad",)
    return ("fprop", "dgrad", "wgrad") if one.problem().k_per_group == 1 else ("fprop", "wgrad")


def shape_of(one: Case) -> str:
    """What a case must be ``forced`` to on Hopper, to run on the kernels that it is for."""
    if one in planes.CASES:
        return PLANES
    return OLDER if one.name in STAGED else SMALL if one.name in LANES + BOXES else ""


def runs() -> Iterator[tuple[str, torch.dtype, str, str, bool]]:
    """Case, dtype, result, shape (``forced``), and whether all inputs are finite."""
    every = (torch.float32, torch.float16, torch.bfloat16)
    yield from planes.runs()
    for one in (one for one in (*SHARED, *CASES) if one not in planes.CASES):
        shape = shape_of(one)
        some = (torch.float32, *HALVES.get(one.name, ()))
        if one.name in PAIRS_WGRAD:
            some = every[1:]
        for dtype in every if one.name in STAGED + PATCHES else some:
            yield from ((one.name, dtype, result, shape, True) for result in results_of(one))
    yield from ((*run, True) for run in EPILOGUES)
    yield from ((name, _BF16, "scale_residual", "", False) for name in ("pairs_5x5", "patch_many"))
    for name in NOT_FINITE:
        yield from ((name, torch.float32, result, "", False) for result in ("fprop", "dgrad", "wgrad"))
    for name in ("pairs_wgrad_3x3", "pairs_wgrad_sides"):
        yield from ((name, dtype, "wgrad", "", False) for dtype in every[1:])
    not_finite = (
        ("band_many", OLDER), ("band_sides", OLDER), ("patch_many", ""), ("patch_border", ""), ("pairs_5x5", ""),
        ("pairs_sides", ""),
    )  # fmt: skip
    for name, shape in not_finite:
        yield from ((name, torch.bfloat16, result, shape, False) for result in ("fprop", "dgrad", "wgrad"))
    for name in ("lanes_3x3", "lanes_7x7", "lanes_sides", "lanes_tiny", "box_7x7", "box_cut", "box_border"):
        yield from ((name, torch.float32, result, SMALL, False) for result in ("fprop", "dgrad", "wgrad"))


@contextmanager
def forced(shape: str) -> Iterator[None]:
    """``OLDER``: Hopper's own kernels take nothing, so that those for older devices do; else they take small images.

    ``SMALL``: lanes of channels and boxes do so, too. ``PLANES``: kernels of small planes take what they can, which
    they leave to others else, and patches do not.
    """
    assert shape in ("", OLDER, SMALL, PLANES)
    with MonkeyPatch.context() as monkey:
        for module in (plane, plane_wgrad) if shape != PLANES else ():
            monkey.setattr(module, "configs", lambda request: [])
        for module in (patch, patch_wgrad):
            monkey.setattr(module, "MOST_IDLE", 0 if shape == PLANES else 1000)
        monkey.setattr(pairs, "LEAST_COLS", (0, 0))
        for limit in LANES_LIMITS if shape == SMALL else ():
            monkey.setattr(lanes_cut, limit, 0)
        for limit, module in product(BOXES_LIMITS if shape == SMALL else (), (box, box_wgrad)):
            monkey.setattr(module, limit, 0)
        for module in (patch, patch_wgrad, tile_sm90, box, box_wgrad) if shape == OLDER else ():
            monkey.setattr(module, "configs", lambda request: [])
        yield
