// halo_sm90_wgrad_ss_sum: dw from the partial sums of halo_sm90_wgrad_ss, in the order of the parts.
//
// PART_LANES threads add RESULT_TAPS items (sum.cuh): thread j adds parts j, j + PART_LANES, ..., and the first of them
// adds the sums of the others in order. Sums that are NaN are computed again (mend.cuh).
//
// Budget: 256 threads; eight sums of each in shared memory, 8 KB, if several threads add an item.
#include "families/halo_sm90/wgrad_ss/sum.cuh"
#include "kernels/ptx/fence.cuh"

// Constants: ELEM is hc::fp16 or hc::bf16; all others integers.
//   M_BLOCKS COLUMNS TAPS SPLIT_K SPLIT_C SPLIT_T  of wgrad_ss.cu
//   RESULT_TAPS PART_LANES  items that a thread adds; threads that add the parts of an item
namespace hc::wgrad_ss {

constexpr int SUM_BLOCKS = 2;  // of a multiprocessor: without it ptxas gives a thread 64 registers, and spills
constexpr int SUM_THREADS = 256, BLOCK_ITEMS = SUM_THREADS / PART_LANES, AT_ONCE = 4;
static_assert(BLOCK_ITEMS % 32 == 0 && TILE_ITEMS % BLOCK_ITEMS == 0,
              "the threads of a warp have the same parts, and a block is in one tile");
using Totals = float[ITEM][SUM_THREADS];

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
    clear(total);
#pragma unroll AT_ONCE
    for (; part < p.parts; part += PART_LANES) add(total, from + part * p.part_sums);
}

// Adds what other lanes have, in their order, to the first one's.
__device__ __forceinline__ void add_lanes(Totals& totals, Item& total) {
    __syncthreads();  // what was there is read
#pragma unroll
    for (int i = 0; i < ITEM; ++i) totals[i][threadIdx.x] = total[i];
    __syncthreads();
    if (threadIdx.x >= BLOCK_ITEMS) return;
#pragma unroll
    for (int other = 1; other < PART_LANES; ++other)
#pragma unroll
        for (int i = 0; i < ITEM; ++i) total[i] += totals[i][other * BLOCK_ITEMS + threadIdx.x];
}

}  // namespace hc::wgrad_ss

extern "C" __global__ void __launch_bounds__(hc::wgrad_ss::SUM_THREADS, hc::wgrad_ss::SUM_BLOCKS)
    halo_sm90_wgrad_ss_sum(const __grid_constant__ hc::wgrad_ss::SumParams p) {
    using namespace hc::wgrad_ss;
    __shared__ Totals totals;
    const int own = threadIdx.x % BLOCK_ITEMS, lane = threadIdx.x / BLOCK_ITEMS;
    const hc::i64 index = (hc::i64)blockIdx.x * BLOCK_ITEMS + own;
    const int tile_index = int(index / TILE_ITEMS), item = int(index % TILE_ITEMS);
    const Tile tile(p.blocks, tile_index);
    const float* const partials = p.partials + (hc::i64)tile_index * TILE_SUMS;
    Rounded rounded;
    hc::ptx::griddepcontrol_wait();  // the launch may begin before the sums are there (PDL)
#pragma unroll
    for (int after = 0; after < RESULT_TAPS; ++after) {
        const Place place(tile, item, after);
        Item total;
        sum_parts(p, partials + place.from, lane, total);
        if (PART_LANES > 1) add_lanes(totals, total);
        if (lane == 0) mend(p, place, total);
        round(rounded, total, after);
    }
    if (lane == 0) write(p, Place(tile, item, 0), rounded);
}
