"""Faults in what halo_sm90/moments.cu has beside pointwise.cu, and in moments_sum.cu."""

from __future__ import annotations

from functools import partial

import torch

from tests.mutations.mutation import Mutation
from tests.oracle import MOMENTS


def _fault(
    name: str, fault: str, *edits: tuple[str, str], kernel: str = "halo_sm90/moments", on: str = "sm90_pointwise_nhwc",
    dtype: torch.dtype = torch.float16, shape: str = "measured pointwise",
) -> Mutation:  # fmt: skip
    return Mutation(f"sm90 moments: {name}", kernel, fault, edits, on, MOMENTS, dtype, "halo_sm90", shape)


_sum = partial(_fault, kernel="halo_sm90/moments_sum")

MUTATIONS = (
    # pointwise/moments.cuh
    _fault("rows twice", "four rows at a time are four times the same", ("+ lane / LANE_WORDS * 2)", ")")),
    _fault("rows of one parity", "every second row is left out", ("i / 2 * 8 + i % 2 +", "i / 2 * 8 +")),
    _fault("words of a warp", "every warp has the filters of the first",
           ("threadIdx.x % 128 / 32 * LANE_WORDS +", "")),
    _fault("the lower filter", "both filters of a word are the lower one", ("word >> 16 * which", "word")),
    _fault("half of the lanes", "two of four lanes with a word are summed",
           ("return sum + __shfl_xor_sync(~0u, sum, 2 * LANE_WORDS);", "return sum;")),
    _fault("no origin", "the mean is that of the differences", ("{from + sum / 64,", "{sum / 64,")),
    _fault("squares from the first", "squares are of differences from the first result, not from the mean",
           ("sum_of_rows(squares) - sum * sum / 64", "sum_of_rows(squares)")),
    _fault("the tile's first box", "every slab of a tile is its first box",
           ("i64(tile.box + m / 64)", "i64(tile.box)")),
    _fault("the tile's first filters", "every slab of a tile has its first filters",
           ("filter = tile.filter + n + word", "filter = tile.filter + word"), shape="measured pointwise 256 columns"),
    _fault("filters beyond the last", "moments of filters that are none are written to the next box",
           ("if (lane >= LANE_WORDS || filter >= p.filters) return;", "if (lane >= LANE_WORDS) return;")),
    _fault("before all have filled", "a slab is read before other warps have filled it",
           ("            ptx::bar_sync(self.barrier, 128);\n            if (self.sends) {",
            "            measure(p, tile, buffer, m, n);\n            ptx::bar_sync(self.barrier, 128);\n"
            "            if (self.sends) {"),
           ("measure(p, tile, buffer, m, n);  // until", "// until")),
    _fault("taps", "the same of several taps", ("i / 2 * 8 + i % 2 +", "i / 2 * 8 +"), on="sm90_taps",
           shape="measured taps"),
    # pointwise/moments_sum.cu
    _sum("boxes of other lanes", "a lane adds the boxes that follow its first",
         ("box + i * BOX_LANES", "box + i")),
    _sum("means alone", "squares of means are left out",
         ("found[i].squares + BOX_PX * mean * mean", "found[i].squares")),
    _sum("variance around zero", "the mean is not taken off", ("/ pixels - mean * mean", "/ pixels")),
    _sum("places for pixels", "places beyond the last pixel count", ("double(p.pixels)", "(p.boxes * double(BOX_PX))")),
    _sum("half a tree", "the tree of a block ends early", ("half > 0; half /= 2", "half > 1; half /= 2")),
)  # fmt: skip
