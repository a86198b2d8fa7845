"""Faults in halo_sm90's shared tiles: two consumers, each with its own block of filters and its own stream of weights,
the second half a tile behind the first; and in how a tap gives back the stage of the one before it."""

from __future__ import annotations

from typing import Any

import torch

from tests.mutations.halo_sm90 import fault

_WAIT_READ = "hc::ptx::cp_async_bulk_wait_group_read<0>();\n"
_KEPT: dict[str, Any] = {"on": "shared_3x3", "shape": "shared tile kept"}
_FLAT: dict[str, Any] = {"on": "shared_nhwc", "shape": "shared tile flat", "dtype": torch.float16}

STREAMS = (
    fault("one stream of weights", "both consumers get the first one's block of filters",
          ("segment.first.block) * STREAMS + stream)", "segment.first.block) * STREAMS)"), **_KEPT),
    fault("blocks of one stream", "the streams of neighbouring blocks overlap",
          ("segment.first.block) * STREAMS + stream)", "segment.first.block) + stream)"), **_FLAT),
    fault("both streams in one ring", "the second one's weights land on the first one's",
          ("smem.stages + stream * STAGES * STAGE_BYTES", "smem.stages"), **_KEPT),
    fault("the second consumer reads the first one's stages", "it multiplies by the weights of the first",
          ("smem.stages + first_stage * STAGE_BYTES", "smem.stages"), **_FLAT),
    fault("the second consumer waits for the first one's stages", "its own may not be there",
          ("smem.control->stage_full + first_stage", "smem.control->stage_full"), **_KEPT),
    fault("the second consumer gives back the first one's stages", "both arrive for one ring",
          ("smem.control->stage_empty + first_stage", "smem.control->stage_empty"), **_FLAT),
    fault("stages given back by both consumers", "the other consumer never arrives",
          ("CONSUMER_WARPS / STREAMS)", "CONSUMER_WARPS)"), **_KEPT),
    fault("barriers of one stream only", "the second ring has none",
          ("thread < STREAMS * STAGES", "thread < STAGES"), **_FLAT),
    fault("memory for one ring of stages", "what lies behind the first ring is the second one, too",
          ("stages + STREAMS * STAGES * STAGE_BYTES", "stages + STAGES * STAGE_BYTES"), **_KEPT),
    fault("stages of a stream are not tested", "weights land over ones that are still read",
          ("first.has_next() && first.is_free()", "first.has_next()"), **_FLAT),
    fault("the second stream ends with the first", "its last weights are never asked for",
          ("first.left >= 0 || second.left >= 0", "first.left >= 0"), on="shared_3x3", shape="shared tile in passing"),
    fault("a filter's taps go on in the next segment", "a stream does not start anew",
          ("+ p.mid_tap : -1, tap = taps;", "+ p.mid_tap : -1;"), on="rows_5x5", shape="rows kept"),
    fault("both consumers write the first block", "filters of the second are lost",
          ("* STREAMS + (SHARED_TILE ? consumer : 0)", "* STREAMS"), **_KEPT),
    fault("filters counted by single blocks", "a work tile's two blocks are one apart from the next's",
          ("column.block * STREAMS", "column.block"), **_FLAT),
)  # fmt: skip

WORK_TILES = (
    fault("work tiles of the first group", "the blocks of all groups are the first one's",
          ("(segment.first.group * p.blocks + segment.first.block)", "segment.first.block"),
          on="shared_groups", shape="shared tile"),
    fault("blocks go on through the residue classes", "a class starts with the block after the last",
          ("column - cls * schedule.blocks.value,", "column,"), **_KEPT),
    fault("all members take the first block", "filters of the others are lost",
          ("member + column", "column"), on="shared_nhwc", shape="shared tile kept"),
    fault("members have the blocks of all", "a member's work tiles are counted as if it had every block",
          ("cls = schedule.blocks.quotient(column);", "cls = schedule.blocks.quotient(column) / schedule.team.value;"),
          on="shared_nhwc", shape="shared tile kept"),
    fault("members have ranges of their own", "neighbouring blocks of threads take different work tiles",
          ("i = schedule.team.quotient(blockIdx.x);", "i = blockIdx.x;"), on="shared_nhwc", shape="shared tile kept"),
    fault("work tiles go on through the tile columns", "a tile column starts with the place after the last",
          ("index - column * schedule.work_tiles.value};", "index};"), **_KEPT),
    fault("images go on through the strips", "a strip starts with the image after the last",
          ("image - strip * schedule.images.value,", "image,"), on="aligned_3x5", shape="two short runs in rows"),
    fault("a work tile of two tiles", "consumers leave out every other tile",
          ("SHARED_TILE ? work_tile :", "SHARED_TILE ? 2 * work_tile :"),
          **_KEPT),
    fault("lines of two tiles", "a tile's lines are staged once more with the next",
          ("{lines_of_tiles(p, work_tile, work_tiles),", "{lines_of_tiles(p, work_tile - 1, work_tiles),"), **_KEPT),
)  # fmt: skip

TERMS = (
    fault("a product of terms is lost", "what TF32 leaves of a weight does not count",
          ("if (px_term < 0) continue;", "if (px_term < 0 || term > 0) continue;"), on="large_3x3",
          shape="three products"),
    fault("the product of large terms twice", "what TF32 leaves of a value does not count",
          ("both = TERMS - 1 - i / TERMS", "both = 0"), on="large_3x3", shape="three products"),
    fault("partial sums are dropped", "a tile's sums are its last partial ones",
          ("sums[j][i] += part[j][i];", "sums[j][i] = part[j][i];"), on="large_3x3", shape="three products"),
    fault("partial sums are added twice", "they begin with those that a tile's sums have already",
          ("accumulate || i > 0 || k > 0", "true"), on="large_3x3", shape="three products"),
    fault("the last partial sums are dropped", "those of fewer taps than are promoted at a time",
          ("                multiply_part<LESS_THAN - 1>(self, run, col_px, sums, meanwhile);",
           "                { Sums none{}; multiply_part<LESS_THAN - 1>(self, run, col_px, none, meanwhile); }"),
          on="rows_5x5", shape="three products in rows"),
    fault("taps of a partial sum in one column", "all are multiplied by the pixels of the first",
          ("moved(slots, col_px[tap]", "moved(slots, col_px[0]"), on="rows_5x5", shape="three products in rows"),
    fault("a line of terms released one tap row early", "a row of pixels is given back while wgmma reads it",
          ("lines.own + r - phase.r);\n                };", "lines.own + r - phase.r + 1);\n                };"),
          on="aligned_3x5", shape="three products in boxes"),
    fault("partial sums are read under way", "they are promoted before wgmma has them",
          ("        hc::ptx::wgmma_wait_group<0>();\n        release(self);\n        last_stage = -1;\n#pragma",
           "        release(self);\n        last_stage = -1;\n#pragma"), on="large_3x3", shape="three products"),
    fault("sums go on from tile to tile", "they do not begin with zero",
          ("if (TERMS > 1 && !accumulate)", "if (false)"), on="large_3x3", shape="three products"),
    fault("sums begin anew with each phase", "those of phase 0 are lost",
          ("if (TERMS > 1 && !accumulate)", "if (TERMS > 1)"), on="rows_5x5", shape="three products in rows"),
    fault("the terms of a pixel in one place", "its first term is multiplied twice",
          ("px_term * slot_term", "0 * slot_term"), on="large_3x3", shape="three products"),
    fault("the terms of a weight in one place", "its first term is multiplied twice",
          ("term * (TERM_BYTES / 16) + 2 * k", "2 * k"), on="large_3x3", shape="three products"),
    fault("the second term is the first", "what TF32 leaves of a value is never formed",
          ("value -= __uint_as_float(cut);", ""), on="large_3x3", shape="three products"),
    fault("infinities in terms are not noted", "sums that met one stay NaN",
          ("|| PACKS > 1 || TERMS > 1;", "|| PACKS > 1;"), on="shared_odd_nhwc",
          shape="three products", finite=False),
    fault("the second term keeps what is left of a row", "padding of rows end to end is zero in its first term alone",
          ("X_JOINED && term < TERMS", "X_JOINED && term < 1"), on="joined_rows", shape="three products in boxes"),
)  # fmt: skip

HALF_WAY = (
    fault("half way is never announced", "the second consumer does not start",
          ("if (SHARED_TILE && chunk == p.mid_chunk && r == p.mid_r) hc::arrive_warp(&control.half_way[self.id]);", ""),
          **_KEPT),
    fault("half way is announced at the end", "the first consumer waits for lines that the second has yet to give back",
          ("chunk == p.mid_chunk && r == p.mid_r", "chunk == p.chunks - 1 && r == p.taps_r - 1"),
          on="shared_3x3", shape="shared tile in passing"),
    fault("half way for both consumers", "the second one's warps are waited for, too",
          ("half_way[thread], CONSUMER_WARPS / CONSUMERS)", "half_way[thread], CONSUMER_WARPS)"), **_FLAT),
    fault("half way has no barrier", "it is not initialised",
          ("if (SHARED_TILE && thread < CONSUMERS)\n", "if (false)\n"), **_FLAT),
    fault("a consumer waits for its own half", "it has yet to begin",
          ("half_way[consumer ^ 1]", "half_way[consumer]"), **_KEPT),
    fault("the first consumer waits for the tile that it begins", "the second one has yet to begin it",
          ("tile_parity ^ consumer ^ 1)", "tile_parity)"), **_KEPT),
)  # fmt: skip

KEPT_STAGES = (
    fault("warps share a stage's first part", "their sums are written over each other's",
          (" * STAGE_BYTES + threadIdx.x % WARPGROUP / 32 * PixelBuffer::BYTES;", " * STAGE_BYTES;"), **_KEPT),
    fault("sums leave through the next stage", "its weights are coming",
          ("self.stages + last_stage(p, self) * STAGE", "self.stages + self.stage.index * STAGE"), **_KEPT),
    fault("a stage is given back before its sums have left", "weights land in it while boxes are read",
          ("    if (hc::ptx::elect_sync()) " + _WAIT_READ + "    hc::arrive", "    hc::arrive"),
          on="strips_3x5", shape="shared tile kept"),
    fault("a kept stage is not given back", "the weights' producer waits for it",
          ("    hc::arrive_warp(&self.stage_empty[last_stage(p, self)]);\n", ""), **_KEPT),
    fault("a kept stage is given back with the others", "weights land where sums are written",
          ("    if (!Y_IN_STAGE) taps.release", "    taps.release"), **_KEPT),
)  # fmt: skip

RELEASE = (
    fault("every lane gives back a stage", "the arrivals of 32 lanes count",
          ("if (threadIdx.x % 32 == 0) last_stage =", "last_stage ="), on="large_3x3", shape="boxes in rows"),
    fault("no lane gives back a stage", "the weights' producer waits for the consumers",
          ("        release(self);\n        if (threadIdx", "        if (threadIdx"),
          on="large_3x3", shape="boxes in rows"),
    fault("a chunk's last stage is kept", "the weights' producer waits for the consumers",
          ("            taps.release(self);\n            taps.last", "            taps.last"), on="strips_3x5",
          shape="rows in passing"),
    fault("a chunk's last stage is given back twice", "the next chunk's first tap gives it back once more",
          ("            taps.last_stage = -1;\n", ""), on="strips_3x5", shape="rows in passing"),
    fault("all taps with the first weights", "the descriptor of the weights stays where it is",
          ("hc::ptx::moved(stages, self.stage.index * (STAGE_BYTES / 16))", "stages"),
          on="large_3x3", shape="boxes in rows"),
    fault("all taps at the first column", "the descriptor of the pixels leaves out the tap",
          ("hc::ptx::moved(slots, px * (CHUNK_BYTES / 16))", "slots"), on="large_3x3", shape="boxes in rows"),
    fault("all slices with the first pixels' channels", "the descriptor of the pixels leaves out the slice",
          ("moved(pixels, run[j] + 2 * k), accumulate", "moved(pixels, run[j]), accumulate"),
          on="aligned_3x5", shape="boxes in rows"),
)  # fmt: skip

MUTATIONS = (*STREAMS, *WORK_TILES, *TERMS, *HALF_WAY, *KEPT_STAGES, *RELEASE)
