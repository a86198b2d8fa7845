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
_BOXED: dict[str, Any] = {"on": "edges_nhwc", "shape": "edges boxed"}
_HALO: dict[str, Any] = {"result": "halo_circular"}

MUTATIONS = (
    _fault("none at the left", "what is left of the image stays zeros",
           ("first = max(begin, p.edge_from)", "first = max(begin, 0)")),
    _fault("none at the right", "what is right of the image stays zeros",
           ("last = min(end, p.edge_to)", "last = min(end, p.w)")),
    _fault("one column too few", "the outermost column on the right stays zeros",
           ("last = min(end, p.edge_to)", "last = min(end, p.edge_to - 1)")),
    _fault("the column beside it", "columns wrap one too far",
           ("return at < 0 ? at + extent :", "return at < 0 ? at + extent - 1 :")),
    _fault("the edge itself mirrored", "a mirror between pixels, not on one",
           ("return at < 0 ? -at :", "return at < 0 ? -at - 1 :"), **_MIRRORED),
    _fault("the row before the last one", "rows below are mirrored at the wrong row",
           ("2 * (extent - 1) - at", "2 * extent - 1 - at"), **_MIRRORED),
    _fault("rows of zeros", "rows outside are not looked for inside",
           ("            row.row = hc::row_at_edge(p, row.row);\n", "")),
    _fault("the first image", "outer columns of all images are the first one's",
           ("first(chunk_of(p, line) + row.n * p.x_n +", "first(chunk_of(p, line) +")),
    _fault("the first chunk", "outer columns of all chunks of channels are the first one's",
           ("first(chunk_of(p, line)", "first(p.x"), dtype=_FP32),
    _fault("channels behind the last one", "outer columns of a chunk that is not full read on",
           ("there && k < channels ?", "there ?")),
    _fault("before the unit is there", "lanes write outer columns while others still transpose",
           ("if (columns.count == 0) return;\n        __syncwarp();", "if (columns.count == 0) return;"), dtype=_FP16),
    _fault("some of many", "of several columns at once only the first ones are stored",
           ("if (i + j < columns.count) store(", "if (i + j < columns.count && j < 2) store("), on="edges_far",
           shape=_WIDE),
    _fault("one channel of two", "a lane stores the first of its two channels",
           ("*reinterpret_cast<Pixel*>(to) = pixel;", "*reinterpret_cast<Elem*>(to) = pixel.channel[0];"), dtype=_FP16),
    _fault("on the left alone", "outer columns on the right are written inside the image",
           ("(i < left ? 0 : jump)", "0"), on="edges_narrow"),
    _fault("rows where they are loaded", "loaded rows outside are zeros",
           ("const int h = row_at_edge(p, at.row + plane_row);", "const int h = at.row + plane_row;"),
           on="edges_apart"),
    _fault("columns where they are loaded", "loaded columns outside are zeros",
           ("const int w = at_edge<COL_EDGE>(staged_col(p, column) + col * p.stride_w + plane_col, p.w);",
            "const int w = staged_col(p, column) + col * p.stride_w + plane_col;"), on="edges_strided", dtype=_FP16),
    _fault("rows of zeros in boxes", "boxes outside the image are not looked for inside",
           ("mapped(p, hc::row_at_edge(p, row.row));", "mapped(p, row.row);"), **_BOXED),
    _fault("before the boxes are there", "columns outside are written while TMA still writes zeros there",
           ("hc::wait(&smem.control->raw_full[before.boxes.index][0], before.boxes.parity);", ""), **_BOXED),
    _fault("before they are written", "a line of boxes is announced without a fence",
           ("before);\n        hc::ptx::fence_proxy_async_shared();", "before);"), **_BOXED),
    _fault("pieces behind the last channel", "outer columns of boxes that are not full read on",
           ("(unsigned)p.w && piece * ELEMS < line.channels)", "(unsigned)p.w)"), **_BOXED),
    _fault("a warp's first pieces", "of many pieces each lane writes one",
           ("i < columns.count * PIECES; i += 32)", "i < min(columns.count * PIECES, 32); i += 32)"),
           **(_BOXED | {"on": "edges_boxed"})),
    _fault("columns of a row of zeros", "a row of zeros gets pixels of the image",
           ("hc::has_row(p, row.row) ? boxes * p.box_px : 0,", "boxes * p.box_px,"),
           **(_BOXED | {"result": "zeros_circular"})),
    _fault("above as below", "rows of the halo above the image are those below",
           ("at + p.h + p.halo_top : at >=", "at + p.h + p.halo_rows : at >="), **_HALO),
    _fault("the image's rows", "rows of the halo are read in the image",
           ("map = &p.halo_map, row -= p.h;", "row -= p.h;"), **_HALO),
    _fault("the halo's columns", "columns beside the halo are read in the image",
           ("if (row.row < p.h) return;", "return;"), **_HALO),
    _fault("a lane that saw no round", "lanes of a consumer pass over a round of a slot",
           ("for (int line = lines.released;", "for (int line = threadIdx.x % 32 ? end : lines.released;"),
           ("hc::arrive_warp(&control.slot_empty", "hc::ptx::mbarrier_arrive(&control.slot_empty"), on="edges_few_rows",
           dtype=_FP16, shape="edges of 128 in passing"),
    Mutation(
        "edges: zeros in the fix-up", "halo_sm90/fixup", "what is summed once more has zeros around the image",
        (("h = hc::at_edge<hc::ROW_EDGE>(h, p.h), col = hc::at_edge<hc::COL_EDGE>(col, p.w_extent);", ""),),
        "edges_packed", "circular_dgrad", _FP32, "halo_sm90", "edges packed in rows", finite=False,
    ),
)  # fmt: skip
