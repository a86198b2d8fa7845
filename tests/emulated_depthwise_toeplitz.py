"""What the emulator runs of depthwise_toeplitz: cases, tilings that it takes for larger problems, and both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import torch
from pytest import MonkeyPatch

from haloconv.families.depthwise_toeplitz import toeplitz, wgrad
from tests.cases import Case, case

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

CASES = (
    case("toeplitz_13x13", "aligned rows, the last image alone", (3, 2, 24, 24), (2, 13, 13), padding=6, groups=2),
    case("toeplitz_31x31", "a filter larger than the image, copies of 8 bytes", (2, 2, 20, 12), (2, 31, 31), padding=15,
         groups=2),
    case("toeplitz_multiplier", "two filters per channel, copies of 4 bytes, several images at a time", (5, 2, 14, 14),
         (4, 27, 27), padding=13, groups=2),
    case("toeplitz_odd", "rows of an odd length, element by element", (2, 3, 9, 13), (3, 8, 11), padding=(3, 4, 7, 2),
         groups=3),
    case("toeplitz_wide", "several half tiles beside each other, of which the last is not full", (2, 2, 18, 120),
         (2, 5, 31), padding=(2, 15), groups=2),
    case("toeplitz_cut", "no padding at the top, and on the left more than the filter reaches", (1, 2, 26, 20),
         (2, 11, 9), padding=(0, 3, 12, 0), groups=2),
    case("toeplitz_row", "1xS: row groups that share no row", (2, 2, 20, 24), (2, 1, 31), padding=(0, 15), groups=2),
    case("toeplitz_column", "Rx1, beyond the image", (2, 2, 40, 16), (2, 51, 1), padding=(25, 0), groups=2),
    case("toeplitz_many", "blocks of several units, at least 10,000 outputs", (24, 3, 16, 16), (3, 9, 9), padding=4,
         groups=3),
    case("toeplitz_channels", "more channels than there are values that are not finite", (2, 24, 9, 12), (24, 9, 9),
         padding=(4, 4, 4, 5), groups=24),
    case("toeplitz_many_taps", "at least 10,000 filter elements", (1, 11, 8, 8), (11, 31, 31), padding=15, groups=11),
    case("toeplitz_nhwc", "channels are neighbours", (3, 5, 12, 13), (5, 9, 7), padding=(4, 3), groups=5,
         storage="channels_last"),
    case("toeplitz_sliced", "a window of a larger image and of larger filters", (2, 3, 14, 17), (3, 9, 9), padding=4,
         groups=3, storage="sliced", w_storage="sliced"),
)  # fmt: skip

# (fprop and dgrad, wgrad) that cut small problems as large ones are cut.
TILINGS = {
    "one row group": (
        toeplitz.Tiling(m_tiles=1, row_groups=1, n_tiles=3, images=2, min_blocks=2, warps=3),
        wgrad.Tiling(images=2, min_blocks=2, warps=8),
    ),
    "strips": (
        toeplitz.Tiling(m_tiles=1, row_groups=2, n_tiles=3, images=2, min_blocks=2, buffers=3, rows=16),
        wgrad.Tiling(images=1, min_blocks=2, buffers=3, rows=10),
    ),
    "pairs of halves": (
        toeplitz.Tiling(m_tiles=2, row_groups=1, n_tiles=2, images=4, min_blocks=2),
        wgrad.Tiling(images=3, min_blocks=2),
    ),
    "mixed halves": (
        toeplitz.Tiling(m_tiles=1, row_groups=1, n_tiles=3, images=1, min_blocks=2),
        wgrad.Tiling(images=1, min_blocks=2),
    ),
}
TILINGS["three products in strips"] = TILINGS["strips"]
TILINGS["three products, pairs of halves"] = TILINGS["pairs of halves"]
TILING_CASES = {
    "one row group": ("toeplitz_13x13", "toeplitz_odd"),
    "strips": ("toeplitz_13x13", "toeplitz_cut", "toeplitz_31x31"),
    "pairs of halves": ("toeplitz_13x13", "toeplitz_multiplier"),
    "mixed halves": ("toeplitz_13x13", "toeplitz_cut"),
}
THREE_PRODUCTS = {  # of fp32 as two TF32 values each, in the tiling of the problem and in those above
    "three products": (
        "toeplitz_13x13", "toeplitz_31x31", "toeplitz_multiplier", "toeplitz_odd", "toeplitz_wide", "toeplitz_nhwc",
        "toeplitz_sliced", "toeplitz_channels",
    ),
    "three products in strips": ("toeplitz_13x13", "toeplitz_cut"),
    "three products, pairs of halves": ("toeplitz_13x13",),
}  # fmt: skip
EVERY_DTYPE = ("toeplitz_13x13", "toeplitz_many")
IN_FP32_TOO = ("toeplitz_multiplier", "toeplitz_odd", "toeplitz_wide", "toeplitz_cut", "toeplitz_nhwc")
ONE_RESULT = {"toeplitz_many_taps": ("wgrad",), "toeplitz_multiplier": ("fprop", "wgrad")}
SHARED = ("window_row",)
NOT_FINITE = ("toeplitz_channels", "toeplitz_cut")


def results_of(one: Case) -> tuple[str, ...]:
    """The results of a case that run: where a channel has several filters no input gradient."""
    return _results_of(one.name)


def _results_of(name: str) -> tuple[str, ...]:
    return ONE_RESULT.get(name, ("fprop", "dgrad", "wgrad"))


def dtypes_of(one: str) -> tuple[torch.dtype, ...]:
    """The dtypes that a case runs in: what copies do depends on their size."""
    if one in EVERY_DTYPE:
        return DTYPES
    return DTYPES[:2] if one in IN_FP32_TOO else (torch.float16,)


def runs() -> Iterator[tuple[str, torch.dtype, str, str, bool]]:
    """(case, dtype, result, tiling, whether every input is finite) of each run."""
    for name in (*SHARED, *(one.name for one in CASES)):
        yield from ((name, dtype, result, "", True) for dtype, result in product(dtypes_of(name), _results_of(name)))
    for tiling, names in TILING_CASES.items():
        for name in names:
            yield from ((name, torch.float16, result, tiling, True) for result in _results_of(name))
        yield from (("toeplitz_13x13", torch.float32, result, tiling, True) for result in _results_of("toeplitz_13x13"))
    for tiling, names in THREE_PRODUCTS.items():
        for name in names:
            yield from ((name, torch.float32, result, tiling, True) for result in _results_of(name))
    yield from (("toeplitz_channels", torch.float32, result, "three products", False) for result in _results_of(""))
    for name, dtype in product(NOT_FINITE, (torch.float32, torch.bfloat16)):
        yield from ((name, dtype, result, "", False) for result in ("fprop", "dgrad", "wgrad"))


@contextmanager
def forced(shape: str) -> Iterator[None]:
    """While active, depthwise_toeplitz has the tiling ``TILINGS[shape]``, where there is one."""
    with MonkeyPatch.context() as patch:
        if shape in TILINGS:
            gradient, filter_gradient = TILINGS[shape]
            patch.setattr(toeplitz, "tilings", lambda *_: [gradient])
            patch.setattr(wgrad, "tilings", lambda *_: [filter_gradient])
        yield
