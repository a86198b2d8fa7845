"""Faults in the tensor-core family: halo_sm90.cu with its rings, staging and epilogue, and halo_sm90_pack.cu."""

from __future__ import annotations

import torch

from tests.mutations.mutation import Mutation


def _fault(
    name: str, fault: str, *edits: tuple[str, str], on: str, result: str = "fprop", kernel: str = "halo_sm90",
    dtype: torch.dtype = torch.float32, shape: str = "",
) -> Mutation:  # fmt: skip
    return Mutation(f"halo: {name}", kernel, fault, edits, on, result, dtype, "halo_sm90", shape)


_WAIT_SLOT_EMPTY = "if (!__all_sync(~0u, hc::ptx::mbarrier_try_wait_parity(empty, slot.parity ^ 1))) {"
_WAIT_STAGE_EMPTY = "hc::wait(&smem.control->stage_empty[stage.index], stage.parity ^ 1);"
_WAIT_STAGE_FULL = "hc::wait(&control.stage_full[self.stage.index], self.stage.parity);"
_WAIT_SLOT_FULL = "hc::wait(&control.slot_full[lines.next_wait.index], lines.next_wait.parity);"

RINGS = (
    _fault("lines are not waited for", "consumers multiply lines that may not be there", (_WAIT_SLOT_FULL, ";"),
           on="large_3x3"),
    _fault("weights are not waited for", "consumers multiply weights that may not be there", (_WAIT_STAGE_FULL, ""),
           on="large_3x3"),
    _fault("empty slots are not waited for", "a line is staged over one that is still read",
           (_WAIT_SLOT_EMPTY, "if (false) {"), on="rows_5x5", shape="rows"),
    _fault("empty stages are not waited for", "weights land over ones that are still read", (_WAIT_STAGE_EMPTY, ""),
           on="small_a"),
    _fault("swapped phase of the weights' producer", "it waits for a round that nobody can finish",
           (_WAIT_STAGE_EMPTY, _WAIT_STAGE_EMPTY.replace(" ^ 1", "")), on="large_3x3"),
    _fault("swapped phase of the weights' consumers", "they take the round before for this one",
           (_WAIT_STAGE_FULL, _WAIT_STAGE_FULL.replace("self.stage.parity", "self.stage.parity ^ 1")), on="large_3x3"),
    _fault("the phase never turns", "a ring's second round is taken for its first",
           ("if (++index == count) index = 0, parity ^= 1;", "if (++index == count) index = 0;"), on="small_a"),
    _fault("too few bytes expected", "the weights' barrier completes before they are there",
           ("mbarrier_arrive_expect_tx(full, STAGE_BYTES)", "mbarrier_arrive_expect_tx(full, STAGE_BYTES / 2)"),
           on="large_3x3"),
    _fault("too many bytes expected", "the weights' barrier never completes",
           ("mbarrier_arrive_expect_tx(full, STAGE_BYTES)", "mbarrier_arrive_expect_tx(full, STAGE_BYTES + 16)"),
           on="large_3x3"),
    _fault("a copy of fewer bytes", "the last row of the weights is not copied",
           ("from, STAGE_BYTES, full)", "from, STAGE_BYTES - 16, full)"), on="large_3x3"),
    _fault("one arrival too few for a slot", "a line is given back while one warp still reads it",
           ("slot_empty[thread], CONSUMER_WARPS)", "slot_empty[thread], CONSUMER_WARPS - 1)"),
           on="rows_5x5", shape="rows"),
    _fault("one unit stands for a line", "a line counts as staged with its first 32 pixels",
           ("slot_full[thread], (p.slot_px + 31) / 32)", "slot_full[thread], 1)"), on="large_3x3"),
    _fault("the start waits for too many", "the second consumer waits for arrivals that never come",
           ("&control.lead, WARPGROUP / 32)", "&control.lead, WARPGROUP / 16)"), on="large_3x3"),
    _fault("a lane arrives for lanes that are not done", "the warp does not meet before its arrival",
           ("    __syncwarp();\n    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive",
            "    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive"), on="large_3x3"),
    _fault("stages released before they are read", "a tap's weights are given back while wgmma reads them",
           ("stage_empty[last_stage]);\n            if (!", "stage_empty[self.stage.index]);\n            if (!"),
           on="small_a"),
    _fault("a line released one tap row early", "a row of pixels is given back while wgmma reads it",
           ("min(first_row + r, p.lines - kept)", "min(first_row + r + 1, p.lines - kept)"),
           on="rows_5x5", shape="rows"),
    _fault("kept lines are released", "lines that the tile below reads again are given back",
           ("self.lines, p.lines - kept);\n", "self.lines, p.lines);\n"),
           on="rows_5x5", shape="rows"),
    _fault("lines of another tile are kept", "the first tile of a column keeps lines of the column before",
           ("index < share.end && (unsigned)index % (unsigned)p.steps != 0", "index < share.end"),
           on="rows_5x5", shape="rows"),
)  # fmt: skip

ASYNCHRONOUS = (
    _fault("no proxy fence", "wgmma may read what the stores before it replaced",
           ("hc::ptx::fence_proxy_async_shared();", ""), on="large_3x3"),
    _fault("no fence after the barriers' start", "the copies may meet barriers that are not initialised",
           ("hc::ptx::fence_mbarrier_init();", ""), on="large_3x3"),
    _fault("no barrier after the barriers' start", "roles begin before the barriers are there",
           ("    __syncthreads();\n}\n\n// ---- Producers", "}\n\n// ---- Producers"), on="large_3x3"),
    _fault("copied lines announced too early", "the copies of a line are not waited for before it counts as staged",
           ("hc::ptx::cp_async_wait_group<2>();", ""), on="large_nhwc", shape="rows", dtype=torch.float16),
    _fault("the last copied lines announced too early", "the copies at the end of a block's share are not waited for",
           ("hc::ptx::cp_async_wait_group<0>();", ""), on="large_nhwc", dtype=torch.float16),
    _fault("no wgmma fence", "the accumulators are not handed over", ("hc::ptx::wgmma_fence();", ""), on="large_3x3"),
    _fault("no wait for the tap before", "its weights are given back while wgmma reads them",
           ("hc::ptx::wgmma_wait_group<1>();", ""), on="small_a"),
    _fault("no wait for the last tap", "sums are written before they are there",
           ("hc::ptx::wgmma_wait_group<0>();", ""), on="large_3x3"),
    _fault("no commit", "the wait has no group to wait for", ("hc::ptx::wgmma_commit_group();", ""), on="large_3x3"),
    _fault("the epilogue's buffer is read at once", "a lane reads what other lanes have yet to write",
           ("first_px / 8, rows);\n            __syncwarp();", "first_px / 8, rows);"), on="large_3x3"),
    _fault("the epilogue's buffer is refilled at once", "a lane writes over what other lanes have yet to read",
           ("            __syncwarp();\n        }\n}\n\n__device__ __forceinline__ void consume",
            "        }\n}\n\n__device__ __forceinline__ void consume"), on="large_3x3"),
)  # fmt: skip

VALUES = (
    _fault("pixels not swizzled", "lines are staged in plain order, wgmma reads them swizzled",
           ("row_bytes + ((piece ^ (row_bytes >> 7 & (ROW_BYTES / 16 - 1))) << 4)", "row_bytes + (piece << 4)"),
           on="large_3x3"),
    _fault("swizzled by other address bits", "the exchange follows rows of 256 bytes",
           ("row_bytes >> 7 &", "row_bytes >> 8 &"), on="small_a"),
    _fault("weights not swizzled", "weights are packed in plain order, wgmma reads them swizzled",
           ("hc::piece_offset<CHUNK_BYTES>(m, piece)", "m * CHUNK_BYTES + (piece << 4)"),
           on="large_3x3", kernel="halo_sm90_pack"),
    _fault("half a step along the channels", "the descriptor moves by 16 bytes a step instead of 32",
           ("a + 2 * k, pixels", "a + k, pixels"), on="small_a"),
    _fault("groups of eight pixels too close", "the descriptor's stride is half of what it should be",
           ("shared_address(smem.slots), 16, 8 * CHUNK_BYTES", "shared_address(smem.slots), 16, 4 * CHUNK_BYTES"),
           on="large_3x3"),
    _fault("sums start from what registers hold", "the first product is added, not written",
           ("accumulate || k > 0", "true"), on="large_3x3"),
    _fault("every tap starts anew", "the sums of the taps before are lost", ("            accumulate = true;\n", ""),
           on="large_3x3"),
    _fault("no right border", "columns right of the image count as inside",
           ("(unsigned)w < (unsigned)p.w;", "w >= 0;"), on="wide_bottom_right"),
    _fault("no last image", "places behind the last image count as inside",
           ("at.n < p.n && (unsigned)h", "(unsigned)h"), on="rows_5x5", shape="rows"),
    _fault("channels beyond the last one", "a chunk always has all its channels",
           ("place.inside ? p.channels - first_channel : 0", "place.inside ? CHUNK_ELEMS : 0"), on="odd_widths"),
    _fault("filters beyond the last one", "a warp always writes 16 rows",
           ("min(hc::WARP_ROWS, p.filters - filter)", "hc::WARP_ROWS"), on="odd_widths"),
    _fault("the zeros between rows are written", "places between two rows count as outputs",
           ("at.col < p.strip_cols && out_row", "out_row"), on="strips_3x5", shape="flat strips"),
    _fault("a pair where the row is not aligned", "two results go out in one store at any address",
           ("(next.offset == own.offset + 1 && aligned)", "next.offset == own.offset + 1"),
           on="rows_5x5", shape="rows", dtype=torch.float16),
    _fault("the bias of the first rows", "the lower rows of a warp take the bias of the upper ones",
           ("p.bias[first + own_row + 8 * half]", "p.bias[first + own_row]"), on="small_a"),
    _fault("packed rows are not shifted", "all output rows of a pack take the taps of the first",
           ("r - p.shift_r * (phase / p.pack_w)", "r"), on="large_3x3", kernel="halo_sm90_pack"),
    _fault("packed channels beyond the last one", "weights are read behind the last channel",
           ("there && first_channel + i < p.channels", "there"), on="odd_widths", kernel="halo_sm90_pack"),
)  # fmt: skip

MUTATIONS = (*RINGS, *ASYNCHRONOUS, *VALUES)
