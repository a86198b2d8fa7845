"""Faults in how halo_sm90 writes its sums: the buffers in shared memory, boxes and stores."""

from __future__ import annotations

import torch

from tests.mutations.halo_sm90 import fault

_NEXT = "if (++self.next_buffer == BUFFERS) self.next_buffer = 0;\n"
_COMMIT = "hc::ptx::cp_async_bulk_commit_group();\n            }"
_FENCE = "            hc::ptx::fence_proxy_async_shared();\n"
_FILLED = "if (Y_BOXES || Y_IN_STAGE) hc::ptx::fence_proxy_async_shared();\n        "
_BY_FILTERS = {"on": "aligned_nhwc", "shape": "boxes in rows"}

BOXES = (
    fault("one box of pixels too many under way", "a buffer is filled while it is sent",
          ("cp_async_bulk_wait_group_read<BUFFERS - 1>", "cp_async_bulk_wait_group_read<BUFFERS>"),
          on="large_3x3", shape="boxes in rows"),
    fault("one buffer of pixels", "a buffer is filled while it is sent",
          (_NEXT + "        __syncwarp();", "        __syncwarp();"), on="large_3x3", shape="boxes in rows"),
    fault("buffers of pixels are filled at once", "lanes do not wait for the one that waits for the box",
          (_NEXT + "        __syncwarp();", _NEXT), on="large_3x3", shape="boxes in rows"),
    fault("no fence before boxes of pixels", "the copy engine may read what the stores before it replaced",
          (_FILLED, ""), on="large_3x3", shape="boxes in rows"),
    fault("boxes of pixels are sent at once", "a lane sends what other lanes have yet to write",
          (_FILLED + "__syncwarp();", _FILLED), on="large_3x3", shape="boxes in rows"),
    fault("boxes of pixels are not committed", "the wait has no group to wait for",
          ("            hc::ptx::cp_async_bulk_commit_group();\n        }\n        const hc::Rows",
           "        }\n        const hc::Rows"), on="large_3x3", shape="boxes in rows"),
    fault("boxes of pixels in the first columns", "all strips are written to the first",
          ("first_col = column.strip * p.strip_cols - shift;", "first_col = -shift;"),
          on="aligned_3x5", shape="two short runs in rows"),
    fault("boxes of one row of a pack", "both output rows of a pack are written to the first",
          ("(run * p.pack_h + phase)", "(run * p.pack_h)"), on="large_3x3", shape="boxes in rows"),
    fault("boxes to the first class", "rows of a dilated filter's other classes are written to the first",
          ("return column.cls + p.classes", "return p.classes"), on="small_a"),
    fault("boxes to the first filters", "all warps write the first warp's filters",
          ("Y_JOINED ? 0 : out_row, filters.first,", "Y_JOINED ? 0 : out_row, 0,"), on="small_a"),
    fault("boxes to the first group", "all groups are written to the first",
          ("                    filters.group, column.band);", "                    0, column.band);"),
          on="aligned_dilated", result="dgrad", shape="boxes in rows"),
    fault("a buffer for four warps", "a consumer's warps fill each other's buffer",
          ("(Y_CHANNELS_INNER ? warp / 4 * 4 : warp)", "(warp / 4 * 4)"), on="large_3x3", shape="boxes in rows"),
    fault("one box of filters too many under way", "a buffer is filled while it is sent",
          ("cp_async_bulk_wait_group_read<BUFFERS - 2>", "cp_async_bulk_wait_group_read<BUFFERS - 1>"), **_BY_FILTERS),
    fault("no fence before boxes of filters", "the copy engine may read what the stores before it replaced",
          (_FENCE + "            if (sends)", "            if (sends)"), **_BY_FILTERS),
    fault("boxes of filters are sent at once", "a warp sends what other warps have yet to write",
          ("is free\n            hc::ptx::bar_sync(self.barrier, WARPGROUP);", "is free"), **_BY_FILTERS),
    fault("both consumers at one barrier", "a warp is counted for the other consumer's",
          ("1 + consumer}", "1}"), on="channels_last"),
    fault("boxes of filters are not committed", "the wait has no group to wait for",
          ("column.band);\n                " + _COMMIT + "\n        } else {\n            hc::ptx::bar_sync",
           "column.band);\n            }\n        } else {\n            hc::ptx::bar_sync"), **_BY_FILTERS),
    fault("boxes of filters in one row of a pack", "both output rows of a pack are written to the first",
          ("PACKS == 1 ? 0 : warp)", "0)"), on="long_nhwc", shape="boxes in rows"),
    fault("the last boxes are not waited for", "a block ends while the copy engine reads its shared memory",
          ("hc::ptx::cp_async_bulk_wait_group_read<0>();  // shared memory outlives", "// shared memory outlives"),
          on="large_3x3", shape="boxes in rows"),
)  # fmt: skip

STORES = (
    fault("buffers of pixels are read at once", "a lane reads what other lanes have yet to write",
          (_FILLED + "__syncwarp();", _FILLED), on="border_3x3"),
    fault("buffers of pixels are filled again at once", "a lane writes over what other lanes have yet to read",
          (_NEXT + "        __syncwarp();", _NEXT), on="border_3x3"),
    fault("buffers of filters are read at once", "a warp reads what other warps have yet to write",
          ("} else {\n            hc::ptx::bar_sync(self.barrier, WARPGROUP);", "} else {"),
          on="large_nhwc", shape="flat"),
    fault("buffers of filters are filled again at once", "a warp writes over what other warps have yet to read",
          (_NEXT + "        hc::fill_by_filters", "        hc::fill_by_filters"), on="large_nhwc", shape="flat"),
    fault("pieces of rows that are not aligned", "four bytes are enough for any piece",
          ("misaligned % PIECE_BYTES || ", "misaligned % 4 || "), on="rows_5x5", shape="rows"),
    fault("pieces beyond a row", "the last piece of a row ends behind it", ("count % PIECE || ", ""),
          on="rows_5x5", shape="rows"),
    fault("all rows where some are missing", "16 rows go out although the result has fewer",
          (" || rows.count < WARP_ROWS)", ")"), on="rows_5x5", shape="rows kept"),
    fault("whole buffers of a row", "pixels right of the image count as inside",
          ("at.inside ? min(PX, p.cols - at.col) : 0", "at.inside ? PX : 0"), on="rows_5x5", shape="rows"),
    fault("flat tiles as rows", "the pixels of several rows go out next to each other",
          ("if (!FLAT && p.pack_w", "if (p.pack_w"),
          on="aligned_3x5", shape="boxes in flat tiles"),
    fault("pieces of pixels that are no neighbours", "a piece is stored from wherever its first pixel is",
          (", aligned &= next.offset == first.offset + i", ""), on="small_b", result="dgrad"),
    fault("pieces at any address", "pieces are stored where they are not aligned",
          ("sizeof(Elem)) % PIECE_BYTES == 0;", "sizeof(Elem)) % 4 == 0;"), on="primes"),
    fault("one lane decides how its warp stores", "lanes whose pixels are no piece store them as such",
          ("__all_sync(~0u, is_piece<8>", "__any_sync(~0u, is_piece<8>"), on="primes"),
    fault("pixels outside are stored", "places that are none are written", ("place.inside && row < rows", "row < rows"),
          on="odd_widths"),
    fault("filters beyond the last one", "a pixel always has all filters of a block",
          ("at.inside && filter + j < count", "at.inside"), on="channels_last_odd"),
    fault("parts beyond the last filter", "a pixel always has all filters of a block",
          ("at.inside && filter < count", "at.inside"), on="channels_last"),
    fault("pixels of one run by filters", "all runs of a flat tile are stored to the first",
          ("(FLAT ? row * RUN : 0) + first_px + px + lane", "first_px + px + lane"), on="large_nhwc", shape="flat"),
    fault("packed columns as neighbours", "outputs of a pack of columns are two apart",
          ("!FLAT && p.pack_w == 1 &&", "!FLAT &&"), on="packed_columns", shape="packed columns in rows"),
    fault("strided columns as neighbours", "the pixels of a residue are a stride apart",
          ("p.y_col == 1) {", "true) {"), on="strided_gradient", shape="rows", result="dgrad"),
    fault("pieces across the end of a row", "a piece is stored whole if its first pixel is inside",
          ("same &= next.inside == first.inside, ", ""), on="rows_5x5", shape="flat strips"),
    fault("outputs of a pack by filters in one place", "both outputs of a pack are stored to the first",
          ("if (j == phase) at", "if (j == 0) at"), on="large_nhwc", shape="two runs of 64", dtype=torch.float16),
)  # fmt: skip

_JOINED = {"on": "joined_rows", "shape": "rows without packs"}

JOINED = (
    fault("a box across the start of a row", "it holds pixels of the row above",
          ("(col >= 0 && col + PX <= p.cols)", "(col + PX <= p.cols)"), **_JOINED),
    fault("a box across the end of a row", "it holds pixels of the row below",
          ("(col >= 0 && col + PX <= p.cols)", "(col >= 0)"), **_JOINED),
    fault("joined rows in one place", "all rows are written to the first",
          ("Y_JOINED ? out_row * p.cols + col : col", "col"), **_JOINED),
    fault("joined rows written without their shift", "a tile is written where its strip begins",
          ("shift = row_shift(p, out_row);", "shift = 0;"), **_JOINED),
    fault("joined rows multiplied without their shift", "a tile's pixels are those before its strip in every row",
          ("p.lead - row_shift(p, box_row", "p.lead + 0 * row_shift(p, box_row"), **_JOINED),
    fault("ends of joined rows without their shift", "what is no box is stored where its strip begins",
          ("(p, {column.band, out_row, col})", "(p, {column.band, out_row, col + shift})"), **_JOINED),
    fault("pixels before a joined row", "they are written to the row above",
          ("(buffer, lane, -col, p.cols", "(buffer, lane, -PX, p.cols"), **_JOINED),
    fault("pixels behind a joined row", "they are written to the row below",
          ("-col, p.cols - col,", "-col, PX,"), **_JOINED),
    fault("joined rows below the last one", "they are written behind the plane",
          ("if (!sends && out_row < p.rows)", "if (!sends)"), on="joined_pairs", shape="two short runs in rows"),
    fault("pieces of joined rows that some are outside of", "a piece is stored whole if its first pixel is inside",
          ("(first | end | (int)rows.stride) % PIECE == 0", "true"), **_JOINED),
    fault("all filters of a joined row", "16 rows go out although the result has fewer",
          ("% PIECE == 0 && rows.count == WARP_ROWS)", "% PIECE == 0)"), on="joined_pairs", shape="rows without packs"),
)  # fmt: skip

_STRIPS = {"on": "joined_rows", "shape": "two runs of 64"}

STRIPS = (
    fault("the first strip for every block", "the others are not computed",
          ("strip = block / own,", "strip = 0,"), **_STRIPS),
    fault("one strip's end for a spare block", "the others' ends are not computed",
          ("(spare + 1) * strips / spares - strip - 1;", "0;"), **_STRIPS),
    fault("runs that end where they begin", "only the ends of strips are computed",
          ("end = strip * whole + run(p, i + 1);", "end = index;"), **_STRIPS),
    fault("the ends of strips begin too late", "what is left begins a step after the runs before it",
          ("index += run(p, p.strip_blocks), end", "index += run(p, p.strip_blocks) + 1, end"), **_STRIPS),
)  # fmt: skip

SUMS = (
    fault("pixels in plain order", "groups of pixels are added to an address that is swizzled",
          ("(to ^ group << 5)", "(to + (group << 5))"), on="border_3x3"),
    fault("rows in each other's half", "rows 0 to 7 of a warp are exchanged with rows 8 to 15",
          ("group << 5) + half * 1024)", "group << 5) + (1 - half) * 1024)"), on="border_3x3"),
    fault("matrices of pixels exchanged", "two groups of pixels are exchanged",
          ("lane % 8 + 8 * half, lane / 16", "lane % 8 + 8 * half, 1 - lane / 16"),
          on="border_3x3", dtype=torch.float16),
    fault("neighbouring pixels exchanged", "every pixel gets its neighbour's filters",
          ("offset(2 * (lane % 4) + odd, row * 4)", "offset(2 * (lane % 4) + 1 - odd, row * 4)"),
          on="large_nhwc", shape="flat"),
    fault("matrices of filters exchanged", "filters 0 to 7 of a warp are exchanged with filters 8 to 15",
          ("warp * WARP_ROWS + lane / 8 % 2 * 8", "warp * WARP_ROWS + (1 - lane / 8 % 2) * 8"),
          on="large_nhwc", dtype=torch.float16, shape="flat"),
    fault("parts in one place", "the second part of the filters is written to the first",
          ("byte / ROW_BYTES * PART_BYTES + unit", "unit"), on="aligned_nhwc", shape="boxes in rows"),
    fault("the bias of the first rows", "the lower rows of a warp take the bias of the upper ones",
          ("threadIdx.x % 32 / 4 + 8 * half;", "threadIdx.x % 32 / 4;"), on="large_3x3", shape="boxes in rows"),
    fault("the bias of the first group", "the group's first filter is ignored",
          ("p.bias[(i64)own.group * p.filters + own.first", "p.bias[own.first"), on="groups_odd", shape="flat"),
    fault("the bias of filters beyond the last one", "it is read behind the last filter",
          ("if (row < own.count) finish", "finish"), on="odd_widths"),
    fault("rows of a pack without their bias", "the second output's rows take other filters' bias",
          ("PACK_FILTERS + row % PACK_FILTERS", "PACK_FILTERS + row"), on="large_3x3", shape="boxes in rows"),
)  # fmt: skip

MUTATIONS = (*BOXES, *STORES, *JOINED, *STRIPS, *SUMS)
