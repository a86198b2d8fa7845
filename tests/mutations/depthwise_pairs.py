"""Faults in the depthwise kernel that multiplies channel pairs: pairs.cu."""

from __future__ import annotations

import torch

from tests.mutations.mutation import Mutation


def _fault(
    name: str, fault: str, *edits: tuple[str, str], on: str, result: str = "fprop",
    dtype: torch.dtype = torch.float16, finite: bool = True,
) -> Mutation:  # fmt: skip
    return Mutation(name, "depthwise/pairs", fault, edits, on, result, dtype, family="depthwise", finite=finite)


STAGING = (
    _fault("pairs: the swizzle of the column beside", "chunks are looked for where the next column has them",
           ("(chunk ^ (col / COLS_OF_LINE", "(chunk ^ ((col + 1) / COLS_OF_LINE"), on="pairs_5x5"),
    _fault("pairs: no left padding", "boxes begin with the strip's first column",
           ("col = run.strip * p.strip_cols - p.left;", "col = run.strip * p.strip_cols;"), on="pairs_3x3"),
    _fault("pairs: no top padding", "windows begin with the output's row",
           ("(run.first + i) * BAND - p.top - p.lead;", "(run.first + i) * BAND - p.lead;"), on="pairs_3x3"),
    _fault("pairs: no lead", "outputs are complete one row of patches after they are written",
           ("(run.first + i) * BAND - p.top - p.lead;", "(run.first + i) * BAND - p.top;"), on="pairs_lead"),
    _fault("pairs: one strip", "all strips read the first one's columns",
           ("col = run.strip * p.strip_cols - p.left;", "col = -p.left;"), on="pairs_7x7"),
    _fault("pairs: the first slab", "all slabs read the first one's channels",
           ("const int first_channel = walk.slab * SLAB_CHANNELS;", "const int first_channel = 0;"), on="pairs_many"),
    _fault("pairs: a stage too many is padding", "the last stage with rows of the image is left out",
           ("return row >= p.rows ||", "return row + BAND > p.rows ||"), on="pairs_3x3"),
    _fault("pairs: padding above is multiplied", "a stage that nobody brought is multiplied",
           ("const bool empty = is_padding(p, row_of_stage(p, run, i)), writes",
            "const bool empty = row_of_stage(p, run, i) >= p.rows, writes"), on="pairs_padding"),
    _fault("pairs: stages too few are waited for", "a stage is read before it is there",
           ("            wait(&smem.full[at.index], at.parity);\n", ""), on="pairs_3x3"),
    _fault("pairs: stages are overwritten", "a stage is asked for while it is read",
           ("            wait(&smem.empty[at.index], at.parity ^ 1);\n", ""), on="pairs_many"),
    _fault("pairs: handed back too early", "the engine may write what is still read",
           ("            ptx::fence_proxy_async_shared();  // before TMA writes x, and before it reads y\n",
            ""), on="pairs_5x5"),
    _fault("pairs: parts overlap", "a block begins with the last band of the one before",
           ("at = part * cut.per_block + (part < cut.longer ? part : cut.longer);",
            "at = part * cut.per_block + (part < cut.longer ? part : cut.longer) - (part > 0);"), on="pairs_5x5"),
)  # fmt: skip

PRODUCTS = (
    _fault("pairs: the tap above", "rows of the filter are one row late",
           ("half / GROUPS - pixel / PATCH_COLS;", "half / GROUPS - pixel / PATCH_COLS - 1;"), on="pairs_3x3"),
    _fault("pairs: the tap beside", "columns of the filter are one column late",
           ("* 4 + lane % 4 - pixel % PATCH_COLS;", "* 4 + lane % 4 - pixel % PATCH_COLS - 1;"),
           on="pairs_3x3"),
    _fault("pairs: rows of patches have one age", "a row's taps are those of the first row of patches",
           ("const int r = age * PATCH_ROWS + half", "const int r = half"), on="pairs_3x3"),
    _fault("pairs: channels change places", "the second channel of a pair has the first one's taps",
           ("unsigned(at[R * S]) << 16", "unsigned(at[0]) << 16"), on="pairs_3x3"),
    _fault("pairs: the last tap", "taps of the last column are left out",
           ("r < R && s >= 0 && s < S;", "r < R && s >= 0 && s < S - 1;"), on="pairs_5x5"),
    _fault("pairs: the oldest sums", "the last products of a window are left out",
           ("return age * HALVES + 2 * product < WINDOW_ROWS * GROUPS;",
            "return age * HALVES + 2 * product + 2 < WINDOW_ROWS * GROUPS;"), on="pairs_7x7"),
    _fault("pairs: sums stay", "the window moves down and its sums do not",
           ("                move_on(sums, taps);\n", ""), on="pairs_3x3"),
    _fault("pairs: no bias", "sums begin with zero", ("HAS_BIAS && c < p.channels ? to_acc(p.bias[c]) : 0.f", "0.f"),
           on="pairs_3x3"),
    _fault("pairs: the rows of a product", "all of x is read from the first row",
           ("(x + half / GROUPS * row_bytes + places", "(x + places"), on="pairs_3x3"),
    _fault("pairs: windows of patches that are not there", "they are read behind the row",
           ("(col < behind ? col : behind)", "col"), on="pairs_3x3"),
    _fault("pairs: no second sum", "zero times an infinity stays in the sum",
           ("if (!finite(sums[LIVE - 1]))", "if (false)"), on="pairs_5x5", dtype=torch.bfloat16, finite=False),
    _fault("pairs: the second sum of a neighbour", "sums that are not finite become those a column further right",
           ("x_col = col + at + s - p.left;", "x_col = col + at + s + 1 - p.left;"), on="pairs_5x5",
           dtype=torch.bfloat16, finite=False),
    _fault("pairs: the second sum of a channel", "sums that are not finite become those of the first channel",
           ("const int channel = place.channel + i % (2 * PAIRS),", "const int channel = place.channel,"),
           on="pairs_sides", dtype=torch.bfloat16, finite=False),
)  # fmt: skip

LEAVING = (
    _fault("pairs: the patch beside", "a lane writes what the next patch has",
           ("const int at = out_col(t, lane % 4 * 2 + e);", "const int at = out_col(t, lane % 4 * 2 + 1 - e);"),
           on="pairs_3x3"),
    _fault("pairs: one row of a patch", "the rows of a patch are written over each other",
           ("? patch_row * y_row + place.in_row(at) : -1;", "? place.in_row(at) : -1;"), on="pairs_3x3"),
    _fault("pairs: the band before", "bands leave one band too far up",
           ("(run.first + band) * BAND + row, run.image);", "(run.first + band) * BAND + row - 1, run.image);"),
           on="pairs_5x5"),
    _fault("pairs: a band leaves too early", "the engine reads before all warps have written",
           ("            wait(&smem.y_full[at.index], at.parity);\n", ""), on="pairs_3x3"),
    _fault("pairs: a band is overwritten while it leaves", "the engine may still read it",
           ("            if (writes) wait(&smem.y_empty[out.index], out.parity ^ 1);\n", ""), on="pairs_5x5"),
    _fault("pairs: warm-up bands are written", "outputs leave before they are complete",
           ("writes = i >= WARMUP;", "writes = i + 1 >= WARMUP;"), on="pairs_3x3"),
    _fault("pairs: dgrad's rows", "bands of dx leave with the strip's first row",
           ("(run.first + band) * BAND + row, run.image);", "band * BAND + row, run.image);"), on="pairs_5x5",
           result="dgrad"),
)  # fmt: skip

MUTATIONS = (*STAGING, *PRODUCTS, *LEAVING)
