// Staged words to sums.
#pragma once

#include "families/halo_sm80_wgrad/work.cuh"
#include "kernels/products.cuh"

namespace hc::wgrad {

// Where a lane finds its operands of the tile's first pixel, in words. Rows and columns behind the last one read that
// one, and are not written.
struct Rows {
    int a[WARP_M][2], b[WARP_N];

    __device__ __forceinline__ Rows(const Params& p, const Place& place) {
        const int pixel = place.lane % 4, row = place.lane / 4;
#pragma unroll
        for (int i = 0; i < 2 * WARP_M; ++i) {
            const int index = (place.m + i / 2) * 16 + i % 2 * 8 + row;
            const Row at(index < ROWS ? index : ROWS - 1);
            const int col = p.lead + at.s * DIL_W;
            a[i / 2][i % 2] = (place.group * TILE_C + at.c) * X_PITCH + at.r * DIL_H * LINE_PITCH +
                              col % STRIDE_W * PLANE_PITCH + col / STRIDE_W + pixel;
        }
#pragma unroll
        for (int j = 0; j < WARP_N; ++j) {
            const int index = (place.n + j) * 8 + row;
            b[j] = (place.group * TILE_K + (index < TILE_K ? index : TILE_K - 1)) * Y_PITCH + pixel;
        }
    }
};

// Eight pixels from `col` of row `row` on. `masks` of the lane's two pixels: pixels outside the output are no zeros of
// dy alone, because x may be infinite there.
template <bool MASKED>
__device__ __forceinline__ void multiply_step(Sums& sums, const Tiles& tiles, const Rows& rows, int row, int col,
                                              const unsigned (&masks)[2]) {
    const unsigned* const x = tiles.x + row * (STRIDE_H * LINE_PITCH) + col;
    const unsigned* const y = tiles.y + row * TILE_Q + col;
    unsigned b[WARP_N][2];
#pragma unroll
    for (int j = 0; j < WARP_N; ++j) b[j][0] = y[rows.b[j]], b[j][1] = y[rows.b[j] + 4];
#pragma unroll
    for (int i = 0; i < WARP_M; ++i) {
        unsigned a[4] = {x[rows.a[i][0]], x[rows.a[i][1]], x[rows.a[i][0] + 4], x[rows.a[i][1] + 4]};
        if (MASKED) {
#pragma unroll
            for (int k = 0; k < 4; ++k) a[k] &= masks[k / 2];
        }
#pragma unroll
        for (int j = 0; j < WARP_N; ++j) mma(sums[i][j], a, b[j], elem_t());
    }
}

__device__ __forceinline__ void multiply(Sums& sums, const Tiles& tiles, const Rows& rows, const Tile& tile,
                                         const Place& place) {
    const int pixel = place.lane % 4;
    for (int row = place.part; row < tile.most_rows(); row += WARPS_E) {
        const unsigned mask = tile.mask(row);
        const int whole = mask == 0xffffffffu ? tile.cols / STEP * STEP : 0;
#pragma unroll(WARP_M* WARP_N > 5 ? 1 : 2)
        for (int col = 0; col < whole; col += STEP) multiply_step<false>(sums, tiles, rows, row, col, {});
        for (int col = whole; col < tile.cols; col += STEP) {
            const unsigned masks[2] = {col + pixel < tile.cols ? mask : 0u, col + pixel + 4 < tile.cols ? mask : 0u};
            multiply_step<true>(sums, tiles, rows, row, col, masks);
        }
    }
}

}  // namespace hc::wgrad
