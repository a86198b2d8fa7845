"""Faults in pairs_wgrad.cu: filter gradients in 16-bit channels_last."""

from __future__ import annotations

import torch

from tests.mutations.mutation import Mutation


def _fault(
    name: str, fault: str, *edits: tuple[str, str], on: str, dtype: torch.dtype = torch.float16, finite: bool = True
) -> Mutation:
    kernel = "depthwise/pairs_wgrad"
    return Mutation(name, kernel, fault, edits, on, "wgrad", dtype, family="depthwise", finite=finite)


COPIES = (
    _fault("pairs wgrad: rows outside are read", "the rows above and below the image count as inside",
           ("here && (unsigned)(row + i) < (unsigned)from.rows", "here"), on="pairs_wgrad_3x3"),
    _fault("pairs wgrad: columns outside are read", "the columns beside the image count as inside",
           ("(unsigned)(col + at) < (unsigned)from.cols && channel", "channel"), on="pairs_wgrad_3x3"),
    _fault("pairs wgrad: channels beyond the last", "the last block of channels reads the next pixel",
           (" && channel + eight * 8 < channels;", ";"), on="pairs_wgrad_channels"),
    _fault("pairs wgrad: no rows of the next band", "the end of a piece's windows is what memory held",
           ("band < run.bands ? BAND_ROWS : NEXT_ROWS", "band < run.bands ? BAND_ROWS : 0"), on="pairs_wgrad_3x3"),
    _fault("pairs wgrad: dy comes too late", "a band of dy waits for one band of x more than it meets",
           ("row - NEXT * BAND_ROWS, col, BAND_ROWS", "row, col, BAND_ROWS"), on="pairs_wgrad_3x3"),
    _fault("pairs wgrad: bands are overwritten too early", "a stage counts as free at once",
           ("hc::wait(&smem.empty[x.index], x.parity ^ 1);", ""), on="pairs_wgrad_long"),
    _fault("pairs wgrad: padding of the other axis", "columns begin where rows do",
           ("col - p.pad_left,\n", "col - p.pad_top,\n"), on="pairs_wgrad_sides"),
    _fault("pairs wgrad: the same strip of each image", "blocks do not change strips",
           ("(at + cut.strip_shift * round) % cut.strips", "at % cut.strips * (1 - cut.strip_shift)"),
           on="pairs_wgrad_shift"),
    _fault("pairs wgrad: strips of the next image", "a block's next piece is the neighbour's",
           ("part + round * cut.parts", "part + round"), on="pairs_wgrad_shift"),
)  # fmt: skip

PRODUCTS = (
    _fault("pairs wgrad: the other channel", "the two channels of a word are not told apart",
           ("{upper & FIRST, upper & SECOND, lower & FIRST", "{upper, upper & SECOND, lower & FIRST"),
           on="pairs_wgrad_3x3"),
    _fault("pairs wgrad: the upper patch twice", "the second half of k is the first once more",
           ("window[i][pair], window[i + BELOW][pair]);", "window[i][pair], window[i][pair]);"), on="pairs_wgrad_3x3"),
    _fault("pairs wgrad: rows of the same band", "the last rows of a window are the band's first ones",
           ("i < BAND_FRAGS ? x : x_next", "x"), on="pairs_wgrad_3x3"),
    _fault("pairs wgrad: the next band before it is there", "windows are read before their last rows have landed",
           ("            if (NEXT) hc::wait(&smem.full[next.index], next.parity);\n", ""), on="pairs_wgrad_3x3"),
    _fault("pairs wgrad: one unit", "the units behind the first one are left out",
           ("unit < units;", "unit < min(units, 1);"), on="pairs_wgrad_3x3"),
    _fault("pairs wgrad: the fragment beside", "fragments beside each other are one",
           ("frag * FRAG_COLS * PIXEL_BYTES);", "0);"), on="pairs_wgrad_5x5"),
    _fault("pairs wgrad: the patch's second column", "both columns of a patch are the first",
           ("patch_col + pixel % PATCH_COLS;", "patch_col;"), on="pairs_wgrad_7x7"),
)  # fmt: skip

SUMS = (
    _fault("pairs wgrad: the tap below", "taps are a row further down",
           ("row = r + a / PATCH_COLS, col", "row = (r + 1) % R + a / PATCH_COLS, col"), on="pairs_wgrad_3x3"),
    _fault("pairs wgrad: the tap beside", "taps are a column further right",
           ("col = s + a % PATCH_COLS;", "col = (s + 1) % S + a % PATCH_COLS;"), on="pairs_wgrad_5x5"),
    _fault("pairs wgrad: one warp of units", "the sums of other warps are left out",
           ("unit < UNIT_WARPS; ++unit)", "unit < 1; ++unit)"), on="pairs_wgrad_3x3"),
    _fault("pairs wgrad: sums too early", "sums overwrite bands that are still read",
           ("    wait_for_multipliers();  // the rings have been read\n", ""), on="pairs_wgrad_3x3"),
    _fault("pairs wgrad: parts too early", "warps add up what others have not written yet",
           ("    wait_for_multipliers();\n", ""), on="pairs_wgrad_3x3"),
    _fault("pairs wgrad: one part", "blocks of a channel block overwrite each other's sums",
           ("(walk.part * (i64)p.cut.channel_blocks + walk.channel_block) * COUNT", "walk.channel_block * COUNT"),
           on="pairs_wgrad_3x3"),
    _fault("pairs wgrad: no second sum", "zero times an infinity stays in the sum", ("sum * 0.f != 0.f);", "false);"),
           on="pairs_wgrad_3x3", dtype=torch.bfloat16, finite=False),
    _fault("pairs wgrad: the second sum of another tap", "a sum that is not finite becomes that of a tap further right",
           ("w = col + s - p.pad_left;", "w = col + s;"), on="pairs_wgrad_3x3", dtype=torch.bfloat16, finite=False),
)  # fmt: skip

MUTATIONS = (*COPIES, *PRODUCTS, *SUMS)
