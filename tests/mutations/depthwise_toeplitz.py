"""Faults in the kernels for large depthwise filters: depthwise_toeplitz.cu, depthwise_toeplitz_wgrad.cu."""

from __future__ import annotations

import torch

from tests.mutations.mutation import Mutation


def _fault(
    name: str, fault: str, *edits: tuple[str, str], on: str = "toeplitz_13x13", result: str = "fprop",
    dtype: torch.dtype = torch.float16, shape: str = "", finite: bool = True,
) -> Mutation:  # fmt: skip
    kernel = "depthwise_toeplitz/wgrad" if result == "wgrad" else "depthwise_toeplitz/toeplitz"
    return Mutation(
        f"toeplitz: {name}", kernel, fault, edits, on, result, dtype, "depthwise_toeplitz", shape, finite=finite
    )


def _lost(
    name: str, fault: str, *edits: tuple[str, str], on: str = "toeplitz_13x13", result: str = "fprop"
) -> Mutation:
    """A fault of three products of TF32 for one of fp32."""
    return _fault(name, fault, *edits, on=on, result=result, dtype=torch.float32, shape="three products")


PLANES = (
    _fault("nothing is cleared", "what copies do not write is what memory held",
           ("hc::toeplitz::clear<THREADS>(dynamic_smem, BUFFERS * p.partition.buffer_bytes);", "")),
    _fault("copies before the zeros", "a thread's zeros overwrite what others have copied",
           ("BUFFERS * p.partition.buffer_bytes);\n    __syncthreads();", "BUFFERS * p.partition.buffer_bytes);")),
    _fault("images behind the last", "a copy reads an image that is not there",
           ("inside && image + i < s.images", "inside")),
    _fault("rows outside are read", "the rows above and below the image count as inside",
           ("(unsigned)(first + at) < (unsigned)s.height", "true"), shape="strips"),
    _fault("pieces in the wrong row", "a thread goes down its rows one by one",
           ("            planes += hop * s.row_bytes;", "            planes += s.row_bytes;"), on="toeplitz_wide"),
    _fault("planes too early", "other threads' words are not yet rounded",
           ("const_cast<char*>(ring.buffer()));\n            __syncthreads();", "const_cast<char*>(ring.buffer()));"),
           dtype=torch.float32),
    _fault("another channel", "each output channel reads its own input channel",
           ("p.in, channel / MULTIPLIER);", "p.in, channel);"), on="toeplitz_multiplier"),
)  # fmt: skip

BANDS = (
    _fault("no zeros beside the filter", "bands end in what memory held",
           ("(&of[0][0][0])[i] = 0;", ";")),
    _fault("the tap before", "pairs at odd places are those at even ones", ("[BEFORE + s - copy]", "[BEFORE + s]")),
    _fault("dgrad's filter is not flipped", "rows of the filter are in fprop's order",
           ("DGRAD ? R - 1 - r : r", "r"), result="dgrad"),
    _fault("no shift", "windows begin with the first column that the filter meets", ("BEFORE - LEAD -", "BEFORE -")),
    _fault("windows begin at the image", "groups before the image are counted as multiplied",
           ("const int at = LO + pair - tile * TILE_GROUPS;", "const int at = pair - tile * TILE_GROUPS;")),
    _fault("a group too few", "the last group of a band is left out",
           ("const bool low = at >= 0 && at < Band::GROUPS;", "const bool low = at >= 0 && at + 1 < Band::GROUPS;")),
    _fault("no bias", "sums begin with zero", ("[i] = output.bias;", "[i] = 0;")),
)  # fmt: skip

STEPS = (
    _fault("all row groups alike", "both row groups meet a row with the same row of the filter",
           ("bands.row(step - 8 * group)", "bands.row(step)")),
    _fault("steps twice", "the first row group meets the rows of the second once more",
           ("least(R < 8 ? R : 8)", "least(R)")),
    _fault("rows above are left out", "groups of which one row is inside the image begin too late",
           ("before - 7 < first ? before - 7 : first", "before < first ? before : first")),
    _fault("the last row is left out", "steps end a row too early",
           ("? before + p.staged.height : end;", "? before + p.staged.height - 1 : end;"), on="toeplitz_31x31"),
    _fault("one half twice", "both halves read the first one's rows",
           ("lane / 8 % 2 ? halves[2 * m + 1] : halves[2 * m]", "halves[2 * m]")),
    _fault("one group twice", "both groups of a pair are the first one",
           (" + lane / 16 * hc::toeplitz::GROUP_BYTES;", ";")),
    _fault("the second pair of halves", "all pairs of a warp are the first one",
           ("halves[i] = Half(p, unit.strip, task + i);", "halves[i] = Half(p, unit.strip, task + i % 2);"),
           shape="pairs of halves"),
    _fault("one part of the columns", "half tiles beside the first one are its copies",
           ("col = index / p.row_parts * (8 * N_TILES);", "col = 0;"), on="toeplitz_wide"),
)  # fmt: skip

OUTPUTS = (
    _fault("rows beyond the last", "a half tile writes all its rows",
           ("if (row_of(at, 0) + group * 8 >= end_row) return;", ""), on="toeplitz_31x31"),
    _fault("columns beyond the last", "a half tile writes all its columns",
           ("if (left > 0) hc::toeplitz::store_pair", "hc::toeplitz::store_pair"), on="toeplitz_wide"),
    _fault("images beyond the last", "halves of images that are not there are written",
           ("if (!at.has || image + at.image >= p.staged.images) continue;", "if (!at.has) continue;")),
    _fault("no second sum", "zero times an infinity stays in the sum",
           ("const bool again = output.suspect || !finite(sums);", "const bool again = output.suspect;"),
           on="toeplitz_channels", dtype=torch.bfloat16, finite=False),
    _fault("the second sum of a neighbour", "sums that are not finite become the next column's",
           ("+ threadIdx.x % 4 * 2 + i % 2;", "+ threadIdx.x % 4 * 2 + 1 - i % 2;"), on="toeplitz_channels",
           dtype=torch.bfloat16, finite=False),
)  # fmt: skip

WGRAD = (
    _fault("the copy is no other", "the copy of dy begins with the same pixel",
           ("words.word[j] >> 16 | (j < 3 ? words.word[j < 3 ? j + 1 : 0] : next) << 16;", "words.word[j];"),
           result="wgrad"),
    _fault("no copy", "words at odd places are read from dy itself",
           ("(odd ? dy_copy : buffer + p.x_bytes)", "(buffer + p.x_bytes)"), result="wgrad"),
    _fault("the copy too early", "others' part of the copy is not yet written",
           ("        __syncthreads();\n        const int left", "        const int left"), result="wgrad"),
    _fault("tiles of taps too near", "the second tile has rows of the first",
           ("m * 16 * p.x_staged.row_bytes", "m * 8 * p.x_staged.row_bytes"), on="toeplitz_31x31", result="wgrad"),
    _fault("tiles of columns are not shifted", "all tiles meet dy as the first one does",
           ("group - tile * TILE_GROUPS + FEWEST", "group + FEWEST"), result="wgrad"),
    _fault("a matrix too few", "matrices that end in dy count as beside it",
           ("first + GROUP > 0", "first >= 0"), result="wgrad"),
    _fault("images run on", "a warp goes on behind the last row of an image",
           ("row -= rows, x += x_next, dy += dy_next;", "row -= rows, dy += dy_next;"), on="toeplitz_multiplier",
           result="wgrad"),
    _fault("rows that are left over", "only whole steps are multiplied",
           ("for (; left > 0; --left) multiply_rows<1>(sums, p, walk);", ""), on="toeplitz_multiplier",
           result="wgrad"),
    _fault("one warp's sums", "the other warps' sums are lost",
           ("for (int i = 0; i < WARPS; ++i) sum +=", "for (int i = 0; i < 1; ++i) sum +="), result="wgrad"),
    _fault("sums too early", "sums are added before all warps have written theirs",
           ("    __syncthreads();\n    float* const partials", "    float* const partials"), result="wgrad"),
    _fault("sums over planes", "sums overwrite planes that other warps still read",
           ("suspect = __syncthreads_or(suspect);", ""), result="wgrad"),
    _fault("wgrad: another channel", "each filter meets the channel of its own number",
           ("p.x, filter / MULTIPLIER);", "p.x, filter);"), on="toeplitz_multiplier", result="wgrad"),
    _fault("wgrad: no second sum", "zero times an infinity stays in the sum",
           ("(suspect || sum * 0.f != 0.f)", "suspect"), on="toeplitz_channels", result="wgrad",
           dtype=torch.bfloat16, finite=False),
    _fault("wgrad: infinities of dy beside the image", "taps that meet them there stay finite",
           ("            carried |= (words.word[j] & 0x7fff7fff) + CARRIES;\n", ""), on="toeplitz_channels",
           result="wgrad", dtype=torch.bfloat16, finite=False),
    _fault("wgrad: the second sum of another tap", "a sum that is not finite becomes that of a tap further right",
           ("w = col + s - PAD_LEFT;", "w = col + s;"), on="toeplitz_channels", result="wgrad",
           dtype=torch.bfloat16, finite=False),
)  # fmt: skip

TERMS = (
    _lost("no small term of a row", "what TF32 leaves of the image does not count",
          ("multiply<Terms::SMALL_ROWS>(of_row, x, band);", "")),
    _lost("no small term of a band", "what TF32 leaves of the filter does not count",
          ("multiply<Terms::SMALL_BANDS>(of_row, x, band);", ""), result="dgrad"),
    _lost("no large term", "the product of the large terms does not count",
          ("multiply<Terms::LARGE>(of_row, x, band);", "")),
    _lost("the small term is the value", "the large term is multiplied twice",
          ("__float_as_uint(value - large_term(value))", "__float_as_uint(value)")),
    _lost("planes are rounded to TF32", "no small term of the image is left",
          ("__uint_as_float(rounded_bits(word, Elem{}))", "__uint_as_float(tf32_bits(word))")),
    _lost("the filter is rounded to TF32", "no small term of the filter is left",
          ("return rounded_bits(tap.value, tap);", "return tf32_bits(tap.value);")),
    _lost("one row of the filter", "each row's sums replace those before",
          ("(&sums[0][0])[i] += (&of_row[0][0])[i];", "(&sums[0][0])[i] = (&of_row[0][0])[i];")),
    _lost("wgrad: no small term of x", "what TF32 leaves of x does not count",
          ("multiply(small_part, small, dy, group);", ""), result="wgrad"),
    _lost("wgrad: no small term of dy", "what TF32 leaves of dy does not count",
          ("multiply(small_part, x, small_dy, group);", ""), result="wgrad"),
    _lost("wgrad: no large term", "the product of the large terms does not count",
          ("multiply(part, x, dy, group);", ""), result="wgrad"),
    _lost("wgrad: small sums are lost", "they are not added to those of large products",
          ("move(part, small_part);", ""), result="wgrad"),
    _lost("wgrad: the last part alone", "a part's sums replace those before",
          ("(&sums[0][0])[i] += (&more[0][0])[i],", "(&sums[0][0])[i] = (&more[0][0])[i],"), result="wgrad"),
    _lost("wgrad: parts of a row", "groups behind the first part are left out",
          ("(group + 2) % PART_GROUPS == 0 || group + 2 >= X_GROUPS", "group + 2 == PART_GROUPS"),
          on="toeplitz_wide", result="wgrad"),
)  # fmt: skip

MUTATIONS = (*PLANES, *BANDS, *STEPS, *OUTPUTS, *WGRAD, *TERMS)
