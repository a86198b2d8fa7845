"""Faults in the family of grouped channels_last layers: grouped_sm90/conv.cu and wgrad.cu."""

from __future__ import annotations

import torch

from tests.mutations.mutation import Mutation

_FP16 = torch.float16


def _fault(
    name: str, fault: str, *edits: tuple[str, str], on: str = "grouped_strips", result: str = "fprop",
    dtype: torch.dtype = _FP16, finite: bool = True,
) -> Mutation:  # fmt: skip
    return Mutation(
        f"grouped: {name}", "grouped_sm90/conv", fault, edits, on, result, dtype, "grouped_sm90", "", finite
    )


def _wgrad(
    name: str, fault: str, *edits: tuple[str, str], on: str = "grouped_wgrad_strips", finite: bool = True,
) -> Mutation:  # fmt: skip
    return Mutation(
        f"grouped: wgrad: {name}", "grouped_sm90/wgrad", fault, edits, on, "wgrad", _FP16, "grouped_sm90", "", finite
    )


_PRODUCER_WAITS = "            wait(&smem.empty[at.index], at.parity ^ 1);\n"
_CONSUMER_WAITS = "            wait(&smem.full[at.index], at.parity);\n"
_FENCE = "            ptx::fence_proxy_async_shared();  // before TMA"

MUTATIONS = (
    _fault("a stage is filled again too early", "rows land over rows that are being read", (_PRODUCER_WAITS, ""),
           on="grouped_wrap"),
    _fault("a stage is not waited for", "warps read rows that have not landed", (_CONSUMER_WAITS, "")),
    _fault("outputs are not waited for", "outputs leave before all warps have written them",
           ("            wait(&smem.y_full[at.index], at.parity);\n", "")),
    _fault("a buffer of outputs is taken too early", "warps write over outputs that are being sent",
           ("            if (writes) wait(&smem.y_empty[out.index], out.parity ^ 1);\n", "")),
    _fault("a buffer of outputs is given back too early", "TMA still reads it",
           ("            ptx::cp_async_bulk_wait_group_read<0>();\n", "")),
    _fault("no fence", "outputs may reach TMA late",
           (_FENCE + " writes x, and before it reads y\n", "")),
    _fault("outputs of the first rows", "sums that lack taps are written",
           ("const bool writes = band >= WARMUP;", "const bool writes = band >= WARMUP - 1;")),
    _fault("sums stay in their row", "what a row of the filter sums up is not handed on to the next one",
           ("sums[r ? r - 1 : 0][i][j][e]", "sums[r][i][j][e]")),
    _fault("no swizzle", "atoms are looked for where TMA did not put them",
           ("(atom ^ (col & 7))", "atom")),
    _fault("columns beyond a stage", "lanes read what lies behind a row of a stage",
           ("(col < x_cols ? col : x_cols - 1, place.group", "(col, place.group"), on="eight_by_eight_nhwc"),
    _fault("filters in the order of columns", "of TF32 the two sums of a lane lie in one atom",
           ("SINGLE ? col % 2 * 4 + col / 2 : col", "col"), dtype=torch.float32),
    _fault("groups behind the last one", "the last slab reads filters that do not exist",
           ("const bool there = group < p.cut.groups;", "const bool there = true;")),
    _fault("one strip", "all strips begin at the first column",
           ("run.strip = column - run.image * cut.strips;", "run.strip = 0;")),
    _fault("equal shares", "what does not divide evenly is left out",
           ("end = at + cut.per_block + (part < cut.longer);", "end = at + cut.per_block;"), on="grouped_wrap"),
    _fault("the atom that is left over", "an odd number of taps loses the last one",
           ("mma_half(sums[r][i][j], a.half[i], filter.b[r][ROW_ATOMS - 1][j], Elem{});", ";")),
    _fault("the bias of the other filter", "a lane's two filters have their biases exchanged",
           ("filter.bias[j][e % 2]", "filter.bias[j][1 - e % 2]")),
    _fault("dgrad filters not flipped", "channels and filters of a group are taken in the wrong order",
           ("lane % 4 * (ATOM_ELEMS / 4) * p.w_channel;", "lane % 4 * (ATOM_ELEMS / 4) * p.w_filter;"), result="dgrad"),
    _wgrad("a stage is filled again too early", "rows land over rows that are being read", (_PRODUCER_WAITS, ""),
           on="grouped_wgrad_wrap"),
    _wgrad("a stage is not waited for", "warps read rows that have not landed", (_CONSUMER_WAITS, "")),
    _wgrad("columns behind the last one", "dy's zeros multiply an infinity",
           ("x[k][pair][word] &= masks[k][word / 2];", ";"), on="grouped_wgrad_loose", finite=False),
    _wgrad("masks of the other columns", "the masks of the two eights change places",
           ("masks[k][word / 2]", "masks[k][word % 2]")),
    _wgrad("rows behind the last one", "rows of dy that do not exist are multiplied",
           ("(unsigned)(row - r) >= (unsigned)rows", "row < r"), on="grouped_wgrad_loose", finite=False),
    _wgrad("rows do not age", "every tap meets the youngest row of dy", ("                age(y);\n", "")),
    _wgrad("rows of other strips", "rows of dy begin at the first column",
           ("channel, run.strip * STRIP_COLS, row, run.image", "channel, 0, row, run.image")),
    _wgrad("bytes of a stage", "a stage counts as landed before dy has",
           ("smem.x_bytes + (band < run.bands ? Y_BYTES : 0)", "smem.x_bytes")),
)  # fmt: skip
