// Sums to partial results: first those of a block's warps are added, in the order of their pixels.
#pragma once

#include "families/halo_sm80_wgrad/work.cuh"

namespace hc::wgrad {

// The warps of the first pixels get the sums of all that have the same rows and columns.
__device__ __forceinline__ void add_warps(Sums& sums, Exchange& exchange, const Place& place) {
    for (int part = 1; part < WARPS_E; ++part) {
        float (&shared)[WARP_M * WARP_N * 4][32] = exchange.sums[place.warp_mn];
        if (place.part == part) {
#pragma unroll
            for (int i = 0; i < WARP_M * WARP_N * 4; ++i)
                shared[i][place.lane] = sums[i / (4 * WARP_N)][i / 4 % WARP_N][i % 4];
        }
        __syncthreads();
        if (place.part == 0) {
#pragma unroll
            for (int i = 0; i < WARP_M * WARP_N * 4; ++i)
                sums[i / (4 * WARP_N)][i / 4 % WARP_N][i % 4] += shared[i][place.lane];
        }
        __syncthreads();
    }
}

__device__ __forceinline__ void write_sums(const Sums& sums, const Params& p, const Work& work, const Place& place) {
    const int group = work.group + place.group;
    if (group >= p.groups) return;
    float* const to = p.partials + ((i64)work.part * p.groups + group) * ((i64)K_PER_GROUP * C_PER_GROUP * R * S);
#pragma unroll
    for (int i = 0; i < 2 * WARP_M; ++i) {
        const Row row((place.m + i / 2) * 16 + i % 2 * 8 + place.lane / 4);
        const int c = work.c + row.c;
        if (!row.there || c >= C_PER_GROUP) continue;
#pragma unroll
        for (int j = 0; j < 2 * WARP_N; ++j) {
            const int col = (place.n + j / 2) * 8 + place.lane % 4 * 2 + j % 2, k = work.k + col;
            if (col < TILE_K && k < K_PER_GROUP)
                to[(((i64)k * C_PER_GROUP + c) * R + row.r) * S + row.s] = sums[i / 2][j / 2][i % 2 * 2 + j % 2];
        }
    }
}

}  // namespace hc::wgrad
