// The producer of halo_sm90_implicit_gemm: one thread that asks TMA for pixels of x (im2col) and boxes of w, tap after
// tap of a chunk of channels.
#pragma once

#include "families/halo_sm90/pointwise/tile.cuh"
#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/bulk.cuh"

namespace hc::pointwise {

// What a stage has: a tap's row and column of the filter, and a chunk of channels.
struct Step {
    int chunk, r, s;

    __device__ __forceinline__ explicit Step(const Tile& tile)
        : chunk(tile.first), r(tile.rows.first), s(tile.cols.first) {}

    __device__ __forceinline__ void next(const Tile& tile) {
        if (++s < tile.cols.first + tile.cols.count) return;
        s = tile.cols.first;
        if (++r < tile.rows.first + tile.rows.count) return;
        r = tile.rows.first, ++chunk;
    }
};

__device__ __forceinline__ void ask_for_w(const Params& p, const Tile& tile, const Step& step, char* to,
                                          ptx::u64* full) {
    const int tap = p.first_tap + p.tap_step * (step.r * p.taps_s + step.s), channel = step.chunk * CHUNK;
    if constexpr (W_LOADS == W_ROWS) {
        for (int i = 0; i < TILE_FILTERS; i += W_BOX_FILTERS)
            ptx::cp_async_bulk_tensor_3d_shared_global(to + i * ROW_BYTES, &p.w_map, full, channel, tap,
                                                       tile.filter + i);
    } else {
        for (int i = 0; i < SPANS; ++i) {
            const int filter = tile.filter + i * SPAN;
            if constexpr (W_LOADS == W_COLUMNS)
                ptx::cp_async_bulk_tensor_3d_shared_global(to + i * SPAN_BYTES, &p.w_map, full, filter, tap, channel);
            else
                ptx::cp_async_bulk_shared_global(
                    to + i * SPAN_BYTES,
                    p.w + ((i64)(filter / SPAN * p.chunks + step.chunk) * p.taps + tap) * SPAN_BYTES, SPAN_BYTES, full);
        }
    }
}

__device__ __forceinline__ void produce_taps(const Params& p, const Smem& smem) {
    if (W_LOADS == W_PACKED) ptx::griddepcontrol_wait();  // the launch may begin before filters are packed (PDL)
    Cursor at;
#ifdef CLUSTER
    const int begin = blockIdx.x / CLUSTER, step = p.tiles;  // one tile
#else
    const int begin = blockIdx.x, step = gridDim.x;
#endif
    for (int index = begin; index < p.tiles; index += step) {
        const Tile tile(p, index);
        Step step(tile);
        for (int i = 0; i < tile.chunks; ++i, at.advance(STAGES), step.next(tile)) {
            wait(&smem.empty[at.index], at.parity ^ 1);
            ptx::u64* const full = &smem.full[at.index];
            ptx::mbarrier_arrive_expect_tx(full, X_BYTES + W_BYTES);
            ptx::cp_async_bulk_tensor_4d_im2col_shared_global(smem.x(at.index), &p.x_map, full, step.chunk * CHUNK,
                                                              tile.column, tile.row, tile.image, step.s * p.dil_w.value,
                                                              step.r * p.dil_h.value);
            ask_for_w(p, tile, step, smem.w(at.index, i), full);
        }
    }
}

}  // namespace hc::pointwise
