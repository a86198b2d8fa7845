// The consumers of halo_sm90_pointwise: products of stages.
#pragma once

#include "families/halo_sm90/multiplied.cuh"
#include "families/halo_sm90/pointwise/write.cuh"
#include "kernels/ptx/wgmma.cuh"

namespace hc::pointwise {

using multiply_t = MultipliedAs<elem_t>::type;

constexpr bool W_MN = W_LOADS == W_COLUMNS, X_MN = !X_INNER;
constexpr bool A_MN = PIXELS_M ? X_MN : W_MN, B_MN = PIXELS_M ? W_MN : X_MN;

// A stage's pixels as the fragments of A, by steps and blocks of M.
using Fragments = unsigned[STEPS][M_BLOCKS][4];

// The descriptor of an operand, K-major or MN-major in spans of 64, and its units from step to step.
template <bool MN>
__device__ __forceinline__ ptx::u64 descriptor(const char* smem) {
    return ptx::smem_descriptor(ptx::shared_address(smem), MN ? SPAN_BYTES : 16, 8 * ROW_BYTES, ROW_BYTES);
}
template <bool MN>
inline constexpr int STEP_UNITS = MN ? DEPTH * ROW_BYTES / 16 : 2;

// Loads what a lane holds of all fragments: words of four channels of its pixels. Rows of M are pixels in the order of
// RowPlace, so that the 8 rows by 4 channels of a load are in different banks.
__device__ __forceinline__ void load(Fragments& a, const char* x) {
    const int channel = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const RowPlace at(i % 2);
        const char* const from =
            x + at.box * BOX_BYTES + unit_offset<ROW_BYTES>(channel + i / 2 * 4, at.unit) + at.word * 4;
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int block = 0; block < M_BLOCKS; ++block)
                a[step][block][i] = *reinterpret_cast<const unsigned*>(from + block * (64 / BOX_PX * BOX_BYTES) +
                                                                       step * (DEPTH * ROW_BYTES));
    }
}

__device__ __forceinline__ void multiply(Sums& sums, const Fragments& fragments, const char* a, const char* b,
                                         bool accumulate) {
    const ptx::u64 desc_a = descriptor<A_MN>(a), desc_b = descriptor<B_MN>(b);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int block = 0; block < M_BLOCKS; ++block) {
            const ptx::u64 own_b = ptx::moved(desc_b, step * STEP_UNITS<B_MN>);
            if constexpr (X_IN_REGISTERS)
                ptx::wgmma_rs<multiply_t, COLUMNS, B_MN>(sums[block], fragments[step][block], own_b,
                                                         accumulate || step > 0);
            else
                ptx::wgmma_ss<multiply_t, COLUMNS, A_MN, B_MN>(
                    sums[block], ptx::moved(desc_a, step * STEP_UNITS<A_MN> + block * (64 * ROW_BYTES / 16)), own_b,
                    accumulate || step > 0);
        }
    ptx::wgmma_commit_group();
}

// Lets TMA write to a stage again, once the warp has read it.
__device__ __forceinline__ void give_back(const Smem& smem, int stage) {
    if (X_IN_REGISTERS) ptx::fence_proxy_async_shared();
    arrive_warp(&smem.empty[stage]);
}

// Multiplies the next stage. The stage before it goes back when its products are done, while those of this one run.
__device__ __forceinline__ void multiply_stage(const Smem& smem, const Consumer& self, Cursor& at, int chunk,
                                               Sums& sums, Fragments& fragments) {
    wait(&smem.full[at.index], at.parity);
    const char *const x = smem.x(at.index), *const w = smem.w(at.index, chunk);
    const char* const a = (PIXELS_M ? x : w) + self.m * ROW_BYTES;
    const char* const b = (PIXELS_M ? w : x) + self.n * ROW_BYTES;
    if constexpr (X_IN_REGISTERS) load(fragments, a);
    multiply(sums, fragments, a, b, chunk > 0);
    ptx::wgmma_wait_group<1>();
    if (chunk > 0) give_back(smem, at.index > 0 ? at.index - 1 : STAGES - 1);
    at.advance(STAGES);
}

// The sums of a tile. Filters that stay are waited for in a block's first one.
__device__ __forceinline__ void multiply_tile(const Smem& smem, const Consumer& self, Cursor& at, const Tile& tile,
                                              bool is_first, Sums& sums) {
    Fragments even, odd;
    for (int chunk = 0;;) {
        if (KEEPS_W && is_first) wait(&smem.kept_full[chunk], 0);
        multiply_stage(smem, self, at, chunk, sums, even);
        if (++chunk == tile.chunks) break;
        if (KEEPS_W && is_first) wait(&smem.kept_full[chunk], 0);
        multiply_stage(smem, self, at, chunk, sums, odd);
        if (++chunk == tile.chunks) break;
    }
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int block = 0; block < M_BLOCKS; ++block) ptx::wgmma_hold(sums[block]);
    give_back(smem, at.index > 0 ? at.index - 1 : STAGES - 1);
}

#ifdef CLUSTER
// The cluster's blocks sum ranges of the channels of one tile. Each hands the sums of one consumer over, in shared
// memory where stages were, and its other consumer adds what the other block handed over to its own, and writes them.
__device__ __forceinline__ void consume(const Params& p, const Smem& smem, int warpgroup) {
    constexpr int MULTIPLIED = 3, SUMS = M_BLOCKS * COLUMNS / 2;  // a barrier; sums of a thread
    static_assert(CLUSTER == 2 && SUMS * 128 * 4 <= STAGES * STAGE_BYTES, "sums of a consumer fit where stages were");
    Consumer self(smem, warpgroup);
    Cursor at;
    const Tile tile(p, blockIdx.x / CLUSTER);
    const int rank = ptx::cluster_rank();
    Sums sums;
    multiply_tile(smem, self, at, tile, false, sums);
    float* const handed = reinterpret_cast<float*>(smem.stages) + threadIdx.x % 128;
    ptx::bar_sync(MULTIPLIED, 128 * CONSUMERS);  // no consumer multiplies the stages any more
    if (warpgroup != rank) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) handed[i * 128] = (&sums[0][0])[i];
    }
    ptx::cluster_sync();
    if (warpgroup == rank) {
        const float* const other = ptx::peer_shared(handed, 1 - rank);
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
            if (i % 32 == 0) __syncwarp();  // there are no registers for more loads at a time
            (&sums[0][0])[i] += other[i * 128];
        }
    }
    ptx::cluster_sync();  // the other block reads this one's sums
    if (warpgroup != rank) return;
    write(p, self, tile, sums);
    settle(self);
}
#else
__device__ __forceinline__ void consume(const Params& p, const Smem& smem, int warpgroup) {
    Consumer self(smem, warpgroup);
    Cursor at;
#ifdef AFFINE_AND_RESIDUAL
    for (int i = 0; self.sends && i < AHEAD; ++i) self.residual.ask(p);
#endif
    for (int index = blockIdx.x; index < p.tiles; index += gridDim.x) {
        const Tile tile(p, index);
        Sums sums;
        multiply_tile(smem, self, at, tile, index == blockIdx.x, sums);
        write(p, self, tile, sums);
    }
    settle(self);
}
#endif

}  // namespace hc::pointwise
