// The consumers of halo_sm90: two warpgroups half a tile apart, each on tiles of its own or both on the same tile.
#pragma once

#include "families/halo_sm90/conv/epilogue.cuh"
#include "kernels/ptx/wgmma.cuh"

// The lines that a consumer reads in a phase, numbered from the segment's first one, which is at position `at` of the
// ring of chunk `chunk`. By the end of the phase lines [released, released_end) are released.
struct Lines {
    int at, chunk;
    int own;  // line of the consumer's first row at the phase's first row of taps
    int released, released_end;
};

// Releases the lines before `end`. One lane does so in order: a producer warp that sees line i released assumes that
// all lines before it are (shape.py gives the ring its least length by that). Before it a line must be full: else the
// arrival of a slow consumer would count for the next round of the slot. All lanes wait for that, so that each by
// itself has seen every round of a slot, of which a barrier tells two apart.
__device__ __forceinline__ void release_lines(const Params& p, Control& control, Lines& lines, int end) {
    end = min(end, lines.released_end);
#pragma unroll 1
    for (int line = lines.released; line < end; ++line) {
        const Slot slot(p, lines.at + line, lines.chunk);
        hc::wait(&control.slot_full[slot.index], slot.parity);
        hc::arrive_warp(&control.slot_empty[slot.index]);
    }
    lines.released = max(lines.released, end);
}

// Waits for the lines of row `down` of the phase's taps; the first pixel of each pixel run there, in descriptor units
// of 16 bytes. `first_px` are those at tap row 0.
__device__ __forceinline__ void locate_runs(const Params& p, Control& control, const Lines& lines, int down, int r,
                                            const int (&first_px)[RUNS], int (&run)[RUNS]) {
#pragma unroll
    for (int j = 0; j < RUNS; ++j) {
        const Slot slot(p, lines.at + (FLAT ? 0 : lines.own + j * p.stride_h + down), lines.chunk);
        if (j + 1 == RUNS || down == 0 || p.stride_h > 1)  // else run j + 1 has waited for the line, a row of taps ago
            hc::wait(&control.slot_full[slot.index], slot.parity);
        const int px = first_px[j] + (FLAT ? control.row_px[r] : 0);
        run[j] = (slot.index * p.slot_bytes + px * CHUNK_BYTES) / 16;
    }
}

// What a consumer does in a phase of a work tile: it multiplies tile `own`, counted from the segment's first one, if it
// is `active`, and else only releases what it does not read.
struct Part {
    int phase, own, work_tiles;
    bool active;
    int first_px[RUNS];  // of each pixel run in its line
};

// The lines of a phase for a consumer. Where each phase stages lines anew (no KEEPS), `at` moves on behind them.
__device__ __forceinline__ Lines lines_in_sight(const Params& p, const Consumer& self, const hc::Phase& phase,
                                                const Part& part, int chunk, int& at) {
    if (FLAT) return {at++, chunk, 0, 0, 1};
    const int own = part.own, row = own * RUNS * p.stride_h;
    if (!KEEPS) {
        const hc::LineRange read = hc::lines_of<RUNS>(p, phase.first_tile, phase.tiles, phase.r, phase.r_end);
        const int here = at - read.first;
        at += read.end - read.first;
        return {here, chunk, part.active ? row + phase.r : read.first, read.first, read.end};
    }
    // The consumer's next tile starts a work tile below, or below all that this one reads; at the end nothing follows.
    const int down = hc::TILES * RUNS * p.stride_h, passed = min(down, (RUNS - 1) * p.stride_h + p.taps_r);
    const int tiles = hc::TILES * part.work_tiles;
    const int all = lines_of_tiles(p, tiles, part.work_tiles),
              first = own < hc::TILES ? 0 : min(all, row - down + passed);
    const bool again =
        p.chunks == 1 && FIRST_PHASE == 0 && part.phase == self.id;  // the other phase reads them once more
    const bool last = own >= tiles - hc::TILES && !(part.active && self.id == 0 && part.phase == 0);
    const int end = again || own < 0 ? first : last ? all : min(all, row + passed);
    return {at, chunk, row + phase.r, first, end};
}

// Multiplies taps. The stage of a tap is given back in the middle of the next tap, so that fewer instructions stand
// between two taps, and wgmma does not idle if the next tap's weights and lines are there. One lane gives the stage
// back, so that the warp need not converge.
struct Taps {
    static constexpr int STEPS = CHUNK_BYTES / 32, HALF = (STEPS + 1) / 2;  // wgmma of a pixel run and a tap

    u64 stages, slots;  // descriptors of the first stage, of the first slot
    int slot_term;      // from one term of a slot to the next, in descriptor units
    int last_stage;     // of the tap before; in lane 0 alone, else -1
    Sums part;          // TERMS > 1: partial sums

    // Waits for a tap's weights, and begins a tap.
    __device__ __forceinline__ u64 wait_for_weights(const Consumer& self) const {
        hc::wait(&self.stage_full[self.stage.index], self.stage.parity);
        hc::ptx::wgmma_fence();
        return hc::ptx::moved(stages, self.stage.index * (STAGE_BYTES / 16));
    }
    // Gives back the stage of the tap before, while the products of this one run.
    __device__ __forceinline__ void next_stage(Consumer& self) {
        hc::ptx::wgmma_wait_group<1>();
        release(self);
        if (threadIdx.x % 32 == 0) last_stage = self.stage.index;
        self.stage.advance(STAGES);
    }
    template <int FROM, int TO>
    __device__ __forceinline__ void multiply_steps(u64 weights, u64 pixels, const int (&run)[RUNS], Sums& sums,
                                                   bool accumulate) const {
#pragma unroll
        for (int k = FROM; k < TO; ++k)
#pragma unroll
            for (int j = 0; j < RUNS; ++j)
                hc::ptx::wgmma_ss<MULTIPLY, RUN>(sums[j], hc::ptx::moved(weights, 2 * k),
                                                 hc::ptx::moved(pixels, run[j] + 2 * k), accumulate || k > 0);
        hc::ptx::wgmma_commit_group();
    }
    // All products of terms that count, the smallest first: what wgmma cuts off is a fraction of the sum so far.
    __device__ __forceinline__ void multiply_terms(u64 weights, u64 pixels, const int (&run)[RUNS], bool accumulate) {
#pragma unroll
        for (int i = 0; i < TERMS * TERMS; ++i) {
            const int both = TERMS - 1 - i / TERMS, term = i % TERMS, px_term = both - term;
            if (px_term < 0) continue;
#pragma unroll
            for (int k = 0; k < STEPS; ++k)
#pragma unroll
                for (int j = 0; j < RUNS; ++j)
                    hc::ptx::wgmma_ss<MULTIPLY, RUN>(part[j], hc::ptx::moved(weights, term * (TERM_BYTES / 16) + 2 * k),
                                                     hc::ptx::moved(pixels, run[j] + px_term * slot_term + 2 * k),
                                                     accumulate || i > 0 || k > 0);
        }
        hc::ptx::wgmma_commit_group();
    }
    // Adds partial sums of COUNT taps, whose columns are at `col_px`, to the tile's, rounded to nearest: wgmma cuts
    // toward zero, and what it cuts off sums of one sign adds up (docs/precision.md says how many taps that allows).
    // No branch between the taps decides what is added: ptxas would wait after every wgmma. `meanwhile` is done while
    // the first tap is multiplied.
    template <int COUNT, class Meanwhile>
    __device__ __forceinline__ void multiply_part(Consumer& self, const int (&run)[RUNS], const int* col_px, Sums& sums,
                                                  const Meanwhile& meanwhile) {
#pragma unroll
        for (int tap = 0; tap < COUNT; ++tap) {
            const u64 pixels = hc::ptx::moved(slots, col_px[tap] * (CHUNK_BYTES / 16));
            multiply_terms(wait_for_weights(self), pixels, run, tap > 0);
            if (tap == 0) meanwhile();
            next_stage(self);
        }
        hc::ptx::wgmma_wait_group<0>();
        release(self);
        last_stage = -1;
#pragma unroll
        for (int j = 0; j < RUNS; ++j) {
            hc::ptx::wgmma_hold(part[j]);
#pragma unroll
            for (int i = 0; i < RUN / 2; ++i) sums[j][i] += part[j][i];
        }
    }
    // multiply_part of the last `count` taps of a row, fewer than LESS_THAN: what PART_TAPS leaves over.
    template <int LESS_THAN, class Meanwhile>
    __device__ __forceinline__ void multiply_rest(Consumer& self, const int (&run)[RUNS], const int* col_px, int count,
                                                  Sums& sums, const Meanwhile& meanwhile) {
        if constexpr (LESS_THAN > 1) {
            if (count == LESS_THAN - 1)
                multiply_part<LESS_THAN - 1>(self, run, col_px, sums, meanwhile);
            else
                multiply_rest<LESS_THAN - 1>(self, run, col_px, count, sums, meanwhile);
        }
    }
    // The taps of a row from column `s` to `s_end`, in partial sums of PART_TAPS and of what is left.
    template <class Meanwhile>
    __device__ __forceinline__ void multiply_parts(Consumer& self, const int (&run)[RUNS], const int* col_px, int s,
                                                   int s_end, Sums& sums, const Meanwhile& meanwhile) {
        for (; s + PART_TAPS <= s_end; s += PART_TAPS) multiply_part<PART_TAPS>(self, run, col_px + s, sums, meanwhile);
        multiply_rest<PART_TAPS>(self, run, col_px + s, s_end - s, sums, meanwhile);
    }
    __device__ __forceinline__ void multiply(Consumer& self, const int (&run)[RUNS], int px, Sums& sums,
                                             bool accumulate) {
        const u64 pixels = hc::ptx::moved(slots, px * (CHUNK_BYTES / 16));
        const u64 weights = wait_for_weights(self);
        multiply_steps<0, HALF>(weights, pixels, run, sums, accumulate);
        next_stage(self);
        if constexpr (HALF < STEPS) multiply_steps<HALF, STEPS>(weights, pixels, run, sums, true);
    }
    __device__ __forceinline__ void release(Consumer& self) {
        if (last_stage >= 0) hc::ptx::mbarrier_arrive(&self.stage_empty[last_stage]);
    }
};

// The taps of a phase. Where each chunk has a ring of lines, wgmma works on from chunk to chunk, and the last lines of
// one go back with the first tap of the next. Else those may have to go first, for the next ones to come.
__device__ __forceinline__ void multiply(const Params& p, const Smem& smem, Consumer& self, const hc::Phase& phase,
                                         const Part& part, int& at, Sums& sums, bool accumulate) {
    Control& control = *smem.control;
    Taps taps{hc::ptx::smem_descriptor(hc::ptx::shared_address(self.stages), 16, 8 * CHUNK_BYTES, CHUNK_BYTES),
              hc::ptx::smem_descriptor(hc::ptx::shared_address(smem.slots), 16, 8 * CHUNK_BYTES, CHUNK_BYTES),
              p.slot_bytes / TERMS / 16, -1};
    if (TERMS > 1 && !accumulate)
#pragma unroll
        for (int i = 0; i < TILE_PX / 2; ++i) sums[i / (RUN / 2)][i % (RUN / 2)] = 0;
    Lines before{};  // of the chunk before, as far as they are still to be released
    for (int chunk = phase.chunk; chunk < phase.chunk_end; ++chunk) {
        Lines lines = lines_in_sight(p, self, phase, part, chunk, at);
        for (int r = phase.r; r < phase.r_end; ++r) {
            if (SHARED_TILE && chunk == p.mid_chunk && r == p.mid_r) hc::arrive_warp(&control.half_way[self.id]);
            int run[RUNS];
            locate_runs(p, control, lines, r - phase.r, r, part.first_px, run);
            if constexpr (TERMS > 1) {
                const auto meanwhile = [&] {
                    if (KEEPS && r == phase.r) release_lines(p, control, before, before.released_end);
                    if (!FLAT) release_lines(p, control, lines, lines.own + r - phase.r);
                };
                taps.multiply_parts(self, run, control.col_px, phase.s, phase.s_end, sums, meanwhile);
            } else {
                taps.multiply(self, run, control.col_px[phase.s], sums, accumulate);
                accumulate = true;
                if (KEEPS && r == phase.r) release_lines(p, control, before, before.released_end);
                if (!FLAT) release_lines(p, control, lines, lines.own + r - phase.r);
                for (int s = phase.s + 1; s < phase.s_end; ++s) taps.multiply(self, run, control.col_px[s], sums, true);
            }
        }
        before = lines;
        if (!KEEPS && chunk + 1 < phase.chunk_end) {
            hc::ptx::wgmma_wait_group<0>();
            taps.release(self);
            taps.last_stage = -1;
            release_lines(p, control, before, before.released_end);
        }
    }
    if constexpr (TERMS == 1) {
        hc::ptx::wgmma_wait_group<0>();
#pragma unroll
        for (int j = 0; j < RUNS; ++j) hc::ptx::wgmma_hold(sums[j]);
        if (!Y_IN_STAGE) taps.release(self);
    }
    release_lines(p, control, before, before.released_end);
}

// What a consumer does that has no tile in the phase: it releases the weights and lines that it does not read.
__device__ __forceinline__ void skip(const Params& p, const Smem& smem, Consumer& self, const hc::Phase& phase,
                                     const Part& part, int& at) {
    for (int chunk = phase.chunk; chunk < phase.chunk_end; ++chunk) {
        Lines lines = lines_in_sight(p, self, phase, part, chunk, at);
        for (int r = phase.r; r < phase.r_end; ++r) {
            for (int s = phase.s; s < phase.s_end; ++s) {
                hc::wait(&self.stage_full[self.stage.index], self.stage.parity);
                hc::arrive_warp(&self.stage_empty[self.stage.index]);
                self.stage.advance(STAGES);
            }
            release_lines(p, *smem.control, lines, lines.own + r - phase.r);
        }
        release_lines(p, *smem.control, lines, lines.released_end);
    }
}

__device__ __forceinline__ void consume(const Params& p, const Smem& smem, int consumer) {
    const int warp = threadIdx.x / 32, first_stage = SHARED_TILE ? consumer * STAGES : 0;
    Consumer self{consumer,
                  {},
                  smem.stages + first_stage * STAGE_BYTES,
                  smem.control->stage_full + first_stage,
                  smem.control->stage_empty + first_stage,
                  smem.buffers + (Y_CHANNELS_INNER ? warp / 4 * 4 : warp) * WARP_BUFFER_BYTES,
                  {},
                  1 + consumer};
    const int last_phase = consumer == 0 || SHARED_TILE ? 1 : FIRST_PHASE;
    int at = 0;                // of the ring, as in for_each_line
    unsigned tile_parity = 0;  // of the consumer's tiles
    Sums sums;
    for (hc::Segments segment(p.schedule); segment.next(p.schedule);) {
        const int first_tile = hc::TILES * segment.first.index;
        bool accumulate = false;
        for (int work_tile = 0; work_tile <= segment.work_tiles; ++work_tile)
            for (int i = FIRST_PHASE; i < (work_tile < segment.work_tiles ? 2 : 1); ++i) {
                const hc::Phase phase(p, i, work_tile, segment.work_tiles);
                const int own = SHARED_TILE ? work_tile : 2 * work_tile + (consumer == 0 ? 0 : i ? 1 : -1);
                const bool active = own >= 0 && own < hc::TILES * segment.work_tiles;
                const int line_px = FLAT ? (first_tile + phase.first_tile) * TILE_PX : 0;  // its row's begin the line
                Part part{i, own, segment.work_tiles, active, {}};
#pragma unroll
                for (int run = 0; run < RUNS; ++run)
                    part.first_px[run] =
                        FLAT ? (own - phase.first_tile) * TILE_PX + line_px -
                                   p.pitch.quotient(line_px) * p.pitch.value + run * RUN
                             : p.lead - row_shift(p, Y_PLANES > 1 ? filters_of(p, consumer, segment.first, 0).first : 0,
                                                  box_row(p, segment.first, (first_tile + own) * RUNS + run, 0));
                // Half a tile apart: each begins a tile when the other is half way through its own.
                if (SHARED_TILE) hc::wait(&smem.control->half_way[consumer ^ 1], tile_parity ^ consumer ^ 1);
                if (active)
                    multiply(p, smem, self, phase, part, at, sums, accumulate), accumulate = true;
                else
                    skip(p, smem, self, phase, part, at);
                if (!active || i != last_phase) continue;
                if (NEEDS_FIXUP) note_not_finite(p, sums);
                if (Y_IN_STAGE) keep_stage(p, self);
                write_tile(p, *smem.control, self, segment.first, first_tile + own, sums);
                if (Y_IN_STAGE) give_back_stage(p, self);
                accumulate = false, tile_parity ^= 1;
            }
        if (KEEPS) at += lines_of_tiles(p, hc::TILES * segment.work_tiles, segment.work_tiles);
    }
    hc::ptx::cp_async_bulk_wait_group_read<0>();  // shared memory outlives its last reader
}
