// Lines of dy in fp32 nhwc: TMA brings and rounds them as [span][line][pixel][32 filters], swizzled, and warps
// transpose them into the ring. wgmma multiplies TF32 only where pixels are neighbours.
#pragma once

#include "families/halo_sm90/swizzle.cuh"
#include "families/halo_sm90/wgrad/shift.cuh"

namespace hc::wgrad {

// Asks for a raw box from a row on: the tile's filters.
__device__ __forceinline__ void ask_for_transposed(const Params& p, const Tile& tile, char* to, ptx::u64* full,
                                                   const Place& place, int row) {
    const int filter = tile.group * p.filters + tile.filter;
    ptx::mbarrier_arrive_expect_tx(full, TRANSPOSED_BYTES);
    for (int span = 0; span < TRANSPOSED_SPANS; ++span)
        ptx::cp_async_bulk_tensor_4d_shared_global(to + span * TRANSPOSED_SPAN, &p.y_map, full, filter + span * 32,
                                                   place.column, row, place.image);
}

// The warpgroup transposes the first `steps` steps of the lines of a raw box to the ring's lines from `to_line` on. A
// lane has a filter of each span: a warp reads a pixel of 32 filters, 128 bytes, four times for a piece of each, and
// eight lanes store to different banks.
__device__ __forceinline__ void transpose_box(const char* raw, int steps, char* ring, int to_line) {
    constexpr int LINE_STEPS = Y_RAW / DEPTH, ITEMS = BOX_ROWS * LINE_STEPS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int first = 0; first < ITEMS; first += 4) {
        const int item = first + warp, line = BOX_ROWS == 1 ? 0 : item / LINE_STEPS, step = item - line * LINE_STEPS;
        if (item >= ITEMS || step >= steps) continue;
        const ToDy to(ring, to_line + line, lane);
#pragma unroll
        for (int span = 0; span < TRANSPOSED_SPANS; ++span) {
            Piece piece[2];
#pragma unroll
            for (int i = 0; i < DEPTH; ++i) {
                const int at = unit_offset<128>(i, lane / 4) + lane % 4 * 4;
                piece[i / 4].word[i % 4] =
                    *reinterpret_cast<const unsigned*>(raw + span * TRANSPOSED_SPAN + item * (DEPTH * 128) + at);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) to.store(piece[i], to.at(2 * step + i) + span * (32 * 128));
        }
    }
}

}  // namespace hc::wgrad
