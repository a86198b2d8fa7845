// The consumers of halo_sm90: two warpgroups, each with its own tiles, half a tile apart.
#pragma once

#include "halo_sm90/epilogue.cuh"
#include "ptx/wgmma.cuh"

// The lines that a consumer has in sight in a phase, counted from the segment's first one; `at` is that one's position
// in the ring of the phase's chunk. All lines of [released, released_end) are released by the end of the phase.
struct Lines {
    int at, chunk;
    int own;  // of the consumer's first row at the phase's first row of taps
    int released, released_end;
};

// A line counts as read only once it was there: else a slow consumer's arrivals would be taken for the next round's.
__device__ __forceinline__ void release_lines(const Params& p, Control& control, Lines& lines, int end) {
    for (; lines.released < min(end, lines.released_end); ++lines.released) {
        const Slot slot(p, lines.at + lines.released, lines.chunk);
        hc::wait(&control.slot_full[slot.index], slot.parity);
        hc::arrive_warp(&control.slot_empty[slot.index]);
    }
}

// Waits for the lines of row `down` of the phase's taps; the first pixel of each run there, in descriptor units of 16
// bytes. `first_px` is the tile's first one in a slot (FLAT).
__device__ __forceinline__ void locate_runs(const Params& p, Control& control, const Lines& lines, int down, int r,
                                            int first_px, int (&run)[RUNS]) {
#pragma unroll
    for (int j = 0; j < RUNS; ++j) {
        const Slot slot(p, lines.at + (FLAT ? 0 : lines.own + j * p.stride_h + down), lines.chunk);
        hc::wait(&control.slot_full[slot.index], slot.parity);
        const int px = FLAT ? first_px + j * RUN + control.row_px[r] : 0;
        run[j] = (slot.index * p.slot_bytes + px * CHUNK_BYTES) / 16;
    }
}

// The taps of a phase of one chunk of channels.
__device__ __forceinline__ void multiply(const Params& p, const Smem& smem, Consumer& self, const hc::Phase& phase,
                                         Lines& lines, int first_px, Sums& sums, bool accumulate) {
    Control& control = *smem.control;
    const u64 weights =
        hc::ptx::smem_descriptor(hc::ptx::shared_address(smem.stages), 16, 8 * CHUNK_BYTES, CHUNK_BYTES);
    const u64 pixels = hc::ptx::smem_descriptor(hc::ptx::shared_address(smem.slots), 16, 8 * CHUNK_BYTES, CHUNK_BYTES);
    int last_stage = -1;
    for (int r = phase.r; r < phase.r_end; ++r) {
        int run[RUNS];
        locate_runs(p, control, lines, r - phase.r, r, first_px, run);
        for (int s = phase.s; s < phase.s_end; ++s) {
            const int tap_px = control.col_px[s];
            hc::wait(&control.stage_full[self.stage.index], self.stage.parity);
            hc::ptx::wgmma_fence();
            const u64 a = weights + self.stage.index * (STAGE_BYTES / 16);
#pragma unroll
            for (int k = 0; k < CHUNK_BYTES / 32; ++k)
#pragma unroll
                for (int j = 0; j < RUNS; ++j)
                    hc::ptx::wgmma_ss<MULTIPLY, RUN>(
                        sums[j], a + 2 * k, pixels + run[j] + tap_px * (CHUNK_BYTES / 16) + 2 * k, accumulate || k > 0);
            hc::ptx::wgmma_commit_group();
            hc::ptx::wgmma_wait_group<1>();  // the tap before this one is done
            if (last_stage >= 0) hc::arrive_warp(&control.stage_empty[last_stage]);
            if (!FLAT && s == phase.s) release_lines(p, control, lines, lines.own + r - phase.r);
            accumulate = true;
            last_stage = self.stage.index;
            self.stage.advance(p.stages);
        }
    }
    hc::ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int j = 0; j < RUNS; ++j) hc::ptx::wgmma_hold(sums[j]);
    hc::arrive_warp(&control.stage_empty[last_stage]);
    release_lines(p, control, lines, lines.released_end);
}

// The same for a consumer that has no tile in the phase.
__device__ __forceinline__ void skip(const Params& p, const Smem& smem, Consumer& self, const hc::Phase& phase,
                                     Lines& lines) {
    for (int r = phase.r; r < phase.r_end; ++r) {
        for (int s = phase.s; s < phase.s_end; ++s) {
            hc::wait(&smem.control->stage_full[self.stage.index], self.stage.parity);
            hc::arrive_warp(&smem.control->stage_empty[self.stage.index]);
            self.stage.advance(p.stages);
        }
        release_lines(p, *smem.control, lines, lines.own + r - phase.r);
    }
    release_lines(p, *smem.control, lines, lines.released_end);
}

// The lines of a phase for a consumer whose tile is `own`, which is none of the segment's if it has none.
__device__ __forceinline__ Lines lines_in_sight(const Params& p, const Consumer& self, const hc::Phase& phase, int i,
                                                int own, bool active, int steps, int at) {
    if (FLAT) return {at, 0, 0, 0, 1};
    const int row = own * RUNS * p.stride_h;
    if (!p.keeps) {
        const hc::LineRange read = hc::lines_of<RUNS>(p, phase.first_tile, phase.tiles, phase.r, phase.r_end);
        return {at - read.first, 0, active ? row + phase.r : read.first, read.first, read.end};
    }
    // The next tile starts two tiles below, or below all that this one reads; at the end nothing follows.
    const int down = 2 * RUNS * p.stride_h, passed = min(down, (RUNS - 1) * p.stride_h + p.taps_r);
    const int all = lines_of_tiles(p, 2 * steps, steps), first = own < 2 ? 0 : min(all, row - down + passed);
    const bool again = p.chunks == 1 && p.first_phase == 0 && i == self.id;  // the other phase reads them once more
    const bool last = own >= 2 * steps - 2 && !(active && self.id == 0 && i == 0);
    const int end = again || own < 0 ? first : last ? all : min(all, row + passed);
    return {at, 0, row + phase.r, first, end};
}

__device__ __forceinline__ void consume(const Params& p, const Smem& smem, int consumer) {
    const int warp = threadIdx.x / 32;
    Consumer self{
        consumer, {}, smem.buffers + (Y_CHANNELS_INNER ? warp / 4 * 4 : warp) * WARP_BUFFER_BYTES, 0, 1 + consumer};
    const int last_phase = consumer == 0 ? 1 : p.first_phase;
    int at = 0;  // of the ring, as in for_each_line
    Sums sums;
    for (hc::Segments segment(p); segment.steps > 0; segment.advance(p)) {
        const int first_tile = 2 * segment.first.step;
        bool accumulate = false;
        for (int step = 0; step <= segment.steps; ++step)
            for (int i = p.first_phase; i < (step < segment.steps ? 2 : 1); ++i) {
                const hc::Phase phase(p, i, step, segment.steps);
                const int own = 2 * step + (consumer == 0 ? 0 : i ? 1 : -1);
                const bool active = own >= 0 && own < 2 * segment.steps;
                const int line_px = FLAT ? (first_tile + phase.first_tile) * TILE_PX : 0;  // its row's begin the line
                const int first_px =
                    (own - phase.first_tile) * TILE_PX + line_px - p.pitch.quotient(line_px) * p.pitch.value;
                for (int chunk = phase.chunk; chunk < phase.chunk_end; ++chunk) {
                    Lines lines = lines_in_sight(p, self, phase, i, own, active, segment.steps, at);
                    lines.chunk = chunk;
                    if (!p.keeps) at += FLAT ? 1 : lines.released_end - lines.released;
                    if (active)
                        multiply(p, smem, self, phase, lines, first_px, sums, accumulate), accumulate = true;
                    else
                        skip(p, smem, self, phase, lines);
                }
                if (!active || i != last_phase) continue;
                if (PACKS > 1) note_not_finite(p, sums);
                write_tile(p, self, segment.first, first_tile + own, sums);
                accumulate = false;
            }
        if (p.keeps) at += lines_of_tiles(p, 2 * segment.steps, segment.steps);
    }
    hc::ptx::cp_async_bulk_wait_group_read<0>();  // shared memory outlives its last reader
}
