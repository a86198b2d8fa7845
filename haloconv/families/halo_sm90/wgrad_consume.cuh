// The consumers of halo_sm90_wgrad: products of lines, and partial sums.
#pragma once

#include "families/halo_sm90/wgrad_fragment.cuh"
#include "kernels/ptx/wgmma.cuh"

namespace hc::wgrad {

template <class Elem>
struct MultipliedAs {
    using type = Elem;
};
template <>
struct MultipliedAs<float> {
    using type = tf32;
};
using multiply_t = MultipliedAs<elem_t>::type;

using Sums = float[COLUMN_GROUPS][ROWS][FILTERS / 2];

// A consumer's part of its block.
struct Part {
    int s, c, k, p;

    __device__ __forceinline__ explicit Part(int warpgroup)
        : s(warpgroup % SPLIT_S),
          c(warpgroup / SPLIT_S % SPLIT_C),
          k(warpgroup / (SPLIT_S * SPLIT_C) % SPLIT_K),
          p(SPLIT_P > 1 ? warpgroup / (SPLIT_S * SPLIT_C * SPLIT_K) : 0) {}
};

// Descriptor units from the start of a line of dy to step `step`.
__device__ __forceinline__ int step_units(int step) {
    if (Y_INNER) return step * (DEPTH * Y_ROW_BYTES / 16);
    return step / 4 * (Y_SPAN_BYTES / 16) + step % 4 * 2;
}

// The stage of the oldest line of dy that the line before met, until that is given back.
struct Done {
    int stage = -1;

    __device__ __forceinline__ void release(const Smem& smem) {
        if (stage < 0) return;
        if (!X_LOADS) ptx::fence_proxy_async_shared();  // before TMA writes here again
        arrive_warp(&smem.y_empty[stage]);
        stage = -1;
    }
};

// What a line is multiplied by: for each row of taps the descriptor of its line of dy, if it has one.
struct Lines {
    ptx::u64 dy[ROWS];
    unsigned valid;  // a bit for each row of taps
};

// EDGE: not all rows of taps have a line. Without that question the products of a step stand in one block of code.
template <bool EDGE>
__device__ __forceinline__ void multiply_step(Sums& sums, const Fragments& x, const Lines& lines, int step) {
    ptx::wgmma_fence();
#pragma unroll
    for (int group = 0; group < COLUMN_GROUPS; ++group)
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            if (!EDGE || lines.valid >> r & 1)
                ptx::wgmma_rs<multiply_t, FILTERS, Y_INNER != 0>(sums[group][r], x[group],
                                                                 ptx::moved(lines.dy[r], step_units(step)), true);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<EDGE ? 0 : 1>();
}

// One line of x. Fragments are loaded while the step before is multiplied.
template <bool EDGE>
__device__ __forceinline__ void multiply_line(Sums& sums, const Lines& lines, const char* x, const Lanes& lanes,
                                              int first_step, int steps, const Masks& masks, const Smem& smem,
                                              Done& done) {
    Fragments even, odd;
    const auto load = [&](Fragments& a, int step) {
#pragma unroll
        for (int group = 0; group < COLUMN_GROUPS; ++group) {
            lanes.load(a[group], x, group, step);
            if (step + 1 == steps)
#pragma unroll
                for (int i = 0; i < 4; ++i) a[group][i] &= masks[i / 2];
        }
    };
#pragma unroll 1
    for (int step = first_step; step < steps; step += EDGE ? SPLIT_P : 2 * SPLIT_P) {
        load(even, step);
        multiply_step<EDGE>(sums, even, lines, step);
        done.release(smem);
        if (EDGE) continue;
        if (step + SPLIT_P >= steps) break;
        load(odd, step + SPLIT_P);
        multiply_step<EDGE>(sums, odd, lines, step + SPLIT_P);
    }
}

// Adds the sums to those of the block's part in memory, or writes them there if they are the first.
__device__ __forceinline__ void write_sums(const Sums& sums, const Params& p, const Tile& tile, const Part& part,
                                           int of_part, bool first) {
    const int lane = threadIdx.x % 32, first_row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    const i64 taps = (i64)p.taps_r * p.taps_s;
    float* const to = p.partials + ((i64)of_part * p.groups + tile.group) * taps * p.channels * p.filters;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Row row(part.c, first_row + half * 8);
        const int channel = tile.channel + row.channel;
#pragma unroll
        for (int i = 0; i < COLUMN_GROUPS * ROWS; ++i) {
            const int r = tile.row + i % ROWS;
            const int s = tile.column + (part.s * COLUMN_GROUPS + i / ROWS) * GROUP_COLUMNS + row.column;
            if (channel >= p.channels || r >= p.taps_r || s >= p.taps_s) continue;
            const int filter = tile.filter + part.k * FILTERS + lane % 4 * 2;
            float* const sum = to + ((i64)(r * p.taps_s + s) * p.channels + channel) * p.filters + filter;
#pragma unroll
            for (int j = 0; j < FILTERS / 4; ++j) {
                const int k = j / 2 * 8 + j % 2;
                const float value = sums[i / ROWS][i % ROWS][j / 2 * 4 + half * 2 + j % 2];
                if (filter + k < p.filters) sum[k] = first ? value : sum[k] + value;
            }
        }
    }
}

// The lines of dy that line `line` of a run meets: `newest` is the stage of the youngest of them.
__device__ __forceinline__ Lines lines_of(const Params& p, const Tile& tile, const Place& place, int line, int newest,
                                          ptx::u64 ring) {
    Lines lines{{}, 0};
    const bool inside = place.row + line * p.dil_h < p.h;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int stage = newest - r < 0 ? newest - r + Y_STAGES : newest - r;
        lines.dy[r] = ptx::moved(ring, stage * (Y_BYTES / 16));
        const int row = place.dy_row + (line + ROWS - 1 - r) * p.dil_h;
        if (inside && (unsigned)row < (unsigned)p.rows && tile.row + r < p.taps_r) lines.valid |= 1u << r;
    }
    return lines;
}

__device__ __forceinline__ void consume(const Params& p, const Smem& smem, int warpgroup) {
    constexpr int PART_BYTES = Y_INNER ? FILTERS / Y_SPAN * Y_SPAN_BYTES : FILTERS * 128;
    Walk walk(p.cut);
    const Tile tile(p, walk.slab);
    const Part part(warpgroup);
    const Lanes lanes(p, tile, part.s, part.c);
    const ptx::u64 ring = ptx::smem_descriptor(ptx::shared_address(smem.y + part.k * PART_BYTES),
                                               Y_INNER ? Y_SPAN_BYTES : 16, 8 * Y_ROW_BYTES, Y_ROW_BYTES);
    Sums sums = {};
    Cursor x_at, y_at;
    int steps = 0;  // that the sums have
    bool first = true;
    const auto settle = [&] {
        ptx::wgmma_wait_group<0>();
#pragma unroll
        for (int i = 0; i < COLUMN_GROUPS * ROWS; ++i) ptx::wgmma_hold(sums[i / ROWS][i % ROWS]);
    };
    for (Run run; walk.next(p.cut, run);) {
        const Place place(p, tile, run);
        const int pixels = place.pixels(p), line_steps = (pixels + DEPTH - 1) / DEPTH;
        Masks masks;
        mask_pixels(masks, pixels);
        int oldest = y_at.index;
        for (int i = 0; i < ROWS - 1; ++i, y_at.advance(Y_STAGES)) wait(&smem.y_full[y_at.index], y_at.parity);
        Done done;
        for (int line = 0; line < run.bands; ++line, x_at.advance(X_STAGES), y_at.advance(Y_STAGES)) {
            wait(&smem.y_full[y_at.index], y_at.parity);
            wait(&smem.x_full[x_at.index], x_at.parity);
            const Lines lines = lines_of(p, tile, place, line, y_at.index, ring);
            const char* const x = smem.x + x_at.index * X_BYTES;
            if (lines.valid + 1 == 1u << ROWS)
                multiply_line<false>(sums, lines, x, lanes, part.p, line_steps, masks, smem, done);
            else if (lines.valid)
                multiply_line<true>(sums, lines, x, lanes, part.p, line_steps, masks, smem, done);
            if (done.stage >= 0) ptx::wgmma_wait_group<0>(), done.release(smem);
            done.stage = oldest;
            oldest = oldest + 1 == Y_STAGES ? 0 : oldest + 1;
            steps += line_steps;
            const bool last = line + 1 == run.bands && walk.at == walk.end;
            if (steps < FLUSH_STEPS && !last) continue;
            settle();
            write_sums(sums, p, tile, part, walk.part * SPLIT_P + part.p, first);
            first = false, steps = 0;
#pragma unroll
            for (int i = 0; i < COLUMN_GROUPS * ROWS * FILTERS / 2; ++i) (&sums[0][0][0])[i] = 0;
        }
        settle();
        done.release(smem);
        for (int i = 0; i < ROWS - 1; ++i) {
            arrive_warp(&smem.y_empty[oldest]);
            oldest = oldest + 1 == Y_STAGES ? 0 : oldest + 1;
        }
    }
}

}  // namespace hc::wgrad
