"""Faults in how halo_sm90/conv_edges finds pixels of the image outside it."""

from __future__ import annotations

from typing import Any

import torch

from tests.mutations.mutation import Mutation

_FP16, _FP32 = torch.float16, torch.float32
_WIDE = "edges of wide tiles"


def _fault(
    name: str, fault: str, *edits: tuple[str, str], on: str = "edges_aligned", result: str = "circular",
    dtype: torch.dtype = _FP32, shape: str = "edges",
) -> Mutation:  # fmt: skip
    return Mutation(f"edges: {name}", "halo_sm90/conv_edges", fault, edits, on, result, dtype, "halo_sm90", shape)


_MIRRORED: dict[str, Any] = {"result": "reflect_replicate"}

MUTATIONS = (
    _fault("none at the left", "what is left of the image stays zeros",
           ("first = max(max(begin, px.from), p.edge_from - col);", "first = max(begin, px.inside_from);")),
    _fault("none at the right", "what is right of the image stays zeros",
           ("UNIT_PX, px.to), p.edge_to - col)", "UNIT_PX, px.to), px.inside_to)")),
    _fault("one column too few", "the outermost column on the right stays zeros",
           ("px.to), p.edge_to - col)", "px.to), p.edge_to - col - 1)")),
    _fault("the column beside it", "columns wrap one too far",
           ("return at < 0 ? at + extent :", "return at < 0 ? at + extent - 1 :")),
    _fault("the edge itself mirrored", "a mirror between pixels, not on one",
           ("return at < 0 ? -at :", "return at < 0 ? -at - 1 :"), **_MIRRORED),
    _fault("the row before the last one", "rows below are mirrored at the wrong row",
           ("2 * (extent - 1) - at", "2 * extent - 1 - at"), **_MIRRORED),
    _fault("rows of zeros", "rows outside are not looked for inside",
           ("row.row = hc::at_edge<hc::ROW_EDGE>(row.row, p.h);", "")),
    _fault("the first image", "outer columns of all images are the first one's",
           ("chunk_of(p, line) + row.n * p.x_n +", "chunk_of(p, line) +")),
    _fault("the first chunk", "outer columns of all chunks of channels are the first one's",
           ("edges.row = chunk_of(p, line)", "edges.row = p.x"), dtype=_FP32),
    _fault("channels behind the last one", "outer columns of a chunk that is not full read on",
           ("there && k < channels ?", "there ?")),
    _fault("before the unit is there", "lanes write outer columns while others still transpose",
           ("if (places.count == 0) return;\n        __syncwarp();", "if (places.count == 0) return;"), dtype=_FP16),
    _fault("some of many", "of several columns at once only the first ones are stored",
           ("if (i + j < places.count) store(", "if (i + j < places.count && j < 2) store("), on="edges_far",
           shape=_WIDE),
    _fault("one channel of two", "a lane stores the first of its two channels",
           ("*reinterpret_cast<Pixel*>(to) = pixel;", "*reinterpret_cast<Elem*>(to) = pixel.channel[0];"), dtype=_FP16),
    _fault("on the left alone", "outer columns on the right are written inside the image",
           ("(i < left ? 0 : jump)", "0"), on="edges_narrow"),
    _fault("rows where they are loaded", "loaded rows outside are zeros",
           ("const int h = at_edge<ROW_EDGE>(at.row + plane_row, p.h);", "const int h = at.row + plane_row;"),
           on="edges_nhwc"),
    _fault("columns where they are loaded", "loaded columns outside are zeros",
           ("const int w = at_edge<COL_EDGE>(staged_col(p, column) + col * p.stride_w + plane_col, p.w);",
            "const int w = staged_col(p, column) + col * p.stride_w + plane_col;"), on="edges_strided", dtype=_FP16),
    _fault("a lane that saw no round", "lanes of a consumer pass over a round of a slot",
           ("for (int line = lines.released;", "for (int line = threadIdx.x % 32 ? end : lines.released;"),
           ("hc::arrive_warp(&control.slot_empty", "hc::ptx::mbarrier_arrive(&control.slot_empty"), on="edges_few_rows",
           dtype=_FP16, shape="edges of 128 in passing"),
)  # fmt: skip
