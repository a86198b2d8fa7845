"""What halo_sm80_f64 runs on the emulator: its own cases, and the blocks that only larger problems would choose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from pytest import MonkeyPatch

from haloconv.families.halo_sm80_f64 import conv, tile, wgrad
from haloconv.families.halo_sm80_f64.tile import Layer, Tiling, tilings
from haloconv.families.halo_sm80_f64.wgrad import Cut
from haloconv.problem import Request
from tests.cases import Case, case

FP64 = torch.float64
DENSE, WGRAD = ("fprop", "dgrad"), ("wgrad",)
ALL = (*DENSE, *WGRAD)

CASES = (
    case("f64_eights", "groups of 8 channels and 8 filters, odd widths", (2, 24, 7, 11), (24, 3, 3), padding=1,
         groups=3),
    case("f64_groups", "groups of 17 channels and 9 filters: a chunk and an eight that are not full", (2, 34, 9, 10),
         (18, 3, 2), padding=(1, 0, 2, 1), groups=2),
    case("f64_groups_nhwc", "groups of an even number of channels that are neighbours", (2, 36, 9, 10), (20, 3, 3),
         padding=1, groups=2, storage="channels_last"),
    case("f64_images", "tiles that go on in the next images, and leave one in the middle of a row", (7, 20, 5, 7),
         (12, 3, 3), padding=1),
    case("f64_one_row", "images of one row: more images than rows in a tile", (19, 16, 1, 9), (10, 1, 3),
         padding=(0, 1)),
    case("f64_strips", "rows that are cut into strips, three chunks", (1, 40, 9, 70), (24, 3, 3), padding=1),
    case("f64_strips_nhwc", "the same where channels are neighbours, strided", (1, 40, 9, 71), (24, 3, 3), padding=1,
         stride=(1, 2), storage="channels_last"),
    case("f64_pointwise", "one tap: more chunks in shared memory than two", (2, 72, 7, 9), (40, 1, 1)),
    case("f64_residues", "residues of a strided gradient that no tap reaches, and of one tap and of four",
         (2, 20, 13, 11), (24, 4, 3), stride=(3, 2), padding=(2, 1)),
    case("f64_many_filters", "two tiles of filters", (1, 24, 9, 20), (136, 3, 3), padding=1),
    case("f64_five_taps", "two blocks of taps in a row of the filter, of which the second is not full",
         (2, 40, 6, 21), (72, 2, 5), padding=(1, 2)),
    case("f64_loose", "pixels of x that meet outputs behind the last column, which do not exist", (3, 8, 6, 12),
         (16, 3, 8)),
    case("f64_narrow_nhwc", "images of three columns: steps of four rows", (3, 18, 11, 3), (20, 3, 3), padding=(1, 2),
         stride=(2, 1), dilation=(1, 2), storage="channels_last"),
)  # fmt: skip


def _is(*wanted: int) -> Callable[[Tiling], bool]:
    """Fragments and warps along pixels and filters, and the k of an instruction."""

    def is_it(tiling: Tiling) -> bool:
        shape = tiling.shape
        return (shape.m_tiles, shape.n_tiles, shape.warps_m, shape.warps_n, shape.mma_k) == wanted

    return is_it


SHAPES: dict[str, Callable[[Tiling], bool]] = {
    "128 by 64": _is(4, 4, 2, 2, 8),
    "128 by 128": _is(4, 4, 2, 4, 8),
    "k of 16": _is(2, 4, 4, 2, 16),
    "64 by 64": _is(2, 4, 2, 2, 8),
    "128 by 32": _is(2, 4, 4, 1, 8),
    "128 by 16": _is(2, 2, 4, 1, 8),
    "128 by 8": _is(2, 1, 4, 1, 8),
    "strips": lambda tiling: tiling.strips > 2 and tiling.layer.cols % tiling.strip_cols > 0,
}
# Blocks of the weight gradient by fragments and warps along filters and channels, and taps.
WGRAD_SHAPES: dict[str, tuple[int, ...]] = {
    "128 by 32, three taps": (2, 4, 4, 1, 3),
    "64 by 32, three taps": (2, 4, 2, 1, 3),
    "128 by 64": (2, 4, 4, 2, 1),
    "64 by 64, one tap": (2, 4, 2, 2, 1),
    "16 by 16, three taps": (1, 2, 1, 1, 3),
    "32 by 16": (1, 2, 2, 1, 1),
    "several parts": (),
}

_RUNS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("f64_eights", "f64_groups", "f64_groups_nhwc", "f64_images", "f64_strips_nhwc", "f64_residues", "f64_pointwise",
      "large_3x3", "four_sides", "odd_widths", "one_pixel_image", "padding_beyond_filter", "padding_with_stride",
      "one_by_one_everything", "dilated_strided_coprime", "channels_last_odd", "unaligned_channels_last"), ALL),
    (("f64_one_row", "f64_strips", "f64_many_filters", "large_nhwc", "one_pixel_output", "one_column", "many_images",
      "one_channel_in", "one_filter", "many_channels", "rgb_stem", "pointwise_stride", "column_filter", "even_filter",
      "large_filter", "stride_beyond_filter", "dilated_far", "dilated_strided", "sliced", "expanded", "mixed_layouts",
      "channel_slice"), DENSE),
    (("no_bias", "row_filter", "every_other_pixel", "transposed", "unaligned", "channels_last_sliced"), ("fprop",)),
    (("f64_five_taps", "f64_loose", "f64_narrow_nhwc", "large_filter_gradient", "wide", "tall", "huge_filter",
      "stride_mixed", "transposed"), WGRAD),
)  # fmt: skip
_SHAPED: tuple[tuple[Iterable[str], tuple[str, ...], tuple[str, ...]], ...] = (
    (SHAPES, ("f64_strips", "f64_strips_nhwc"), DENSE),
    (WGRAD_SHAPES, ("f64_five_taps", "f64_narrow_nhwc"), WGRAD),
)
_NOT_FINITE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("f64_strips", DENSE),
    ("odd_widths", ALL),
    ("f64_loose", WGRAD),
    ("f64_narrow_nhwc", WGRAD),
)


def results_of(one: Case) -> tuple[str, ...]:
    """The results that a case is there for."""
    return ALL


def runs() -> Iterator[tuple[str, torch.dtype, str, str, bool]]:
    """Case, dtype, result, shape, and whether all inputs are finite."""
    for names, results in _RUNS:
        yield from ((name, FP64, result, "", True) for name in names for result in results)
    for shapes, names, results in _SHAPED:
        yield from ((name, FP64, result, shape, True) for shape in shapes for name in names for result in results)
    for name, results in _NOT_FINITE:
        yield from ((name, FP64, result, "", False) for result in results)


@contextmanager
def forced(shape: str) -> Iterator[None]:
    """While active, halo_sm80_f64 takes the best of its blocks of that shape."""
    if not shape:
        yield
        return

    def only(layer: Layer, sm_count: int, max_smem_bytes: int) -> tuple[Tiling, ...]:
        with MonkeyPatch.context() as every:
            every.setattr(tile, "fitting_shapes", lambda layer: tile.SHAPES)
            return tuple(filter(SHAPES[shape], tilings.__wrapped__(layer, sm_count, max_smem_bytes)))

    def only_cuts(request: Request) -> list[Cut]:
        def is_it(cut: Cut) -> bool:
            b = cut.block
            wanted = WGRAD_SHAPES[shape]
            return not wanted or (b.m_tiles, b.n_tiles, b.warps_m, b.warps_n, b.taps) == wanted

        sm_count = 64 if shape == "several parts" else request.facts.sm_count
        return [Cut(each.problem, each.block, sm_count) for each in cuts(request) if is_it(each)]

    cuts = wgrad.cuts
    with MonkeyPatch.context() as patch:
        patch.setattr(conv, "tilings", only)
        patch.setattr(wgrad, "cuts", only_cuts)
        patch.setattr(wgrad, "LEAST_PART_STEPS", 1)
        yield
