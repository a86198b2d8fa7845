"""Faults in halo_sm90/wgrad.cu and its parts: which lines a block takes, how they come, fragments, products, sums."""

from __future__ import annotations

import torch

from tests.mutations.mutation import Mutation

_FP16 = torch.float16


def _fault(
    name: str, fault: str, *edits: tuple[str, str], on: str, dtype: torch.dtype = torch.float32, shape: str = "",
    finite: bool = True,
) -> Mutation:  # fmt: skip
    kernel = "halo_sm90/wgrad"
    return Mutation(f"sm90 wgrad: {name}", kernel, fault, edits, on, "wgrad", dtype, "halo_sm90", shape, finite)


MUTATIONS = (
    # wgrad_tile.cuh
    _fault("classes by strips", "a strip's class of rows is split off by the wrong extent",
           ("run.strip / p.column_strips;", "run.strip / p.cut.strips;"), on="sm90_wgrad_classes"),
    _fault("lines of dy a row late", "the first line of dy is that of the next tap",
           ("(tile.row + ROWS - 1) * p.dil_h", "(tile.row + ROWS) * p.dil_h"), on="sm90_wgrad_rows"),
    _fault("lines begin at their first pixel", "boxes begin at aligned columns, and fragments do not know",
           ("return first_column(p) & ALIGNED - 1;", "return 0;"), on="sm90_wgrad_rows"),
    _fault("a barrier for one warp", "lines go back when the first warp has read them",
           ("ptx::mbarrier_init(&smem.y_empty[i], CONSUMER_WARPS);", "ptx::mbarrier_init(&smem.y_empty[i], 1);"),
           on="sm90_wgrad_rows"),
    _fault("loaded lines for one warp", "a line counts as there when the first warp has loaded its part",
           ("ptx::mbarrier_init(&smem.x_full[i], X_LOADS ? 4 : 1);", "ptx::mbarrier_init(&smem.x_full[i], 1);"),
           on="sm90_wgrad_narrow"),
    # wgrad_produce.cuh
    _fault("too few bytes", "a line of dy counts as there before its last box",
           ("ptx::mbarrier_arrive_expect_tx(full, boxes * Y_SPAN_BYTES);",
            "ptx::mbarrier_arrive_expect_tx(full, (boxes - 1) * Y_SPAN_BYTES);"), on="sm90_wgrad_strips"),
    _fault("channels of the first tile", "all tiles of a group multiply the same channels",
           ("const int channel = tile.group * p.channels + tile.channel;\n    ptx::mbarrier",
            "const int channel = tile.group * p.channels;\n    ptx::mbarrier"), on="sm90_wgrad_wide"),
    _fault("filters of the first group", "all groups multiply the same filters",
           ("filter = tile.group * p.filters + tile.filter, pixels", "filter = tile.filter, pixels"),
           on="sm90_wgrad_classes_nhwc", dtype=_FP16),
    _fault("no wait for an empty line", "lines are overwritten while they are multiplied",
           ("    wait(&smem.y_empty[at.index], at.parity ^ 1);\n", ""), on="sm90_wgrad_rows"),
    _fault("no fence after loads", "wgmma reads dy before the loaded line is there for it",
           ("        ptx::fence_proxy_async_shared();\n        arrive_warp(full);\n    } else if",
            "        arrive_warp(full);\n    } else if"),
           on="sm90_wgrad_narrow"),
    _fault("columns right of the image", "the pixel right of a row is taken for one of it",
           ("(unsigned)(column + i) < (unsigned)source.columns",
            "(unsigned)(column + i) <= (unsigned)source.columns"),
           on="sm90_wgrad_narrow"),
    _fault("channels behind the last one", "a block reads channels of the next image, or of no tensor",
           ("const bool there = channel < source.limit;", "const bool there = channel < 1 << 30;"),
           on="sm90_wgrad_narrow"),
    _fault("pieces of a neighbouring channel", "loads of several channels store them all in the first row",
           ("store(channel_of(item) + j, piece", "store(channel_of(item), piece"), on="sm90_wgrad_classes_nhwc"),
    _fault("lines above the image", "lines of dy above its first row are asked for as far below",
           ("const bool there = (unsigned)row < (unsigned)p.rows;", "const bool there = row < p.rows;"),
           on="sm90_wgrad_narrow"),
    # wgrad_fragment.cuh
    _fault("the next column of taps", "a column of taps lies one pixel further on than it is dilated",
           ("const int pixel = tile.lead(p) + column * p.dil_w;", "const int pixel = tile.lead(p) + column;"),
           on="sm90_wgrad_classes"),
    _fault("odd pixels", "pairs that begin in the middle of a word are read from its begin",
           ("SIZE == 2 && pixel & 1;", "false;"), on="sm90_wgrad_rows", dtype=_FP16),
    _fault("pixels right of dy", "pixels that no output has meet zeros, and infinities among them make NaN",
           ("masks[i] = left >= EACH ? ~0u : left == 1 ? 0xffffu : 0u;", "masks[i] = ~0u;"), on="sm90_wgrad_loose",
           finite=False),
    _fault("half a word too many", "of a last pair the pixel that dy has not counts as well",
           ("left == 1 ? 0xffffu : 0u", "left == 1 ? ~0u : 0u"), on="sm90_wgrad_loose_odd", dtype=_FP16, finite=False),
    _fault("columns behind the last one", "a column of taps behind the filter reads beyond its line",
           ("column = min(column, p.taps_s - 1 - tile.column);", ""), on="sm90_wgrad_beyond", shape="wgrad one part"),
    # wgrad_consume.cuh
    _fault("no fence", "wgmma reads fragments that are not there yet", ("    ptx::wgmma_fence();\n", ""),
           on="sm90_wgrad_rows"),
    _fault("two steps under way", "a fragment is loaded again while wgmma reads it",
           ("ptx::wgmma_wait_group<EDGE ? 0 : 1>();", ""), on="sm90_wgrad_rows"),
    _fault("lines of other rows of taps", "the lines of dy are taken in the wrong order",
           ("const int stage = newest - r < 0 ? newest - r + Y_STAGES : newest - r;",
            "const int stage = newest < r ? newest - r + Y_STAGES - 1 : newest - r;"), on="sm90_wgrad_rows"),
    _fault("lines that do not exist", "a row of taps meets a line that nobody brought",
           ("if (inside && (unsigned)row < (unsigned)p.rows && tile.row + r < p.taps_r)",
            "if (inside && tile.row + r < p.taps_r)"), on="sm90_wgrad_rows"),
    _fault("classes end together", "lines of x below the image are multiplied",
           ("const bool inside = place.row + line * p.dil_h < p.h;", "const bool inside = true;"),
           on="sm90_wgrad_classes"),
    _fault("lines go back early", "a line is given back before the last wgmma that reads it has been waited for",
           ("            done.stage = oldest;\n",
            "            done.stage = oldest, done.release(smem);\n"), on="sm90_wgrad_rows"),
    _fault("lines are kept", "the lines that end a run do not go back",
           ("for (int i = 0; i < ROWS - 1; ++i) {\n            arrive_warp",
            "for (int i = 1; i < ROWS - 1; ++i) {\n            arrive_warp"),
           on="sm90_wgrad_classes", shape="wgrad one part"),
    _fault("the first sums once more", "sums that have been added to memory are not cleared",
           ("(&sums[0][0][0])[i] = 0;", "(&sums[0][0][0])[i] += 0;"), on="sm90_wgrad_long_sum",
           shape="wgrad one part"),
    _fault("sums replace sums", "later sums of a part overwrite the first ones",
           ("sum[k] = first ? value : sum[k] + value;", "sum[k] = value;"), on="sm90_wgrad_long_sum",
           shape="wgrad one part"),
    _fault("parts of steps in one place", "two consumers that share steps write the same part",
           ("walk.part * SPLIT_P + part.p, first);", "walk.part * SPLIT_P, first);"), on="sm90_wgrad_classes",
           shape="wgrad steps shared"),
    _fault("filters behind the last one", "sums of filters that do not exist are written",
           ("if (filter + k < p.filters) sum[k]", "sum[k]"), on="sm90_wgrad_rows"),
    _fault("columns of taps behind the last one", "sums of taps that do not exist are written",
           ("|| s >= p.taps_s) continue;", ") continue;"), on="sm90_wgrad_rows"),
)  # fmt: skip
