"""Faults in how halo_sm90 stages lines of the input: TMA boxes, transposed raw tiles, rows end to end, loads."""

from __future__ import annotations

from typing import Any

import torch

from tests.mutations.halo_sm90 import fault

_SLOT_EMPTY = "hc::wait(&smem.control->slot_empty[line.slot.index], line.slot.parity ^ 1);"
_UNIT_SLOT_EMPTY = "if (unit.begins) hc::wait(&smem.control->slot_empty[unit.slot.index], unit.slot.parity ^ 1);"
_TRY_SLOT_EMPTY = (
    "if (!__all_sync(~0u, hc::ptx::mbarrier_try_wait_parity(empty, line.slot.parity ^ 1))) {\n                under_way"
)
_BOX = "full, line.chunk * CHUNK_ELEMS, line.column.group,\n"
_RAW = "line.chunk * (CHUNK_ELEMS / PLANES), line.column.group, row.n);"
_STORE_PIECE = "store_piece<TERMS>(slot + unit_offset<ROW_BYTES>(px, first + i)"
_FENCE = "hc::ptx::fence_proxy_async_shared();\n"

BOXES = (
    fault("parts of a long row in one place", "every box of a row brings its first pixels",
          ("(FLAT ? 0 : box * p.box_px)", "0"), on="long_nhwc", shape="rows of 256"),
    fault("boxes are not waited for", "a box lands in a slot that is still read",
          (_SLOT_EMPTY + "\n        ask_for_boxes", "ask_for_boxes"),
          on="aligned_nhwc", shape="boxes in rows"),
    fault("too few bytes of boxes expected", "a line counts as there before its last box",
          ("(full, boxes * bytes)", "(full, boxes * bytes - 128)"), on="aligned_nhwc", shape="boxes in rows"),
    fault("bytes of two tiles expected", "the line of one tile never counts as there",
          ("(full, boxes * bytes)", "(full, p.boxes * bytes)"), on="aligned_nhwc", shape="boxes in flat tiles"),
    fault("boxes of one tile", "the rows of a slot's second tile are not brought",
          ("p.boxes;\n        hc::wait(", "p.single_boxes;\n        hc::wait("),
          on="aligned_nhwc", shape="boxes in flat tiles", dtype=torch.float16),
    fault("boxes of one row", "the boxes of a flat line all bring its first row",
          ("line.line + (FLAT ? box : 0)", "line.line"), on="aligned_nhwc", shape="boxes in flat tiles"),
    fault("boxes of the next column", "a line starts one pixel too far right",
          ("p, line.column) + (FLAT", "p, line.column) + 1 + (FLAT"), on="aligned_nhwc", shape="boxes in rows"),
    fault("boxes of the first image", "all images are staged from the first",
          ("col, mapped.row, row.n);", "col, mapped.row, 0);"), on="aligned_nhwc", shape="boxes in rows"),
    fault("boxes of the first chunk", "all chunks of channels are the first", 
          (_BOX, _BOX.replace("line.chunk * CHUNK_ELEMS", "0")), on="aligned_nhwc", shape="boxes in rows"),
    fault("boxes of the first group", "all groups are staged from the first",
          (_BOX, _BOX.replace("line.column.group", "0")), on="channels_last_groups", shape="rows"),
)  # fmt: skip

RAW_TILES = (
    fault("transposed lines are not waited for", "a unit is transposed into a slot that is still read",
          (_UNIT_SLOT_EMPTY, ""), on="aligned_3x5", shape="boxes in rows"),
    fault("only the first warp waits for the slot", "the others transpose into one that is still read",
          ("unit < LINE_WARPS,", "unit == 0,"), on="aligned_3x5", shape="boxes in rows"),
    fault("raw tiles are not waited for", "a unit is transposed before it is there",
          ("    hc::wait(&full[unit.raw.index], unit.raw.parity);\n", ""), on="large_3x3", shape="boxes in rows"),
    fault("the parity of raw tiles does not flip", "a tile counts as there in every other round",
          ("unit.raw.index], unit.raw.parity)", "unit.raw.index], 0)"), on="large_3x3", shape="boxes in rows"),
    fault("too few bytes of raw tiles expected", "a tile counts as there before it is",
          ("(full, RAW_BYTES)", "(full, RAW_BYTES / 2)"), on="large_3x3", shape="boxes in rows"),
    fault("one raw tile", "a tile lands where the one before is transposed",
          ("column, raw + asked.index * RAW_BYTES,", "column, raw,"), on="large_3x3", shape="boxes in rows"),
    fault("a raw tile asked for too early", "lanes still read the tile that TMA fills again",
          ("    __syncwarp();\n    if (!unit.ends) return;", "    if (!unit.ends) return;"),
          on="large_3x3", shape="boxes in flat tiles"),
    fault("no fence after transposing", "wgmma may read what the stores before it replaced",
          ("if (!unit.ends) return;\n    " + _FENCE, "if (!unit.ends) return;\n"),
          on="large_3x3", shape="boxes in rows"),
    fault("every unit is announced", "a line counts as there before the warp's last unit",
          ("    if (!unit.ends) return;\n", ""), on="large_3x3", shape="boxes in flat tiles"),
    fault("the last unit alone is announced", "warps that do not have it stay silent",
          ("unit + LINE_WARPS >= units}", "unit + 1 >= units}"), on="large_3x3", shape="boxes in rows"),
    fault("the last unit is not transposed", "it stays in its raw tile",
          ("    });\n    transpose_before();\n", "    });\n"), on="large_3x3", shape="boxes in rows"),
    fault("units of another box", "a flat line's units are counted on through its boxes",
          ("(unit - box * p.box_units.value)", "unit"), on="large_3x3", shape="boxes in flat tiles"),
    fault("raw tiles of one tile", "the rows of a slot's second tile are not transposed",
          ("p.single_boxes : p.boxes, first_col", "p.single_boxes : p.single_boxes, first_col"),
          on="large_3x3", shape="boxes in flat tiles"),
    fault("pixels are not shifted", "what comes from an aligned address is taken for the first pixel",
          ("first & (ALIGNED - 1), from, box", "0, from, box"), on="large_3x3", shape="boxes in rows"),
    fault("raw tiles of the first chunk", "all chunks of channels are the first",
          (_RAW, _RAW.replace("line.chunk", "0")), on="aligned_3x5", shape="boxes in rows"),
    fault("raw tiles of the first group", "all groups are staged from the first",
          (_RAW, _RAW.replace("line.column.group", "0")), on="groups_2", shape="rows"),
    fault("raw tiles of the first image", "all images are staged from the first", (_RAW, _RAW.replace("row.n", "0")),
          on="large_3x3", shape="boxes in rows"),
)  # fmt: skip

TRANSPOSING = (
    fault("raw tiles read by the wrong swizzle", "TMA swizzles by the upper bit of the channel, too",
          ("((crossed ^ (column & 1) * 4 ^ i % 4) << 4)", "((crossed ^ i % 4) << 4)"),
          on="large_3x3", shape="boxes in rows"),
    fault("lanes crossed on one side only", "pixels are read by one lane and written by another",
          ("plane_px) + 4 * crossed", "plane_px) + 4 * (lane / 4)"), on="aligned_3x5", shape="boxes in rows"),
    fault("pieces not transposed", "a piece gets the pixels of a channel instead of the channels of a pixel",
          ("{of[0].word[j], of[1].word[j], of[2].word[j], of[3].word[j]}", "of[j]"),
          on="large_3x3", shape="boxes in rows"),
    fault("columns beyond the chunk", "lanes without channels write over other pixels",
          ("if (column >= ACROSS) return;", ""), on="large_3x3", shape="boxes in rows"),
    fault("the first half of the channels twice", "wide chunks repeat their first 16 channels",
          ("(first + i / 4) * ACROSS * 512", "i / 4 * ACROSS * 512"), on="aligned_3x5", shape="two runs of 128"),
    fault("pixels beyond the row are transposed", "they land on other lines", ("if (px.has(own_px + j))", ""),
          on="large_3x3", shape="boxes in rows"),
    fault("matrices read in plain order", "TMA swizzles 16-bit types by other bits",
          ("((lane / 8 ^ channel >> 1) << 4)", "(lane / 8 << 4)"),
          on="large_3x3", dtype=torch.float16, shape="boxes in rows"),
    fault("matrices not transposed", "a piece gets the pixels of a channel instead of the channels of a pixel",
          ("ldmatrix_x4_trans(transposed,", "ldmatrix_x4(transposed,"),
          on="large_3x3", dtype=torch.float16, shape="boxes in rows"),
    fault("fp32 pixels before the row go into the slot", "they land on other rows",
          ("if (px.has(own_px + j))", "if (own_px + j < px.to)"), on="large_3x3", shape="boxes in rows"),
    fault("fp32 pixels behind the row go into the slot", "they land on other rows",
          ("if (px.has(own_px + j))", "if (own_px + j >= px.from)"), on="large_3x3", shape="boxes in flat tiles"),
    fault("pixels before the row go into the slot", "they land on other rows",
          ("const bool has = px.has(own_px);", "const bool has = own_px < px.to;"),
          on="large_3x3", dtype=torch.float16, shape="boxes in rows"),
    fault("pixels behind the row go into the slot", "they land on other rows",
          ("const bool has = px.has(own_px);", "const bool has = own_px >= px.from;"),
          on="large_3x3", dtype=torch.float16, shape="boxes in flat tiles"),
    fault("spare bytes of all lanes are one's", "pixels that are not the row's meet in them",
          ("spare + lane * 16,", "spare,"), on="large_3x3", dtype=torch.float16, shape="boxes in rows"),
    fault("spare bytes of all warps are one's", "pixels that are not the row's meet in them",
          ("+ warp * SPARE_BYTES;", ";"), on="large_3x3", dtype=torch.float16, shape="boxes in rows"),
)  # fmt: skip

JOINED = (
    fault("the left is not cleared", "padding holds the end of the row above",
          ("from + max(0, -first_col)", "from"), on="rows_5x5", shape="rows"),
    fault("the right is not cleared", "padding holds the start of the row below",
          ("p.w - first_col : 0", "p.box_px : 0"), on="wide_bottom_right", shape="rows"),
    fault("units at the right are not looked at", "only units that leave the image at the left are cleared",
          (" &&\n        min(px.first + UNIT_PX, px.to) <= px.inside_to)", ")"),
          on="wide_bottom_right", shape="rows"),
    fault("cleared before they are transposed", "lanes clear what others have yet to write",
          ("        return;\n    __syncwarp();\n#pragma", "        return;\n#pragma"),
          on="wide_bottom_right", shape="rows"),
    fault("the first piece is cleared", "channels beyond the first four stay",
          ("(own_px, plane * (PIECES / PLANES) + i)) = {}", "(own_px, plane * (PIECES / PLANES))) = {}"),
          on="wide_bottom_right", shape="rows"),
    fault("pixels of other boxes are cleared", "lanes beyond the row clear the next",
          ("if (!px.has(own_px) || (", "if (("), on="shared_joined", shape="shared tile flat"),
    fault("rows end to end by their number", "a row starts after as many pixels as there are rows",
          ("row.row * p.w + first_col", "row.row * p.h + first_col"), on="wide_bottom_right", shape="rows"),
)  # fmt: skip

LOADS = (
    fault("loaded lines are not waited for", "a line is staged over one that is still read",
          (_TRY_SLOT_EMPTY, "if (false) {\n                under_way"), on="groups_odd", shape="rows"),
    fault("no fence after loads", "wgmma may read what the stores before it replaced",
          ("(u64* full) {\n        " + _FENCE, "(u64* full) {\n"), on="border_3x3"),
    fault("copied lines announced too early", "the copies of a line are not waited for before it counts as staged",
          ("hc::ptx::cp_async_wait_group<2>();", ""), on="large_nhwc", shape="rows", dtype=torch.float16),
    fault("the last copied lines announced too early", "the copies at the end of a block's work are not waited for",
          ("finish() {\n        hc::ptx::cp_async_wait_group<0>();", "finish() {"),
          on="large_nhwc", dtype=torch.float16, shape="flat"),
    fault("copied lines announced one unit early", "the copies of the unit that is announced may be under way",
          ("hc::ptx::cp_async_wait_group<2>();", "hc::ptx::cp_async_wait_group<3>();"),
          on="large_nhwc", shape="rows", dtype=torch.float16),
    fault("no right border", "columns right of the image count as inside", ("(unsigned)w < (unsigned)p.w;", "w >= 0;"),
          on="border_3x3"),
    fault("no last image", "places behind the last image count as inside",
          ("at.n < p.n && (unsigned)h", "(unsigned)h"), on="border_3x3"),
    fault("channels beyond the last one", "a chunk always has all its channels",
          ("const int there = place.inside ? channels : 0;", "const int there = place.inside ? PIECES * ELEMS : 0;"),
          on="odd_widths"),
    fault("pixels beyond the slot", "the last unit of a line writes over the next slot",
          ("if (px < px_limit) " + _STORE_PIECE, _STORE_PIECE),
          on="pointwise"),
)  # fmt: skip

_BY_FOUR: dict[str, Any] = {"on": "joined_by_four", "shape": "boxes in rows", "dtype": torch.float16}
_BY_EIGHT = {**_BY_FOUR, "on": "joined_by_eight"}

PLANES = (
    fault("planes in one place", "the boxes of a raw tile land over each other",
          ("raw + plane * (RAW_BYTES / PLANES), mapped.map", "raw, mapped.map"), **_BY_FOUR),
    fault("one plane for all", "every box of a raw tile brings the same channels",
          ("first + plane * int(p.x_c)", "first"), **_BY_FOUR),
    fault("planes with one shift", "a plane's first pixel is taken to be where the first plane's is",
          ("first - (shift + plane * plane_px &", "first - (shift &"), **_BY_EIGHT),
    fault("planes shifted the other way", "a plane's raw tile is taken to begin further right",
          ("(shift + plane * plane_px & 16", "(shift - plane * plane_px & 16"), **_BY_FOUR),
    fault("channels in plain order", "weights are packed as if neighbouring channels came together",
          ("in_chunk % PLANE_ELEMS * PLANES + in_chunk / PLANE_ELEMS", "in_chunk"),
          kernel="halo_sm90/pack", **_BY_FOUR),
    fault("neighbouring channels in a piece", "a piece of weights has channels that came apart",
          ("from[i * PLANES * p.w_channel]", "from[i * p.w_channel]"), kernel="halo_sm90/pack", **_BY_FOUR),
    fault("all planes are the first when they are transposed", "their pixels go where the first plane's belong",
          ("piece * PLANES / PIECES", "0"), **_BY_EIGHT),
    fault("all planes of fp32 are the first", "their pixels go where the first plane's belong",
          ("(half * ACROSS + column) * PLANES / PIECES", "0"), on="joined_by_eight", shape="boxes in rows"),
    fault("only the first plane is cleared", "padding of the others holds their neighbours",
          ("for (int plane = 0; plane < PLANES; ++plane) {\n        const int own_px",
           "for (int plane = 0; plane < 1; ++plane) {\n        const int own_px"), **_BY_FOUR),
    fault("a plane's padding is cleared like the first's", "pixels beside it stay",
          ("px.begin<Elem>(plane, plane_px) + threadIdx", "px.begin<Elem>(0, plane_px) + threadIdx"), **_BY_EIGHT),
    fault("units that are clear by the first plane", "a plane's pixels left of the image stay",
          ("px.first - 16 / int(sizeof(Elem)) + 1, px.from)", "px.first, px.from)"),
          **{**_BY_EIGHT, "on": "joined_far_left"}),
    fault("chunks as far apart as without planes", "the second chunk's boxes are too far on",
          (_RAW, _RAW.replace("(CHUNK_ELEMS / PLANES)", "CHUNK_ELEMS")), **_BY_FOUR),
)  # fmt: skip

MUTATIONS = (*BOXES, *RAW_TILES, *TRANSPOSING, *JOINED, *LOADS, *PLANES)
