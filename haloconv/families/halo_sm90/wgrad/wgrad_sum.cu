// halo_sm90_wgrad_sum: dw from the partial sums of halo_sm90_wgrad, in the order of the parts.
//
// Sums are numbered as they lie in a part: [tile][consumer][sum of a thread][thread]. PART_LANES threads add one:
// thread j adds parts j, j + PART_LANES, ..., and the first of them adds the sums of the others in order. Neighbouring
// threads read neighbouring sums, with AT_ONCE loads in flight.
//
// Budget: 256 threads, AT_ONCE registers for loads; a sum for each thread in shared memory, 1 KB.
#include "families/halo_sm90/wgrad/order.cuh"
#include "kernels/ptx/fence.cuh"

// Constants: ELEM is float, hc::fp16 or hc::bf16; all others integers.
//   ROWS CHANNELS FILTERS COLUMN_GROUPS SPLIT_S SPLIT_C SPLIT_K  of wgrad.cu
//   SPREAD_ROWS  1: rows of M have channels in different banks
//   PART_LANES   threads that add the parts of one sum
namespace hc::wgrad {

using elem_t = ELEM;

constexpr int SUM_THREADS = 256, BLOCK_SUMS = SUM_THREADS / PART_LANES, AT_ONCE = 8;
static_assert(SUM_THREADS % PART_LANES == 0 && BLOCK_SUMS % 32 == 0 && TILE_SUMS % BLOCK_SUMS == 0,
              "the threads of a warp have the same parts, and a block is in one tile");

struct SumParams {
    elem_t* dw;
    const float* partials;
    i64 w_k, w_c, w_r, w_s;                        // strides of dw in elements
    i64 part_sums;                                 // of a part
    int parts, channels, filters, taps_r, taps_s;  // channels and filters of a group
    Blocks blocks;
};

struct SumSmem {
    float totals[PART_LANES][BLOCK_SUMS];
};

__device__ __forceinline__ float sum_parts(const SumParams& p, i64 sum, int part) {
    const float* const from = p.partials + sum;
    float total = 0;
#pragma unroll AT_ONCE
    for (; part < p.parts; part += PART_LANES) total += from[part * p.part_sums];
    return total;
}

// Writes a sum where it belongs, if its channel, filter and tap exist.
__device__ __forceinline__ void write(const SumParams& p, i64 index, float total) {
    const int in_tile = int(index % TILE_SUMS), thread = in_tile % 128, sum = in_tile / 128 % SUMS;
    const Tile tile(p.blocks, int(index / TILE_SUMS));
    const Part part(in_tile / OWNER_SUMS);
    const int in_wgmma = sum % (FILTERS / 2), lane = thread % 32;
    const Row row(part, thread / 32 * 16 + lane / 4 + in_wgmma / 2 % 2 * 8, SPREAD_ROWS);
    const int channel = tile.channel + row.channel;
    const int filter = tile.filter + part.k * FILTERS + in_wgmma / 4 * 8 + lane % 4 * 2 + in_wgmma % 2;
    const int r = tile.row + sum / (FILTERS / 2) % ROWS * p.blocks.row_step;
    const int s = tile.column + (part.s * COLUMN_GROUPS + sum / (ROWS * FILTERS / 2)) * GROUP_COLUMNS + row.column;
    if (channel >= p.channels || filter >= p.filters || r >= p.taps_r || s >= p.taps_s) return;
    const i64 k = (i64)tile.group * p.filters + filter;
    p.dw[k * p.w_k + channel * p.w_c + r * p.w_r + s * p.w_s] = from_acc<elem_t>(total);
}

}  // namespace hc::wgrad

extern "C" __global__ void __launch_bounds__(hc::wgrad::SUM_THREADS)
    halo_sm90_wgrad_sum(const __grid_constant__ hc::wgrad::SumParams p) {
    using namespace hc;
    using namespace hc::wgrad;
    __shared__ SumSmem smem;
    auto& totals = smem.totals;
    const int own = threadIdx.x % BLOCK_SUMS, lane = threadIdx.x / BLOCK_SUMS;
    const i64 index = (i64)blockIdx.x * BLOCK_SUMS + own;
    ptx::griddepcontrol_wait();  // the launch may begin before the sums are there (PDL)
    totals[lane][own] = sum_parts(p, index, lane);
    __syncthreads();
    if (lane > 0) return;
    float total = totals[0][own];
#pragma unroll
    for (int other = 1; other < PART_LANES; ++other) total += totals[other][own];
    write(p, index, total);
}
