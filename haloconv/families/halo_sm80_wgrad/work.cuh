// What a block of halo_sm80_wgrad computes: its extents, its part of the sum, the tiles that it passes through.
#pragma once

#include "kernels/numeric.cuh"

#define CHANNELS_INNER (TILE_C % 8 == 0)  // rows of the product are ordered (r, s, c), else (c, r, s)
#define PIXEL_PAIRS (STAGED == 1)         // 16 bits: a word is two neighbouring pixels
#define PIECES (STAGED == 2)              // 16 bits: eight neighbouring channels of a pixel are staged as they are

namespace hc::wgrad {

using elem_t = ELEM;
using offset_t = OFFSET;

constexpr int HALVES = sizeof(elem_t) == 2 && !PIXEL_PAIRS && !PIECES ? 2 : 1;  // tiles in a word
constexpr int WORD_PX = PIXEL_PAIRS ? 2 : 1;                                    // columns of a word
constexpr int PIECE_CHANNELS = PIECES ? 8 : 1, PIECE_WORDS = PIECES ? 4 : 1;
constexpr int STEP = 8 * WORD_PX;                       // columns of one mma
constexpr int BUFFERS = PIXEL_PAIRS || PIECES ? 2 : 1;  // of staged tiles
constexpr int WARPS_MN = WARPS_M * WARPS_N * TILE_G;
constexpr int THREADS = 32 * WARPS_MN * WARPS_E;
constexpr int TAP_PAIRS = (S + FIRST_HALF + 1) / 2;  // PIXEL_PAIRS: words of a row of the filter
constexpr int EIGHTS = (TILE_C * R + 7) / 8;         // PIXEL_PAIRS: of the rows of all channels' filters
constexpr int UNITS = TILE_C / 8 * R * S;            // PIECES: eight channels of a tap
constexpr int ROWS = PIXEL_PAIRS ? EIGHTS * TAP_PAIRS * 16 : TILE_C * R * S;
constexpr int WARP_EIGHTS = (EIGHTS + WARPS_M - 1) / WARPS_M;
constexpr int WARP_M =
    PIXEL_PAIRS ? WARP_EIGHTS * TAP_PAIRS : ((ROWS + 15) / 16 + WARPS_M - 1) / WARPS_M;  // blocks of 16 rows of a warp
constexpr int WARP_N = ((TILE_K + 7) / 8 + WARPS_N - 1) / WARPS_N;  // blocks of 8 columns of a warp
constexpr int LEAD = X_INNER ? 0 : X_VEC - 1;                       // columns before the first one, at most
constexpr int X_LINES = (TILE_P - 1) * STRIDE_H + (R - 1) * DIL_H + 1;
constexpr int SPARE = PIXEL_PAIRS ? 2 : 0;  // columns of words whose taps do not exist
constexpr int X_NEEDED = LEAD + (TILE_Q - 1) * STRIDE_W + (S - 1) * DIL_W + 1 + SPARE;
constexpr int X_COLS = X_INNER ? X_NEEDED : (X_NEEDED + X_VEC - 1) / X_VEC * X_VEC;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000  // where the compiler takes more registers
constexpr int BLOCKS = MIN_BLOCKS > 1 ? MIN_BLOCKS - 1 : 1;
#else
constexpr int BLOCKS = MIN_BLOCKS;
#endif
constexpr int LOADED_WORDS = WARP_M * WARP_N > 5 ? 16 : 24;  // registers of a thread for loads in flight

struct alignas(16) Tiles {
    unsigned x[TILE_G * TILE_C / PIECE_CHANNELS * X_PITCH];
    alignas(16) unsigned y[TILE_G * TILE_K / PIECE_CHANNELS * Y_PITCH];
};

using Smem = Tiles[BUFFERS];

// Sums on their way from one warp to another, after the last stage.
struct Exchange {
    float sums[WARPS_MN][WARP_M * WARP_N * 4][32];
};

struct Params {
    const elem_t *x, *dy;
    float* partials;         // [part][K][C_PER_GROUP][R][S]
    i64 x_n, x_c, x_h, x_w;  // strides in elements
    i64 y_n, y_k, y_p, y_q;
    i64 stages;  // of all parts
    int n, h, w, p, q;
    int pad_top, pad_left, lead;  // lead: columns that are staged before the first one
    int groups, group_blocks, parts;
    int strips, row_tiles;          // stages of an image, across and down
    int image_step, row_tile_step;  // images and tiles below each other of a stage; their product is HALVES
};

// What one block computes: channels and filters of one group or several, over a range of stages.
struct Work {
    int group, c, k, part;  // the first ones
    i64 first;              // stage
    int stages;

    __device__ __forceinline__ explicit Work(const Params& p) {
        constexpr int C_BLOCKS = (C_PER_GROUP + TILE_C - 1) / TILE_C, K_BLOCKS = (K_PER_GROUP + TILE_K - 1) / TILE_K;
        unsigned index = blockIdx.x;
        c = index % C_BLOCKS * TILE_C, index /= C_BLOCKS;
        k = index % K_BLOCKS * TILE_K, index /= K_BLOCKS;
        group = index % p.group_blocks * TILE_G, part = index / p.group_blocks;
        first = p.stages * part / p.parts, stages = int(p.stages * (part + 1) / p.parts - first);
    }
};

// A stage's place: image, strip of columns, tile of the strip, each in steps.
struct Position {
    int image, strip, row_tile;

    __device__ __forceinline__ Position(const Params& p, i64 stage) {
        const i64 column = stage / p.row_tiles;
        row_tile = int(stage - column * p.row_tiles);
        image = int(column / p.strips);
        strip = int(column - (i64)image * p.strips);
    }
    __device__ __forceinline__ void advance(const Params& p) {
        if (++row_tile < p.row_tiles) return;
        row_tile = 0;
        if (++strip < p.strips) return;
        strip = 0, ++image;
    }
};

// The output pixels of a stage: of each half the image, the first row and the number of rows; the columns of both.
struct Tile {
    int image[HALVES], p0[HALVES], rows[HALVES];
    int q0, cols;

    __device__ __forceinline__ Tile(const Params& p, Position at) {
        q0 = at.strip * TILE_Q;
        cols = p.q - q0 < TILE_Q ? p.q - q0 : TILE_Q;
#pragma unroll
        for (int i = 0; i < HALVES; ++i) {
            image[i] = at.image * p.image_step + (p.image_step > 1 ? i : 0);
            p0[i] = (at.row_tile * p.row_tile_step + (p.row_tile_step > 1 ? i : 0)) * TILE_P;
            const int left = image[i] < p.n ? p.p - p0[i] : 0;
            rows[i] = left < 0 ? 0 : left < TILE_P ? left : TILE_P;
        }
    }
    __device__ __forceinline__ int most_rows() const { return rows[HALVES - 1] > rows[0] ? rows[HALVES - 1] : rows[0]; }
    // The bits of a word whose pixels lie in row `row` of the output.
    __device__ __forceinline__ unsigned mask(int row) const {
        if constexpr (HALVES == 1) return row < rows[0] ? 0xffffffffu : 0u;
        return (row < rows[0] ? 0xffffu : 0u) | (row < rows[HALVES - 1] ? 0xffff0000u : 0u);
    }
};

// A warp's place in the block, a lane's in the warp.
struct Place {
    int group, m, n, part;  // m and n in blocks of 16 rows and 8 columns, of the group
    int warp_mn, lane;

    __device__ __forceinline__ Place() {
        const int warp = threadIdx.x / 32;
        lane = threadIdx.x % 32;
        warp_mn = warp % WARPS_MN, part = warp / WARPS_MN;
        m = warp_mn % WARPS_M * WARP_M;
        n = warp_mn / WARPS_M % WARPS_N * WARP_N;
        group = warp_mn / (WARPS_M * WARPS_N);
    }
};

// Row of the product -> channel and tap. PIXEL_PAIRS: of 16 rows the first eight have the taps of the words' lower
// halves, the others those of the upper halves.
struct Row {
    int c, r, s;
    bool there;

    __device__ __forceinline__ explicit Row(int row) {
        if (PIXEL_PAIRS) {
            const int line = row / (16 * TAP_PAIRS) * 8 + row % 8;
            c = line / R, r = line % R, s = row / 16 % TAP_PAIRS * 2 + row / 8 % 2 - FIRST_HALF;
            there = c < TILE_C && s >= 0 && s < S;
        } else if (PIECES) {
            const int unit = row / 8, tap = unit % (R * S);
            c = unit / (R * S) * 8 + row % 8, r = tap / S, s = tap % S;
            there = unit < UNITS;
        } else {
            const int tap = CHANNELS_INNER ? row / TILE_C : row % (R * S);
            c = CHANNELS_INNER ? row % TILE_C : row / (R * S);
            r = tap / S, s = tap % S;
            there = row < ROWS;
        }
    }
};

using Sums = float[WARP_M][WARP_N][4];

}  // namespace hc::wgrad
