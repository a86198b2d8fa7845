"""Faults in how halo_sm90/wgrad_edges finds pixels of the image outside it."""

from __future__ import annotations

import torch

from tests.mutations.mutation import Mutation

_FP16, _FP32 = torch.float16, torch.float32
_NHWC, _SHIFTED, _LOADED = "wgrad_edges_rows_nhwc", "wgrad_edges_shifted", "wgrad_edges_loaded"
_MIRRORED = "reflect_replicate_wgrad"


def _fault(
    name: str, fault: str, *edits: tuple[str, str], on: str = "wgrad_edges_rows", result: str = "circular_wgrad",
    dtype: torch.dtype = _FP32, shape: str = "wgrad edges",
) -> Mutation:  # fmt: skip
    return Mutation(
        f"wgrad edges: {name}", "halo_sm90/wgrad_edges", fault, edits, on, result, dtype, "halo_sm90", shape
    )


MUTATIONS = (
    _fault("none at the right", "what is right of the image stays zeros",
           ("last = min(end, p.edge_to)", "last = min(end, p.w)")),
    _fault("rows of zeros", "rows outside are not looked for inside",
           ("return at_edge<ROW_EDGE>(at - p.edge_top, p.image_rows);", "return at - p.edge_top;")),
    _fault("the image's first row", "rows above the image are not counted",
           ("return at_edge<ROW_EDGE>(at - p.edge_top, p.image_rows);",
            "return at_edge<ROW_EDGE>(at, p.image_rows);"), result=_MIRRORED),
    _fault("one line a box", "all lines of a box come from the row of its first",
           ("place.image, source_row(p, row + line),", "place.image, source_row(p, row),")),
    _fault("a box is there with its first line", "lines are filled up while TMA brings others of their box",
           ("ptx::mbarrier_init(&smem.x_landed[i], X_BOXES);", "ptx::mbarrier_init(&smem.x_landed[i], 1);")),
    _fault("before lines are there", "outer columns are written while TMA still writes zeros there",
           ("wait(&smem.x_landed[at.index], at.parity);", "")),
    _fault("before lines are there, by all threads", "the same where they transpose dy",
           ("wait(&smem.x_landed[at.index], at.parity);", ""), on=_NHWC),
    _fault("announced by one", "a box counts as filled up when the first thread has done its part",
           ("X_FILLED ? EDGE_THREADS : X_BOXES,", "X_FILLED ? 1 : X_BOXES,")),
    _fault("before they are stored", "outer columns are written while other threads still store zeros there",
           ("ptx::bar_sync(STORED, 128);", ""), on=_SHIFTED),
    _fault("before they are loaded", "the same where pixels are loaded", ("ptx::bar_sync(STORED, 128);", ""),
           on=_LOADED),
    _fault("shifted rows of zeros", "rows that are shifted are asked for outside the image",
           ("begin_of_x(p, source_row(p, x_row(one)),", "begin_of_x(p, x_row(one),"), on=_SHIFTED),
    _fault("loaded rows of zeros", "rows that are loaded are looked for outside the image",
           ("smem, to_line, place.image, from, column);", "smem, to_line, place.image, row, column);"), on=_LOADED),
    _fault("the first image", "outer columns of all images are the first one's",
           ("x = p.x + place.image * p.x_n + channel", "x = p.x + channel")),
    _fault("the first group", "outer columns of all groups are the first one's",
           ("const int channel = tile.group * p.channels + tile.channel;\n        x =",
            "const int channel = tile.channel;\n        x ="), on="wgrad_edges_groups"),
    _fault("the first tile", "outer columns of all blocks of channels are the first one's",
           ("const int channel = tile.group * p.channels + tile.channel;\n        x =",
            "const int channel = tile.group * p.channels;\n        x ="), on="wgrad_edges_wide_nhwc", dtype=_FP16),
    _fault("channels behind the last one", "outer columns of a tile that is not full read on",
           ("const bool there = at.channel < channels && ", "const bool there = "), on="wgrad_edges_wide"),
    _fault("the first line", "outer columns of all lines of a box are written to its first one",
           ("smem.x + (to_line + at.line) * X_LINE,", "smem.x + to_line * X_LINE,")),
    _fault("rows of the first line", "outer columns of all lines of a box are those of its first row",
           ("source_row(p, row + at.line) * p.x_h", "source_row(p, row) * p.x_h"), on=_NHWC, dtype=_FP16),
    _fault("the same once more", "of many outer columns those are written again that were loaded first",
           ("            if (first != own()) load(p, first);\n", ""), on="wgrad_edges_far"),
    _fault("some of many", "of several outer columns at once only the first one is stored",
           ("                if (i >= count) break;\n", "                if (i >= count || j > 0) break;\n"),
           on="wgrad_edges_far_nhwc", dtype=_FP16),
)  # fmt: skip
