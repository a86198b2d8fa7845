"""The runs of halo_sm90 on the emulator: tiles that its cost model takes for larger problems only, and their cases.

Weight gradients, 1x1 layers and the ways in which outputs leave have modules of their own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from pytest import MonkeyPatch

from haloconv.families.halo_sm90.conv import conv
from haloconv.families.halo_sm90.conv.configs import copied_tilings, cost, split_tilings, tilings
from haloconv.families.halo_sm90.conv.form import Form
from haloconv.families.halo_sm90.conv.shape import Storage, TileShape
from haloconv.families.halo_sm90.conv.tile import Tiling
from haloconv.families.halo_sm90.pointwise import implicit_gemm, pointwise, pointwise_planes
from tests import emulated_halo_sm90_classes as classes
from tests import emulated_halo_sm90_edges as edges
from tests import emulated_halo_sm90_implicit_gemm as of_taps
from tests import emulated_halo_sm90_joined as joined
from tests import emulated_halo_sm90_moments as measured
from tests import emulated_halo_sm90_planes as planes
from tests import emulated_halo_sm90_pointwise as of_pointwise
from tests import emulated_halo_sm90_residual as residuals
from tests import emulated_halo_sm90_wgrad as wgrad
from tests import emulated_halo_sm90_wgrad_edges as wgrad_edges
from tests import emulated_halo_sm90_wgrad_ss as wgrad_ss
from tests.cases import case
from tests.emulated_cases import EVERY_DTYPE, HUGE, ON_EMULATOR
from tests.oracle import ACTIVATED as ACTIVATED_RESULTS
from tests.oracle import RELU

EVERY, BOTH, DENSE = (torch.float32, torch.float16, torch.bfloat16), (torch.float32, torch.float16), ("fprop", "dgrad")
MANY_GROUPS = ("depthwise_7x7", "large_depthwise")  # 64 rows of M for each of 24 filters: five seconds a seed

TILED = (
    case("rows_5x5", "long rows: tiles below each other that keep the lines they share, in a ring that wraps",
         (1, 16, 28, 301), (24, 5, 5), padding=2),
    case("strips_3x5", "long rows cut into strips, several chunks of channels", (1, 72, 12, 150), (80, 3, 5),
         padding=(1, 2)),
    case("aligned_3x5", "long rows that begin at multiples of 16 bytes, a last chunk of channels that is not full",
         (2, 42, 8, 152), (40, 3, 5), padding=(1, 2)),
    case("aligned_nhwc", "the same where channels are neighbours", (2, 40, 8, 152), (48, 3, 5), padding=(1, 2),
         storage="channels_last"),
    case("aligned_dilated", "aligned rows of groups, dilated, with padding that differs on every side",
         (3, 24, 13, 48), (32, 3, 3), padding=(5, 4, 7, 6), dilation=(3, 2), groups=2),
    case("packed_columns", "two columns of outputs share M, in rows", (1, 4, 3, 516), (16, 3, 3), padding=1),
    case("strided_gradient", "residues of a strided gradient, in rows", (2, 16, 15, 18), (8, 3, 3), stride=2,
         padding=1),
    case("short_rows", "pieces of the output that rows of a flat tile cut", (1, 8, 8, 42), (16, 3, 3), padding=1),
    case("long_nhwc", "rows that are longer than a box", (1, 16, 5, 300), (32, 2, 9), padding=(1, 4),
         storage="channels_last"),
    case("nhwc_pointwise", "two units in a line, and a tile needs half of the ring at once", (1, 16, 24, 40),
         (40, 1, 1), storage="channels_last"),
    case("images_of_a_row", "each a segment of its own, two units in a line, a ring for each of three chunks",
         (32, 76, 1, 4), (36, 1, 1)),
    case("shared_3x3", "three blocks of filters, two chunks of channels or more, aligned rows", (2, 72, 7, 40),
         (130, 3, 3)),
    case("shared_joined", "two blocks of filters, rows that follow each other without a gap", (1, 72, 4, 62),
         (96, 3, 3), padding=1),
    case("shared_nhwc", "three blocks of filters where channels are neighbours", (2, 72, 6, 20), (136, 3, 3), padding=1,
         storage="channels_last"),
    case("shared_groups", "two blocks of filters in each group, strided, nothing aligned", (2, 132, 9, 13), (140, 3, 2),
         padding=1, stride=(2, 1), groups=2),
    case("shared_odd_nhwc", "two blocks of filters where channels are neighbours, nothing aligned", (1, 66, 7, 9),
         (70, 2, 3), padding=1, storage="channels_last"),
    case("joined_rows", "rows that are not aligned in planes that are: boxes begin at every place in them",
         (2, 40, 8, 147), (40, 3, 3), padding=1),
    case("joined_by_two", "rows end to end, every other plane aligned (in 16 bits)", (1, 40, 6, 102), (40, 3, 3),
         padding=1),
    case("joined_by_four", "every fourth plane is aligned (in 16 bits); a last chunk that is not full", (2, 72, 5, 70),
         (40, 3, 3), padding=1),
    case("joined_by_eight", "every eighth plane is aligned (in 16 bits)", (2, 64, 5, 67), (40, 3, 3), padding=1),
    case("joined_far_left", "every eighth plane, and a unit whose first pixels are padding in some planes only",
         (1, 64, 3, 67), (40, 3, 3), padding=(1, 1, 30, 2)),
    case("joined_pairs", "rows end to end of an even length, of which two come alone at the end of a column",
         (1, 40, 6, 146), (40, 3, 3), padding=1),
    case("joined_column", "every fourth plane, in long rows for a filter of one column, with an odd padding",
         (1, 64, 3, 130), (72, 3, 1), padding=1),
    case("strided_rows", "chunks of channels pass through a ring without a line to spare", (1, 72, 12, 70), (40, 3, 3),
         stride=(2, 1)),
    case("split_small", "few tiles of many channels, ranges of which different blocks sum", (2, 256, 5, 7), (128, 3, 3),
         padding=1),
    case("split_aligned", "the same, where boxes take partial sums", (1, 256, 4, 40), (128, 3, 3), padding=1),
    case("split_nhwc", "the same where channels are neighbours", (2, 256, 5, 7), (128, 3, 3), padding=1,
         storage="channels_last"),
    case("split_few", "the next split's filters follow inside a block", (1, 256, 5, 7), (70, 3, 3), padding=1),
    case("split_few_nhwc", "the same where channels are neighbours", (1, 256, 5, 7), (70, 3, 3), padding=1,
         storage="channels_last"),
    case("joined_small", "images of few pixels, of which every eighth plane is aligned", (3, 64, 7, 7), (72, 3, 3),
         padding=1),
)  # fmt: skip
PARTS = (wgrad, wgrad_ss, of_pointwise, planes, of_taps, measured, classes, joined, residuals, edges, wgrad_edges)
CASES = (*TILED, *(each for part in PARTS for each in part.CASES))
KERNELS_APART = {  # what runs of these shapes alone launch
    **dict.fromkeys(wgrad_ss.SHAPES, wgrad_ss.KERNELS),
    **dict.fromkeys(of_taps.SHAPES, of_taps.KERNELS),
    **dict.fromkeys(measured.SHAPES, measured.KERNELS),
    **dict.fromkeys(edges.SHAPES, edges.KERNELS),
    **dict.fromkeys(wgrad_edges.SHAPES, wgrad_edges.KERNELS),
}

# Tiles of halo_sm90 that its cost model takes for larger problems only, and the cases that run with them here.
SHAPES: dict[str, Callable[[TileShape], bool]] = {
    "flat": lambda shape: shape.flat and not shape.strip_cols,
    "flat strips": lambda shape: shape.flat and shape.strip_cols > 0,
    "rows": lambda shape: not shape.flat,
    "rows kept": lambda shape: shape.keeps,
    "rows in passing": lambda shape: not shape.flat and not shape.keeps,
    "two runs in passing": lambda shape: not shape.flat and not shape.keeps and shape.runs == 2,
    "runs of 64": lambda shape: shape.run == 64,
    "two runs of 64": lambda shape: shape.run == 64 and shape.runs == 2,
    "two runs of 128": lambda shape: shape.run == 128 and shape.runs == 2,
    "runs of 256": lambda shape: shape.run == 256,
    "two short runs in rows": lambda shape: not shape.flat and shape.runs == 2,
    "two runs kept in boxes": lambda shape: shape.boxes and shape.keeps and shape.runs == 2,
    "boxes in flat tiles": lambda shape: shape.boxes and shape.flat,
    "boxes in flat strips": lambda shape: shape.boxes and shape.flat and shape.strip_cols > 0,
    "boxes in rows": lambda shape: shape.boxes and not shape.flat,
    "packed rows": lambda shape: not shape.flat and shape.pack_h == 2,
    "packed columns in rows": lambda shape: shape.pack_w == 2 and not shape.flat,
    "rows of 256": lambda shape: shape.run == 256 and not shape.flat,
    "shared tile": lambda shape: shape.shared_tile,
    "shared tile kept": lambda shape: shape.shared_tile and shape.keeps,
    "shared tile in passing": lambda shape: shape.shared_tile and not shape.flat and not shape.keeps,
    "shared tile flat": lambda shape: shape.shared_tile and shape.flat,
    "rows without packs": lambda shape: not shape.flat and shape.packs == 1,
    "rows of 128": lambda shape: shape.run == 128 and shape.runs == 1 and not shape.flat,
    "split-K of two": lambda shape: shape.splits == 2 and shape.flat,
    "split-K in rows": lambda shape: shape.splits > 1 and not shape.flat,
    "three products": lambda shape: shape.flat,
    "three products in rows": lambda shape: not shape.flat,
    "three products in boxes": lambda shape: shape.boxes,
    "copied flat": lambda shape: shape.copied and shape.flat,
    "copied rows": lambda shape: shape.copied and not shape.flat,
}
SHAPED = {
    "flat": ("large_3x3", "large_nhwc", "stride_2", "dilated_strided_coprime", "groups_odd", "four_sides"),
    "flat strips": ("rows_5x5", "strips_3x5"),
    "rows": (
        "strided_gradient", "rows_5x5", "strips_3x5", "large_3x3", "large_nhwc", "stride_2", "dilated_strided_coprime",
        "groups_odd", "four_sides", "nhwc_pointwise", "wide_bottom_right", "channels_last_groups", "groups_2",
        "padding_one_side",
    ),
    "rows kept": ("rows_5x5", "strips_3x5", "aligned_nhwc", "stride_2"),
    "rows in passing": ("rows_5x5", "strips_3x5", "aligned_nhwc", "stride_2"),
    "two runs in passing": ("strided_rows",),
    "runs of 64": ("large_3x3",),
    "two runs of 128": ("large_3x3", "large_nhwc", "aligned_3x5"),
    "two runs of 64": ("large_3x3", "large_nhwc", "joined_rows"),
    "runs of 256": ("large_3x3",),
    "two short runs in rows": ("aligned_3x5", "aligned_nhwc", "joined_pairs"),
    "two runs kept in boxes": ("images_of_a_row",),
    "boxes in flat tiles": (
        "large_3x3", "short_rows", "aligned_3x5", "aligned_nhwc", "aligned_dilated", "one_channel_in",
        "joined_by_four", "joined_by_eight", "joined_small",
    ),
    "boxes in flat strips": ("aligned_3x5", "aligned_nhwc"),
    "packed rows": ("large_3x3", "wide_bottom_right"),
    "packed columns in rows": ("packed_columns",),
    "rows of 256": ("long_nhwc",),
    "boxes in rows": (
        "large_3x3", "aligned_3x5", "aligned_nhwc", "aligned_dilated", "one_channel_in", "long_nhwc", "joined_by_two",
        "joined_by_four", "joined_by_eight", "joined_far_left", "joined_column",
    ),
    "rows of 128": ("joined_column",),
    "split-K of two": ("split_small", "split_nhwc"),
    "split-K in rows": ("split_small", "split_aligned", "split_nhwc"),
    "rows without packs": ("row_filter", "joined_rows", "joined_pairs"),
    "shared tile": ("shared_3x3", "shared_nhwc", "shared_groups", "shared_odd_nhwc"),
    "shared tile kept": ("shared_3x3", "shared_joined", "shared_nhwc", "strips_3x5"),
    "shared tile in passing": ("shared_3x3", "shared_joined", "shared_nhwc", "shared_groups"),
    "shared tile flat": ("shared_3x3", "shared_joined", "shared_nhwc", "shared_odd_nhwc"),
}  # fmt: skip
# fp32 as two TF32 values each, of which three products count: by lanes, transposed, end to end, kept, packed, in shared
# tiles.
THREE_PRODUCTS = {
    "three products": ("large_3x3", "large_nhwc", "odd_widths", "channels_last_odd", "shared_3x3", "groups_odd"),
    "three products in rows": ("rows_5x5", "aligned_nhwc", "shared_joined", "stride_2"),
    "three products in boxes": ("aligned_3x5", "joined_rows", "joined_by_two"),
}
# Tiles that also run with ReLU: whose sums leave by pixels and by filters, in boxes and by lanes, packed and not.
ACTIVATED = {
    "": ("border_3x3", "large_3x3", "one_channel_in", "channels_last", "channels_last_odd"),
    "two runs of 128": ("large_3x3",),
    "boxes in rows": ("aligned_3x5", "aligned_nhwc", "joined_by_two"),
    "shared tile flat": ("shared_nhwc",),
    "split-K of two": ("split_few", "split_few_nhwc"),
}
# Cases that also run with values that are not finite: packed outputs, with a stride, in groups, and not packed.
NOT_FINITE = ("odd_widths", "large_3x3", "groups_odd", "depthwise_stride", "rgb_stem", "plain_3x3")


def runs() -> Iterator[tuple[str, torch.dtype, str, str, bool]]:
    """Case, dtype, result, shape, and whether all inputs are finite.

    Every case in TF32 and, where a path depends on it, in 16 bits, the tiles in TF32 and fp16.
    """
    for one in (each for each in ON_EMULATOR if each.name not in (*HUGE, *MANY_GROUPS)):
        for dtype in EVERY if one.name in EVERY_DTYPE else (torch.float32,):
            yield from ((one.name, dtype, result, "", True) for result in DENSE)
    for shape, names in SHAPED.items():
        for name, dtype in product(names, BOTH):
            yield from ((name, dtype, result, shape, True) for result in DENSE)
    for shape, names in THREE_PRODUCTS.items():
        for name, result in product(names, DENSE):
            yield name, torch.float32, result, shape, True
    for result in DENSE:
        yield "shared_odd_nhwc", torch.float32, result, "three products", False
        yield "large_3x3", torch.float32, result, "packed rows", False
    for name, dtype in product(NOT_FINITE, BOTH):
        yield from ((name, dtype, result, "", False) for result in DENSE)
    for (shape, names), dtype in product(ACTIVATED.items(), BOTH):
        results = (RELU,) if shape == "split-K of two" else ACTIVATED_RESULTS  # what partial sums may become
        yield from ((name, dtype, result, shape, True) for name in names for result in results)
    for name, dtype in product(("large_3x3", "plain_3x3"), BOTH):
        yield from ((name, dtype, result, "", False) for result in ACTIVATED_RESULTS)
    for part in PARTS:
        yield from part.runs()


@contextmanager
def forced(shape: str) -> Iterator[None]:
    """While active, halo_sm90 takes the best of its tiles of that shape, whatever its cost model prefers.

    Without a shape weight gradients are those of wgrad, and layers of several taps are conv's.
    """
    module = next((each for each in PARTS if shape in each.SHAPES), None)
    if module or not shape:
        with ExitStack() as stack:
            for other in (each for each in (wgrad_ss, of_taps) if module not in (each, measured)):
                stack.enter_context(other.left_out())
            if module:
                stack.enter_context(module.forced(shape))
            yield
        return

    def only(form: Form, storage: Storage, sm_count: int, may_split: bool = True) -> tuple[Tiling, ...]:
        if "boxes" in shape:  # why_not does not know the strides; the encoder refuses those that do not fit
            storage = replace(storage, x_whole=True)
        found = copied_tilings(form, storage) if shape.startswith("copied") else tilings(form, storage)
        found = [*found, *split_tilings(form, storage)]
        fitting = [each for each in found if SHAPES[shape](each.shape)]
        return tuple(sorted(fitting, key=lambda each: cost(each, each.storage, sm_count)))

    with MonkeyPatch.context() as patch:
        patch.setattr(conv, "best_tilings", only)
        for special in (pointwise, pointwise_planes, implicit_gemm):
            patch.setattr(special, "configs", lambda request: [])
        yield


@contextmanager
def fixups_noted() -> Iterator[list[int]]:
    """While active, the flag that each nonfinite fix-up of halo_sm90 finds is added to the list."""
    flags: list[int] = []
    bind = conv.fixup_launch

    def noting(*args: Any) -> Callable[..., None]:
        launch = bind(*args)

        def call(*pointers: int) -> None:
            flags.append(ctypes.c_uint32.from_address(pointers[4]).value)  # not_finite
            launch(*pointers)

        return call

    with MonkeyPatch.context() as patch:
        patch.setattr(conv, "fixup_launch", noting)
        yield flags
