// Parts of halo_sm90_wgrad_ss's sums added up, and dw written: by wgrad_ss_sum.cu, or in a cluster by its own blocks.
//
// Sums are numbered as they lie in a part: [tile][consumer][sum of a thread][thread]. An item are the sums of four
// neighbouring threads in two neighbouring registers: a filter's eight neighbouring channels at a tap. A thread adds
// RESULT_TAPS items: where taps are neighbours in dw, all of the filter, so that what it writes are whole pieces.
#pragma once

#include "families/halo_sm90/piece.cuh"
#include "families/halo_sm90/wgrad_ss/mend.cuh"
#include "families/halo_sm90/wgrad_ss/order.cuh"

namespace hc::wgrad_ss {

constexpr int ITEM = 8, TAP_ITEMS = BLOCK_FILTERS * BLOCK_CHANNELS / ITEM;        // of a tap of a tile
constexpr int TILE_ITEMS = RESULT_TAPS > 1 ? TAP_ITEMS : BLOCK_TAPS * TAP_ITEMS;  // that are a thread's first ones
static_assert(TAP_ITEMS % 32 == 0, "the items of a warp are of one tap of a tile");
static_assert(RESULT_TAPS <= BLOCK_TAPS, "a tile has all taps that a thread adds");

// dw, but for its address: strides in elements, and how it was summed.
struct Result {
    i64 w_k, w_c, w_r, w_s;
    int filters, channels, taps;
    int whole;  // 1: what a thread adds are 16-byte pieces of dw, all in the layer or none
    Layer layer;
};

using Item = float[ITEM];
using Rounded = elem_t[ITEM * RESULT_TAPS];  // [channel][tap]

// The place of an item in its tile, `after` taps behind a thread's first one, and what it is of dw. The sums of threads
// and registers are wgmma's: wgmma.cuh.
struct Place {
    int from;  // of the sums of the first register; those of the second are 128 further on
    int filter, channel, tap;

    __device__ __forceinline__ Place(const Tile& tile, int item, int after) {
        constexpr int WGMMA_ITEMS = COLUMNS / 4 * 32, PART_ITEMS = M_BLOCKS * WGMMA_ITEMS;
        const int in_tile = item / TAP_ITEMS + after, of_tap = item % TAP_ITEMS;
        const int consumer = of_tap / PART_ITEMS * SPLIT_T + in_tile / TAPS, block = of_tap / WGMMA_ITEMS % M_BLOCKS;
        const int thread = item % 32 * 4, in_wgmma = of_tap / 32 % (COLUMNS / 4) * 2;
        const Part part(consumer);
        from =
            consumer * CONSUMER_SUMS + ((in_tile % TAPS * M_BLOCKS + block) * (COLUMNS / 2) + in_wgmma) * 128 + thread;
        filter = tile.filter + part.filter + block * 64 + thread / 32 * 16 + thread % 32 / 4 + in_wgmma / 2 % 2 * 8;
        channel = tile.channel + part.channel + in_wgmma / 4 * 8;
        tap = tile.tap + in_tile;
    }
};

// Four neighbouring sums.
struct alignas(16) Four {
    float of[4];
};

__device__ __forceinline__ void clear(Item& total) {
#pragma unroll
    for (int i = 0; i < ITEM; ++i) total[i] = 0;
}

// Adds an item of a part, whose sums are at `from`.
__device__ __forceinline__ void add(Item& total, const float* from) {
    const Four even = *reinterpret_cast<const Four*>(from), odd = *reinterpret_cast<const Four*>(from + 128);
#pragma unroll
    for (int i = 0; i < 4; ++i) total[2 * i] += even.of[i], total[2 * i + 1] += odd.of[i];
}

// Stores an item as a part's.
__device__ __forceinline__ void store(float* to, const Item& total) {
    *reinterpret_cast<Four*>(to) = {{total[0], total[2], total[4], total[6]}};
    *reinterpret_cast<Four*>(to + 128) = {{total[1], total[3], total[5], total[7]}};
}

// Sums of a warp's items that are NaN and belong to dw, computed again one after the other by all its lanes.
template <class P>
__device__ __forceinline__ void mend(const P& p, const Place& place, Item& total) {
    unsigned bad = 0;
#pragma unroll
    for (int i = 0; i < ITEM; ++i) bad |= unsigned(total[i] != total[i] && place.channel + i < p.result.channels) << i;
    if (place.filter >= p.result.filters || place.tap >= p.result.taps) bad = 0;
    for (unsigned lanes = __ballot_sync(~0u, bad != 0); lanes; lanes &= lanes - 1) {
        const int lane = __ffs(lanes) - 1;
        const int filter = __shfl_sync(~0u, place.filter, lane), tap = __shfl_sync(~0u, place.tap, lane);
        const int channel = __shfl_sync(~0u, place.channel, lane);
        for (unsigned left = __shfl_sync(~0u, bad, lane); left; left &= left - 1) {
            const int i = __ffs(left) - 1;
            const float sum = mended(p.result.layer, p.x, p.dy, filter, channel + i, tap);
#pragma unroll
            for (int j = 0; j < ITEM; ++j)
                if (threadIdx.x % 32 == lane && i == j) total[j] = sum;
        }
    }
}

// Rounds an item, `after` taps behind the thread's first one.
__device__ __forceinline__ void round(Rounded& to, const Item& total, int after) {
#pragma unroll
    for (int i = 0; i < ITEM; ++i) to[i * RESULT_TAPS + after] = from_acc<elem_t>(total[i]);
}

// Writes what a thread added where it belongs, as far as the filter, channels and tap of its first item exist.
template <class P>
__device__ __forceinline__ void write(const P& p, const Place& first, const Rounded& from) {
    const Result& of = p.result;
    if (first.filter >= of.filters || first.tap >= of.taps) return;
    const int r = first.tap / of.layer.taps_s, s = first.tap - r * of.layer.taps_s;
    elem_t* const to = p.dw + first.filter * of.w_k + first.channel * of.w_c + r * of.w_r + s * of.w_s;
    if (of.whole && first.channel < of.channels) {
        Piece* const pieces = reinterpret_cast<Piece*>(to);
#pragma unroll
        for (int i = 0; i < RESULT_TAPS; ++i)
            pieces[i] = to_piece(reinterpret_cast<const elem_t(&)[ITEM]>(from[i * ITEM]));
    }
    if (RESULT_TAPS > 1 || of.whole) return;
#pragma unroll
    for (int i = 0; i < ITEM; ++i)
        if (first.channel + i < of.channels) to[i * of.w_c] = from[i * RESULT_TAPS];
}

}  // namespace hc::wgrad_ss
