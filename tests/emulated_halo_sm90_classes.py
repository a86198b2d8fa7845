"""The runs of halo_sm90/conv on the emulator whose rows of M are residue classes: gradients of strided convolutions."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.cases import case

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
CASES = (
    case("classes_4x4", "all classes have as many taps: two columns alternate, from before the first pixel on",
         (2, 16, 12, 136), (40, 4, 4), stride=2, padding=1),
    case("classes_2x2", "a tap each", (2, 40, 8, 80), (24, 2, 2), stride=2),
    case("classes_3x3", "classes with zero taps, three blocks of filters", (2, 40, 9, 40), (72, 3, 3), stride=2,
         padding=1),
    case("classes_odd", "rows of dx whose starts are at no multiple of 8 bytes", (2, 9, 11, 43), (16, 4, 4), stride=2,
         padding=1),
    case("classes_1x16", "eight columns alternate, a signal", (2, 24, 1, 648), (16, 1, 16), stride=(1, 8),
         padding=(0, 4)),
    case("classes_1x15", "the same in lines of one image, from three columns before the first pixel on",
         (2, 21, 3, 200), (24, 1, 15), stride=(1, 8), padding=(0, 3)),
    case("classes_1x7_by_4", "four columns alternate, the last class has a tap less", (1, 10, 1, 262), (24, 1, 7),
         stride=(1, 4), padding=(0, 2)),
    case("classes_by_3", "three columns have rows of M of their own", (2, 18, 13, 40), (16, 5, 5), stride=3, padding=2),
    case("classes_dilated", "taps of a class three filter rows apart", (2, 12, 21, 40), (16, 5, 4), stride=2, padding=3,
         dilation=3),
    case("classes_common", "stride and dilation with a common divisor: classes that no tap reaches",
         (1, 12, 17, 38), (16, 3, 3), stride=(2, 4), padding=2, dilation=2),
    case("classes_gaps", "a stride beyond the filter", (2, 12, 17, 40), (16, 2, 1), stride=(3, 2), padding=1),
    case("classes_groups", "runs of classes that begin inside a block, in each of three groups", (2, 27, 9, 34),
         (24, 4, 4), stride=2, padding=1, groups=3),
    case("classes_rows_only", "no stride across columns", (2, 24, 17, 66), (16, 4, 3), stride=(2, 1), padding=1),
    case("classes_nhwc_3x3", "boxes of 32 and 64 filters of a class", (2, 64, 8, 144), (16, 3, 3), stride=2, padding=1,
         storage="channels_last"),
    case("classes_nhwc_above", "boxes that begin above the first row", (1, 32, 8, 72), (16, 4, 2), stride=2,
         padding=(1, 0), storage="channels_last"),
    case("classes_nhwc_long", "boxes of long rows", (1, 16, 4, 320), (16, 3, 3), stride=2, padding=1,
         storage="channels_last"),
    case("classes_nhwc_4x4", "lanes store 8 bytes of a class", (2, 32, 8, 144), (24, 4, 4), stride=2, padding=1,
         storage="channels_last"),
    case("classes_nhwc_few", "boxes of 16 filters, four classes in a block", (2, 16, 8, 160), (24, 2, 2), stride=2,
         storage="channels_last"),
    case("classes_nhwc_odd", "single filters are stored", (2, 18, 9, 43), (12, 3, 2), stride=2, padding=1,
         storage="channels_last"),
    case("classes_nhwc_groups", "the same in groups, and a stride of three", (2, 48, 10, 32), (32, 4, 3), stride=(3, 2),
         padding=1, groups=2, storage="channels_last"),
    case("classes_copied", "small images in groups, whose gradient is copied", (5, 12, 13, 15), (24, 4, 4), stride=2,
         padding=1, groups=3),
    case("classes_wide", "two blocks of filters of one tile", (1, 72, 6, 40), (40, 4, 4), stride=2, padding=1),
    case("classes_nhwc_wide", "the same where channels are neighbours", (1, 72, 6, 40), (40, 4, 4), stride=2, padding=1,
         storage="channels_last"),
)  # fmt: skip
SHAPES: dict[str, object] = {}  # those of tests.emulated_halo_sm90
_SHAPED = {
    "rows": ("classes_4x4", "classes_3x3", "classes_odd", "classes_1x7_by_4", "classes_by_3", "classes_dilated",
             "classes_groups", "classes_rows_only", "classes_nhwc_3x3", "classes_nhwc_4x4", "classes_nhwc_few",
             "classes_nhwc_odd", "classes_nhwc_groups"),
    "flat": ("classes_4x4", "classes_1x16", "classes_1x15", "classes_dilated", "classes_groups", "classes_nhwc_4x4",
             "classes_nhwc_groups"),
    "flat strips": ("classes_1x16", "classes_nhwc_4x4"),
    "shared tile in passing": ("classes_wide", "classes_nhwc_wide"),
    "shared tile flat": ("classes_wide", "classes_nhwc_wide"),
    "rows of 256": ("classes_nhwc_long",),
    "two runs of 128": ("classes_4x4", "classes_1x16", "classes_nhwc_3x3"),
    "boxes in rows": ("classes_4x4", "classes_nhwc_3x3", "classes_nhwc_above"),
    "copied flat": ("classes_4x4", "classes_2x2", "classes_1x16", "classes_copied", "classes_by_3"),
    "copied rows": ("classes_4x4", "classes_3x3", "classes_1x16", "classes_by_3"),
}  # fmt: skip
_NOT_FINITE = ("classes_3x3", "classes_dilated", "classes_nhwc_odd", "classes_1x7_by_4")


def runs() -> Iterator[tuple[str, torch.dtype, str, str, bool]]:
    """Case, dtype, result, shape, and whether all inputs are finite."""
    for one in CASES:
        yield from ((one.name, dtype, "dgrad", "", True) for dtype in (FP32, FP16))
    yield "classes_4x4", BF16, "dgrad", "", True
    for shape, names in _SHAPED.items():
        yield from ((name, dtype, "dgrad", shape, True) for name in names for dtype in (FP32, FP16))
    for shape, name in (("three products", "classes_3x3"), ("three products in rows", "classes_4x4")):
        yield name, FP32, "dgrad", shape, True
    for name in _NOT_FINITE:
        yield from ((name, dtype, "dgrad", "", False) for dtype in (FP32, FP16))
