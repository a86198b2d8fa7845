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

// Descriptor units from the start of a line of dy to step `step`.
__device__ __forceinline__ int step_units(int step) {
    if (Y_INNER) return step * (DEPTH * Y_ROW_BYTES / 16);
    return step / 4 * (Y_SPAN_BYTES / 16) + step % 4 * 2;
}

// Gives a line of dy back, and the line of x that came with it, which this thread has read.
__device__ __forceinline__ void give_back(ptx::u64* empty) {
    if constexpr (X_STORED)
        ptx::mbarrier_arrive(empty);
    else
        arrive_warp(empty);
}

// The stage of the oldest line of dy that the line before met, until that is given back.
struct Done {
    int stage = -1;

    __device__ __forceinline__ void release(const Smem& smem) {
        if (stage < 0) return;
        if (!X_STORED) ptx::fence_proxy_async_shared();  // before TMA writes here again
        give_back(&smem.y_empty[stage]);
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

// Adds the sums to those of the same consumer in memory, or writes them there if they are the first: a register of 128
// threads is 512 bytes side by side. wgrad_sum.cu knows the order.
__device__ __forceinline__ void write_sums(const Sums& sums, float* to, bool first) {
    const float* const from = &sums[0][0][0];
    to += threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) to[i * 128] = first ? from[i] : to[i * 128] + from[i];
}

// The lines of dy that line `line` of a run meets: `newest` is the stage of the youngest of them.
__device__ __forceinline__ Lines lines_of(const Params& p, const Tile& tile, const Place& place, int line, int newest,
                                          ptx::u64 ring) {
    Lines lines{{}, 0};
    const bool inside = place.row + line * place.row_step < p.h;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int stage = newest - r < 0 ? newest - r + Y_STAGES : newest - r;
        lines.dy[r] = ptx::moved(ring, stage * (Y_BYTES / 16));
        const int row = place.dy_row + (line + ROWS - 1 - r) * p.line_step;
        if (inside && (unsigned)row < (unsigned)p.rows && tile.row + r * p.blocks.row_step < p.taps_r)
            lines.valid |= 1u << r;
    }
    return lines;
}

__device__ __forceinline__ void consume(const Params& p, const Smem& smem, int warpgroup) {
    constexpr int PART_BYTES = Y_INNER ? FILTERS / Y_SPAN * Y_SPAN_BYTES : FILTERS * 128;
    Walk walk(p.cut);
    const Tile tile(p.blocks, walk.slab);
    const int owner = warpgroup % OWNERS, first_step = SPLIT_P > 1 ? warpgroup / OWNERS : 0;
    const Part part(owner);
    const Lanes lanes(p, tile, part);
    float* const partials = p.partials +
                            ((i64)(walk.part * SPLIT_P + first_step) * p.cut.slabs + walk.slab) * TILE_SUMS +
                            owner * OWNER_SUMS;
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
                multiply_line<false>(sums, lines, x, lanes, first_step, line_steps, masks, smem, done);
            else if (lines.valid)
                multiply_line<true>(sums, lines, x, lanes, first_step, line_steps, masks, smem, done);
            if (done.stage >= 0) ptx::wgmma_wait_group<0>(), done.release(smem);
            done.stage = oldest;
            oldest = oldest + 1 == Y_STAGES ? 0 : oldest + 1;
            steps += line_steps;
            const bool last = line + 1 == run.bands && walk.at == walk.end;
            if (steps < FLUSH_STEPS && !last) continue;
            settle();
            write_sums(sums, partials, first);
            first = false, steps = 0;
#pragma unroll
            for (int i = 0; i < SUMS; ++i) (&sums[0][0][0])[i] = 0;
        }
        settle();
        done.release(smem);
        for (int i = 0; i < ROWS - 1; ++i) {
            give_back(&smem.y_empty[oldest]);
            oldest = oldest + 1 == Y_STAGES ? 0 : oldest + 1;
        }
    }
}

}  // namespace hc::wgrad
