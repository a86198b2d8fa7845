"""Faults in halo_sm80, the family of few channels per group: conv.cu with its headers, and pack.cu."""

from __future__ import annotations

import torch

from tests.mutations.mutation import Mutation


def _fault(
    name: str, what: str, *edits: tuple[str, str], on: str, result: str = "fprop", kernel: str = "halo_sm80/conv",
    dtype: torch.dtype = torch.float32, shape: str = "", finite: bool = True,
) -> Mutation:  # fmt: skip
    return Mutation(f"sm80: {name}", kernel, what, edits, on, result, dtype, "halo_sm80", shape, finite)


_STAGED = "        await_landing(p, work, step, x_smem);\n"

STEPS = (
    _fault("no barrier before the products", "warps multiply what others may not have staged",
           (_STAGED + "        __syncthreads();\n", _STAGED), on="eight_by_eight"),
    _fault("copies are not waited for", "a thread rounds what has not landed",
           ("        ptx::cp_async_wait_group<0>();\n", ""), on="eight_by_eight"),
    _fault("the youngest copies are not waited for", "the tile itself is taken for landed",
           ("cp_async_wait_group<0>", "cp_async_wait_group<1>"),
           on="many_tiles", shape="several tiles"),
    _fault("one buffer for two tiles", "the next tile lands over the one that is multiplied",
           ("char* const buffer = x_smem + step % DEPTH * p.x_bytes;", "char* const buffer = x_smem;"),
           ("char* const x = x_smem + step % DEPTH * p.x_bytes;", "char* const x = x_smem;"),
           on="many_tiles", shape="several tiles"),
    _fault("no barrier before one buffer is filled again", "warps still multiply what the next tile overwrites",
           ("            __syncthreads();\n            stage(p, work, next", "            stage(p, work, next"),
           on="many_tiles", shape="several tiles in one buffer"),
    _fault("the first chunk's weights for all", "weights are not staged anew for each chunk",
           ("if (PACKED && (step < p.chunks || p.chunks > p.weight_buffers))", "if (step == 0)"),
           on="patches", shape="chunks in two buffers"),
    _fault("sums of the tile before", "sums are not cleared for each tile", ("if (at.chunk == 0) clear(sums);",
           "if (at.tile.n == 0) clear(sums);"),
           on="many_tiles", shape="several tiles"),
    _fault("chunks are not added up", "each chunk begins with zero",
           ("if (at.chunk == 0) clear(sums);", "clear(sums);"),
           on="patches", shape="chunks in two buffers"),
)  # fmt: skip

STAGING = (
    _fault("the row below the image", "a row that is not there is copied",
           ("const bool there = column.channels > 0 && (unsigned)(at.h + row) < (unsigned)p.h;",
            "const bool there = column.channels > 0 && (unsigned)(at.h + row) <= (unsigned)p.h;"),
           on="eight_by_eight"),
    _fault("no right border", "columns beyond the image are read from the next row",
           ("(unsigned)w < (unsigned)p.width &&", "w >= 0 &&"), on="four_sides"),
    _fault("channels beyond the group", "the last unit takes channels of the next group",
           ("j < column.channels", "column.channels > 0"), on="four_sides", dtype=torch.float16),
    _fault("groups beyond the last one", "the last tile of groups reads channels that do not exist",
           (" && work.group + group < p.groups", ""), on="four_by_four_nhwc", dtype=torch.float16, shape="groups"),
    _fault("a part of the lines is lost", "the rows of the last part are not staged",
           ("end < p.rows ? end : p.rows}", "end < p.rows ? end : p.rows - 1}"), on="four_sides"),
    _fault("runs begin at the tile", "runs of four pixels are copied from places that are not aligned",
           ("at.lead = col & (STAGED_PX - 1);", "at.lead = 0;"), on="eight_by_eight"),
    _fault("a NaN is rounded to an infinity", "rounding takes a NaN for a number",
           ("return value != value ? 0x7fffffffu : __float_as_uint(value) + 0x1000u;",
            "return __float_as_uint(value) + 0x1000u;"), on="one_channel_in", shape="copies", finite=False),
)  # fmt: skip

PRODUCTS = (
    _fault("k beyond the last one", "the last slice multiplies what lies at the first k by weights that are zero",
           ("    if (!TAP_PAIRS && ks % WHOLE) mask_slice(a, used - 1, ks);\n", ""), on="one_channel_in",
           finite=False),
    _fault("halves of words that are no taps", "a tap that does not exist multiplies an infinity by a weight of zero",
           ("words.word[i] &= entry.word[TAP_PAIRS ? 2 + i : 0];", ";"), on="aligned_stem", dtype=torch.float16,
           finite=False),
    _fault("taps one off", "a row of the filter begins with the other half of its first word",
           ("return TAP_PAIRS ? horizontal.base & 1 : 0;", "return 0;"), on="aligned_stem", dtype=torch.float16),
    _fault("the next slice's words", "fragments are multiplied a slice late",
           ("entry_of(from, used > 1 ? 1 : 0)", "entry_of(from, 0)"), on="eight_by_eight"),
    _fault("the last slice is lost", "k that do not fill a slice are left out",
           ("    multiply_slice(sums, a, from, used - 1, slices);\n}", "}"),
           on="four_sides"),
    _fault("taps from the wrong end", "offsets of a gradient's taps do not start at the lowest one",
           ("(at.row * v.tap_move - work.low_h)", "at.row * v.tap_move"), on="eight_by_eight", result="dgrad"),
    _fault("the wrong half of a fragment", "rows 8 to 15 are taken for rows 0 to 7",
           ("lane_row + 8 * half)", "lane_row + 8 * (1 - half))"), on="eight_by_eight"),
    _fault("one group's weights for all", "every group is multiplied by the weights of the tile's first",
           ("(item.group * p.n_items.value + item.n)", "item.n"), on="four_by_four_nhwc", dtype=torch.float16,
           shape="groups"),
)  # fmt: skip

STORES = (
    _fault("late outputs of a place too far", "outputs that go late are written where the next tile's belong",
           ("write_late(sums, p, work, at.tile, tables)", "write_late(sums, p, work, next.tile, tables)"),
           on="aligned_stride_4", shape="late"),
    _fault("columns beyond the image", "a tile at the border writes columns that do not exist",
           (" && at.col < output.cols", ""), on="eight_by_eight", dtype=torch.float16, shape="strips"),
    _fault("images beyond the last one", "the last tile writes images that do not exist",
           ("at.n < output.images && ", ""), on="many_images"),
    _fault("filters beyond the group", "a group's last filters are written over the next group's",
           ("if (j * 8 + e < left) write_filter", "write_filter"), on="groups_32"),
    _fault("groups written beyond the last one", "the last tile of groups writes channels that do not exist",
           ("    if (group >= p.groups) return;\n", ""), on="four_by_four_nhwc", dtype=torch.float16, shape="groups"),
    _fault("the bias of the first group", "every group adds the bias of the first one",
           ("bias_and_scale(p.bias[filter + j", "bias_and_scale(p.bias[first + j"), on="eight_by_eight"),
    _fault("residues in one place", "every class of a strided gradient is written to the first one's pixels",
           ("v.residue + (i64)tile.row * v.spacing", "(i64)tile.row * v.spacing"), on="pointwise_stride",
           result="dgrad"),
)  # fmt: skip

WEIGHTS = (
    _fault("weights of one filter for all", "every lane makes the weights of the first filter",
           ("filter_of(rest - tile_group * eights, lane / 4);", "filter_of(rest - tile_group * eights, 0);"),
           on="eight_by_eight"),
    _fault("half of a fragment one row off", "the second half of a fragment is read eight pixels too far left",
           ("(PIXEL_PAIRS ? 1 : 8) * MOVE_W", "(PIXEL_PAIRS ? 1 : 0) * MOVE_W"), on="eight_by_eight"),
    _fault("places behind a row's columns", "places that fill up a row are written over the next one",
           (" && at.col < p.tile_q;", ";"), on="eight_by_eight"),
    _fault("pack: half of the lanes", "weights of the last filters are not packed", ("if (index >= p.total) return;",
           "if (index >= p.total / 2) return;"), on="rgb_stem", kernel="halo_sm80/pack"),
    _fault("pack: the first chunk's channels", "every chunk has the weights of the first channels",
           ("chunk * p.chunk_channels,", "0,"), on="patches", shape="chunks in two buffers", kernel="halo_sm80/pack"),
    _fault("taps are not flipped", "the gradient's taps are counted from the first one on",
           ("axes.horizontal.first + at.col * axes.horizontal.step", "axes.horizontal.first + at.col"),
           on="dilated_strided_coprime", result="dgrad"),
    _fault("channels beyond the filter", "weights are read behind the filter's last channel",
           ("row.first_channel + channel >= row.channels", "row.first_channel + channel > row.channels"),
           on="four_sides", dtype=torch.float16),
)  # fmt: skip

BOXES = (
    _fault("boxes are not waited for", "warps multiply planes that have not landed", (_STAGED, ""), on="aligned_stem"),
    _fault("the landing of the tile before", "the phase of the buffer's first tile counts for all",
           ("step / DEPTH & 1", "0"), on="aligned_stem", shape="boxes one after the other"),
    _fault("bytes of one plane", "a tile counts as landed with its first plane",
           ("p.planes.value * p.image_bytes);", "p.image_bytes);"), on="aligned_stem"),
    _fault("planes of the first image", "every tile takes the first image's planes",
           ("at.chunk * p.chunk_channels + plane, at.tile.n", "at.chunk * p.chunk_channels + plane, 0"),
           on="aligned_stem"),
    _fault("nothing behind the planes", "places without a pixel read what nobody wrote",
           ("i < planes * gap; i +=", "i < 0; i +="), on="stem_with_gaps"),
    _fault("eights that share no filters", "what lanes store as neighbours is not",
           ("column / 2 * 4 + eight % 2 * 2 + column % 2", "eight % 2 * 8 + column"), on="aligned_stem_nhwc",
           dtype=torch.float16),
    _fault("the bias of the eight", "four neighbours take the biases of two",
           ("y_of(four[e], own[e],", "y_of(four[e], own[e % 2],"), on="aligned_stem_nhwc"),
    _fault("fours behind the last filter", "filters that do not exist are written",
           ("if (pair * 16 < left) write_fours", "write_fours"), on="aligned_stem_nhwc", dtype=torch.float16),
)  # fmt: skip

_THERE = "if (offset >= 0 && filter < left) to ="

FOLLOWED = (
    _fault("no scale", "filters that leave by fours are not scaled",
           ("own[e] = bias_and_scale(p.bias[filter + pair * 16 + e]);",
            "own[e] = {bias_and_scale(p.bias[filter + pair * 16 + e]).bias, 1.f};"), on="aligned_stem_nhwc",
           result="scale_residual", dtype=torch.float16),
    _fault("the scale of the filter before", "every other filter is scaled as its neighbour",
           ("first = y_of(first, own[e], both, 0)", "first = y_of(first, own[0], both, 0)"), on="large_3x3",
           result="scale_residual"),
    _fault("the residual is lost", "nothing is added",
           ("finished<AFFINE, ACTIVATION>(sum, own, to_acc(added.elem[place]))",
            "finished<AFFINE, ACTIVATION>(sum, own, 0.f)"), on="wide_groups_nhwc", result="residual_relu",
           dtype=torch.bfloat16),
    _fault("the activation before the residual", "what is added goes past the activation",
           ("finished<AFFINE, ACTIVATION>(sum, own, to_acc(added.elem[place]))",
            "finished<AFFINE, ACTIVATION>(sum, own) + to_acc(added.elem[place])"), on="eight_by_eight_nhwc",
           result="residual_relu"),
    _fault("the residual of the pixel before", "of two neighbours both add what belongs to the first",
           ("both, NEIGHBOURS - 1)", "both, 0)"), on="aligned_stem", result="residual_relu", dtype=torch.float16),
    _fault("the residual of other rows", "rows 8 to 15 of a fragment add what belongs to rows 0 to 7",
           ("(2 * j + e) / FILTERS][i][half];", "(2 * j + e) / FILTERS][i][0];"), on="eight_by_eight",
           result="scale_residual"),
    _fault("the residual of the first columns", "what is read once is taken for all",
           ("if (column % AHEAD > 0) return;", "if (column > 0) return;"), on="large_3x3", result="scale_residual"),
    _fault("the residual of the first image", "every image adds what belongs to the first one",
           ("p.residual + (y - p.y);", "p.residual + (y - p.y) % p.y_n;"), on="many_tiles", result="residual_relu",
           shape="several tiles"),
    _fault("the residual of filters beyond the last one", "it is read where no output is",
           (_THERE, "if (offset >= 0) to ="), on="aligned_stem_nhwc", result="scale_residual", dtype=torch.float16),
    _fault("the residual of places outside", "it is read before the tensor",
           (_THERE, "if (filter < left) to ="), on="eight_by_eight", result="residual_relu", dtype=torch.float16,
           shape="strips"),
)  # fmt: skip

MUTATIONS = (*STEPS, *BOXES, *STAGING, *PRODUCTS, *STORES, *WEIGHTS, *FOLLOWED)
