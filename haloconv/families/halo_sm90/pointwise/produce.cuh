// The producer of halo_sm90_pointwise: one thread that asks TMA for the boxes of x and of w, stage after stage. The
// other warps of its warpgroup write zeros where the result has pixels that no output meets.
#pragma once

#include "families/halo_sm90/pointwise/tile.cuh"
#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/bulk.cuh"

namespace hc::pointwise {

__device__ __forceinline__ void ask_for_x(const Params& p, const Tile& tile, int chunk, char* to, ptx::u64* full) {
#pragma unroll 1
    for (int i = 0; i < BOXES; ++i) {
        const Place at(p, tile.box + i);
        const int channel = chunk * CHUNK;
        ptx::cp_async_bulk_tensor_4d_shared_global(to + i * BOX_BYTES, &p.x_map, full, X_INNER ? channel : at.column,
                                                   X_INNER ? at.column : channel, at.row, at.image);
    }
}

__device__ __forceinline__ void ask_for_w(const Params& p, const Tile& tile, int chunk, char* to, ptx::u64* full) {
    if constexpr (W_LOADS == W_ROWS) {
        for (int i = 0; i < TILE_FILTERS; i += W_BOX_FILTERS)
            ptx::cp_async_bulk_tensor_2d_shared_global(to + i * ROW_BYTES, &p.w_map, full, chunk * CHUNK,
                                                       tile.filter + i);
    } else {
        for (int i = 0; i < SPANS; ++i) {
            const int filter = tile.filter + i * SPAN;
            if constexpr (W_LOADS == W_COLUMNS)
                ptx::cp_async_bulk_tensor_2d_shared_global(to + i * SPAN_BYTES, &p.w_map, full, filter, chunk * CHUNK);
            else
                ptx::cp_async_bulk_shared_global(
                    to + i * SPAN_BYTES, p.w + (i64)(filter / SPAN * p.chunks + chunk) * SPAN_BYTES, SPAN_BYTES, full);
        }
    }
}

__device__ __forceinline__ void produce(const Params& p, const Smem& smem) {
    if (W_LOADS == W_PACKED) ptx::griddepcontrol_wait();  // the launch may begin before filters are packed (PDL)
    Cursor at;
    for (int index = blockIdx.x; index < p.tiles; index += gridDim.x) {
        const Tile tile(p, index);
        const bool keeps = KEEPS_W && index == blockIdx.x;
        for (int i = 0; i < tile.chunks; ++i, at.advance(STAGES)) {
            const int chunk = tile.first + i;
            if (keeps) {
                ptx::mbarrier_arrive_expect_tx(&smem.kept_full[i], W_BYTES);
                ask_for_w(p, tile, chunk, smem.w(0, i), &smem.kept_full[i]);
            }
            wait(&smem.empty[at.index], at.parity ^ 1);
            ptx::u64* const full = &smem.full[at.index];
            ptx::mbarrier_arrive_expect_tx(full, BOXES * p.box_bytes + (KEEPS_W ? 0 : W_BYTES));
            ask_for_x(p, tile, chunk, smem.x(at.index), full);
            if (!KEEPS_W) ask_for_w(p, tile, chunk, smem.w(at.index, i), full);
        }
    }
}

#ifdef HAS_GAPS
// Writes zeros, 16 bytes a lane.
__device__ __forceinline__ void clear(char* to, i64 bytes) {
    for (i64 at = threadIdx.x % 32 * 16; at < bytes; at += 32 * 16) *reinterpret_cast<Piece*>(to + at) = {};
}

// Clears the pixels that no output meets, a warp a line: all of most lines, those between outputs of the others.
__device__ __forceinline__ void clear_gaps(const Params& p) {
    constexpr int WARPS = 3;  // all of the warpgroup but the one that asks TMA
    const int first = blockIdx.x * WARPS + threadIdx.x % 128 / 32, step = gridDim.x * WARPS;
    int row = first % p.height;
    for (i64 line = first; line < p.all_lines; line += step, row = (row + step) % p.height) {
        char* const to = p.lines + line * p.line_bytes;
        if (row % p.y_down > 0)
            clear(to, p.line_bytes);
        else if (p.y_across > 1)
            for (int pixel = 1; pixel < p.width; pixel += p.y_across)
                clear(to + (i64)pixel * p.pixel_bytes, (i64)min(p.y_across - 1, p.width - pixel) * p.pixel_bytes);
    }
}
#endif

}  // namespace hc::pointwise
