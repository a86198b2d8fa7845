"""Faults in halo_sm80_wgrad/wgrad.cu and its parts: work, window, multiply, sums."""

from __future__ import annotations

import torch

from tests.mutations.mutation import Mutation

_FP16 = torch.float16


def _fault(
    name: str, fault: str, *edits: tuple[str, str], on: str, dtype: torch.dtype = torch.float32, shape: str = "",
    finite: bool = True,
) -> Mutation:  # fmt: skip
    kernel = "halo_sm80_wgrad/wgrad"
    return Mutation(f"wgrad: {name}", kernel, fault, edits, on, "wgrad", dtype, "halo_sm80_wgrad", shape, finite)


MUTATIONS = (
    # work.cuh and the stages
    _fault("no barrier before multiplying", "warps read words that others have not staged yet",
           ("    __syncthreads();\n        multiply(", "    multiply("), on="wgrad_stem"),
    _fault("no barrier after multiplying", "a warp stages over words that others still multiply",
           ("place);\n        __syncthreads();\n    }\n}\n#endif", "place);\n    }\n}\n#endif"), on="wgrad_strips"),
    _fault("a stage too many", "parts overlap by one stage",
           ("(part + 1) / p.parts - first)", "(part + 1) / p.parts - first + 1)"), on="wgrad_stem"),
    _fault("strips do not follow each other", "a block stays in its strip of columns",
           ("if (++strip < p.strips) return;", "if (strip < p.strips) return;"), on="wgrad_strips"),
    _fault("tiles of a strip by strips", "a stage's number is split by the wrong extent",
           ("const i64 column = stage / p.row_tiles;", "const i64 column = stage / p.strips;"), on="wgrad_one_image"),
    _fault("the same image twice", "both halves of a word are of the lower image",
           ("at.image * p.image_step + (p.image_step > 1 ? i : 0)", "at.image * p.image_step"), on="wgrad_stem_odd",
           dtype=_FP16),
    _fault("the same tile twice", "both halves of a word are of the lower tile",
           ("(at.row_tile * p.row_tile_step + (p.row_tile_step > 1 ? i : 0))", "(at.row_tile * p.row_tile_step)"),
           on="wgrad_one_image_odd", dtype=_FP16),
    _fault("an image behind the last one", "an odd image meets one that does not exist",
           ("image[i] < p.n ? p.p - p0[i] : 0", "p.p - p0[i]"), on="wgrad_stem_odd", dtype=_FP16),
    _fault("the halves' masks change places", "pixels below the image are multiplied, others are not",
           ("(row < rows[0] ? 0xffffu : 0u)", "(row < rows[HALVES - 1] ? 0xffffu : 0u)"),
           ("(row < rows[HALVES - 1] ? 0xffff0000u", "(row < rows[0] ? 0xffff0000u"), on="wgrad_one_image_odd",
           dtype=_FP16),
    _fault("channels by taps", "rows of the product are split by the wrong extent",
           ("CHANNELS_INNER ? row % TILE_C : row / (R * S)", "CHANNELS_INNER ? row % TILE_C : row / S"),
           on="wgrad_stem"),
    # window.cuh
    _fault("columns right of the image", "the column right of the image counts as inside",
           ("(unsigned)(from.col + at.col) < (unsigned)from.width",
            "(unsigned)(from.col + at.col) <= (unsigned)from.width"),
           on="channels_last_odd"),
    _fault("columns left of the image", "columns left of the image count as inside",
           ("(unsigned)(from.col + at.col) < (unsigned)from.width", "from.col + at.col < from.width"),
           on="wgrad_pairs"),
    _fault("lines below the image", "the line below the image counts as inside",
           ("(unsigned)(from.line[i] + at.line) < (unsigned)from.height",
            "(unsigned)(from.line[i] + at.line) <= (unsigned)from.height"), on="four_sides"),
    _fault("channels behind the last one", "blocks stage the channels of the next group, or of no tensor",
           ("at.channel < from.channels &&", "true &&"), on="wgrad_wide_groups", shape="parts of a group"),
    _fault("groups behind the last one", "blocks of several groups stage groups that do not exist",
           ("groups_left * of_group", "TILE_G * of_group"), on="wgrad_groups", shape="several groups"),
    _fault("no lead", "rows begin at the padding, not at an aligned column",
           ("p.pad_left - p.lead;", "p.pad_left;"), on="wgrad_stem"),
    _fault("planes change places", "a load's columns go to the wrong residues",
           ("lane[first + i * PLANES]", "lane[RUN * first + i]"), on="wgrad_stem"),
    _fault("the image's padding on the other side", "columns are shifted by the padding at the top",
           ("tile.q0 * STRIDE_W - p.pad_left", "tile.q0 * STRIDE_W - p.pad_top"), on="four_sides"),
    _fault("halves change places", "the pixel of the lower tile stands in the upper half of x and dy",
           ("pixel[0].bits | unsigned(pixel[1].bits) << 16", "pixel[1].bits | unsigned(pixel[0].bits) << 16"),
           on="wgrad_stem_odd", dtype=_FP16),
    _fault("idle threads stage too", "units behind the last one are staged over other words",
           ("step * THREADS + (int)threadIdx.x >= UNITS", "false"), on="wgrad_stem"),
    _fault("a NaN becomes infinite", "TF32 cuts a NaN's payload off",
           ("pixel[0] == pixel[0] ? ptx::cvt_rna_tf32(pixel[0]) : 0x7fffffffu", "ptx::cvt_rna_tf32(pixel[0])"),
           on="wgrad_groups", finite=False),
    # multiply.cuh
    _fault("no masks", "pixels that are no outputs multiply an infinity by zero",
           ("a[k] &= masks[k / 2];", "a[k] &= 0xffffffffu;"), on="wgrad_loose_end", finite=False),
    _fault("masks of the other pixels", "the masks of a lane's two pixels change places",
           ("masks[k / 2]", "masks[1 - k / 2]"), on="wgrad_pairs"),
    _fault("a step too few", "the last pixels of a row are left out",
           ("col = whole; col < tile.cols;", "col = whole; col + STEP <= tile.cols;"), on="wgrad_pairs"),
    _fault("rows by columns' stride", "a tile's rows are as far apart as its columns",
           ("(STRIDE_H * LINE_PITCH) + col;", "(STRIDE_W * LINE_PITCH) + col;"), on="padding_with_stride"),
    _fault("taps without dilation", "taps of a column are neighbours",
           ("p.lead + at.s * DIL_W", "p.lead + at.s"), on="dilated_strided_coprime"),
    _fault("operands change places", "the lower and the upper eight rows of A change places",
           ("x[rows.a[i][0]], x[rows.a[i][1]], x[", "x[rows.a[i][1]], x[rows.a[i][0]], x["), on="wgrad_pairs"),
    # pixel_pairs.cuh
    _fault("the first rows in the other buffer", "what is multiplied first is not what was staged first",
           ("    const Lines lines(p, place);\n    Position at(p, work.first), next = at;\n    stage_rows(smem[0]",
            "    const Lines lines(p, place);\n    Position at(p, work.first), next = at;\n    stage_rows(smem[1]"),
           on="wgrad_stem", dtype=_FP16),
    _fault("upper taps read lower halves", "of two words the wrong halves are taken",
           ("STRIDE_W == 1 ? 0x5432 : 0x7632", "STRIDE_W == 1 ? 0x5432 : 0x5410"), on="wgrad_stem", dtype=_FP16),
    _fault("a word further", "the neighbouring pixel's tap is looked for in the wrong word",
           ("first = x[pair], second = x[pair + REACH];", "first = x[pair], second = x[pair];"),
           on="wgrad_groups", dtype=_FP16, shape="several groups"),
    _fault("columns behind the last one", "words behind the last column multiply an infinity by zero",
           ("a[k] &= k < 2 ? masks[0] : masks[1];", ";"), on="wgrad_loose_pairs", dtype=_FP16, finite=False),
    _fault("taps from an even column", "the first tap of a row is taken from the wrong half of its word",
           ("row / 16 % TAP_PAIRS * 2 + row / 8 % 2 - FIRST_HALF", "row / 16 % TAP_PAIRS * 2 + row / 8 % 2"),
           on="wgrad_stem", dtype=_FP16),
    # pieces.cuh
    _fault("pixels behind the last one", "lanes without a pixel multiply an infinity by zero",
           ("LAST && !there ? zeros : x + lanes.a[i]", "x + lanes.a[i]"), on="wgrad_loose_pieces", dtype=_FP16,
           finite=False),
    _fault("no zeros", "the piece of zeros is not written",
           ("if (threadIdx.x < PIECE_WORDS * BUFFERS) smem", "if (false) smem"), on="wgrad_groups_nhwc", dtype=_FP16),
    _fault("pixels of one row", "a lane's pixel does not go on in the next row",
           ("if (col >= cols) col -= cols, ++row;", ""), on="wgrad_groups_nhwc", dtype=_FP16),
    _fault("units of eight change places", "the second unit's matrices are taken for the first one's upper pixels",
           ("{m[0], m[2], m[1], m[3]}", "{m[0], m[1], m[2], m[3]}"), on="wgrad_groups_nhwc", dtype=_FP16),
    _fault("channels in the wrong plane", "units count channels where they count taps",
           ("c = unit / (R * S) * 8 + row % 8", "c = unit % (TILE_C / 8) * 8 + row % 8"), on="wgrad_pieces_strided",
           dtype=_FP16),
    # sums.cuh
    _fault("a warp's pixels are lost", "the sums of the last warp of each set are not added",
           ("part < WARPS_E; ++part", "part < WARPS_E - 1; ++part"), on="wgrad_stem", shape="shared pixels"),
    _fault("no barrier before adding", "sums are added that have not arrived",
           ("[i % 4];\n        }\n        __syncthreads();", "[i % 4];\n        }"), on="wgrad_stem",
           shape="shared pixels"),
    _fault("rows behind the last one", "rows of no channel are written",
           ("if (!row.there || c >= C_PER_GROUP) continue;", ""), on="wgrad_pairs"),
    _fault("filters behind the last one", "columns of no filter are written",
           ("if (col < TILE_K && k < K_PER_GROUP)", "if (k >= 0)"), on="groups_many_to_one"),
    _fault("groups that do not exist are written", "warps without a group write partial results",
           ("if (group >= p.groups) return;", ""), on="wgrad_groups", shape="several groups"),
)  # fmt: skip
