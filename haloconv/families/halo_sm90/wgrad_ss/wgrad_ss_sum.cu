// halo_sm90_wgrad_ss_sum: dw from the partial sums of halo_sm90_wgrad_ss, in the order of the parts.
//
// Sums are numbered as they lie in a part: [tile][consumer][sum of a thread][thread]. An item are the sums of four
// neighbouring threads in two neighbouring registers: a filter's eight neighbouring channels at a tap. PART_LANES
// threads add an item: thread j adds parts j, j + PART_LANES, ..., and the first of them adds the sums of the others
// in order. Sums that are NaN are computed again (mend.cuh).
//
// Budget: 256 threads, eight sums of each in shared memory, 8 KB.
#include "families/halo_sm90/piece.cuh"
#include "families/halo_sm90/wgrad_ss/mend.cuh"
#include "families/halo_sm90/wgrad_ss/order.cuh"
#include "kernels/ptx/fence.cuh"

// Constants: ELEM is hc::fp16 or hc::bf16; all others integers.
//   M_BLOCKS COLUMNS TAPS SPLIT_K SPLIT_C SPLIT_T  of wgrad_ss.cu
//   PART_LANES  threads that add the parts of an item
namespace hc::wgrad_ss {

constexpr int ITEM = 8, BLOCK_ITEMS = SUM_THREADS / PART_LANES, TILE_ITEMS = TILE_SUMS / ITEM, AT_ONCE = 4;
static_assert(BLOCK_ITEMS % 32 == 0 && TILE_ITEMS % BLOCK_ITEMS == 0,
              "the threads of a warp have the same parts, and a block is in one tile");

struct SumParams {
    elem_t* dw;
    const float* partials;
    const elem_t *x, *dy;
    i64 w_k, w_c, w_r, w_s;  // strides of dw in elements
    i64 part_sums;           // of a part
    int parts, filters, channels, taps;
    int whole;  // 1: eight neighbouring channels are 16 bytes of dw, all in the layer or none
    Blocks blocks;
    Layer layer;
};

struct SumSmem {
    float totals[ITEM][SUM_THREADS];
    float of_threads[SUM_THREADS];
};

using Item = float[ITEM];

// The place of an item in a part, and what it is of dw. The sums of threads and registers are wgmma's: wgmma.cuh.
struct Place {
    i64 from;  // of the sums of the first register; those of the second are 128 further on
    int filter, channel, tap;

    __device__ __forceinline__ Place(const Blocks& blocks, i64 index) {
        const int in_tile = int(index % TILE_ITEMS), thread = in_tile % 32 * 4, sum = in_tile / 32 % (SUMS / 2) * 2;
        const int consumer = in_tile / (CONSUMER_SUMS / ITEM);
        const Tile tile(blocks, int(index / TILE_ITEMS));
        const Part part(consumer);
        const int in_wgmma = sum % (COLUMNS / 2), wgmma = sum / (COLUMNS / 2);
        from = index / TILE_ITEMS * TILE_SUMS + consumer * CONSUMER_SUMS + sum * 128 + thread;
        filter = tile.filter + part.filter + wgmma % M_BLOCKS * 64 + thread / 32 * 16 + thread % 32 / 4 +
                 in_wgmma / 2 % 2 * 8;
        channel = tile.channel + part.channel + in_wgmma / 4 * 8;
        tap = tile.tap + part.tap + wgmma / M_BLOCKS;
    }
};

// Four neighbouring sums.
struct alignas(16) Four {
    float of[4];
};

__device__ __forceinline__ void sum_parts(const SumParams& p, const Place& place, int part, Item& total) {
    const float* const from = p.partials + place.from;
#pragma unroll
    for (int i = 0; i < ITEM; ++i) total[i] = 0;
#pragma unroll AT_ONCE
    for (; part < p.parts; part += PART_LANES) {
        const Four even = *reinterpret_cast<const Four*>(from + part * p.part_sums);
        const Four odd = *reinterpret_cast<const Four*>(from + part * p.part_sums + 128);
#pragma unroll
        for (int i = 0; i < 4; ++i) total[2 * i] += even.of[i], total[2 * i + 1] += odd.of[i];
    }
}

// Sums of the block that are NaN and belong to dw, computed again one after the other.
__device__ __forceinline__ void mend(const SumParams& p, SumSmem& smem) {
    const i64 first = (i64)blockIdx.x * BLOCK_ITEMS;
    for (int i = 0; i < BLOCK_ITEMS * ITEM; ++i) {
        float& total = smem.totals[i % ITEM][i / ITEM];
        const float before = total;
        if (before == before) continue;
        const Place place(p.blocks, first + i / ITEM);
        const int channel = place.channel + i % ITEM;
        if (place.filter >= p.filters || channel >= p.channels || place.tap >= p.taps) continue;
        const float after = mended(p.layer, p.x, p.dy, place.filter, channel, place.tap, smem.of_threads);
        if (threadIdx.x == 0) total = after;
    }
    __syncthreads();
}

// Writes an item where it belongs, as far as its filter, channels and tap exist.
__device__ __forceinline__ void write(const SumParams& p, const Place& place, const Item& total) {
    if (place.filter >= p.filters || place.tap >= p.taps) return;
    const int r = place.tap / p.layer.taps_s, s = place.tap - r * p.layer.taps_s;
    elem_t* const to = p.dw + place.filter * p.w_k + place.channel * p.w_c + r * p.w_r + s * p.w_s;
    elem_t rounded[ITEM];
#pragma unroll
    for (int i = 0; i < ITEM; ++i) rounded[i] = from_acc<elem_t>(total[i]);
    if (p.whole) {
        if (place.channel < p.channels) *reinterpret_cast<Piece*>(to) = to_piece(rounded);
        return;
    }
#pragma unroll
    for (int i = 0; i < ITEM; ++i)
        if (place.channel + i < p.channels) to[i * p.w_c] = rounded[i];
}

}  // namespace hc::wgrad_ss

extern "C" __global__ void __launch_bounds__(hc::wgrad_ss::SUM_THREADS)
    halo_sm90_wgrad_ss_sum(const __grid_constant__ hc::wgrad_ss::SumParams p) {
    using namespace hc::wgrad_ss;
    __shared__ SumSmem smem;
    const int own = threadIdx.x % BLOCK_ITEMS, lane = threadIdx.x / BLOCK_ITEMS;
    const Place place(p.blocks, (hc::i64)blockIdx.x * BLOCK_ITEMS + own);
    Item total;
    hc::ptx::griddepcontrol_wait();  // the launch may begin before the sums are there (PDL)
    sum_parts(p, place, lane, total);
    if (PART_LANES > 1) {
#pragma unroll
        for (int i = 0; i < ITEM; ++i) smem.totals[i][threadIdx.x] = total[i];
        __syncthreads();
#pragma unroll
        for (int other = 1; lane == 0 && other < PART_LANES; ++other)
#pragma unroll
            for (int i = 0; i < ITEM; ++i) total[i] += smem.totals[i][other * BLOCK_ITEMS + own];
    }
    bool is_nan = false;
#pragma unroll
    for (int i = 0; i < ITEM; ++i) is_nan |= lane == 0 && total[i] != total[i];
    if (__syncthreads_or(is_nan)) {
#pragma unroll
        for (int i = 0; lane == 0 && i < ITEM; ++i) smem.totals[i][own] = total[i];
        __syncthreads();
        mend(p, smem);
#pragma unroll
        for (int i = 0; lane == 0 && i < ITEM; ++i) total[i] = smem.totals[i][own];
    }
    if (lane == 0) write(p, place, total);
}
