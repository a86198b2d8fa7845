// Parts of halo_sm90_wgrad_ss's sums added up, and dw written: by wgrad_ss_sum.cu, or in a cluster by its own blocks.
//
// Sums are numbered as they lie in a part: [tile][consumer][sum of a thread][thread]. An item are the sums of four
// neighbouring threads in two neighbouring registers: a filter's eight neighbouring channels at a tap.
#pragma once

#include "families/halo_sm90/piece.cuh"
#include "families/halo_sm90/wgrad_ss/mend.cuh"
#include "families/halo_sm90/wgrad_ss/order.cuh"

namespace hc::wgrad_ss {

constexpr int ITEM = 8, TILE_ITEMS = TILE_SUMS / ITEM;
static_assert(TILE_ITEMS % 32 == 0, "the items of a warp are in one tile");

// dw, but for its address: strides in elements, and how it was summed.
struct Result {
    i64 w_k, w_c, w_r, w_s;
    int filters, channels, taps;
    int whole;  // 1: eight neighbouring channels are 16 bytes of dw, all in the layer or none
    Layer layer;
};

using Item = float[ITEM];

// The place of an item in its tile, and what it is of dw. The sums of threads and registers are wgmma's: wgmma.cuh.
struct Place {
    int from;  // of the sums of the first register; those of the second are 128 further on
    int filter, channel, tap;

    __device__ __forceinline__ Place(const Tile& tile, int item) {
        const int consumer = item / (CONSUMER_SUMS / ITEM);
        const int thread = item % 32 * 4, sum = item / 32 % (SUMS / 2) * 2;
        const Part part(consumer);
        const int in_wgmma = sum % (COLUMNS / 2), wgmma = sum / (COLUMNS / 2);
        from = consumer * CONSUMER_SUMS + sum * 128 + thread;
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

// Writes an item where it belongs, as far as its filter, channels and tap exist.
template <class P>
__device__ __forceinline__ void write(const P& p, const Place& place, const Item& total) {
    const Result& of = p.result;
    if (place.filter >= of.filters || place.tap >= of.taps) return;
    const int r = place.tap / of.layer.taps_s, s = place.tap - r * of.layer.taps_s;
    elem_t* const to = p.dw + place.filter * of.w_k + place.channel * of.w_c + r * of.w_r + s * of.w_s;
    elem_t rounded[ITEM];
#pragma unroll
    for (int i = 0; i < ITEM; ++i) rounded[i] = from_acc<elem_t>(total[i]);
    if (of.whole) {
        if (place.channel < of.channels) *reinterpret_cast<Piece*>(to) = to_piece(rounded);
        return;
    }
#pragma unroll
    for (int i = 0; i < ITEM; ++i)
        if (place.channel + i < of.channels) to[i * of.w_c] = rounded[i];
}

}  // namespace hc::wgrad_ss
