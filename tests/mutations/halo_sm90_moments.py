"""Faults in what halo_sm90/moments.cu has beside pointwise.cu, and in moments_sum.cu."""

from __future__ import annotations

from functools import partial

import torch

from tests.measured import MOMENTS, MOMENTS_IMAGES
from tests.mutations.mutation import Mutation


def _fault(
    name: str, fault: str, *edits: tuple[str, str], kernel: str = "halo_sm90/moments", on: str = "sm90_pointwise_nhwc",
    dtype: torch.dtype = torch.float16, shape: str = "measured pointwise", result: str = MOMENTS,
) -> Mutation:  # fmt: skip
    return Mutation(f"sm90 moments: {name}", kernel, fault, edits, on, result, dtype, "halo_sm90", shape)


_sum = partial(_fault, kernel="halo_sm90/moments_sum")
_images = partial(_sum, on="sm90_pointwise_many_nhwc", result=MOMENTS_IMAGES)

MUTATIONS = (
    # pointwise/moments.cuh
    _fault("rows twice", "four rows at a time are four times the same",
           (" + threadIdx.x % 32 / LANE_WORDS * 2;", ";")),
    _fault("rows of one parity", "every second row is left out", ("step / 2 * 8 + step % 2 +", "step / 2 * 8 +")),
    _fault("words of a warp", "every warp has the filters of the first",
           ("threadIdx.x % 128 / 32 * LANE_WORDS +", "")),
    _fault("the lower filter", "both filters of a word are the lower one", ("word >> 16 * which", "word")),
    _fault("half of the lanes", "two of four lanes with a word are summed",
           ("return value + __shfl_xor_sync(~0u, value, 2 * LANE_WORDS);", "return value;")),
    _fault("no origin", "the mean is that of the differences", ("{from + mean,", "{mean,")),
    _fault("squares from the first", "squares are of differences from the first result, not from the mean",
           (" - sum * mean}", "}")),
    _fault("zeros behind the last pixel", "places without a pixel have results of zero",
           ("if (row_of_step(i) >= box.pixels) words[i] = first;", ";")),
    _fault("zeros behind rows", "the same in boxes of rows",
           ("if (row_of_step(i) >= box.pixels) words[i] = first;", ";"), on="sm90_pointwise_stride"),
    _fault("the tile's first box", "every slab of a tile is its first box",
           ("index(tile.box + m / BOX_PX),", "index(tile.box),")),
    _fault("boxes beyond the last", "a tile's boxes that no pixel has are measured",
           ("index < p.boxes ? p.pixels.of(index) : 0", "BOX_PX"), shape="measured pointwise two blocks"),
    _fault("the tile's first filters", "every slab of a tile has its first filters",
           ("measure(p, box, buffer, filter);", "measure(p, box, buffer, tile.filter);"),
           shape="measured pointwise 256 columns"),
    _fault("filters beyond the last", "moments of filters that are none are written to the next box",
           ("if (lane >= LANE_WORDS || filter >= p.filters) return;", "if (lane >= LANE_WORDS) return;")),
    _fault("before all have filled", "a slab is read before other warps have filled it",
           ("            ptx::bar_sync(self.barrier, 128);\n            if (self.sends) {",
            "            measure(p, box, buffer, filter);\n            ptx::bar_sync(self.barrier, 128);\n"
            "            if (self.sends) {"),
           ("measure(p, box, buffer, filter);  // until", "// until")),
    _fault("taps", "every second row is left out of several taps",
           ("step / 2 * 8 + step % 2 +", "step / 2 * 8 +"), on="sm90_taps", shape="measured taps"),
    # pointwise/moments_sum.cu, pointwise/box_pixels.cuh
    _sum("boxes of other lanes", "a lane adds the boxes that follow its first",
         ("const int at = box + i * BOX_LANES;", "const int at = box + i;")),
    _sum("means alone", "squares of means are left out",
         ("found[i].squares + pixels * mean * mean", "found[i].squares")),
    _sum("variance around zero", "the mean is not taken off", ("/ pixels - mean * mean", "/ pixels")),
    _sum("boxes that are full", "every box counts as one of 64 pixels",
         ("pixels = p.pixels.of(min(box + i * BOX_LANES, end - 1));", "pixels = 64;")),
    _sum("pixels of the last box", "the last box of a row counts as a full one",
         ("return min(box_cols, cols - box * box_cols);", "return box_cols;")),
    _sum("rows of the last boxes", "a box beyond the last row of an image counts rows that are none",
         ("min(box_rows, rows - row)", "box_rows"), on="sm90_pointwise_stride_joined"),
    _sum("half a tree", "the tree of a block ends early", ("half > 0; half /= 2", "half > 1; half /= 2")),
    _images("the first image", "every image has the boxes of the first",
            ("const int first = image * p.boxes,", "const int first = 0,")),
    _images("boxes of later images", "an image has the boxes of those behind it, too",
            ("end = first + p.boxes;", "end = p.boxes * int(gridDim.x) / p.blocks;")),
    _images("one place", "every image writes where the first does",
            ("p.mean[image * p.filters + filter]", "p.mean[filter]")),
    _images("filters of an image", "blocks of filters are counted through all images",
            ("(blockIdx.x - image * p.blocks) * FILTERS", "blockIdx.x * FILTERS")),
)  # fmt: skip
