// Where the sums of halo_sm90_wgrad belong: tiles, the parts of consumers, the rows of M, and partial sums in memory.
#pragma once

#include "kernels/numeric.cuh"

namespace hc::wgrad {

constexpr int GROUP_COLUMNS = 64 / CHANNELS;  // columns of taps of a wgmma
constexpr int BLOCK_CHANNELS = SPLIT_C * CHANNELS, BLOCK_FILTERS = SPLIT_K * FILTERS;
constexpr int BLOCK_COLUMNS = SPLIT_S * COLUMN_GROUPS * GROUP_COLUMNS;
constexpr int OWNERS = SPLIT_S * SPLIT_C * SPLIT_K;                      // consumers with sums of their own
constexpr int SUMS = COLUMN_GROUPS * ROWS * FILTERS / 2;                 // of a thread
constexpr int OWNER_SUMS = SUMS * 128, TILE_SUMS = OWNERS * OWNER_SUMS;  // [tile][owner][sum of a thread][thread]

// Tiles of a group along filters, channels, rows and columns of taps. Rows of taps of a tile are row_step apart: their
// rows of x are whole strides apart, so that a line of x meets all of them.
struct Blocks {
    int k, c, r, s, row_step;
};

// The first channel and filter of a tile in its group, row and column of its first tap.
struct Tile {
    int group, channel, filter, row, column;

    __device__ __forceinline__ Tile(const Blocks& blocks, int index) {
        column = index % blocks.s * BLOCK_COLUMNS, index /= blocks.s;
        const int first = index % blocks.r;  // tiles of neighbouring first rows follow one another
        row = first + first / blocks.row_step * ((ROWS - 1) * blocks.row_step), index /= blocks.r;
        channel = index % blocks.c * BLOCK_CHANNELS, index /= blocks.c;
        filter = index % blocks.k * BLOCK_FILTERS, group = index / blocks.k;
    }
};

// What a consumer has of its tile: columns of taps, channels, filters.
struct Part {
    int s, c, k;

    __device__ __forceinline__ explicit Part(int owner)
        : s(owner % SPLIT_S), c(owner / SPLIT_S % SPLIT_C), k(owner / (SPLIT_S * SPLIT_C)) {}
};

// The channel of a row of M. Where a lane reads words of a pixel (`spread`), rows 4 to 7 are half a row of shared
// memory, 128 bytes at most, further on: four neighbouring pixels of eight rows are in 32 different banks.
__device__ __forceinline__ int channel_of(int row, bool spread) {
    constexpr int SPREAD = CHANNELS < 32 ? CHANNELS : 32;
    if (!spread) return row;
    return row / SPREAD * SPREAD + row / 4 % 2 * (SPREAD / 2) + row % SPREAD / 8 * 4 + row % 4;
}

// A row of a consumer's M: its channel of the tile, and its column of taps in a column group.
struct Row {
    int channel, column;

    __device__ __forceinline__ Row(const Part& part, int row, bool spread)
        : channel(part.c * CHANNELS + channel_of(row % CHANNELS, spread)), column(row / CHANNELS) {}
};

}  // namespace hc::wgrad
