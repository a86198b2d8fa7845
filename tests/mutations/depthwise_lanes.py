"""Faults in the depthwise kernels whose lanes are channels: lanes.cu, lanes_wgrad.cu."""

from __future__ import annotations

import torch

from tests.emulated_depthwise import SMALL
from tests.mutations.mutation import Mutation


def _fault(
    name: str, fault: str, *edits: tuple[str, str], on: str = "lanes_3x3", result: str = "fprop", finite: bool = True,
) -> Mutation:  # fmt: skip
    kernel = "depthwise/lanes_wgrad" if result == "wgrad" else "depthwise/lanes"
    return Mutation(
        f"lanes: {name}", kernel, fault, edits, on, result, torch.float32, "depthwise", SMALL, finite
    )  # fmt: skip


RING = (
    _fault("a row is overwritten", "rows land over rows that are being read",
           ("            wait(&ring.empty[to.index], to.parity ^ 1);\n", ""), on="lanes_tall"),
    _fault("a row is not waited for", "warps read rows that have not landed",
           (" wait(&ring.full[next.index], next.parity);", ";"), on="lanes_tall"),
    _fault("a row is given back too early", "TMA overwrites the first row of the next step",
           ("at == ROWS - 1) reader.free(ring, cut, row + STEP_ROWS);",
            "at == ROWS - 1) reader.free(ring, cut, row + STEP_ROWS + 1);"), on="lanes_7x7"),
    _fault("rows of a run stay", "what the last step leaves in the ring is taken for the next run's rows",
           ("reader.free(ring, cut, row + STEP_ROWS < run.rows ? row + STEP_ROWS : reads);",
            "reader.free(ring, cut, row + STEP_ROWS);")),
    _fault("no wrap", "a window goes on behind the ring", ("if (window == ring_bytes) window = 0;", ""),
           on="lanes_tall"),
    _fault("a window's first row", "it is looked for behind the ring",
           ("return at < cut.stages ? at : at - cut.stages;", "return at;"), on="lanes_tall"),
    _fault("filters are not waited for", "warps read filters that others have not copied",
           ("    wait_for_barriers();\n    const Place", "    __syncwarp();\n    const Place"), on="lanes_3x3"),
    _fault("rows land over filters", "the last buffers are filled before all warps have read their filters",
           ("        if (early-- == 0) hc::wait(&ring.spare, 0);\n", ""), on="lanes_tall"),
)  # fmt: skip

PLACES = (
    _fault("no left padding", "strips begin with the first column",
           ("(p.cut.warps_q * COLS) - p.cut.left", "(p.cut.warps_q * COLS)"), on="lanes_sides"),
    _fault("no top padding", "runs begin with their first row", ("return first - cut.top;", "return first;"),
           on="lanes_sides"),
    _fault("one strip", "all strips begin at the first column",
           ("run.strip = strip - run.image * cut.strips;", "run.strip = 0;"), on="lanes_7x7"),
    _fault("equal parts", "what does not divide evenly is left out",
           ("count = (cut.per_block + (part < cut.longer)) * STEP_ROWS;", "count = cut.per_block * STEP_ROWS;"),
           on="lanes_tall"),
    _fault("one slab", "all blocks do the first channels", ("channel = slab * SLAB + lane;", "channel = lane;"),
           on="lanes_slabs"),
    _fault("one row of warps", "warps below each other do the same rows",
           ("rest / cut.warps_q * ROWS : 0;", "0 : 0;"), on="lanes_5x5"),
    _fault("lanes without channels", "they read filters that do not exist",
           ("(there ? place.lane : 0) * FILTER_PITCH", "place.lane * FILTER_PITCH")),
    _fault("channels behind the last one", "lanes without channels write the next pixel's",
           ("place.channel < CHANNELS ? cut.cols - col : 0;", "cut.cols - col;")),
)  # fmt: skip

PRODUCTS = (
    _fault("a row of the filter too few", "the last row that a window meets is left out",
           ("at < ROWS + R - 1; ++at) {\n                    Window",
            "at < ROWS + R - 2; ++at) {\n                    Window")),
    _fault("the column beside", "taps are a column early",
           ("x[b + s] * filter.of[r][s]", "x[b + (s + 1) % S] * filter.of[r][s]")),
    _fault("dgrad's filter is not flipped", "taps are in fprop's order", ("DGRAD ? TAPS - 1 - tap : tap", "tap"),
           result="dgrad"),
    _fault("no bias", "sums begin with zero", ("of[i / COLS][i % COLS] = bias;", "of[i / COLS][i % COLS] = 0;")),
    _fault("rows beyond the last", "a step leaves with all its rows", ("if (row < rows && b < cols)", "if (b < cols)")),
    _fault("columns beyond the last", "a tile leaves with all its columns",
           ("if (row < rows && b < cols)", "if (row < rows)")),
    _fault("every tile is whole", "tiles at the bottom leave with all their rows",
           ("rows >= ROWS && cols >= COLS;", "cols >= COLS;")),
)  # fmt: skip

WGRAD = (
    _fault("wgrad: the row of dy beside", "dy lands with the row of x before",
           ("dy_row = row - (R - 1);", "dy_row = row - (R - 2);"), on="lanes_5x5", result="wgrad"),
    _fault("wgrad: the first row of dy", "it is looked for where the first row of x is",
           ("reader.stage(cut, own + R - 1)", "reader.stage(cut, own)"), result="wgrad"),
    _fault("wgrad: tiles with too many columns", "x beside the last column of dy is multiplied by zero",
           ("height >= ROWS && width >= COLS", "height >= ROWS"), on="lanes_tiny", result="wgrad",
           finite=False),
    _fault("wgrad: tiles with too many rows", "rows below the last one of a run are summed, too",
           ("height >= ROWS && width >= COLS", "width >= COLS"), on="lanes_sides", result="wgrad"),
    _fault("wgrad: parts of tiles are left out", "what fills no tile is not summed",
           ("else if (height > 0)", "else if (false)"), result="wgrad"),
    _fault("wgrad: no wrap", "windows go on behind the ring",
           ("return row + stage_bytes < ring_bytes ? row + stage_bytes : 0;", "return row + stage_bytes;"),
           on="lanes_tall", result="wgrad"),
    _fault("wgrad: sums overwrite rows", "a warp writes its sums while others read rows",
           ("    hc::ptx::bar_sync(2, readers() * 32);  // all have read the last rows\n", ""), on="lanes_7x7",
           result="wgrad"),
    _fault("wgrad: sums too early", "sums are added before all warps have written them",
           ("    hc::ptx::bar_sync(2, threads);\n", ""), on="lanes_7x7", result="wgrad"),
    _fault("wgrad: one warp", "the other warps' sums are left out", ("other < threads / SLAB", "other < 1"),
           result="wgrad"),
    _fault("wgrad: channels behind the last one", "lanes without channels write the next tap's sums",
           ("if (walk.slab * SLAB + i % SLAB < CHANNELS) to[", "to["), result="wgrad"),
    _fault("wgrad: one part", "blocks of a slab overwrite each other's sums",
           ("(i64)walk.part * (TAPS * CHANNELS)", "0"), result="wgrad"),
)  # fmt: skip

MUTATIONS = (*RING, *PLACES, *PRODUCTS, *WGRAD)
