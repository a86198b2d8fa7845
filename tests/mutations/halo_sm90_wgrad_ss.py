"""Faults in halo_sm90/wgrad_ss.cu, its parts and its sum: which boxes come, taps, gaps, products, sums, infinities."""

from __future__ import annotations

import torch

from tests.emulated_halo_sm90_wgrad_ss import FIRST
from tests.mutations.mutation import Mutation

_ONE_PART, _MANY_PARTS = "wgrad by descriptor, one part", "wgrad by descriptor, many parts"


def _fault(
    name: str, fault: str, *edits: tuple[str, str], on: str, shape: str = FIRST, finite: bool = True,
    kernel: str = "halo_sm90/wgrad_ss",
) -> Mutation:  # fmt: skip
    return Mutation(
        f"sm90 wgrad_ss: {name}", kernel, fault, edits, on, "wgrad", torch.float16, "halo_sm90", shape, finite
    )


_SUM = "halo_sm90/wgrad_ss_sum"

MUTATIONS = (
    # wgrad_ss/tile.cuh
    _fault("pixels behind boxes stay as they are", "steps read what shared memory had before",
           ("    for (int i = threadIdx.x; i < pieces; i += THREADS)\n", "    for (int i = pieces; i < pieces; ++i)\n"),
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
    # wgrad_ss/wgrad_ss_sum.cu and mend.cuh
    _fault("a part is lost", "the first part does not count",
           ("sum_parts(p, place, lane, total);", "sum_parts(p, place, lane + 1, total);"),
           on="sm90_wgrad_ss_of_28", shape=_MANY_PARTS, kernel=_SUM),
    _fault("sums that are NaN stay", "an infinity in a gap makes a NaN",
           ("if (__syncthreads_or(is_nan))", "if (__syncthreads_or(false))"), on="sm90_wgrad_ss_loose", finite=False,
           kernel=_SUM),
    _fault("mended by the wrong tap", "a sum that is computed again has the rows of x of the first tap",
           ("at.row + r * p.dil_h - p.pad_top", "at.row - p.pad_top"), on="sm90_wgrad_ss_loose", finite=False,
           kernel=_SUM),
)  # fmt: skip
