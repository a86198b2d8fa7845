"""Faults in what halo_sm90/implicit_gemm.cu has beside pointwise.cu: taps of a tile, planes, clusters."""

from __future__ import annotations

from functools import partial

import torch

from tests.mutations.mutation import Mutation

_FP16 = torch.float16


def _fault(
    name: str, fault: str, *edits: tuple[str, str], on: str = "sm90_taps", result: str = "fprop",
    dtype: torch.dtype = torch.float32, shape: str = "taps",
) -> Mutation:  # fmt: skip
    return Mutation(
        f"sm90 taps: {name}", "halo_sm90/implicit_gemm", fault, edits, on, result, dtype, "halo_sm90", shape
    )


# Of planes of 7x7 in 16 bits; of clusters in TF32.
_planes = partial(_fault, on="sm90_taps_planes", dtype=_FP16)
_cluster = partial(_fault, on="sm90_taps_cluster", shape="taps, in cluster")

MUTATIONS = (
    # pointwise/tile.cuh
    _fault("one tap fewer", "the last tap that meets a tile is left out",
           ("max(last - first + 1, 1)", "max(last - first, 1)")),
    _fault("the first row of x", "a tap that meets the first row of x alone is left out",
           ("dil.quotient(max(dil.value - 1 - to, 0))", "dil.quotient(max(dil.value - to, 0))"),
           on="sm90_taps_rows_apart"),
    _fault("the last row of x", "a tap that meets the last row of x alone is left out",
           ("most = extent - 1 - from;", "most = extent - 2 - from;"), on="sm90_taps_rows_apart"),
    _fault("taps of nothing", "a tile that meets none of the image has the taps of no row",
           ("{first, max(last - first + 1, 1)}", "{first, max(last - first + 1, 0)}"), on="sm90_taps_between"),
    _fault("columns of one row", "a tile of several rows has the taps that its first and last pixel name",
           ("one_row = one_image && from.row == to.row;", "one_row = one_image;"), on="sm90_taps_columns_apart"),
    _fault("rows of one image", "a tile of several images has the taps that its first and last pixel name",
           ("one_image = from.image == to.image,", "one_image = true,"), on="sm90_taps_images",
           shape="taps, columns shared"),
    _fault("the tile's first row alone", "taps that only later rows of a tile meet are left out",
           ("(one_image ? to.row : last_row)", "(one_image ? from.row : last_row)"), on="sm90_taps_rows_apart"),
    _fault("no stride of a range", "the last row that a tile meets is counted without the stride",
           ("last_row) * p.stride_h - p.pad_h, p.dil_h", "last_row) - p.pad_h, p.dil_h"),
           on="sm90_taps_stride_rows"),
    _fault("no stride of the first pixel", "a tile begins at the output's column in x",
           ("column = from.column * p.stride_w - p.pad_w,", "column = from.column - p.pad_w,"),
           on="sm90_taps_stride_uneven"),
    _fault("padding of the wrong sign", "a tile begins as many rows below as it should above",
           ("row = from.row * p.stride_h - p.pad_h,", "row = from.row * p.stride_h + p.pad_h,")),
    _fault("pixels of the first image", "every tile is of the first image",
           ("image = from.image;", "image = 0;"), on="sm90_taps_images"),
    _fault("taps of one row", "as many products as one row of taps has",
           ("chunks *= rows.count * cols.count;", "chunks *= cols.count;")),
    # pointwise/taps_produce.cuh
    _fault("taps from the first one", "rows of taps that a tile does not meet are not passed over",
           ("r(tile.rows.first), s(tile.cols.first)", "r(0), s(tile.cols.first)"), on="sm90_taps_far"),
    _fault("columns from the first one", "the second row of taps begins with a column that is not met",
           ("        s = tile.cols.first;\n", "        s = 0;\n"), on="sm90_taps_columns_apart",
           shape="taps, columns shared"),
    _fault("rows from the first one", "the second chunk begins with a row that is not met",
           ("r = tile.rows.first, ++chunk;", "r = 0, ++chunk;"), on="sm90_taps_rows_apart",
           shape="taps, columns shared"),
    _fault("channels of the first chunk", "all chunks are the first one",
           ("r = tile.rows.first, ++chunk;", "r = tile.rows.first;")),
    _fault("channels of the first range", "every range of channels is the first one",
           ("chunk(tile.first)", "chunk(0)"), on="sm90_taps_deep", shape="taps, split-K"),
    _fault("axes of a tap", "a tap is as far to the right as it should be down",
           ("step.s * p.dil_w.value,", "step.r * p.dil_h.value,"),
           ("step.r * p.dil_h.value);", "step.s * p.dil_w.value);")),
    _fault("no dilation", "columns of taps are neighbours in x", ("step.s * p.dil_w.value,", "step.s,"),
           on="sm90_taps_sides"),
    _fault("filters not flipped", "a gradient has the taps of the forward",
           ("p.first_tap + p.tap_step * (step.r", "(step.r"), result="dgrad", dtype=_FP16),
    _fault("taps of a square", "a row of taps is taken to be as long as a column",
           ("step.r * p.taps_s + step.s", "step.r * p.taps_r + step.s"), on="sm90_taps_5x3"),
    _fault("filters of the first chunk", "filters of all chunks are those of the first",
           ("channel = step.chunk * CHUNK;", "channel = 0;"), dtype=_FP16, result="dgrad"),
    _fault("packed filters of one tap", "packed filters of all taps are those of the first",
           (") * p.taps + tap) * SPAN_BYTES", ") * p.taps) * SPAN_BYTES"), on="sm90_taps_packed"),
    _fault("packed filters of one chunk", "packed filters of all chunks are those of the first",
           ("filter / SPAN * p.chunks + step.chunk", "filter / SPAN * p.chunks"), on="sm90_taps_packed"),
    _fault("packed filters of the first span", "all spans of packed filters are the first one",
           ("(filter / SPAN * p.chunks + step.chunk)", "(step.chunk)"), on="sm90_taps_packed"),
    _fault("a stage is filled again too early", "pixels land over those that are being read",
           ("            wait(&smem.empty[at.index], at.parity ^ 1);\n", "")),
    _fault("too few bytes", "a stage counts as there before its filters are",
           ("mbarrier_arrive_expect_tx(full, X_BYTES + W_BYTES)", "mbarrier_arrive_expect_tx(full, X_BYTES)")),
    # pointwise/write.cuh: results in nchw, which lanes store
    _planes("pairs of two planes", "two pixels are a word though they are of two planes",
            ("place[1] == place[0] + 1 && pixel + 1 < p.all_px", "pixel + 1 < p.all_px")),
    _planes("pairs anywhere", "two pixels are a word that is not aligned",
            ("both && reinterpret_cast<unsigned long long>(to + place[0]) % 4 == 0", "both")),
    _planes("the second pixel of no pair", "of two pixels that are no word the second is not stored",
            ("                if (pixel + 1 < p.all_px) to[place[1]] = pair.of[1];\n", "")),
    _planes("a pixel behind the last one", "the word of the last pixel, whose number is odd, is stored whole",
            ("if (pixel + 1 < p.all_px) to[place[1]]", "to[place[1]]"), on="sm90_taps_planes_filters"),
    _planes("pixels behind the last one", "places of a tile that are no pixels are stored",
            ("if (pixel >= p.all_px) return;", "")),
    _planes("filters behind the last one", "rows of a slab that are no filters are stored",
            ("row < min(16, p.filters - filter)", "row < 16")),
    _planes("one image", "pixels of all images are stored over those of the first",
            ("image * p.y_image + (pixel", "(pixel")),
    _planes("images without planes", "pixels of a later image are stored as many planes too far",
            ("(pixel + i - image * p.image_px.value)", "(pixel + i)")),
    _planes("filters of one warp", "all warps store the filters of the first one",
            ("filter = tile.filter + m + warp * 16, byte", "filter = tile.filter + m, byte")),
    _planes("rows of one warp", "all warps store the rows of the first one's filters",
            ("unit_offset<ROW_BYTES>(warp * 16 + row, byte / 16)", "unit_offset<ROW_BYTES>(row, byte / 16)")),
    _planes("ranges over one another", "partial sums of all ranges are stored at one place",
            ("p.y + tile.split * p.y_part + filter", "p.y + filter"), on="sm90_taps_planes_deep",
            shape="taps, split-K", dtype=torch.float32),
    _planes("a buffer is stored too early", "lanes store what other warps have not put into the buffer yet",
            ("            ptx::bar_sync(self.barrier, 128);\n            store(", "            store(")),
    # pointwise/consume.cuh, tile.cuh and taps_produce.cuh: clusters
    _cluster("the other consumer's sums", "a block hands over the sums that it writes itself",
             ("if (warpgroup != rank) {", "if (warpgroup == rank) {")),
    _cluster("sums that are not added", "a part of the channels is left out",
             ("            (&sums[0][0])[i] += other[i * 128];\n", "")),
    _cluster("own sums twice", "a block adds what it handed over itself",
             ("peer_shared(handed, 1 - rank)", "peer_shared(handed, rank)")),
    _cluster("no meeting", "sums are read before the other block has handed them over",
             ("    }\n    ptx::cluster_sync();\n    if", "    }\n    if")),
    _cluster("a block leaves", "a block may end while the other one reads its sums",
             ("    ptx::cluster_sync();  // the other block reads this one's sums\n", "")),
    _cluster("stages that are read", "sums are put where the other consumer still multiplies a stage",
             ("    ptx::bar_sync(MULTIPLIED, 128 * CONSUMERS);  // no consumer multiplies the stages any more\n", "")),
    _cluster("both write", "both consumers of a block write, one without the other block's sums",
             ("    if (warpgroup != rank) return;\n", "")),
    _cluster("one part", "both blocks sum the first part of the channels",
             ("first = int(ptx::cluster_rank()) * p.range_chunks, chunks = min(p.range_chunks, p.chunks - first);",
              "first = 0, chunks = min(p.range_chunks, p.chunks - first);")),
    _cluster("a part from the first chunk on", "chunks of a part are counted from its own first, asked for from 0",
             ("chunk(tile.first)", "chunk(0)")),
    _cluster("tiles of blocks", "the blocks of a cluster produce different tiles",
             ("begin = blockIdx.x / CLUSTER, step", "begin = blockIdx.x, step"), on="sm90_taps_cluster_tiles"),
    _cluster("a tile of another cluster", "the blocks of a cluster write different tiles",
             ("tile(p, blockIdx.x / CLUSTER);", "tile(p, blockIdx.x % CLUSTER);"), on="sm90_taps_cluster_tiles"),
    _cluster("sums of one lane", "all lanes hand their sums over at one place",
             ("reinterpret_cast<float*>(smem.stages) + threadIdx.x % 128", "reinterpret_cast<float*>(smem.stages)")),
)  # fmt: skip
