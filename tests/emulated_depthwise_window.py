"""What the emulator runs of depthwise_window: cases, cuts that its cost model takes for larger problems, and both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import torch
from pytest import MonkeyPatch

from haloconv.families.depthwise_window import wgrad, window
from haloconv.families.depthwise_window.cut import Block, Cut, Tiling
from haloconv.families.depthwise_window.wgrad import Split
from tests.cases import Case, case

RESULTS = ("fprop", "dgrad", "wgrad")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

CASES = (
    case("window_13x11", "several quads of taps and some left over", (2, 4, 23, 27), (4, 13, 11), padding=(6, 5),
         groups=4),
    case("window_31x31", "a filter larger than the image, two filters per channel", (1, 2, 14, 15), (4, 31, 31),
         padding=15, groups=2),
    case("window_many_taps", "at least 10,000 filter elements", (1, 12, 7, 8), (12, 31, 31), padding=15, groups=12),
    case("window_all_above", "a tile whose rows are all above an image of one pixel", (1, 1, 1, 1), (1, 1, 1),
         padding=(9, 0, 0, 0), stride=(1, 4), dilation=2),
    case("window_row", "1xS", (1, 3, 5, 40), (3, 1, 15), padding=(0, 7), groups=3),
    case("window_column", "Rx1, beyond the image", (2, 3, 40, 6), (3, 63, 1), padding=(31, 0), groups=3),
    case("window_even", "even extents, padding on two sides", (1, 3, 13, 18), (3, 8, 12), padding=(0, 5, 7, 0),
         groups=3),
    case("window_stride", "residues of a stride that differs by axis", (2, 3, 16, 19), (3, 5, 6), stride=(2, 3),
         padding=(2, 1, 1, 3), groups=3),
    case("window_far_stride", "a stride beyond the filter", (1, 3, 17, 15), (3, 2, 3), stride=(4, 5), groups=3),
    case("window_dilated", "classes of a dilation, some without results", (2, 3, 17, 6), (3, 3, 3), padding=(4, 7),
         dilation=(4, 7), groups=3),
    case("window_both", "stride and dilation without a common divisor, two filters per channel", (2, 3, 19, 22),
         (6, 3, 4), stride=(3, 2), padding=(1, 3, 4, 2), dilation=(2, 3), groups=3),
    case("window_common", "stride and dilation with one", (2, 3, 19, 22), (3, 3, 3), stride=(2, 4), padding=(2, 3),
         dilation=(4, 2), groups=3),
    case("window_nhwc", "channels innermost, more than a run of them", (3, 20, 12, 13), (20, 7, 7), padding=3,
         groups=20, storage="channels_last"),
    case("window_nhwc_both", "channels innermost, two filters per channel, stride and dilation", (2, 5, 15, 13),
         (10, 5, 3), padding=(4, 2), stride=(2, 1), dilation=(1, 2), groups=5, storage="channels_last"),
    case("window_sliced", "a window of a larger image", (2, 3, 14, 17), (3, 9, 9), padding=4, groups=3,
         storage="sliced", w_storage="sliced"),
    case("window_transposed", "H and W swapped in memory", (2, 3, 14, 17), (3, 5, 9), padding=4, groups=3,
         storage="transposed", w_storage="transposed"),
    case("window_tall", "filter rows of which many lie outside of the image", (8, 1, 20, 32), (1, 21, 3),
         padding=(10, 1), groups=1),
    case("window_low_nhwc", "channels innermost, and results that are more words than what they come from: few rows",
         (3, 8, 5, 53), (8, 3, 3), padding=1, groups=8, storage="channels_last"),
    case("window_low_dilated", "columns side by side, and results that are more words than what they come from",
         (3, 13, 1, 52), (13, 1, 2), dilation=(2, 3), groups=13),
    case("window_aligned", "rows of 16 bytes, which leave four at a time", (2, 4, 12, 16), (4, 9, 7), padding=(4, 3),
         groups=4, bias=False),
)  # fmt: skip
BY_NAME = {one.name: one for one in CASES}

# (fprop and dgrad, wgrad) that cut small problems as the cost model cuts large ones.
CUTS = {
    "tiles and chunks": (
        Tiling(Block(4, 128, 4), Cut(4, 8, 2, 2, 3, 5, promotes=True)),
        wgrad.Tiling(Block(4, 128, 4), Cut(4, 8, 2, 2, 9, 7), Split(3, 4, 3)),
    ),
    "images together": (
        Tiling(Block(4, 256, 2), Cut(8, 16, 4, 2, 13, 11)),
        wgrad.Tiling(Block(4, 128, 4), Cut(8, 16, 2, 2, 16, 5), Split(2, 8, 2)),
    ),
    "the same rows of planes": (
        Tiling(Block(4, 256, 2), Cut(20, 32, 8, 1, 21, 3)),
        wgrad.Tiling(Block(4, 128, 4), Cut(8, 8, 1, 1, 20, 32), Split(8, 8, 1)),
    ),
    "several channel runs": (
        Tiling(Block(4, 128, 4), Cut(8, 8, 16, 8, 4, 7)),
        wgrad.Tiling(Block(4, 128, 4), Cut(8, 8, 8, 8, 11, 6), Split(2, 8, 1)),
    ),
}

SHARED = ("depthwise", "depthwise_multiplier", "depthwise_stride", "channels_last_depthwise", "one_channel_in",
          "one_by_one_everything")  # fmt: skip
EVERY_DTYPE = ("window_aligned", "window_nhwc_both")
LARGE = (("large_depthwise", ("fprop", "dgrad")), ("window_many_taps", ("wgrad",)))
CUT_CASES = {
    "tiles and chunks": (
        "window_13x11",
        "window_31x31",
        "window_stride",
        "window_both",
        "window_nhwc",
        "window_dilated",
    ),
    "images together": ("window_13x11", "window_transposed", "window_aligned"),
    "the same rows of planes": ("window_tall",),
    "several channel runs": ("window_nhwc",),
}
NOT_FINITE = ("window_stride", "window_nhwc")


def results_of(one: Case) -> tuple[str, ...]:
    """Every result of every case."""
    return RESULTS


def runs() -> Iterator[tuple[str, torch.dtype, str, str, bool]]:
    """(case, dtype, result, cut, whether every input is finite) of each run."""
    large = [name for name, _ in LARGE]
    for name in (*SHARED, *(one.name for one in CASES if one.name not in large)):
        dtypes = DTYPES if name in EVERY_DTYPE else (torch.float32,)
        yield from ((name, dtype, result, "", True) for dtype, result in product(dtypes, RESULTS))
    for name, results in LARGE:
        yield from ((name, dtype, result, "", True) for dtype, result in product(DTYPES, results))
    for cut, names in CUT_CASES.items():
        yield from ((name, torch.float32, result, cut, True) for name, result in product(names, RESULTS))
    yield from ((name, torch.float32, result, "", False) for name, result in product(NOT_FINITE, RESULTS))


@contextmanager
def forced(shape: str) -> Iterator[None]:
    """While active, depthwise_window cuts as ``CUTS[shape]`` says, or with few blocks, as each takes a build."""
    with MonkeyPatch.context() as patch:
        if shape in CUTS:
            gradient, filter_gradient = CUTS[shape]
            patch.setattr(window, "tilings", lambda *_: [gradient])
            patch.setattr(wgrad, "tilings", lambda *_: [filter_gradient])
        else:
            patch.setattr(window, "BLOCKS", window.BLOCKS[:1])
            patch.setattr(wgrad, "BLOCKS", wgrad.BLOCKS[:1])
        yield
