"""Faults in halo_sm90/pointwise_planes.cu and its parts: tiles, copies, fragments, products, planes of sums."""

from __future__ import annotations

import torch

from tests.mutations.mutation import Mutation

_FP16, _FP32 = torch.float16, torch.float32


def _fault(
    name: str, fault: str, *edits: tuple[str, str], on: str = "sm90_planes", result: str = "fprop",
    dtype: torch.dtype = _FP16, shape: str = "planes", finite: bool = True,
) -> Mutation:  # fmt: skip
    return Mutation(
        f"sm90 planes: {name}", "halo_sm90/pointwise_planes", fault, edits, on, result, dtype, "halo_sm90", shape,
        finite,
    )  # fmt: skip


_SENDS = "            send(p, smem, tile, filter, buffer);\n"

MUTATIONS = (
    # bands and boxes
    _fault("bands of the first rows", "all bands of an image are its first one",
           ("band = pixels - images * p.bands.value;", "band = 0;"), on="sm90_planes_bands"),
    _fault("bands of the first image", "bands behind those of the first image begin there again",
           ("image = images * p.images, band", "image = 0, band"), on="sm90_planes_bands"),
    _fault("boxes of x in one row", "boxes of rows are asked for column by column",
           ("tile.band * p.x_band_row, channel, image", "0, channel, image"), on="sm90_planes_bands"),
    _fault("boxes of dense x in one place", "boxes of pixels that are one row begin with its first one",
           ("full, tile.band * p.x_band_col,", "full, 0,"), on="sm90_planes_bands", result="dgrad"),
    _fault("boxes of y in one row", "boxes of rows with zeros go to the first rows",
           ("tile.band * p.y_band_row, filter, image", "0, filter, image"), on="sm90_planes_bands", result="dgrad"),
    _fault("boxes of dense y in one place", "boxes of sums go to the first pixels",
           ("buffer, tile.band * p.y_band_col,", "buffer, 0,"), on="sm90_planes_bands"),
    _fault("fewer bytes than a box has", "a stage counts as there before its last channels are",
           ("(X_BOXES ? CHUNK : min(", "(false ? CHUNK : min("), on="sm90_planes_bands"),
    # pointwise/planes_tile.cuh
    _fault("filters of the first block", "all blocks of filters are the first one",
           ("filter = (index - pixels * p.blocks.value) * TILE_FILTERS;", "filter = 0;")),
    _fault("images of the first tile", "all tiles have the first images",
           ("image = images * p.images,", "image = 0,"), on="sm90_planes_many"),
    _fault("a barrier for one consumer", "a stage goes back when one of the consumers has read it",
           ("constexpr int READERS = (X_BOXES ? 4 : 128) * CONSUMERS;", "constexpr int READERS = X_BOXES ? 4 : 128;"),
           on="sm90_planes_deep"),
    _fault("gaps are left as they are", "pixels that no output meets are what was in shared memory",
           ("if (HAS_GAPS) {", "if (false) {"), on="sm90_planes_stride", result="dgrad"),
    _fault("gaps of one set of buffers", "the second consumer's buffers are not cleared",
           ("i < BUFFER_SETS * Y_BUFFERS * smem.buffer / 16", "i < Y_BUFFERS * smem.buffer / 16"),
           on="sm90_planes_stride", result="dgrad", shape="planes, columns shared"),
    _fault("zeros without a fence", "TMA takes gaps before they are zeros",
           ("[i] = {};\n        ptx::fence_proxy_async_shared();", "[i] = {};"), on="sm90_planes_stride",
           result="dgrad"),
    _fault("a stage is filled again too early", "copies land over planes that are being read",
           ("            wait(&smem.empty[at.index], at.parity ^ 1);\n", ""), on="sm90_planes_deep"),
    _fault("bytes of one image", "a stage counts as there before all of its images are",
           ("W_BYTES + p.images * bytes", "W_BYTES + bytes")),
    _fault("images behind the last one", "a tile reads images that the layer does not have",
           ("min(tile.image + i, p.all_images - 1)", "tile.image + i")),
    _fault("channels behind the last one", "the last chunk reads planes of the next image",
           ("min(CHUNK, p.channels - channel)", "CHUNK")),
    _fault("planes of the first chunk", "all chunks of channels are the first one",
           ("(i64)channel * X_PLANE,", "(i64)0,")),
    _fault("packed filters of one chunk", "packed filters of all chunks are those of the first",
           ("filter / SPAN * p.chunks + chunk)", "filter / SPAN * p.chunks)"), result="dgrad", dtype=_FP32),
    _fault("spans of the first filters", "all spans of a tile are its first one",
           ("const int filter = tile.filter + i * SPAN;", "const int filter = tile.filter;"), result="dgrad",
           shape="planes, columns shared"),
    # pointwise/planes_consume.cuh
    _fault("rows of no image", "rows behind the last image write somewhere",
           ("there = image < p.images && pixel < p.pixels;", "there = true;")),
    _fault("pixels of the first image", "all images of a tile are its first one",
           ("return image * smem.x_image + ", "return ")),
    _fault("columns without a stride", "neighbouring pixels of x in place of every second one",
           ("across * p.x_col) * SIZE", "across) * SIZE"), on="sm90_planes_stride"),
    _fault("rows of pixels in their place", "rows of the result without the ones between them",
           ("down * p.y_row + across", "down * p.cols.value + across"), on="sm90_planes_stride", result="dgrad"),
    _fault("the lane's own channels", "each lane multiplies the first lane's channels",
           ("lane % 4 * LANE_CHANNELS * X_PLANE;", "0;")),
    _fault("channels that are not there", "what was in a stage before is multiplied by zero, also if not finite",
           ("if (!X_BOXES && channels < CHUNK)", "if (false)"), on="sm90_planes", finite=False),
    _fault("pixels of a pair", "both rows of a pair are its first pixel",
           ("odd = __byte_perm(low, high, 0x7632);", "odd = __byte_perm(low, high, 0x5410);"), on="sm90_planes_even"),
    _fault("halves of a row", "a row's second channel is its first one",
           ("even = __byte_perm(low[0], high[0], 0x5410)", "even = __byte_perm(low[0], low[0], 0x5410)"),
           on="sm90_planes_stride"),
    _fault("pixels of even channels", "both rows of a pair are its first pixel in even channels",
           ("second), 0x5432);", "second), 0x5410);")),
    _fault("rows of the first warp", "all warps have its pixels",
           ("block_row + warp * p.warp_rows + half", "block_row + half")),
    _fault("fp32 is cut", "TF32 in place of the nearest one", ("return value != value ? 0x7fffffffu : "
           "__float_as_uint(value) + 0x1000u;", "return __float_as_uint(value) + 0x7000u;"), dtype=_FP32),
    _fault("a stage is not waited for", "what has not landed is multiplied",
           ("    wait(&smem.full[at.index], at.parity);\n", "")),
    _fault("a stage goes back too early", "copies land where wgmma still reads",
           ("ptx::wgmma_wait_group<1>();\n    if (chunk > 0)", "ptx::wgmma_wait_group<2>();\n    if (chunk > 0)"),
           on="sm90_planes_deep"),
    _fault("sums go on", "a tile's sums begin with those of the tile before",
           ("SPAN * SPAN_BYTES : self.n * CHUNK_BYTES), chunk > 0);",
            "SPAN * SPAN_BYTES : self.n * CHUNK_BYTES), true);")),
    _fault("the first consumer's filters", "both consumers multiply the first one's filters",
           ("SPAN * SPAN_BYTES : self.n * CHUNK_BYTES)", "SPAN * SPAN_BYTES : 0)"), shape="planes, columns shared"),
    _fault("planes behind the last filter", "a slab that is not full writes over the next image",
           ("min(SLAB, p.filters - filter) * Y_PLANE;", "SLAB * Y_PLANE;")),
    _fault("more images than there are", "a tile writes images that the layer does not have",
           ("i < min(p.images, p.all_images - tile.image)", "i < p.images")),
    _fault("the bias of the first slab", "all slabs add the bias of their tile's first filters",
           ("fill(p, self, buffer, sums, slab * (SLAB / 8), filter);",
            "fill(p, self, buffer, sums, slab * (SLAB / 8), tile.filter);"), shape="planes, columns shared"),
    _fault("no activation", "ReLU is left out", ("return activated<KIND>(sum);", "return sum;"), result="relu"),
    _fault("no scale", "sums are not multiplied", ("fmaf(sum, own.scale, own.bias)", "sum + own.bias"),
           result="scale_relu"),
    _fault("no fence before copies", "TMA takes a slab before it is there",
           ("        ptx::fence_proxy_async_shared();\n        if (self.sends)", "        if (self.sends)")),
    _fault("slabs of one warp", "a slab goes when the first warp has filled its part",
           ("        ptx::bar_sync(self.barrier, GROUP_THREADS);\n", "")),
    _fault("buffers are not waited for", "a slab is filled while TMA takes it",
           ("        if (self.sends) ptx::cp_async_bulk_wait_group_read<Y_BUFFERS - 2>();\n", ""),
           shape="planes, 256 columns"),
    _fault("copies without a group", "nobody waits for the copies of a slab",
           (_SENDS + "            ptx::cp_async_bulk_commit_group();\n", _SENDS), shape="planes, 256 columns"),
)  # fmt: skip
