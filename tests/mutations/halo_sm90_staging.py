"""Faults in how halo_sm90 stages lines of the input: boxes, raw tiles that are turned, joined rows, loads, copies."""

from __future__ import annotations

import torch

from tests.mutations.halo_sm90 import fault

_SLOT_EMPTY = "hc::wait(&smem.control->slot_empty[line.slot.index], line.slot.parity ^ 1);"
_UNIT_SLOT_EMPTY = "if (unit.begins) hc::wait(&smem.control->slot_empty[unit.slot.index], unit.slot.parity ^ 1);"
_TRY_SLOT_EMPTY = "if (!__all_sync(~0u, hc::ptx::mbarrier_try_wait_parity(empty, line.slot.parity ^ 1))) {"
_BOX = "full, line.chunk * CHUNK_ELEMS,\n"
_RAW = "line.chunk * CHUNK_ELEMS, line.column.block / p.blocks, row.n);"
_STORE_PIECE = "*reinterpret_cast<Piece*>(slot + unit_offset<ROW_BYTES>(px, first"
_FENCE = "hc::ptx::fence_proxy_async_shared();\n"

BOXES = (
    fault("parts of a long row in one place", "every box of a row brings its first pixels",
          ("(FLAT ? 0 : box * p.box_px)", "0"), on="long_nhwc", shape="rows of 256"),
    fault("boxes are not waited for", "a box lands in a slot that is still read", (_SLOT_EMPTY, ""),
          on="aligned_nhwc", shape="boxes in rows"),
    fault("too few bytes of boxes expected", "a line counts as there before its last box",
          ("(full, boxes * bytes)", "(full, boxes * bytes - 128)"), on="aligned_nhwc", shape="boxes in rows"),
    fault("bytes of two tiles expected", "the line of one tile never counts as there",
          ("(full, boxes * bytes)", "(full, p.boxes * bytes)"), on="aligned_nhwc", shape="boxes in flat tiles"),
    fault("boxes of one tile", "the rows of a slot's second tile are not brought",
          ("p.single_boxes : p.boxes;", "p.single_boxes : p.single_boxes;"),
          on="aligned_nhwc", shape="boxes in flat tiles", dtype=torch.float16),
    fault("boxes of one row", "the boxes of a flat line all bring its first row",
          ("line.line + (FLAT ? box : 0)", "line.line"), on="aligned_nhwc", shape="boxes in flat tiles"),
    fault("boxes of the next column", "a line starts one pixel too far right",
          ("p, line.column) + (FLAT", "p, line.column) + 1 + (FLAT"), on="aligned_nhwc", shape="boxes in rows"),
    fault("boxes of the first image", "all images are staged from the first",
          ("col, row.row, row.n);", "col, row.row, 0);"), on="aligned_nhwc", shape="boxes in rows"),
    fault("boxes of the first chunk", "all chunks of channels are the first", (_BOX, "full, 0,\n"),
          on="aligned_nhwc", shape="boxes in rows"),
    fault("boxes of the first group", "all groups are staged from the first",
          ("line.column.block / p.blocks, col,", "0, col,"), on="channels_last_groups"),
)  # fmt: skip

RAW_TILES = (
    fault("turned lines are not waited for", "a unit is turned into a slot that is still read",
          (_UNIT_SLOT_EMPTY, ""), on="large_3x3"),
    fault("only the first warp waits for the slot", "the others turn into one that is still read",
          ("unit < LINE_WARPS,", "unit == 0,"), on="large_3x3"),
    fault("raw tiles are not waited for", "a unit is turned before it is there",
          ("    hc::wait(full, parity);\n", ""), on="large_3x3"),
    fault("the parity of raw tiles does not turn", "the second tile's wait is for the round after",
          ("asked.parity ^ (asked.index == 0)", "asked.parity"), on="large_3x3"),
    fault("too few bytes of raw tiles expected", "a tile counts as there before it is",
          ("[asked.index], RAW_BYTES)", "[asked.index], RAW_BYTES / 2)"), on="large_3x3"),
    fault("one raw tile", "a tile lands where the one before is turned",
          ("raw + asked.index * RAW_BYTES, &p.x_map", "raw, &p.x_map"), on="large_3x3"),
    fault("a raw tile asked for too early", "lanes still read the tile that the copy engine fills again",
          ("clear_outside<CHUNK_BYTES>(slot, unit.px);\n    __syncwarp();",
           "clear_outside<CHUNK_BYTES>(slot, unit.px);"), on="large_3x3", shape="flat"),
    fault("no fence after turning", "wgmma may read what the stores before it replaced",
          ("if (!unit.ends) return;\n    " + _FENCE, "if (!unit.ends) return;\n"), on="large_3x3"),
    fault("every unit is announced", "a line counts as there before the warp's last unit",
          ("    if (!unit.ends) return;\n", ""), on="large_3x3", shape="flat"),
    fault("the last unit alone is announced", "warps that do not have it stay silent",
          ("unit + LINE_WARPS >= units}", "unit + 1 >= units}"), on="large_3x3"),
    fault("the last unit is not turned", "it stays in its raw tile",
          ("    });\n    turn_before();\n", "    });\n"), on="large_3x3"),
    fault("units of another box", "a flat line's units are counted on through its boxes",
          ("(unit - box * p.box_units.value)", "unit"), on="large_3x3", shape="flat"),
    fault("raw tiles of one tile", "the rows of a slot's second tile are not turned",
          ("p.single_boxes : p.boxes, first_col", "p.single_boxes : p.single_boxes, first_col"),
          on="large_3x3", shape="flat"),
    fault("pixels are not shifted", "what comes from an aligned address is taken for the first pixel",
          ("{from + in_box, from,", "{from + in_box + shift, from,"), on="large_3x3"),
    fault("raw tiles of the first chunk", "all chunks of channels are the first",
          (_RAW, _RAW.replace("line.chunk * CHUNK_ELEMS", "0")), on="aligned_3x5", shape="boxes in rows"),
    fault("raw tiles of the first group", "all groups are staged from the first",
          (_RAW, _RAW.replace("line.column.block / p.blocks", "0")), on="groups_2"),
    fault("raw tiles of the first image", "all images are staged from the first", (_RAW, _RAW.replace("row.n", "0")),
          on="large_3x3"),
)  # fmt: skip

TURNING = (
    fault("raw tiles read by the wrong swizzle", "the copy engine swizzles by the upper bit of the channel, too",
          ("((crossed ^ (column & 1) * 4 ^ i % 4) << 4)", "((crossed ^ i % 4) << 4)"), on="large_3x3"),
    fault("lanes crossed on one side only", "pixels are read by one lane and written by another",
          ("px.first + 4 * crossed", "px.first + 4 * (lane / 4)"), on="aligned_3x5", shape="boxes in rows"),
    fault("pieces not turned", "a piece gets the pixels of a channel instead of the channels of a pixel",
          ("{\n                    of[0].word[j], of[1].word[j], of[2].word[j], of[3].word[j]}", "of[j]"),
          on="large_3x3"),
    fault("columns beyond the chunk", "lanes without channels write over other pixels",
          ("if (column >= ACROSS) return;", ""), on="large_3x3"),
    fault("the first half of the channels twice", "wide chunks repeat their first 16 channels",
          ("(first + i / 4) * ACROSS * 512", "i / 4 * ACROSS * 512"), on="aligned_3x5", shape="boxes in rows"),
    fault("pixels beyond the row are turned", "they land on other lines", ("if (px.has(own_px + j))", ""),
          on="large_3x3"),
    fault("matrices read in plain order", "the copy engine swizzles 16-bit types by other bits",
          ("((lane / 8 ^ channel >> 1) << 4)", "(lane / 8 << 4)"), on="large_3x3", dtype=torch.float16),
    fault("matrices not turned", "a piece gets the pixels of a channel instead of the channels of a pixel",
          ("ldmatrix_x4_trans(turned,", "ldmatrix_x4(turned,"), on="large_3x3", dtype=torch.float16),
    fault("units before the row are whole", "pixels left of the row are turned",
          ("px.first >= px.from && px.first + UNIT_PX", "px.first + UNIT_PX"), on="large_3x3", dtype=torch.float16),
    fault("units behind the row are whole", "pixels right of the row are turned",
          (" && px.first + UNIT_PX <= px.to;", ";"), on="large_3x3", dtype=torch.float16, shape="flat"),
    fault("groups before the row are whole", "eight pixels are turned although the row begins among them",
          ("group >= px.from && group + 8", "group + 8"), on="large_3x3", dtype=torch.float16),
    fault("pixels of broken groups are turned", "they land on other rows", ("else if (px.has(at))", "else"),
          on="large_3x3", dtype=torch.float16),
)  # fmt: skip

JOINED = (
    fault("the left is not cleared", "padding holds the end of the row above",
          ("from + max(0, -first_col)", "from"), on="rows_5x5", shape="rows"),
    fault("the right is not cleared", "padding holds the start of the row below",
          ("p.w - first_col : 0", "p.box_px : 0"), on="wide_bottom_right"),
    fault("units at the right are not looked at", "only units that leave the image at the left are cleared",
          (" && min(px.first + UNIT_PX, px.to) <= px.inside_to) return", ") return"), on="wide_bottom_right"),
    fault("cleared before they are turned", "lanes clear what others have yet to write",
          ("<= px.inside_to) return;\n    __syncwarp();", "<= px.inside_to) return;"), on="wide_bottom_right"),
    fault("the first piece is cleared", "channels beyond the first four stay",
          ("(own_px, piece)) = {}", "(own_px, 0)) = {}"), on="wide_bottom_right"),
    fault("pixels of other boxes are cleared", "lanes beyond the row clear the next",
          ("if (!px.has(own_px) || (", "if (("), on="rows_5x5", shape="flat strips"),
    fault("rows joined by their number", "a row starts after as many pixels as there are rows",
          ("row.row * p.w + first_col", "row.row * p.h + first_col"), on="wide_bottom_right"),
)  # fmt: skip

LOADS = (
    fault("loaded lines are not waited for", "a line is staged over one that is still read",
          (_TRY_SLOT_EMPTY, "if (false) {"), on="rows_5x5", shape="rows", dtype=torch.float16),
    fault("no fence after loads", "wgmma may read what the stores before it replaced",
          ("(u64* full) {\n        " + _FENCE, "(u64* full) {\n"), on="border_3x3"),
    fault("copied lines announced too early", "the copies of a line are not waited for before it counts as staged",
          ("hc::ptx::cp_async_wait_group<2>();", ""), on="large_nhwc", shape="rows", dtype=torch.float16),
    fault("the last copied lines announced too early", "the copies at the end of a block's share are not waited for",
          ("hc::ptx::cp_async_wait_group<0>();", ""), on="large_nhwc", dtype=torch.float16),
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
          ("            if (px < px_limit)\n                " + _STORE_PIECE, "                " + _STORE_PIECE),
          on="pointwise"),
)  # fmt: skip

MUTATIONS = (*BOXES, *RAW_TILES, *TURNING, *JOINED, *LOADS)
