// halo_sm90_wgrad_ss_sum: dw from the partial sums of halo_sm90_wgrad_ss, in the order of the parts.
//
// PART_LANES threads add an item (sum.cuh): thread j adds parts j, j + PART_LANES, ..., and the first of them adds the
// sums of the others in order. Sums that are NaN are computed again (mend.cuh).
//
// Budget: 256 threads; eight sums of each in shared memory, 8 KB, if several threads add an item.
#include "families/halo_sm90/wgrad_ss/sum.cuh"
#include "kernels/ptx/fence.cuh"

// Constants: ELEM is hc::fp16 or hc::bf16; all others integers.
//   M_BLOCKS COLUMNS TAPS SPLIT_K SPLIT_C SPLIT_T  of wgrad_ss.cu
//   PART_LANES  threads that add the parts of an item
namespace hc::wgrad_ss {

constexpr int SUM_THREADS = 256, BLOCK_ITEMS = SUM_THREADS / PART_LANES, AT_ONCE = 4;
static_assert(BLOCK_ITEMS % 32 == 0 && TILE_ITEMS % BLOCK_ITEMS == 0,
              "the threads of a warp have the same parts, and a block is in one tile");

struct SumParams {
    elem_t* dw;
    const float* partials;
    const elem_t *x, *dy;
    i64 part_sums;  // of a part
    int parts;
    Blocks blocks;
    Result result;
};

__device__ __forceinline__ void sum_parts(const SumParams& p, const float* from, int part, Item& total) {
#pragma unroll
    for (int i = 0; i < ITEM; ++i) total[i] = 0;
#pragma unroll AT_ONCE
    for (; part < p.parts; part += PART_LANES) add(total, from + part * p.part_sums);
}

}  // namespace hc::wgrad_ss

extern "C" __global__ void __launch_bounds__(hc::wgrad_ss::SUM_THREADS)
    halo_sm90_wgrad_ss_sum(const __grid_constant__ hc::wgrad_ss::SumParams p) {
    using namespace hc::wgrad_ss;
    __shared__ float totals[ITEM][SUM_THREADS];
    const int own = threadIdx.x % BLOCK_ITEMS, lane = threadIdx.x / BLOCK_ITEMS;
    const hc::i64 item = (hc::i64)blockIdx.x * BLOCK_ITEMS + own;
    const int tile = int(item / TILE_ITEMS);
    const Place place(Tile(p.blocks, tile), int(item % TILE_ITEMS));
    Item total;
    hc::ptx::griddepcontrol_wait();  // the launch may begin before the sums are there (PDL)
    sum_parts(p, p.partials + (hc::i64)tile * TILE_SUMS + place.from, lane, total);
    if (PART_LANES > 1) {
#pragma unroll
        for (int i = 0; i < ITEM; ++i) totals[i][threadIdx.x] = total[i];
        __syncthreads();
        if (lane > 0) return;
#pragma unroll
        for (int other = 1; other < PART_LANES; ++other)
#pragma unroll
            for (int i = 0; i < ITEM; ++i) total[i] += totals[i][other * BLOCK_ITEMS + own];
    }
    mend(p, place, total);
    write(p, place, total);
}
