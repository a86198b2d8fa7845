"""The runs of halo_sm80_wgrad on the emulator: its own cases, and the blocks that only larger problems would choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from pytest import MonkeyPatch

from haloconv.families.halo_sm80_wgrad import wgrad
from haloconv.families.halo_sm80_wgrad.blocks import Block, ranked_blocks
from haloconv.families.halo_sm80_wgrad.layer import Layer
from haloconv.problem import Problem
from tests.cases import case

CASES = (
    case("wgrad_stem", "C = 3, 7x7, stride 2, rows of whole loads: two planes, several strips, an odd image",
         (3, 3, 18, 72), (20, 7, 7), stride=2, padding=3),
    case("wgrad_stem_nhwc", "the same where channels are neighbours", (3, 3, 14, 40), (20, 7, 7), stride=2, padding=3,
         storage="channels_last"),
    case("wgrad_patches", "stride as large as the filter: more planes than a load has columns", (2, 3, 16, 32),
         (12, 8, 8), stride=8),
    case("wgrad_stride_4", "11x11, stride 4: as many planes as a load has columns", (2, 3, 27, 40), (12, 11, 11),
         stride=4, padding=(2, 1, 5, 2)),
    case("wgrad_pairs", "rows of an even width, of which no more than two columns are one load", (2, 16, 6, 14),
         (16, 3, 3), padding=1, groups=2),
    case("wgrad_groups", "seven groups of eight channels, an odd number of bands and images", (3, 56, 9, 12),
         (56, 3, 3), padding=1, groups=7),
    case("wgrad_groups_nhwc", "the same where channels are neighbours", (3, 56, 9, 12), (56, 3, 3), padding=1,
         groups=7, storage="channels_last"),
    case("wgrad_one_image", "one image: in 16 bits two bands of its rows share words", (1, 16, 21, 12), (16, 3, 3),
         padding=(1, 0, 2, 1), groups=2),
    case("wgrad_one_image_odd", "the same with rows of odd widths", (1, 16, 21, 13), (16, 3, 3), padding=(1, 0, 2, 1),
         groups=2),
    case("wgrad_stem_odd", "a stem with rows of odd widths: several strips, an odd image", (3, 3, 18, 71), (20, 7, 7),
         stride=2, padding=3),
    case("wgrad_even_filter", "rows that are copied two pixels at a time, an even filter with an odd padding",
         (2, 2, 5, 18), (8, 2, 2), padding=(1, 0, 1, 0)),
    case("wgrad_long_rows", "several strips of columns, where rows are copied", (2, 2, 5, 300), (8, 3, 3), padding=1),
    case("wgrad_long_rows_nhwc", "the same where channels are neighbours", (2, 16, 5, 150), (8, 3, 3), padding=1,
         storage="channels_last"),
    case("wgrad_pieces_strided", "groups of 16 channels and 24 filters that are neighbours, strided", (2, 32, 11, 14),
         (48, 3, 3), stride=2, padding=1, groups=2, storage="channels_last"),
    case("wgrad_pieces_dilated", "the same dilated", (2, 32, 11, 14), (48, 3, 3), padding=2, dilation=2, groups=2,
         storage="channels_last"),
    case("wgrad_wide_groups", "channels and filters of a group that are no multiples of a block's",
         (2, 40, 7, 10), (44, 3, 3), padding=1, groups=2),
    case("wgrad_wide_groups_nhwc", "the same where channels are neighbours", (2, 40, 7, 10), (40, 3, 3), padding=1,
         groups=2, storage="channels_last"),
    case("wgrad_loose_end", "pixels of x that meet outputs behind the last column, which do not exist", (5, 2, 6, 5),
         (4, 3, 3)),
    case("wgrad_loose_pairs", "the same in rows that are copied", (5, 2, 6, 6), (4, 3, 5)),
    case("wgrad_loose_pieces", "the same where channels are neighbours", (3, 8, 6, 7), (16, 3, 3),
         storage="channels_last"),
    case("wgrad_strips", "several strips of columns, and several stages for each block", (9, 2, 3, 200), (4, 3, 3),
         padding=1),
)  # fmt: skip

_EVERY = (torch.float32, torch.float16, torch.bfloat16)
_BOTH = (torch.float32, torch.float16)
_RUNS = (
    (("large_filter_gradient", "wgrad_stem"), _EVERY),
    (("wgrad_pairs", "wgrad_groups_nhwc", "wgrad_one_image", "wgrad_long_rows", "wgrad_long_rows_nhwc",
      "wgrad_pieces_strided", "wgrad_stem_odd", "wgrad_even_filter"), _BOTH),
    (("four_sides", "dilated_strided_coprime", "wgrad_strips", "expanded", "every_other_pixel", "huge_filter",
      "many_images", "groups_many_to_one", "channels_last_sliced", "channels_last_odd", "wgrad_patches",
      "padding_with_stride"), (torch.float32,)),
    (("tall", "sliced", "transposed", "unaligned", "groups_odd", "wgrad_stem_nhwc", "wgrad_stride_4",
      "wgrad_one_image_odd", "wgrad_patches", "wgrad_pieces_dilated", "one_by_one_everything"), (torch.float16,)),
)  # fmt: skip

# Blocks that the cost model takes for larger problems, and the cases that run with them here.
SHAPES: dict[str, Callable[[Block, Layer], bool]] = {
    "several groups": lambda block, layer: block.tile_g == 4,
    "parts of a group": lambda block, layer: block.tile_c == 16 and block.tile_k in (8, 16),
    "shared pixels": lambda block, layer: block.warps_e >= 4,
    "warps side by side": lambda block, layer: block.warps_m >= 2 and block.warps_n >= 2,
    "long distances": lambda block, layer: True,
    "runs of parts": lambda block, layer: True,
}
SHAPED: dict[str, tuple[str, ...]] = {
    "several groups": ("wgrad_groups", "wgrad_groups_nhwc"),
    "parts of a group": ("wgrad_wide_groups", "wgrad_wide_groups_nhwc"),
    "shared pixels": ("wgrad_stem", "wgrad_one_image"),
    "warps side by side": ("wgrad_stem",),
    "long distances": ("wgrad_groups_nhwc",),
    "runs of parts": ("wgrad_strips",),
}
NOT_FINITE = (
    "wgrad_loose_end", "wgrad_loose_pairs", "wgrad_loose_pieces", "grouped_wgrad_loose", "wgrad_groups", "odd_widths",
)  # fmt: skip


def runs() -> Iterator[tuple[str, torch.dtype, str, str, bool]]:
    """Case, dtype, result, shape, and whether all inputs are finite."""
    for names, dtypes in _RUNS:
        yield from ((name, dtype, "wgrad", "", True) for name in names for dtype in dtypes)
    for shape, shaped in SHAPED.items():
        yield from ((name, dtype, "wgrad", shape, True) for name in shaped for dtype in _BOTH)
    yield from ((name, dtype, "wgrad", "", False) for name in NOT_FINITE for dtype in _BOTH)


@contextmanager
def forced(shape: str) -> Iterator[None]:
    """While active, halo_sm80_wgrad has only its blocks of that shape, whatever its cost model prefers."""
    if not shape:
        yield
        return

    def only(problem: Problem, layer: Layer, max_smem_bytes: int) -> list[Block]:
        return [each for each in ranked_blocks(problem, layer, max_smem_bytes) if SHAPES[shape](each, layer)]

    with MonkeyPatch.context() as patch:
        patch.setattr(wgrad, "ranked_blocks", only)
        if shape == "long distances":
            patch.setattr(wgrad, "_INT_LIMIT", 0)
        if shape == "runs of parts":
            patch.setattr(wgrad, "_PARTS_AT_ONCE", 3)
        yield
