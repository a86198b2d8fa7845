"""Faults in the tensor-core family: halo_sm90.cu with its rings, phases and sums, halo_sm90_pack.cu, and
halo_sm90_repair.cu. How lines are staged and results written is in halo_sm90_staging.py and halo_sm90_stores.py."""

from __future__ import annotations

import torch

from tests.mutations.mutation import Mutation


def fault(
    name: str, what: str, *edits: tuple[str, str], on: str, result: str = "fprop", kernel: str = "halo_sm90",
    dtype: torch.dtype = torch.float32, shape: str = "", finite: bool = True,
) -> Mutation:  # fmt: skip
    """A fault in one of halo_sm90's kernels."""
    return Mutation(f"halo: {name}", kernel, what, edits, on, result, dtype, "halo_sm90", shape, finite)


_WAIT_STAGE_FULL = "hc::wait(&self.stage_full[self.stage.index], self.stage.parity);\n"
_FENCE, _SKIPPED = "        hc::ptx::wgmma_fence();", "                hc::arrive_warp(&self.stage_empty"
_SET_LAST_STAGE = "        if (threadIdx.x % 32 == 0) last_stage = self.stage.index;\n"
_WAIT_SLOT_FULL = "hc::wait(&control.slot_full[slot.index], slot.parity);"
_STEPS = "for (int step = 0; step <= segment.steps; ++step)"
_LINES_OF_COLUMN = "        if (p.keeps) at += lines_of_tiles(p, hc::STEP_TILES * segment.steps, segment.steps);\n"

RINGS = (
    fault("lines are not waited for", "consumers multiply lines that may not be there",
          (_WAIT_SLOT_FULL + "\n        const int px", "const int px"), on="large_3x3", shape="boxes in rows"),
    fault("the parity of slots never turns", "a ring's second round is taken for its first",
          ("parity = round & 1;", "parity = 0;"), on="aligned_3x5", shape="boxes in rows"),
    fault("weights are not waited for", "consumers multiply weights that may not be there", 
          (_WAIT_STAGE_FULL + _FENCE, _FENCE),
          on="large_3x3", shape="boxes in rows"),
    fault("empty stages are not waited for", "weights land over ones that are still read", 
          ("first.advance()) first.wait();", "first.advance()) {}"),
          on="large_3x3", shape="boxes in rows"),
    fault("the phase never turns", "a ring's second round is taken for its first",
          ("if (++index == count) index = 0, parity ^= 1;", "if (++index == count) index = 0;"),
          on="large_3x3", shape="boxes in rows"),
    fault("too few bytes expected", "the weights' barrier completes before they are there",
          ("mbarrier_arrive_expect_tx(full, STAGE_BYTES)", "mbarrier_arrive_expect_tx(full, STAGE_BYTES / 2)"),
          on="large_3x3", shape="boxes in rows"),
    fault("one arrival too few for a slot", "a line is given back while one warp still reads it",
          ("slot_empty[thread], CONSUMER_WARPS)", "slot_empty[thread], CONSUMER_WARPS - 1)"),
          on="aligned_3x5", shape="boxes in rows"),
    fault("one unit stands for a line", "a loaded line counts as staged with its first 32 pixels",
          (": units_of_line(p));", ": 1);"), on="border_3x3"),
    fault("one warp stands for a line", "a turned line counts as staged with its first warp's units",
          ("min(units_of_line(p), LINE_WARPS)", "1"), on="large_3x3", shape="boxes in rows"),
    fault("every warp is waited for", "a line of two units waits for a third warp",
          ("min(units_of_line(p), LINE_WARPS)", "LINE_WARPS"), on="pointwise_stride", result="dgrad"),
    fault("a lane arrives for lanes that are not done", "the warp does not meet before its arrival",
          ("    __syncwarp();\n    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive",
           "    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive"), on="border_3x3"),
    fault("stages released before they are read", "a tap's weights are given back while wgmma reads them",
          ("        release(self);\n" + _SET_LAST_STAGE, _SET_LAST_STAGE + "        release(self);\n"),
          on="large_3x3", shape="boxes in rows"),
    fault("a line released one tap row early", "a row of pixels is given back while wgmma reads it",
          ("p, control, lines, lines.own + r - phase.r)", "p, control, lines, lines.own + r - phase.r + 1)"),
          on="aligned_3x5", shape="boxes in rows"),
    fault("lines are never released", "producers wait for the consumers",
          ("        release_lines(p, control, lines, lines.released_end);\n", ""), on="many_images"),
)  # fmt: skip

PHASES = (
    fault("phase 0 has all chunks", "it takes the chunks of phase 1, too",
          ("phase ? p.chunks : p.mid_chunk", "p.chunks"), on="aligned_nhwc", shape="boxes in rows"),
    fault("phase 1 starts with the first column", "it takes the columns of phase 0, too", ("phase ? p.next_s : 0", "0"),
          on="row_filter", shape="rows without packs"),
    fault("both phases of a step have its tiles", "phase 0 is staged for a tile that nobody has yet",
          ("phase || step == 0 ? STEP_TILES * step : STEP_TILES * step - 1", "STEP_TILES * step"),
          on="aligned_nhwc", shape="rows in passing"),
    fault("no tile carried over", "the second consumer takes the next step's tile in phase 0",
          ("consumer == 0 ? 0 : i ? 1 : -1", "consumer"), on="large_3x3", shape="boxes in rows"),
    fault("the last tile of a segment is not finished", "the consumers leave out the step more",
          ("bool accumulate = false;\n        " + _STEPS, "bool accumulate = false;\n        "
           + _STEPS.replace("<=", "<")), on="large_3x3", shape="boxes in rows"),
    fault("no lines for the step more", "the second consumer waits for its last lines",
          (".first;\n        " + _STEPS, ".first;\n        " + _STEPS.replace("<=", "<")),
          on="aligned_nhwc", shape="boxes in rows"),
    fault("sums of the tile before are kept", "a tile adds to the sums of the one before",
          ("accumulate = false, tile_parity ^= 1;", "tile_parity ^= 1;"), on="large_3x3", shape="boxes in rows"),
    fault("every phase starts anew", "the sums of the phase before are lost",
          ("accumulate), accumulate = true;", "accumulate);"), on="large_3x3", shape="boxes in rows"),
    fault("the second consumer writes with the first", "its tile is written half done",
          ("consumer == 0 || SHARED_TILE ? 1 : p.first_phase", "1"), on="large_3x3", shape="boxes in rows"),
    fault("a tile of one phase is never written", "phase 0 is waited for where there is none",
          ("SHARED_TILE ? 1 : p.first_phase", "SHARED_TILE ? 1 : 0"), on="border_3x3"),
    fault("skipped stages are not released", "the weights' producer waits for a consumer without a tile",
          (_SKIPPED + "[self.stage.index]);\n", ""), on="large_3x3", shape="boxes in rows"),
    fault("skipped stages are released at once", "arrivals count for the round before",
          (_WAIT_STAGE_FULL + _SKIPPED, _SKIPPED), on="small_a"),
    fault("skipped lines are not released", "the lines' producer waits for a consumer without a tile",
          ("        release_lines(p, *smem.control, lines, lines.released_end);\n", ""),
          on="aligned_nhwc", shape="rows in passing"),
    fault("segments run over columns", "a block goes on below a column's end",
          ("min(p.steps - first.step, end - index)", "end - index"), on="rows_5x5", shape="rows"),
)  # fmt: skip

KEPT = (
    fault("one kept line is released", "the first line that the tile below reads again is given back",
          ("min(all, row + passed);", "min(all, row + passed + 1);"),
          on="rows_5x5", shape="rows kept"),
    fault("one line is kept too long", "the ring fills with lines that nobody gives back",
          ("min(all, row + passed);", "min(all, row + passed - 1);"),
          on="rows_5x5", shape="rows kept"),
    fault("lines are released between phases", "the other phase reads them once more",
          ("again || own < 0 ? first", "own < 0 ? first"),
          on="aligned_3x5", shape="boxes in rows", dtype=torch.float16),
    fault("a column's last lines are kept", "nothing follows that would release them",
          ("last ? all : ", ""), on="rows_5x5", shape="rows kept"),
    fault("a column's last lines are released twice", "the first consumer gives them back before its last phase, too",
          (" && !(part.active && self.id == 0 && part.phase == 0)", ""), on="aligned_nhwc", shape="rows kept"),
    fault("released lines begin at the tile", "a consumer's first tile leaves the lines above to nobody",
          ("own < hc::STEP_TILES ? 0 : min(all, row - down + passed)", "min(all, max(row, 0))"),
          on="rows_5x5", shape="rows kept"),
    fault("lines count as known too early", "a tile's new lines are never staged",
          ("p.first_phase == 0 ? 1 : 2)", "p.first_phase == 0 ? 0 : 2)"), on="large_3x3", shape="boxes in rows"),
    fault("all chunks in the first one's ring", "lines of two chunks are staged over each other",
          ("(p.keeps ? chunk * p.ring.value : 0)", "0"), on="aligned_nhwc", shape="rows kept"),
    fault("consumers read the first chunk's ring", "all chunks are taken from the first",
          ("return {at, chunk, row + phase.r, first, end}", "return {at, 0, row + phase.r, first, end}"),
          on="aligned_nhwc", shape="rows kept"),
    fault("barriers of one ring only", "the rings of later chunks have none",
          ("thread < (p.keeps ? p.chunks : 1) * p.ring.value", "thread < p.ring.value"),
          on="aligned_nhwc", shape="rows kept"),
    fault("the ring starts anew in each column", "producers take the places of the column before",
          (_LINES_OF_COLUMN + "    }\n}", "    }\n}"), on="rows_5x5", shape="rows kept"),
    fault("lines in passing stay", "consumers do not go on in the ring",
          ("        at += read.end - read.first;\n", ""),
          on="rows_5x5", shape="rows in passing"),
)  # fmt: skip

ASYNCHRONOUS = (
    fault("no fence after the barriers' start", "the copies may meet barriers that are not initialised",
          ("hc::ptx::fence_mbarrier_init();", ""), on="large_3x3", shape="boxes in rows"),
    fault("no barrier after the barriers' start", "roles begin before the barriers are there",
          ("col / p.stride_w;\n    }\n    __syncthreads();", "col / p.stride_w;\n    }"),
          on="large_3x3", shape="boxes in rows"),
    fault("no wgmma fence", "the accumulators are not handed over", ("hc::ptx::wgmma_fence();", ""),
          on="large_3x3", shape="boxes in rows"),
    fault("no wait for the tap before", "its weights are given back while wgmma reads them",
          ("hc::ptx::wgmma_wait_group<1>();", ""), on="large_3x3", shape="boxes in rows"),
    fault("no wait for the last tap", "sums are written before they are there",
          ("hc::ptx::wgmma_wait_group<0>();", ""), on="large_3x3", shape="boxes in rows"),
    fault("no commit", "the wait has no group to wait for", ("hc::ptx::wgmma_commit_group();", ""),
          on="large_3x3", shape="boxes in rows"),
)  # fmt: skip

VALUES = (
    fault("weights not swizzled", "weights are packed in plain order, wgmma reads them swizzled",
          ("hc::unit_offset<CHUNK_BYTES>(m, piece)", "m * CHUNK_BYTES + (piece << 4)"),
          on="large_3x3", kernel="halo_sm90_pack", shape="boxes in rows"),
    fault("groups of eight pixels too close", "the descriptor's stride is half of what it should be",
          ("shared_address(smem.slots), 16, 8 * CHUNK_BYTES", "shared_address(smem.slots), 16, 4 * CHUNK_BYTES"),
          on="large_3x3", shape="boxes in rows"),
    fault("sums start from what registers hold", "the first product is added, not written",
          ("accumulate || k > 0", "true"), on="large_3x3", shape="boxes in rows"),
    fault("every tap starts anew", "the sums of the taps before are lost", ("            accumulate = true;\n", ""),
          on="large_3x3", shape="boxes in rows"),
    fault("tiles of a slot in one place", "both consumers multiply the first tile of a slot",
          ("(own - phase.first_tile) * TILE_PX + line_px", "line_px"), on="border_3x3"),
    fault("slots begin with their tile", "what a slot's first row has before the tile is left out",
          ("* TILE_PX + line_px -\n" + " " * 35 + "p.pitch.quotient(line_px) * p.pitch.value", "* TILE_PX"),
          on="border_3x3"),
    fault("packed rows are not shifted", "all output rows of a pack take the taps of the first",
          ("r - p.shift_r * (phase / p.pack_w)", "r"), on="large_3x3", kernel="halo_sm90_pack", shape="boxes in rows"),
    fault("packed channels beyond the last one", "weights are read behind the last channel",
          ("there && first_channel + i * PLANES < p.channels", "there"), on="odd_widths", kernel="halo_sm90_pack"),
)  # fmt: skip

PLACES = (
    fault("no division by one", "a divisor of one, which has no magic number, gives 0",
          ("value == 1 ? n : __umulhi", "__umulhi"), on="one_column"),
    fault("planes in one row", "planes that stand below each other are taken to stand side by side",
          ("plane / p.planes_w", "plane"), on="stride_2", shape="flat"),
    fault("rows of a pack in one place", "all output rows of a pack are written to the first",
          ("row * p.pack_h + phase_row", "row * p.pack_h"), on="wide_bottom_right", shape="packed rows"),
    fault("columns of a pack in one place", "all output columns of a pack are written to the first",
          ("+ col) * p.pack_w + phase_col", "+ col) * p.pack_w"), on="large_3x3", shape="two runs of 128"),
    fault("classes in one place", "rows of a dilated filter's other classes are written to the first",
          ("out_row = column.cls + p.classes * (row", "out_row = p.classes * (row"),
          on="aligned_dilated", shape="boxes in rows"),
    fault("strips in one place", "all strips are written to the first",
          ("(column.strip * p.strip_cols + col) * p.pack_w", "col * p.pack_w"),
          on="aligned_3x5", shape="boxes in flat tiles"),
    fault("the zeros between rows are written", "places between two rows count as outputs",
          ("col < p.strip_cols && out_row", "out_row"), on="strips_3x5", shape="flat strips"),
    fault("images one row apart", "the next image begins one row too early in a flat column",
          ("row - images * p.wrap.value", "row - images * (p.wrap.value - 1)"), on="border_3x3"),
)  # fmt: skip

NOT_FINITE = (
    fault("the repair is not called for", "sums that are not finite are not noted",
          ("if (mark != 0.f) atomicExch(p.not_finite, 1u);", ""), on="large_3x3", finite=False),
    fault("the note is a plain store", "blocks store to one word without an atomic operation",
          ("atomicExch(p.not_finite, 1u)", "*p.not_finite = 1u"), on="large_3x3", finite=False),
    fault("the repair is always called for", "any sum is noted", ("if (mark != 0.f) atomicExch", "atomicExch"),
          on="large_3x3", shape="boxes in rows"),
    fault("the note is not cleared", "what was in memory calls for a repair",
          ("    if (blockIdx.x == 0 && threadIdx.x == 0) *p.not_finite = 0;\n", ""),
          on="large_3x3", kernel="halo_sm90_pack", shape="boxes in rows"),
    fault("the repair does nothing", "it takes the note the wrong way round",
          ("*p.not_finite == 0", "*p.not_finite != 0"), on="large_3x3", finite=False, kernel="halo_sm90_repair"),
    fault("the repair ends early", "the second half of the outputs is left as it is",
          ("index < p.outputs", "index < p.outputs / 2"), on="large_3x3", finite=False, kernel="halo_sm90_repair"),
    fault("the repair has no border", "rows outside the image count", ("(unsigned)h >= (unsigned)p.h || ", ""),
          on="large_3x3", shape="packed rows", result="dgrad", finite=False,
          kernel="halo_sm90_repair"),
    fault("the repair does not flip the filter", "dgrad walks the taps in the direction of fprop",
          ("(p.first_r + r * p.step_r)", "r"), on="large_3x3", shape="packed rows", result="dgrad", finite=False,
          kernel="halo_sm90_repair"),
    fault("the repair forgets the bias", "an output is summed anew without its bias",
          ("HAS_BIAS ? hc::to_acc(p.bias[at.filter]) : 0.f", "0.f"),
          on="large_3x3", finite=False, kernel="halo_sm90_repair"),
    fault("NaN run over", "the payload of a NaN is rounded as if it were a number",
          ("value != value ? 0x7fffffffu : __float_as_uint(value) + 0x1000u", "__float_as_uint(value) + 0x1000u"),
          on="odd_widths", finite=False),
)  # fmt: skip

MUTATIONS = (*RINGS, *PHASES, *KEPT, *ASYNCHRONOUS, *VALUES, *PLACES, *NOT_FINITE)
