"""Faults in halo_sm90/pointwise.cu and its parts: tiles, what is asked for, products, slabs of sums."""

from __future__ import annotations

import torch

from tests.mutations.mutation import Mutation

_FP16 = torch.float16


def _fault(
    name: str, fault: str, *edits: tuple[str, str], on: str = "sm90_pointwise", result: str = "fprop",
    dtype: torch.dtype = torch.float32, shape: str = "pointwise",
) -> Mutation:  # fmt: skip
    return Mutation(
        f"sm90 pointwise: {name}", "halo_sm90/pointwise", fault, edits, on, result, dtype, "halo_sm90", shape
    )


_WAITS_FOR_KEPT = "        if (KEEPS_W && is_first) wait(&smem.kept_full[chunk], 0);\n"
_NEXT_STAGE = "        multiply_stage(smem, self, at, chunk, sums, even);\n"

MUTATIONS = (
    # pointwise/tile.cuh
    _fault("boxes of one image", "boxes behind those of the first image begin there again",
           ("image = p.down.quotient(line);", "image = 0;"), on="sm90_pointwise_stride"),
    _fault("boxes of one row", "boxes behind those of the first row begin there again",
           ("row = (line - image * p.down.value) * p.box_rows;", "row = 0;")),
    _fault("columns of the first box", "all boxes of a row begin with its first pixel",
           ("column = (box - line * p.across.value) * p.box_cols,", "column = 0,")),
    _fault("filters of the first block", "all blocks of filters are the first one",
           ("filter = (index - rest * p.blocks.value) * TILE_FILTERS;", "filter = 0;"),
           shape="pointwise kept", dtype=_FP16),
    _fault("channels of the next range", "the last range of channels goes on behind the last one",
           ("first = split * p.range_chunks, chunks = min(p.range_chunks, p.chunks - first);",
            "first = split * p.range_chunks, chunks = p.range_chunks;"), on="sm90_pointwise_deep", result="dgrad",
           shape="pointwise split-K"),
    _fault("a barrier for one consumer", "a stage goes back when one of the consumers has read it",
           ("ptx::mbarrier_init(&smem.empty[i], 4 * CONSUMERS);", "ptx::mbarrier_init(&smem.empty[i], 4);"),
           on="sm90_pointwise_deep"),
    _fault("places behind the last pixel", "what no box fills is multiplied as it is found",
           ("if (X_INNER && Y_INNER && p.box_bytes < BOX_BYTES) clear_places(p, smem);", ""),
           on="sm90_pointwise_stride"),
    # pointwise/produce.cuh
    _fault("a stage is filled again too early", "boxes land over those that are being read",
           ("            wait(&smem.empty[at.index], at.parity ^ 1);\n", ""), on="sm90_pointwise_deep"),
    _fault("too few bytes", "a stage counts as there before its filters are",
           ("BOXES * p.box_bytes + (KEEPS_W ? 0 : W_BYTES)", "BOXES * p.box_bytes"), shape="pointwise streamed",
           on="sm90_pointwise_many"),
    _fault("boxes of the first place", "all boxes of a tile are its first one",
           ("const Place at(p, tile.box + i);\n        const int", "const Place at(p, tile.box);\n        const int")),
    _fault("channels of the first range", "every range of channels is the first one",
           ("const int chunk = tile.first + i;", "const int chunk = i;"), on="sm90_pointwise_deep",
           shape="pointwise split-K"),
    _fault("spans of the first filters", "all spans of a tile are its first one",
           ("const int filter = tile.filter + i * SPAN;", "const int filter = tile.filter;"), result="dgrad",
           dtype=_FP16, shape="pointwise 256 columns", on="sm90_pointwise_nhwc"),
    _fault("packed filters of one chunk", "packed filters of all chunks are those of the first",
           ("filter / SPAN * p.chunks + chunk)", "filter / SPAN * p.chunks)"), result="dgrad"),
    _fault("lines without outputs", "lines that no output meets are left as they are",
           ("            clear(to, p.line_bytes);\n", "            ;\n"), on="sm90_pointwise_stride", result="dgrad"),
    _fault("gaps of a line", "pixels between outputs are left as they are",
           ("else if (p.y_across > 1)", "else if (p.y_across > 2)"), on="sm90_pointwise_stride_long", result="dgrad"),
    _fault("gaps over outputs", "the pixel behind a gap is cleared, too",
           ("min(p.y_across - 1, p.width", "min(p.y_across, p.width"), on="sm90_pointwise_stride", result="dgrad"),
    _fault("lines of the first image", "a block's next line counts as one of its first line's row",
           ("row = (row + step) % p.height", "row = row + 0 * step"), on="sm90_pointwise_stride", result="dgrad"),
    # pointwise/consume.cuh
    _fault("kept filters are not waited for", "they are multiplied before they are there",
           (_WAITS_FOR_KEPT + _NEXT_STAGE, _NEXT_STAGE), on="sm90_pointwise_many", shape="pointwise kept"),
    _fault("a stage is not waited for", "what has not landed is multiplied",
           ("    wait(&smem.full[at.index], at.parity);\n    const char *const x", "    const char *const x")),
    _fault("a stage goes back too early", "TMA writes where wgmma still reads",
           ("ptx::wgmma_wait_group<1>();\n    if (chunk > 0)", "ptx::wgmma_wait_group<2>();\n    if (chunk > 0)"),
           on="sm90_pointwise_deep_nhwc"),
    _fault("sums go on", "a tile's sums begin with those of the tile before",
           ("multiply(sums, fragments, a, b, chunk > 0);", "multiply(sums, fragments, a, b, true);"),
           on="sm90_pointwise_many"),
    _fault("rows of one consumer", "both consumers multiply the first rows of M",
           ("+ self.m * ROW_BYTES;", "+ 0 * ROW_BYTES;")),
    _fault("columns of one consumer", "both consumers multiply the first columns of N",
           ("+ self.n * ROW_BYTES;", "+ 0 * ROW_BYTES;"), shape="pointwise columns shared"),
    _fault("one block of rows", "a consumer's second block of M is its first one",
           ("+ block * (64 * ROW_BYTES / 16)), own_b", "), own_b"), shape="pointwise two blocks", dtype=_FP16),
    _fault("pixels of one block", "the same for pixels in registers",
           ("from + block * (64 / BOX_PX * BOX_BYTES) +", "from +"), shape="pointwise two blocks"),
    _fault("channels of the first half", "fragments have four channels twice",
           ("(channel + i / 2 * 4, at.unit)", "(channel, at.unit)")),
    _fault("spans side by side", "a step of MN-major operands is taken for one of K-major ones",
           ("MN ? DEPTH * ROW_BYTES / 16 : 2", "2"), dtype=_FP16),
    _fault("one span", "the second 64 columns of an MN-major operand are the first ones",
           ("MN ? SPAN_BYTES : 16, 8", "MN ? 0 : 16, 8"), dtype=_FP16, shape="pointwise 256 columns"),
    # pointwise/write.cuh
    _fault("bias of the other filter", "a lane's two columns have the first one's bias",
           ("threadIdx.x % 4 * 2 + i % 2 : row_of(half)", "threadIdx.x % 4 * 2 : row_of(half)")),
    _fault("no scale", "sums are not multiplied", ("fmaf(sum, own.scale, own.bias)", "sum + own.bias"),
           result="scale_relu"),
    _fault("bias of the first rows", "all rows have the bias of the first eight",
           ("i % 2 : row_of(half)", "i % 2 : row_of(0)"), dtype=_FP16),
    _fault("units of the rows", "sums are put where rows of M would have them",
           ("unit = warp % 2 * 2 + half + row / 4 * 4, word", "unit = warp % 2 * 4 + half * 2 + row / 4, word"),
           ("at.box * BOX_BYTES + unit_offset<ROW_BYTES>(channel + i / 2 * 4, at.unit)",
            "at.box * BOX_BYTES + unit_offset<ROW_BYTES>(channel + i / 2 * 4, at.unit ^ 1)")),
    _fault("no fence before boxes", "TMA takes a slab before it is there",
           ("            ptx::fence_proxy_async_shared();\n            if (self", "            if (self")),
    _fault("slabs of one warp", "a slab goes when the first warp has filled its part",
           ("ptx::bar_sync(self.barrier, 128);\n            if (self.sends) {", "if (self.sends) {")),
    _fault("buffers are not waited for", "a slab is filled while TMA takes it",
           ("            if (self.sends) ptx::cp_async_bulk_wait_group_read<Y_BUFFERS - 1 - AHEAD>();\n", ""),
           shape="pointwise 256 columns"),
    _fault("sums of the first slab", "all slabs of a tile are its first one",
           ("fill(buffer, sums[block], slab * GROUPS);", "fill(buffer, sums[block], 0);")),
    _fault("pixels of the first half of a box", "32 partial sums of 64 pixels go where the first ones do",
           ("at.column + n % BOX_PX, tile.filter + m", "at.column, tile.filter + m"), on="sm90_pointwise_deep",
           shape="pointwise split-K", dtype=_FP16),
    _fault("partial sums of one range", "all ranges write over the first one's sums",
           ("tile.split);", "0);"),
           on="sm90_pointwise_deep_nhwc", shape="pointwise split-K"),
)  # fmt: skip
