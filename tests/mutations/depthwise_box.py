"""Faults in the depthwise kernels whose planes come as boxes: box.cu, box_wgrad.cu."""

from __future__ import annotations

import torch

from tests.emulated_depthwise import SMALL
from tests.mutations.mutation import Mutation


def _fault(
    name: str, fault: str, *edits: tuple[str, str], on: str = "box_7x7", result: str = "fprop", finite: bool = True,
) -> Mutation:  # fmt: skip
    kernel = "depthwise/box_wgrad" if result == "wgrad" else "depthwise/box"
    return Mutation(f"box: {name}", kernel, fault, edits, on, result, torch.float32, "depthwise", SMALL, finite)


RING = (
    _fault("a unit is not waited for", "threads read boxes that have not landed",
           ("        wait(&full[in.index], in.parity);\n", ""), on="box_many"),
    _fault("a unit is overwritten", "TMA fills a buffer that is being read",
           ("        __syncthreads();\n        if (threadIdx.x == 0) ask_next(in.index, ask);",
            "        if (threadIdx.x == 0) ask_next(in.index, ask);"), on="box_many", result="wgrad"),
    _fault("a unit counts too early", "half of a unit's bytes are waited for",
           ("mbarrier_arrive_expect_tx(&full[buffer], cut.box_bytes);",
            "mbarrier_arrive_expect_tx(&full[buffer], cut.box_bytes / 2);"), on="box_5x5"),
    _fault("neighbouring units", "a block asks for units of others",
           ("        asked += cut.parts;", "        asked += 1;"), on="box_many"),
    _fault("one parity", "a buffer's second unit counts as landed", ("        in.advance(BUFFERS);",
           "        if (++in.index == BUFFERS) in.index = 0;"), on="box_many"),
)  # fmt: skip

PLACES = (
    _fault("no top padding", "boxes begin with the strip's first row", ("unit.row - cut.top,", "unit.row,"),
           on="box_sides"),
    _fault("no left padding", "boxes begin with the first column", ("-cut.left - LEAD,", "0,"), on="box_sides"),
    _fault("one strip", "all strips are the first", ("row(index % cut.strips * cut.rows)", "row(0)"), on="box_5x5"),
    _fault("one image", "units begin with neighbouring images",
           ("image(index / cut.strips * cut.images)", "image(index / cut.strips)")),
    _fault("images without a halo", "the box of an image is taken to have the strip's rows",
           ("(image * (cut.rows + R - 1) + row)", "(image * cut.rows + row)")),
    _fault("one channel", "filters of a channel read channels of their own",
           ("barrier, channel / MULTIPLIER, unit", "barrier, channel, unit"), on="box_5x5_multiplier"),
    _fault("images behind the last one", "they are written", (" && unit.image + place.image < p.images", "")),
    _fault("rows behind the last one", "they are written",
           ("p.out_h, p.out_rows - unit.row - place.row);\n        }", "p.out_h, ROWS);\n        }"),
           on="box_many"),
    _fault("columns too early", "a window begins with what the filter does not meet",
           ("[(LEAD + col + s) / 4].of[(LEAD + col + s) % 4]", "[(col + s) / 4].of[(col + s) % 4]"), on="box_sides"),
)  # fmt: skip

WGRAD = (
    _fault("wgrad: threads without a tile", "they add what they find behind the unit",
           ("active = image < cut.images;", "active = true;"), on="box_5x5_multiplier", result="wgrad"),
    _fault("wgrad: one strip of dy", "all strips of x meet the first", ("barrier, 0, unit.row, filter,",
           "barrier, 0, 0, filter,"), on="box_5x5", result="wgrad"),
    _fault("wgrad: dy of one image", "all images of a unit meet the first",
           ("row = place.image * p.cut.rows + place.row;", "row = place.row;"), result="wgrad"),
    _fault("wgrad: one channel", "filters of a channel read channels of their own",
           ("barrier, filter / MULTIPLIER, unit", "barrier, filter, unit"), on="box_5x5_multiplier", result="wgrad"),
    _fault("wgrad: one part", "blocks of a filter write the same sums",
           ("((i64)first * p.filters + filter) * TAPS", "(i64)filter * TAPS"), on="box_many", result="wgrad"),
    _fault("wgrad: sums are read early", "warps add sums that others have not written",
           ("    __syncthreads();\n    const int lane", "    const int lane"), result="wgrad"),
    _fault("wgrad: a warp is left out", "its sums are lost", ("warp < WARPS; ++warp", "warp < WARPS - 1; ++warp"),
           result="wgrad"),
    _fault("wgrad: sums that are not finite", "they stay",
           ("        if (sum * 0.f != 0.f) sum = hc::warp_sum(sum_again(p, filter, first, tap / S, tap % S));\n", ""),
           on="box_border", result="wgrad", finite=False),
    _fault("wgrad: summed again beyond the images", "images are read that do not exist",
           (" && image < p.images; ++image", "; ++image"), result="wgrad", finite=False),
    _fault("wgrad: summed again without padding", "pixels meet others than in the boxes",
           ("r - p.cut.top, s - p.cut.left", "r, s"), on="box_border", result="wgrad", finite=False),
)  # fmt: skip

MUTATIONS = (*RING, *PLACES, *WGRAD)
