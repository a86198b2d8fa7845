"""The runs of halo_sm90's weight gradient on the emulator: its own cases, and tiles that only larger layers choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from pytest import MonkeyPatch

from haloconv.families.halo_sm90.wgrad import wgrad
from haloconv.families.halo_sm90.wgrad.cut import Cut
from haloconv.families.halo_sm90.wgrad.wgrad import Tiling
from haloconv.problem import Request
from tests.cases import case

CASES = (
    case("sm90_wgrad_rows", "aligned rows, filters that are no multiple of a tile's", (2, 16, 9, 40), (40, 3, 3),
         padding=1),
    case("sm90_wgrad_rows_nhwc", "the same where channels are neighbours", (2, 16, 9, 40), (40, 3, 3), padding=1,
         storage="channels_last"),
    case("sm90_wgrad_strips", "several strips of columns, the last one short", (1, 24, 5, 296), (32, 3, 3), padding=1),
    case("sm90_wgrad_strips_nhwc", "the same where channels are neighbours", (1, 24, 5, 296), (32, 3, 3), padding=1,
         storage="channels_last"),
    case("sm90_wgrad_classes", "classes of rows of different lengths, padding that differs on every side, groups",
         (2, 48, 13, 48), (32, 3, 3), padding=(5, 4, 7, 5), dilation=(3, 6), groups=2),
    case("sm90_wgrad_classes_nhwc", "the same where channels are neighbours", (2, 48, 13, 48), (32, 3, 3),
         padding=(5, 4, 7, 5), dilation=(3, 6), groups=2, storage="channels_last"),
    case("sm90_wgrad_row_filter", "a row of 15 taps: several columns of them in a wgmma", (1, 24, 7, 80), (36, 1, 15),
         padding=(0, 7)),
    case("sm90_wgrad_wide", "several blocks of channels and of filters", (1, 72, 5, 16), (136, 3, 3), padding=1),
    case("sm90_wgrad_wide_nhwc", "the same where channels are neighbours", (1, 72, 5, 16), (136, 3, 3), padding=1,
         storage="channels_last"),
    case("sm90_wgrad_pointwise", "1x1: rows of an image are one", (2, 40, 6, 7), (72, 1, 1)),
    case("sm90_wgrad_pointwise_nhwc", "1x1: rows of all images are one", (2, 40, 5, 7), (72, 1, 1),
         storage="channels_last"),
    case("sm90_wgrad_pointwise_sliced", "1x1: lines of dy are met once", (2, 40, 6, 8), (72, 1, 1), storage="sliced"),
    case("sm90_wgrad_stride", "rows of taps whose lines of x are whole strides apart", (2, 16, 13, 40), (40, 3, 3),
         padding=1, stride=2),
    case("sm90_wgrad_stride_nhwc", "the same where channels are neighbours", (2, 16, 13, 40), (40, 3, 3), padding=1,
         stride=2, storage="channels_last"),
    case("sm90_wgrad_stride_classes", "strides and dilations without a common factor, padding on four sides",
         (2, 16, 25, 45), (24, 5, 3), padding=(6, 5, 3, 4), stride=(2, 3), dilation=(3, 2)),
    case("sm90_wgrad_stride_pointwise", "1x1 of every second pixel of a row", (2, 24, 8, 16), (40, 1, 1), stride=2),
    case("sm90_wgrad_stride_pointwise_nhwc", "the same where channels are neighbours", (2, 24, 7, 15), (40, 1, 1),
         stride=(3, 2), storage="channels_last"),
    case("sm90_wgrad_narrow", "rows of 7 pixels, shifted", (2, 24, 7, 7), (48, 3, 3), padding=1),
    case("sm90_wgrad_pairs", "rows of 14 pixels, loaded two at a time", (2, 21, 7, 14), (45, 3, 3), padding=1),
    case("sm90_wgrad_singles", "rows of 7 pixels, loaded one at a time", (2, 21, 7, 7), (45, 3, 3), padding=1),
    case("sm90_wgrad_valid", "aligned rows of x, rows of dy that are shifted", (1, 16, 9, 40), (40, 3, 3)),
    case("sm90_wgrad_odd_nhwc", "channels and filters that are no groups of 16 bytes", (2, 21, 7, 9), (13, 3, 3),
         padding=1, storage="channels_last"),
    case("sm90_wgrad_fours_nhwc", "channels and filters that in 16 bits are loaded four at a time", (2, 20, 7, 9),
         (44, 3, 3), padding=1, storage="channels_last"),
    case("sm90_wgrad_short_nhwc", "lines of one step, an odd number of them inside a box", (1, 64, 20, 7), (40, 3, 3),
         padding=1, storage="channels_last"),
    case("sm90_wgrad_many_rows", "13 rows of taps: several blocks of them", (1, 8, 20, 24), (8, 13, 3), padding=(6, 1)),
    case("sm90_wgrad_nine", "lines of two whole spans and a step", (1, 16, 5, 72), (40, 3, 3), padding=1),
    case("sm90_wgrad_beyond", "padding beyond the filter and the image", (1, 8, 4, 8), (8, 2, 2), padding=(3, 4, 6, 7)),
    case("sm90_wgrad_long_sum", "more steps than wgmma sums at a time", (1, 8, 300, 64), (8, 1, 1)),
    case("sm90_wgrad_sliced", "rows of a larger tensor", (2, 16, 6, 10), (24, 3, 3), padding=1, storage="sliced"),
    case("sm90_wgrad_every_other", "pixels that are no neighbours", (2, 16, 6, 10), (24, 3, 3), padding=1,
         storage="every_other_pixel"),
    case("sm90_wgrad_expanded", "one image seen as several", (3, 16, 6, 16), (24, 3, 3), padding=1, storage="expanded"),
    case("sm90_wgrad_unaligned_nhwc", "a tensor that starts in the middle of 16 bytes", (2, 16, 6, 16), (24, 3, 3),
         padding=1, storage="channels_last_unaligned"),
    case("sm90_wgrad_loose", "pixels right of the last column that dy has, in a last step", (3, 8, 4, 24), (16, 1, 13)),
    case("sm90_wgrad_loose_nhwc", "the same where channels are neighbours", (3, 8, 4, 24), (16, 1, 13),
         storage="channels_last"),
    case("sm90_wgrad_loose_halves", "the same in aligned rows of 16 bits", (3, 8, 4, 40), (16, 1, 17)),
    case("sm90_wgrad_loose_span", "the same in a step that would make a span whole", (3, 8, 1, 40), (16, 1, 13)),
    case("sm90_wgrad_loose_odd", "the same in rows that are shifted", (3, 8, 4, 25), (16, 1, 13)),
    case("sm90_wgrad_loose_rows", "rows of x that some rows of taps meet no output with", (3, 8, 6, 16), (16, 3, 3),
         padding=(0, 0, 1, 1)),
    case("sm90_wgrad_cells", "images of 7 columns side by side, a number of them that fills no line", (3, 24, 7, 7),
         (48, 3, 3), padding=1),
    case("sm90_wgrad_cells_nhwc", "the same where channels are neighbours, no groups of 16 bytes", (5, 21, 7, 7),
         (43, 3, 3), padding=1, storage="channels_last"),
    case("sm90_wgrad_cells_of_14", "images of 14 columns side by side, rows one by one", (4, 16, 9, 14), (40, 3, 3),
         padding=(2, 1), dilation=(2, 1)),
    case("sm90_wgrad_cells_of_27", "columns of dy that are fewer than those of x, padding on one side, dilation",
         (2, 16, 5, 28), (40, 3, 2), padding=(1, 2, 1, 0), dilation=(1, 2)),
    case("sm90_wgrad_cells_sliced", "rows of a larger tensor, five columns of taps", (4, 8, 6, 6), (24, 3, 5),
         padding=(1, 2), storage="sliced"),
    case("sm90_wgrad_cells_loose", "pixels of neighbours, and of the image, that meet the gap of dy", (3, 16, 7, 7),
         (24, 3, 3), padding=(0, 0, 1, 1)),
    case("sm90_wgrad_cells_loose_of_14", "the same in cells of 16 pixels", (3, 8, 4, 14), (16, 3, 3),
         padding=(0, 0, 1, 1)),
    case("sm90_wgrad_cells_loose_span", "the same in rows that come one by one", (7, 8, 19, 7), (16, 3, 3),
         padding=(0, 0, 1, 1), dilation=(2, 1)),
)  # fmt: skip

_CELLS = (
    "sm90_wgrad_cells", "sm90_wgrad_cells_nhwc", "sm90_wgrad_cells_of_14", "sm90_wgrad_cells_of_27",
    "sm90_wgrad_cells_sliced",
)  # fmt: skip
_LOOSE_CELLS = ("sm90_wgrad_cells_loose", "sm90_wgrad_cells_loose_of_14", "sm90_wgrad_cells_loose_span")
_SIDE_BY_SIDE, _ONE_IN_A_ROW, _STEPS_OF_CELLS = (
    "wgrad side by side",
    "wgrad one in a row",
    "wgrad steps of cells shared",
)
_OF_COPIES = (_SIDE_BY_SIDE, _ONE_IN_A_ROW, _STEPS_OF_CELLS)  # other shapes multiply tensors as they are
AS_THEY_ARE = "wgrad as they are"
SHORT = (
    "sm90_wgrad_narrow", "sm90_wgrad_pairs", "sm90_wgrad_singles", "sm90_wgrad_odd_nhwc", "sm90_wgrad_fours_nhwc",
    "sm90_wgrad_sliced", "sm90_wgrad_every_other", "sm90_wgrad_pointwise_sliced",
)  # fmt: skip
"""Cases about how lines come, of which the cost model would take copies."""
_EVERY = (torch.float32, torch.float16, torch.bfloat16)
_BOTH = (torch.float32, torch.float16)
_RUNS = (
    (("sm90_wgrad_rows", "sm90_wgrad_rows_nhwc", "large_filter_gradient"), _EVERY),
    (("sm90_wgrad_strips", "sm90_wgrad_strips_nhwc", "sm90_wgrad_classes", "sm90_wgrad_classes_nhwc",
      "sm90_wgrad_row_filter", "sm90_wgrad_wide", "sm90_wgrad_wide_nhwc", "sm90_wgrad_pointwise",
      "sm90_wgrad_stride", "sm90_wgrad_stride_nhwc", "sm90_wgrad_stride_classes", "sm90_wgrad_narrow",
      "sm90_wgrad_pairs", "sm90_wgrad_singles", "sm90_wgrad_valid", "sm90_wgrad_odd_nhwc",
      "sm90_wgrad_fours_nhwc", "sm90_wgrad_many_rows", "sm90_wgrad_nine", "sm90_wgrad_beyond",
      "sm90_wgrad_every_other", "sm90_wgrad_expanded", "small_a", "one_pixel_image", "one_row", "one_column"), _BOTH),
    (("sm90_wgrad_sliced", "sm90_wgrad_pointwise_sliced"), (torch.float32,)),
    (_CELLS, _BOTH),
    (("sm90_wgrad_unaligned_nhwc", "sm90_wgrad_pointwise_nhwc", "sm90_wgrad_stride_pointwise",
      "sm90_wgrad_stride_pointwise_nhwc"), (torch.float16,)),
)  # fmt: skip

SHAPES: dict[str, Callable[[Tiling], bool]] = {
    "wgrad columns shared": lambda each: each.tile.split[0] == 3,
    "wgrad channels shared": lambda each: each.tile.split[1] == 2,
    "wgrad filters shared": lambda each: each.tile.split[2] == 3,
    "wgrad steps shared": lambda each: each.tile.split[3] == 2 and each.tile.rows == 3,
    "wgrad columns in turn": lambda each: each.tile.column_groups > 1,
    "wgrad many filters": lambda each: each.tile.filters == 128,
    "wgrad short lines": lambda each: each.tile.rows == each.tile.split[0] == 3,
    "wgrad one part": lambda each: True,
    "wgrad many parts": lambda each: True,
    _SIDE_BY_SIDE: lambda each: each.arrangement is not None and each.arrangement.images > 1,
    _ONE_IN_A_ROW: lambda each: each.arrangement is not None and each.arrangement.images == 1,
    _STEPS_OF_CELLS: lambda each: each.arrangement is not None and each.tile.split[3] == 2,
    AS_THEY_ARE: lambda each: True,
}
PARTS = {"wgrad short lines": 1, "wgrad one part": 1, "wgrad many parts": 9}  # of the shapes that are about them
SHAPED: dict[str, tuple[str, ...]] = {
    "wgrad columns shared": ("sm90_wgrad_wide", "sm90_wgrad_wide_nhwc"),
    "wgrad channels shared": ("sm90_wgrad_rows", "sm90_wgrad_strips_nhwc"),
    "wgrad filters shared": ("sm90_wgrad_wide", "sm90_wgrad_wide_nhwc"),
    "wgrad steps shared": ("sm90_wgrad_classes", "sm90_wgrad_rows_nhwc", "sm90_wgrad_narrow"),
    "wgrad columns in turn": ("sm90_wgrad_wide", "sm90_wgrad_row_filter"),
    "wgrad many filters": ("sm90_wgrad_wide", "sm90_wgrad_wide_nhwc"),
    "wgrad short lines": ("sm90_wgrad_short_nhwc", "sm90_wgrad_wide_nhwc"),
    "wgrad one part": (
        "sm90_wgrad_long_sum",
        "sm90_wgrad_classes",
        "sm90_wgrad_beyond",
        "sm90_wgrad_narrow",
        "sm90_wgrad_rows",
    ),
    "wgrad many parts": ("sm90_wgrad_rows", "sm90_wgrad_classes"),
    _SIDE_BY_SIDE: _CELLS,
    _ONE_IN_A_ROW: ("sm90_wgrad_cells_of_27", "sm90_wgrad_pointwise"),
    _STEPS_OF_CELLS: ("sm90_wgrad_cells", "sm90_wgrad_cells_of_14"),
}
NOT_FINITE = (
    "sm90_wgrad_loose", "sm90_wgrad_loose_nhwc", "sm90_wgrad_loose_halves", "sm90_wgrad_loose_span",
    "sm90_wgrad_loose_odd", "sm90_wgrad_loose_rows",
)  # fmt: skip


def runs() -> Iterator[tuple[str, torch.dtype, str, str, bool]]:
    """Case, dtype, result, shape, and whether all inputs are finite."""
    for names, dtypes in _RUNS:
        for name in names:
            shape = AS_THEY_ARE if name in SHORT else ""
            yield from ((name, dtype, "wgrad", shape, True) for dtype in dtypes)
    for shape, shaped in SHAPED.items():
        yield from ((name, dtype, "wgrad", shape, True) for name in shaped for dtype in _BOTH)
    yield from ((name, dtype, "wgrad", "", False) for name in NOT_FINITE for dtype in _BOTH)
    yield from ((name, dtype, "wgrad", _SIDE_BY_SIDE, False) for name in _LOOSE_CELLS for dtype in _BOTH)


def _in_parts(one: Tiling, request: Request, parts: int) -> Cut:
    """So many parts, if there are as many boxes."""
    rows = -(-request.problem.n // (one.arrangement.images if one.arrangement else 1))
    return one.cut._replace(parts=min(parts, rows * one.cut.column_strips * one.cut.bands))


@contextmanager
def forced(shape: str) -> Iterator[None]:
    """While active, the weight gradient takes the best each of that shape, whatever its cost model prefers."""
    tilings = wgrad.tilings

    def only(request: Request) -> list[Tiling]:
        allowed = [each for each in tilings(request) if (each.arrangement is not None) == (shape in _OF_COPIES)]
        found = [each for each in allowed if SHAPES[shape](each)][:1]
        return [each._replace(cut=_in_parts(each, request, PARTS.get(shape, each.cut.parts))) for each in found]

    with MonkeyPatch.context() as patch:
        patch.setattr(wgrad, "tilings", only)
        yield
