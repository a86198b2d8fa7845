"""Faults in the depthwise marches: march.cu, march_wgrad.cu and their headers."""

from __future__ import annotations

import torch

from tests.mutations.mutation import Mutation


def _fault(
    name: str, fault: str, *edits: tuple[str, str], on: str, result: str = "fprop",
    dtype: torch.dtype = torch.float32, finite: bool = True,
) -> Mutation:  # fmt: skip
    kernel = "depthwise/march_wgrad" if result == "wgrad" else "depthwise/march"
    return Mutation(name, kernel, fault, edits, on, result, dtype, family="depthwise", finite=finite)


ROWS = (
    _fault("march: rows above the image", "the row above the image counts as inside",
           ("row < 0 ? ceil_div(-row, dil) : 0", "row < 0 ? ceil_div(-row, dil) - 1 : 0"),
           on="march_3x3"),
    _fault("march: rows below the image", "the row below the image counts as inside",
           ("ceil_div(extent - row, dil) : 0", "ceil_div(extent - row, dil) + 1 : 0"), on="march_5x5"),
    _fault("march: the last strip has all its rows", "rows below the image are written",
           ("left < p.strip_rows ? left : p.strip_rows", "p.strip_rows"), on="march_strips"),
    _fault("march: a strip starts a row late", "the first row of each strip but the first is not written",
           ("place.first;", "(place.first ? place.first + 1 : 0);"), on="march_strips"),
    _fault("march: an incomplete row leaves", "a row leaves before the last tap row was added",
           ("FIRST_COMPLETE = DGRAD ? MET_ROWS - 1 : R - 1", "FIRST_COMPLETE = DGRAD ? MET_ROWS - 1 : R - 2"),
           on="march_3x3"),
    _fault("march: classes are not told apart", "all rows of a dilated layer belong to class 0",
           ("int(strip) / p.strips", "0"), on="march_dilated"),
    _fault("march: a row of the gradient's class too far", "rows of dx are shifted by the class",
           ("p.pad_top - place.cls : -place.cls", "p.pad_top : -place.cls"), on="march_dilated", result="dgrad"),
    _fault("march: rows of dx above the image", "rows that the padding cuts off are written",
           ("!DGRAD || march.written.has((t - FIRST_COMPLETE) * DONE + i)", "true"), on="march_stride_even",
           result="dgrad"),
    _fault("march: the padding's rows are read from the strip's own", "the first input row ignores the padding",
           ("+ place.cls - p.pad_top", "+ place.cls"), on="march_3x3"),
)  # fmt: skip

RING = (
    _fault("march: the ring is a row short", "a row of sums is begun again before it has left",
           ("RING = DGRAD ? MET_ROWS * STRIDE_H : MET_ROWS", "RING = DGRAD ? MET_ROWS * STRIDE_H : MET_ROWS - 1"),
           on="march_5x5"),
    _fault("march: sums are not begun", "a row of sums goes on from the row before",
           ("sums[b][c] = bias[c];", "sums[b][c] += bias[c];"), on="march_3x3"),
    _fault("march: no bias", "sums begin with zero", ("sums[b][c] = bias[c];", "sums[b][c] = 0;"), on="march_3x3"),
    _fault("march: slots stay where they are", "after a period the row of a slot is another one",
           ("moved[i] = state.rows[(i + PERIOD) % AHEAD]", "moved[i] = state.rows[i]"), on="march_5x5"),
    _fault("march: rows are asked for a step late", "a slot gets the row after the one that it is for",
           ("if (is_read(i % PERIOD))", "if (i && is_read(i % PERIOD))"),
           on="march_3x3"),
    _fault("march: the wrong row leaves", "another row of the ring is stored",
           ("(u + R * PERIOD - (R - 1)) / STRIDE_H % RING", "(u + R * PERIOD - R) / STRIDE_H % RING"), on="march_3x3"),
    _fault("march: rows that are needed are left out", "the last input row that an output meets counts as one between",
           ("u % STRIDE_H < R", "u % STRIDE_H < R - 1"), on="march_stride_mixed"),
)  # fmt: skip

COLUMNS = (
    _fault("march: the column right of the image", "a vector right of the row counts as inside",
           ("< (unsigned)extent;\n            mask", "<= (unsigned)extent;\n            mask"), on="march_3x3"),
    _fault("march: no left border", "vectors left of the row count as inside",
           ("(unsigned)(first - LEAD + v * VEC) < (unsigned)extent", "first - LEAD + v * VEC < extent"),
           on="march_3x3"),
    _fault("march: a vector loses its lead", "columns are read as if the first vector began with the first one",
           ("e = VEC > 1 ? (LEAD + col) % VEC", "e = VEC > 1 ? col % VEC"),
           on="march_3x3"),
    _fault("march: the high half for the low", "halves of a word are exchanged",
           ("index % 2 ? word >> 16 : word", "index % 2 ? word : word >> 16"), on="march_large", dtype=torch.float16),
    _fault("march: a lone half is taken for a high one", "a column that is moved alone is read from the wrong half",
           ("alone ? 0 : e", "e"), on="march_stride", dtype=torch.float16),
    _fault("march: halves are packed in the wrong order", "neighbours change places",
           ("from_acc_pair<Half>(low, high)", "from_acc_pair<Half>(high, low)"), on="march_nhwc", dtype=torch.bfloat16),
    _fault("march: taps that do not meet", "dx of every column meets every tap",
           ("!SCATTER || (PHASE", "true || (PHASE"), on="march_stride", result="dgrad"),
    _fault("march: the other phase", "columns of dx alternate the wrong way",
           ("SCATTER ? (PHASE + b - s * DIL + BEFORE", "SCATTER ? (b - s * DIL + BEFORE"), on="march_stride",
           result="dgrad"),
    _fault("march: the dilation of columns", "taps are neighbours", ("b * STRIDE + s * DIL;", "b * STRIDE + s;"),
           on="march_dilated"),
    _fault("march: threads beyond the last", "threads without outputs write",
           ("    if (index >= p.threads) return;\n", ""), on="march_nhwc"),
    _fault("march: filters of another channel", "each output channel reads its own input channel",
           ("place.channel / MULTIPLIER", "place.channel"), on="march_nhwc_odd"),
    _fault("march: columns in memory", "columns are taken for neighbours in memory",
           ("IN_COL ? IN_COL : p.in_w", "1"), on="march_nhwc_storage"),
)  # fmt: skip

WGRAD = (
    _fault("march wgrad: dy beyond the strip", "rows of dy below the strip take part",
           ("item.steps > 0 ? unsigned(item.steps - R + 1) : 0u", "item.steps > 0 ? unsigned(item.steps) : 0u"),
           on="march_3x3", result="wgrad"),
    _fault("march wgrad: the ring keeps the last item's rows", "an item meets rows of dy of the one before",
           ("int filter) : ring{} {", "int filter) {"), on="march_3x3", result="wgrad"),
    _fault("march wgrad: another slot of the ring", "each x row meets rows of dy one too young",
           ("(u / STRIDE_H + RING - i) % RING], x)", "(u / STRIDE_H + i) % RING], x)"),
           on="march_3x3", result="wgrad"),
    _fault("march wgrad: no second sum", "zero times an infinity stays in the sum",
           ("if (!finite(sums)) sum_again(sums, p, filter);", ""), on="march_stride_even", result="wgrad",
           finite=False),
    _fault("march wgrad: no exchange", "the sums of a warp's other lanes are lost",
           ("all[i] += __shfl_xor_sync(0xffffffffu, all[i], far)", "__shfl_xor_sync(0xffffffffu, all[i], far)"),
           on="march_3x3", result="wgrad"),
    _fault("march wgrad: lanes of other filters are added", "an exchange goes over all lanes",
           ("far >= LANES", "far >= 1"), on="march_nhwc", result="wgrad"),
    _fault("march wgrad: no barrier between warps", "a warp adds to sums that are not there yet",
           ("        __syncthreads();\n    }\n}", "    }\n}"), on="march_3x3", result="wgrad"),
    _fault("march wgrad: a warp overwrites", "only the last warp's sums stay",
           ("writer == 0 ? all[i]", "writer >= 0 ? all[i]"), on="march_3x3", result="wgrad"),
    _fault("march wgrad: filters beyond the last", "partial sums are written beyond the filter",
           ("        if (first + at < p.filters)\n", ""), on="march_many_filters", result="wgrad"),
    _fault("march wgrad: items beyond the last", "a thread without an item does one",
           ("item_index(p, i) < p.items; ++i)\n            march", "true; ++i)\n            march"),
           on="march_3x3", result="wgrad"),
)  # fmt: skip

MUTATIONS = (*ROWS, *RING, *COLUMNS, *WGRAD)
