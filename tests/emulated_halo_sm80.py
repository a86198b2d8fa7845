"""What halo_sm80 runs on the emulator, and how its tests make it take a given tile.

Tiles are small here and image extents are run-time values, so that few kernels are built: the cost is compiling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from pytest import MonkeyPatch

from haloconv.families.halo_sm80 import conv
from haloconv.families.halo_sm80.tile import Layer, Tiling
from haloconv.families.halo_sm80.tilings import tilings
from tests.cases import case

SM_COUNT, SMEM_BYTES = 4, 227 * 1024  # of the emulated device
CHUNKS_SMEM_BYTES = 32 * 1024  # that leave no room for all channels
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
BOTH = ("fprop", "dgrad")

CASES = (
    case("eight_by_eight", "groups of 8 channels and 8 filters, rows at multiples of 16 bytes", (3, 32, 12, 28),
         (32, 3, 3), padding=1, groups=4),
    case("many_tiles", "more tiles than blocks at a time", (9, 16, 12, 28), (16, 3, 3), padding=1, groups=2),
    case("eight_by_eight_nhwc", "the same where channels are neighbours", (3, 32, 12, 28), (32, 3, 3), padding=1,
         groups=4, storage="channels_last"),
    case("four_by_four_nhwc", "groups of 4, a last tile of groups that is not full", (2, 20, 9, 14), (20, 3, 3),
         padding=1, groups=5, storage="channels_last"),
    case("patches", "patches as a vision transformer takes them", (2, 3, 32, 48), (40, 8, 8), stride=8),
    case("aligned_stem", "rows of whole copies: in 16 bits a word is two taps, of which the first is none",
         (3, 3, 18, 40), (20, 7, 7), stride=2, padding=3),
    case("aligned_stride_4", "such rows with stride 4: in 16 bits the last word of a row is half a tap too many",
         (2, 3, 27, 40), (24, 11, 11), stride=4, padding=2),
    case("stem_of_pairs", "rows of which no more than two pixels are a copy, an even filter, four different paddings",
         (2, 2, 12, 26), (8, 4, 6), stride=2, padding=(0, 2, 2, 1)),
    case("stem_stride_4", "an odd filter with stride 4", (2, 3, 43, 47), (24, 11, 11), stride=4),
    case("wide_groups", "groups of 24 channels: chunks, and a unit that is not full", (2, 48, 7, 14), (48, 3, 3),
         padding=1, groups=2),
    case("wide_groups_nhwc", "the same where channels are neighbours", (2, 48, 7, 14), (48, 3, 3), padding=1,
         groups=2, storage="channels_last"),
    case("aligned_stem_nhwc", "a stem whose pixels and taps are neighbours, folded into one of a single channel",
         (3, 3, 18, 40), (20, 7, 7), stride=2, padding=(3, 2, 1, 4), storage="channels_last",
         w_storage="channels_last"),
    case("stem_with_gaps", "rows that fragments fill with places without a pixel, which read on behind the planes",
         (2, 3, 18, 28), (20, 7, 7), stride=2, padding=3),
    case("odd_plane", "an odd number of columns, and of pixels in whole tiles", (2, 16, 7, 7), (16, 3, 3), padding=1,
         groups=2),
)  # fmt: skip


def _tiles_of_a_block(tiling: Tiling) -> float:
    """Tiles that a block of the emulated device takes one after the other."""
    n, p, q = tiling.tiles
    return n * p * q / tiling.blocks(SM_COUNT, SMEM_BYTES)


SHAPES: dict[str, Callable[[Tiling], bool]] = {
    "chunks in one buffer": lambda tiling: tiling.chunks > 1 and tiling.tile.depth == 1,
    "chunks in two buffers": lambda tiling: tiling.chunks > 1 and tiling.tile.depth == 2,
    "one buffer": lambda tiling: tiling.tile.depth == 1 and tiling.chunks == 1,
    "several tiles": lambda tiling: tiling.tile.depth == 2 and _tiles_of_a_block(tiling) > 2,
    "several tiles in one buffer": lambda tiling: tiling.tile.depth == 1 and _tiles_of_a_block(tiling) > 1,
    "strips": lambda tiling: tiling.tiles[2] > 1 and tiling.layer.cols % tiling.tile.tile_q > 0,
    "groups": lambda tiling: tiling.tile.tile_groups == 4,
    "images": lambda tiling: tiling.tile.tile_n == 2,
    "items": lambda tiling: tiling.items > tiling.tile.warps and tiling.tile.n_items > 1,
    "wide": lambda tiling: tiling.chunks == 1,
    "copies": lambda tiling: not tiling.boxes,
    "boxes one after the other": lambda tiling: tiling.boxes and _tiles_of_a_block(tiling) > 2,
    "late": lambda tiling: tiling.late and _tiles_of_a_block(tiling) > 1,
}

# case, dtypes, results, shape ("": what the cost model puts first)
_RUNS: tuple[tuple[str, tuple[torch.dtype, ...], tuple[str, ...], str], ...] = (
    ("large_3x3", (FP32, FP16, BF16), BOTH, ""),
    ("large_nhwc", (FP32,), ("dgrad",), ""),
    ("eight_by_eight", (FP32,), BOTH, ""),
    ("eight_by_eight", (FP16,), ("fprop",), "strips"),
    ("many_tiles", (FP32,), ("fprop",), "several tiles"),
    ("many_tiles", (FP32,), ("fprop",), "several tiles in one buffer"),
    ("eight_by_eight", (FP32,), ("dgrad",), "wide"),
    ("eight_by_eight_nhwc", (FP32, FP16), BOTH, ""),
    ("aligned_stem_nhwc", (FP32, FP16), ("fprop",), ""),
    ("wide_groups_nhwc", (BF16,), ("fprop",), ""),
    ("four_by_four_nhwc", (FP16,), ("fprop",), "groups"),
    ("groups_32", (FP32,), ("fprop",), ""),
    ("rgb_stem", (FP32,), BOTH, ""),
    ("rgb_stem", (FP16,), ("fprop",), ""),
    ("aligned_stem", (FP32, FP16, BF16), ("fprop",), ""),
    ("aligned_stem", (FP32, FP16), ("fprop",), "copies"),
    ("aligned_stem", (FP32, FP16), ("fprop",), "boxes one after the other"),
    ("stem_with_gaps", (FP32,), ("fprop",), ""),
    ("aligned_stride_4", (FP32, FP16), ("fprop",), ""),
    ("aligned_stride_4", (FP32, FP16), ("fprop",), "copies"),
    ("aligned_stride_4", (FP32,), ("fprop",), "late"),
    ("stem_of_pairs", (FP32, FP16), ("fprop",), ""),
    ("stem_stride_4", (FP32, FP16), ("fprop",), ""),
    ("patches", (FP32,), ("dgrad",), ""),
    ("patches", (FP32,), ("fprop",), "chunks in two buffers"),
    ("wide_groups", (FP16,), ("fprop",), "chunks in one buffer"),
    ("wide_groups_nhwc", (FP32,), ("fprop",), "chunks in two buffers"),
    ("rgb_stem", (FP32,), ("fprop",), "items"),
    ("odd_plane", (FP32, FP16), ("fprop",), "images"),
    ("odd_plane", (FP32,), ("fprop",), "one buffer"),
    ("many_images", (FP32,), BOTH, ""),
    ("groups_odd", (FP32,), BOTH, ""),
    ("four_sides", (FP32,), BOTH, ""),
    ("four_sides", (FP16,), ("fprop",), ""),
    ("padding_beyond_filter", (FP32,), BOTH, ""),
    ("padding_with_stride", (FP32,), ("dgrad",), ""),
    ("odd_widths", (FP32,), ("dgrad",), ""),
    ("one_pixel_image", (FP32,), ("fprop",), "one buffer"),
    ("dilated_strided", (FP32,), BOTH, ""),
    ("dilated_strided_coprime", (FP32,), BOTH, ""),
    ("pointwise_stride", (FP32,), ("dgrad",), ""),
    ("stride_beyond_filter", (FP32,), ("dgrad",), ""),
    ("no_bias", (FP32,), ("fprop",), ""),
    ("channels_last_odd", (FP32,), ("fprop",), ""),
    ("channels_last_odd", (FP16,), ("dgrad",), ""),
    ("channels_last_sliced", (FP32,), ("fprop",), ""),
    ("channels_last_groups", (FP16,), ("fprop",), ""),
    ("unaligned_channels_last", (FP32,), ("fprop",), ""),
    ("channel_slice", (FP32,), ("dgrad",), ""),
)  # fmt: skip
# The same with what follows the convolution: each kind of stores in each type, late and wide ones, tiles that are not
# full of images, groups, columns or filters, chunks, a folded stem, neither a bias nor a scale.
_FOLLOWED: tuple[tuple[str, torch.dtype, str, str], ...] = (
    ("large_3x3", FP32, "relu", ""),
    ("large_3x3", FP16, "scale_relu", ""),
    ("large_3x3", BF16, "residual_relu", ""),
    ("large_3x3", FP32, "scale_residual", ""),
    ("eight_by_eight", FP32, "scale_residual", ""),
    ("eight_by_eight", FP16, "residual_relu", "strips"),
    ("eight_by_eight", FP32, "residual_relu", "wide"),
    ("eight_by_eight_nhwc", FP32, "residual_relu", ""),
    ("eight_by_eight_nhwc", BF16, "scale_residual", ""),
    ("four_by_four_nhwc", FP16, "scale_residual", "groups"),
    ("many_tiles", FP32, "residual_relu", "several tiles"),
    ("aligned_stem", FP32, "scale_residual", ""),
    ("aligned_stem", FP16, "residual_relu", ""),
    ("aligned_stem_nhwc", FP32, "residual_relu", ""),
    ("aligned_stem_nhwc", FP16, "scale_residual", ""),
    ("aligned_stem_nhwc", BF16, "scale_relu", ""),
    ("aligned_stride_4", FP32, "scale_residual", "late"),
    ("wide_groups", FP16, "scale_residual", "chunks in one buffer"),
    ("wide_groups_nhwc", BF16, "residual_relu", ""),
    ("odd_plane", FP16, "residual_relu", "images"),
    ("groups_32", FP32, "scale_residual", ""),
    ("channels_last_odd", FP32, "residual_relu", ""),
    ("channels_last_sliced", FP32, "residual_relu", ""),
    ("no_bias", FP32, "residual_relu", ""),
    ("no_bias", FP32, "scale_relu", ""),
)
_NOT_FINITE = (
    ("one_channel_in", (FP32,)),
    ("large_3x3", (FP16,)),
    ("eight_by_eight_nhwc", (FP32,)),
    ("aligned_stem_nhwc", (FP16,)),
    ("aligned_stem", (FP16,)),
    ("aligned_stride_4", (FP16,)),
)


def runs() -> Iterator[tuple[str, torch.dtype, str, str, bool]]:
    """Case, dtype, result, shape, and whether all inputs are finite."""
    for name, dtypes, results, shape in _RUNS:
        yield from ((name, dtype, result, shape, True) for dtype in dtypes for result in results)
    for name, dtypes in _NOT_FINITE:
        yield from ((name, dtype, result, "", False) for dtype in dtypes for result in BOTH)
    yield "one_channel_in", FP32, "fprop", "copies", False
    yield from ((*run, True) for run in _FOLLOWED)
    yield "eight_by_eight_nhwc", FP32, "residual_relu", "", False


@contextmanager
def forced(shape: str) -> Iterator[None]:
    """While active, halo_sm80 takes the best of its tilings of that shape; "wide": with 64-bit offsets."""
    if not shape:
        yield
        return

    def only(layer: Layer, sm_count: int, max_smem_bytes: int) -> tuple[Tiling, ...]:
        layer = replace(
            layer, i64_offsets=layer.i64_offsets or shape == "wide", x_boxes=layer.x_boxes and shape != "copies"
        )
        smem_bytes = CHUNKS_SMEM_BYTES if shape.startswith("chunks") else max_smem_bytes
        return tuple(each for each in tilings(layer, sm_count, smem_bytes) if SHAPES[shape](each))

    with MonkeyPatch.context() as patch:
        patch.setattr(conv, "tilings", only)
        yield
