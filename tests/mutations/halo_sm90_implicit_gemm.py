"""Faults in what halo_sm90/implicit_gemm.cu has beside pointwise.cu: which taps meet a tile, and what is asked for."""

from __future__ import annotations

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
           ("step.s * p.dil_w.value, step.r * p.dil_h.value", "step.r * p.dil_h.value, step.s * p.dil_w.value")),
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
)  # fmt: skip
