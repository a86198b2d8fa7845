"""Faults in halo_sm90/wgrad_ss.cu, its parts and its sum: which boxes come, taps, gaps, products, sums, infinities."""

from __future__ import annotations

import torch

from tests.emulated_halo_sm90_wgrad_ss import ALL_TAPS, ALL_TAPS_OF_PARTS, CLUSTER, CLUSTERS, FIRST
from tests.mutations.mutation import Mutation

_ONE_PART, _MANY_PARTS = "wgrad by descriptor, one part", "wgrad by descriptor, many parts"


def _fault(
    name: str, fault: str, *edits: tuple[str, str], on: str, shape: str = FIRST, finite: bool = True,
    kernel: str = "halo_sm90/wgrad_ss",
) -> Mutation:  # fmt: skip
    return Mutation(
        f"sm90 wgrad_ss: {name}", kernel, fault, edits, on, "wgrad", torch.float16, "halo_sm90", shape, finite
    )


_SUM, _COPIES = "halo_sm90/wgrad_ss_sum", "halo_sm90/nchw_to_nhwc"

MUTATIONS = (
    # wgrad_ss/tile.cuh
    _fault("pixels behind boxes stay as they are", "steps read what shared memory had before",
           ("to < pixels * PIXEL_BYTES; to += 32 * 16)", "to < 0; to += 32 * 16)"),
           on="sm90_wgrad_ss_of_14"),
    _fault("no wait for zeros", "products begin while pixels behind boxes are cleared",
           ("        ptx::bar_sync(BEGUN, THREADS);\n", "        ptx::bar_arrive(BEGUN, THREADS);\n"),
           on="sm90_wgrad_ss_of_14"),
    _fault("a barrier for one warp", "boxes go back when the first warp has read them",
           ("ptx::mbarrier_init(&smem.empty[i], 4 * CONSUMERS);", "ptx::mbarrier_init(&smem.empty[i], 1);"),
           on="sm90_wgrad_ss_of_28", shape=_ONE_PART),
    # wgrad_ss/produce.cuh
    _fault("rows without padding", "rows of x begin at the image",
           ("first_row(p, tile) - p.pad_top;", "first_row(p, tile);"), on="sm90_wgrad_ss_sides"),
    _fault("strips in one place", "all strips of x are the first one",
           ("run.strip * p.strip_cols - p.pad_left;", "-p.pad_left;"), on="sm90_wgrad_ss_strips"),
    _fault("channels of the first span", "all spans have the same channels",
           ("tile.channel + span * SPAN,", "tile.channel,"), on="sm90_wgrad_ss_of_14",
           shape="wgrad by descriptor, many channels"),
    _fault("no wait for an empty stage", "boxes are overwritten while they are multiplied",
           ("            wait(&smem.empty[at.index], at.parity ^ 1);\n", ""),
           on="sm90_wgrad_ss_of_28", shape=_ONE_PART),
    # wgrad_ss/consume.cuh
    _fault("taps a pixel off", "a tap meets the pixel right of its own",
           ("* p.pitch + s * p.dil_w;", "* p.pitch + s * p.dil_w + 1;"), on="sm90_wgrad_ss_of_7"),
    _fault("rows of taps by the filter", "the first row of a tile's taps is taken for that of the filter",
           ("(r * p.dil_h - first_row(p, tile)) * p.pitch", "r * p.dil_h * p.pitch"), on="sm90_wgrad_ss_of_7",
           shape="wgrad by descriptor, blocks of filters"),
    _fault("the last box as long", "a lower box is given the steps of a whole one, and a whole one those of the lower",
           ("min(p.box_rows, p.rows - band * p.box_rows)", "min(p.box_rows, p.rows - (p.cut.bands - 1) * p.box_rows)"),
           on="sm90_wgrad_ss_of_28", shape=_ONE_PART),
    _fault("sums begin anew", "the sums of steps before are lost in memory",
           ("    if (!first) {\n", "    if (false) {\n"), on="sm90_wgrad_ss_long_sum", shape=_ONE_PART),
    _fault("sums before the stages are free", "a consumer's sums go where another one still multiplies",
           ("    ptx::bar_sync(MULTIPLIED, THREADS_ADD);  // no consumer multiplies the stages any more\n", ""),
           on="sm90_wgrad_ss_of_7", shape=CLUSTER),
    _fault("sums of peers that are not there", "a block adds what others have not written yet",
           ("(&sums[0][0][0])[i];\n    ptx::cluster_sync();\n", "(&sums[0][0][0])[i];\n"), on="sm90_wgrad_ss_of_7",
           shape=CLUSTER),
    _fault("a block leaves its peers", "shared memory goes while others read it",
           ("    ptx::cluster_sync();  // others read this block's sums\n", ""), on="sm90_wgrad_ss_of_7",
           shape=CLUSTER),
    _fault("a block's own sums", "the sums of other blocks are lost, and its own counted for them",
           ("part == rank ? at : ptx::peer_shared(at, part)", "at"), on="sm90_wgrad_ss_of_7", shape=CLUSTER),
    _fault("items of one block", "every block adds the first fraction of the items",
           ("for (int item = rank * THREADS_ADD + threadIdx.x;", "for (int item = threadIdx.x;"),
           on="sm90_wgrad_ss_of_7", shape=CLUSTER),
    _fault("clusters in one place", "all clusters of a tile write the first one's sums",
           ("((i64)boxes.cluster * p.cut.slabs + boxes.slab)", "((i64)boxes.slab)"), on="sm90_wgrad_ss_of_14",
           shape=CLUSTERS),
    _fault("parts of the first block", "all blocks of a cluster have the first one's boxes",
           ("cluster * CLUSTER + (CLUSTER > 1 ? int(ptx::cluster_rank()) : 0)", "cluster * CLUSTER"),
           on="sm90_wgrad_ss_of_7", shape=CLUSTER),
    # wgrad_ss/sum.cuh, mend.cuh and wgrad_ss_sum.cu
    _fault("registers side by side", "channels of two registers change places on their way through memory",
           ("{{total[0], total[2], total[4], total[6]}}", "{{total[0], total[1], total[4], total[6]}}"),
           on="sm90_wgrad_ss_of_14", shape=CLUSTERS),
    _fault("a part is lost", "the first part does not count",
           ("partials + place.from, lane, total);", "partials + place.from, lane + 1, total);"),
           on="sm90_wgrad_ss_of_28", shape=_MANY_PARTS, kernel=_SUM),
    _fault("sums that are NaN stay", "an infinity in a gap makes a NaN",
           ("        if (lane == 0) mend(p, place, total);\n", ""),
           on="sm90_wgrad_ss_loose", finite=False, kernel=_SUM),
    _fault("mended in the first lane", "what is computed again goes to another item",
           ("if (threadIdx.x % 32 == lane && i == j)", "if (threadIdx.x % 32 == 0 && i == j)"),
           on="sm90_wgrad_ss_loose", finite=False, kernel=_SUM),
    _fault("mended by the wrong tap", "a sum that is computed again has the rows of x of the first tap",
           ("at.row + r * p.dil_h - p.pad_top", "at.row - p.pad_top"), on="sm90_wgrad_ss_loose", finite=False,
           shape=CLUSTER),
    _fault("taps for channels", "where taps are neighbours in dw, elements of a piece change places",
           ("to[i * RESULT_TAPS + after] =", "to[after * ITEM + i] ="), on="sm90_wgrad_ss_large_planes",
           shape=ALL_TAPS),
    _fault("one tap for all", "where taps are neighbours in dw, all have the sums of the first one",
           ("item / TAP_ITEMS + after,", "item / TAP_ITEMS,"), on="sm90_wgrad_ss_large_planes",
           shape=ALL_TAPS_OF_PARTS, kernel=_SUM),
    _fault("lanes of the tap before", "the sums of lanes are overwritten while they are added",
           ("    __syncthreads();  // what was there is read\n", ""), on="sm90_wgrad_ss_large_planes",
           shape=ALL_TAPS_OF_PARTS, kernel=_SUM),
    # wgrad_ss/nchw_to_nhwc.cu
    _fault("copies: one barrier less", "elements are read before they are there",
           ("        __syncthreads();\n        store(to, smem, one, one.plane,",
            "        store(to, smem, one, one.plane,"),
           on="sm90_wgrad_ss_planes", kernel=_COPIES),
    _fault("copies: pixels of the first block", "all blocks of a plane move the same pixels",
           ("+ (i64)channel * one.plane + place;", "+ (i64)channel * one.plane;"), on="sm90_wgrad_ss_large_planes",
           kernel=_COPIES),
    _fault("copies: runs beyond the plane", "the last block of a plane reads the next channel's",
           ("min(one.block_pixels, one.pixels - pixel), row", "one.block_pixels, row"), on="sm90_wgrad_ss_large_planes",
           kernel=_COPIES),
    _fault("copies: channels of the next pixel", "channels behind the last one are written",
           ("if (channel >= channels || pixel >= pixels) continue;", "if (pixel >= pixels) continue;"),
           on="sm90_wgrad_ss_odd_planes", kernel=_COPIES),
    _fault("copies: neighbours for strided pixels", "a stride's pixels of a row are taken from beside each other",
           ("one.cols) * one.across;\n        elem_t eight", "one.cols);\n        elem_t eight"),
           on="sm90_wgrad_ss_pointwise_stride_planes", kernel=_COPIES),
    _fault("copies: rows that a stride leaves out", "rows of a large plane are read one after the other",
           ("row * one.down + at;", "row * elems + at;"), on="sm90_wgrad_ss_pointwise_stride_rows", kernel=_COPIES),
)  # fmt: skip
