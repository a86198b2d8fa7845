"""Small planes on the emulator: the cases and runs of the depthwise family's kernels ``plane`` and ``plane_wgrad``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.cases import Case, case

PLANES = "planes"  # what runs are forced to: these kernels, which other runs leave out
KERNELS = {"depthwise/plane", "depthwise/plane_wgrad"}
CASES = (
    case("plane_5x5", "rows that begin at odd elements, two blocks of which the last is short and ends amid 16 bytes, "
         "filters that begin anew amid a block", (11, 13, 7, 7), (13, 5, 5), padding=2, groups=13),
    case("plane_7x7", "several images at a time, fewer of the last part", (22, 40, 7, 7), (40, 7, 7), padding=3,
         groups=40),
    case("plane_steps", "two groups of filters of which the last is not full, parts of several steps",
         (50, 40, 7, 7), (40, 3, 3), padding=1, groups=40),
    case("plane_3x3", "strips of a plane, of which the last is shorter", (3, 40, 14, 14), (40, 3, 3), padding=1,
         groups=40),
    case("plane_large", "at least 10,000 outputs; two rows of a thread", (3, 24, 14, 14), (24, 7, 7), padding=3,
         groups=24),
    case("plane_stride", "planes of two sizes", (3, 40, 14, 14), (40, 5, 5), padding=2, stride=2, groups=40),
    case("plane_sides", "strides that differ by axis, an even filter, padding that differs on every side",
         (3, 16, 13, 9), (16, 4, 3), padding=(2, 3, 1, 0), stride=(2, 3), groups=16),
    case("plane_stride_alone", "strides beyond the filter: pixels that no tap meets", (2, 24, 11, 15), (24, 2, 1),
         padding=(1, 0, 0, 2), stride=3, groups=24),
    case("plane_dilated", "taps that lie apart", (2, 24, 11, 13), (24, 3, 4), padding=(2, 1, 4, 3), dilation=(2, 3),
         groups=24),
    case("plane_multiplier", "two filters of a channel", (2, 40, 9, 7), (80, 3, 3), padding=1, groups=40),
    case("plane_three", "three filters of a channel, several blocks", (5, 16, 7, 7), (48, 5, 5), padding=2, groups=16),
    case("plane_wide", "planes of whole pieces, which lie apart in shared memory", (2, 40, 16, 16), (40, 3, 3),
         padding=1, groups=40),
    case("plane_aligned", "rows of whole words", (2, 48, 10, 10), (48, 3, 5), padding=(1, 2), groups=48),
    case("plane_pixel", "planes of one pixel: one live tap", (5, 24, 1, 1), (24, 3, 3), padding=1, groups=24),
    case("plane_border", "padding wider than the filter: outputs of padding alone", (2, 24, 5, 4), (24, 2, 2),
         padding=(3, 4, 5, 3), groups=24),
    case("plane_tall", "many strips of few columns", (1, 24, 100, 3), (24, 5, 3), padding=(2, 1), groups=24),
    case("plane_expanded", "one image that is seen as several", (6, 16, 7, 7), (16, 3, 3), padding=1, groups=16,
         storage="expanded"),
)  # fmt: skip
_FP32, _FP16, _BF16 = torch.float32, torch.float16, torch.bfloat16
EPILOGUES = (  # case, dtype, result, shape
    ("plane_5x5", _FP16, "scale_residual", PLANES),
    ("plane_5x5", _BF16, "residual_relu", PLANES),
    ("plane_7x7", _FP32, "scale_relu", PLANES),
    ("plane_large", _BF16, "relu", PLANES),
    ("plane_three", _FP16, "residual_relu", PLANES),
    ("plane_stride", _FP32, "scale_residual", PLANES),
    ("plane_wide", _BF16, "scale_residual", PLANES),
)
_NOT_FINITE = ("plane_5x5", "plane_large", "plane_sides", "plane_dilated", "plane_border")


def results_of(one: Case) -> tuple[str, ...]:
    """The results of a case that these kernels give: of filter gradients where images begin at 16 bytes."""
    found = ("fprop",) if one.problem().k_per_group > 1 else ("fprop", "dgrad")
    if one.storage != "contiguous":
        return ("wgrad",)
    return found if one.problem().c % 8 else (*found, "wgrad")


def runs() -> Iterator[tuple[str, torch.dtype, str, str, bool]]:
    """Case, dtype, result, shape (``forced``), and whether all inputs are finite; EPILOGUES are not among them."""
    for one in CASES:
        for dtype in (_FP32, _FP16, _BF16):
            yield from ((one.name, dtype, result, PLANES, True) for result in results_of(one))
    for name in _NOT_FINITE:
        one = next(each for each in CASES if each.name == name)
        yield from ((name, _BF16, result, PLANES, False) for result in results_of(one))
