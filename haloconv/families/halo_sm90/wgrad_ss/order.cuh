// Where the sums of halo_sm90_wgrad_ss belong: tiles, the parts of consumers, and partial sums in memory.
#pragma once

#include "kernels/numeric.cuh"

namespace hc::wgrad_ss {

constexpr int BLOCK_FILTERS = SPLIT_K * M_BLOCKS * 64, BLOCK_CHANNELS = SPLIT_C * COLUMNS, BLOCK_TAPS = SPLIT_T * TAPS;
constexpr int CONSUMERS = SPLIT_K * SPLIT_C * SPLIT_T;
constexpr int SUMS = TAPS * M_BLOCKS * COLUMNS / 2;                               // of a thread
constexpr int CONSUMER_SUMS = SUMS * 128, TILE_SUMS = CONSUMERS * CONSUMER_SUMS;  // [consumer][sum of a thread][thread]

static_assert(SUMS <= (CONSUMERS == 2 ? 192 : 128), "a thread has registers for its sums");
static_assert(COLUMNS % 32 == 0 && COLUMNS <= 256, "wgmma takes this N");

// Tiles of the layer along filters, channels and taps, which are counted row by row.
struct Blocks {
    int k, c, t;
};

// The first filter, channel and tap of a tile.
struct Tile {
    int filter, channel, tap;

    __device__ __forceinline__ Tile(const Blocks& blocks, int index) {
        tap = index % blocks.t * BLOCK_TAPS, index /= blocks.t;
        channel = index % blocks.c * BLOCK_CHANNELS, filter = index / blocks.c * BLOCK_FILTERS;
    }
};

// What a consumer has of its tile: its first filter, channel and tap.
struct Part {
    int filter, channel, tap;

    __device__ __forceinline__ explicit Part(int consumer)
        : filter(consumer / (SPLIT_T * SPLIT_C) * (M_BLOCKS * 64)),
          channel(consumer / SPLIT_T % SPLIT_C * COLUMNS),
          tap(consumer % SPLIT_T * TAPS) {}
};

}  // namespace hc::wgrad_ss
