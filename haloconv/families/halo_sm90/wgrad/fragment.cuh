// The fragments of x: M is 64 / CHANNELS columns of taps by CHANNELS channels, K neighbouring pixels, read from a line
// at any column.
#pragma once

#include "families/halo_sm90/swizzle.cuh"
#include "families/halo_sm90/wgrad/tile.cuh"
#include "kernels/ptx/ldmatrix.cuh"

namespace hc::wgrad {

using Fragment = unsigned[4];
using Fragments = Fragment[COLUMN_GROUPS];
using Masks = unsigned[2];  // of a lane's words in a last step, of a line or of each cell: those of pixels that dy has

__device__ __forceinline__ void mask_pixels(Masks& masks, int pixels) {
    constexpr int EACH = 4 / SIZE;  // pixels of a word
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const unsigned pixel = (i * 4 + threadIdx.x % 4) * EACH;  // of the step
        const unsigned in_cell = (pixel + CELL_STEPS * DEPTH - DEPTH) % CELL;
        const int left = IMAGE_COLUMNS > 0 ? IMAGE_COLUMNS - in_cell : (pixels - 1) % DEPTH + 1 - pixel;
        masks[i] = left >= EACH ? ~0u : left == 1 ? 0xffffu : 0u;
    }
}

// Whether a line's step, of so many, is masked: its last one, or the last one of each cell.
__device__ __forceinline__ constexpr bool is_masked(int step, int steps) {
    return IMAGE_COLUMNS > 0 ? (step + 1) % CELL_STEPS == 0 : step + 1 == steps;
}

__device__ __forceinline__ void mask(Fragment& a, const Masks& masks) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] &= masks[i / 2];
}

// Where a lane reads: from the start of a line, for each column group. In bytes (X_INNER), else in words.
struct Lanes {
    static constexpr bool MATRICES = X_INNER && SIZE == 2;         // ldmatrix reads all four words
    static constexpr int PLACES = MATRICES ? 1 : X_INNER ? 4 : 2;  // of a fragment's words
    static constexpr int STEP = STRIDE_W * (X_INNER ? DEPTH * X_ROW_BYTES : DEPTH * SIZE / 4);  // from step to step

    static constexpr int STEP_BYTES = X_INNER ? STEP : 4 * STEP;

    int at[COLUMN_GROUPS][PLACES];
    bool odd[COLUMN_GROUPS][2];  // 16 bits, pixels are neighbours: the first of a pair is the second half of a word

    __device__ __forceinline__ Lanes(const Params& p, const Tile& tile, const Part& part) {
        const int lane = threadIdx.x % 32, first_row = threadIdx.x % 128 / 32 * 16;
        const int half = MATRICES ? lane / 8 % 2 : 0;  // the lane's matrix: eight rows, eight pixels
#pragma unroll
        for (int group = 0; group < COLUMN_GROUPS; ++group)
#pragma unroll
            for (int i = 0; i < PLACES; ++i) {
                const Row row(part, first_row + (MATRICES ? half * 8 : lane / 4 + i % 2 * 8), SPREAD_ROWS);
                int column = (part.s * COLUMN_GROUPS + group) * GROUP_COLUMNS + row.column;
                column = min(column, p.taps_s - 1 - tile.column);  // what is behind the last one is not written
                const int pixel = lead(p, tile) + column * p.dil_w;
                if constexpr (MATRICES)
                    at[group][i] = place(pixel + STRIDE_W * (lane / 16 * 8 + lane % 8), row.channel);
                else if constexpr (X_INNER)
                    at[group][i] = place(pixel + STRIDE_W * (i / 2 * 4 + lane % 4), row.channel);
                else
                    at[group][i] =
                        (row.channel * X_PITCH + (SIZE == 2 ? pixel & ~1 : pixel)) * SIZE / 4 + STRIDE_W * (lane % 4);
                if (!X_INNER) odd[group][i % 2] = SIZE == 2 && pixel & 1;
            }
    }
    // Bytes of a channel of a pixel in a line.
    static __device__ __forceinline__ int place(int pixel, int channel) {
        const int span = channel / X_SPAN, in_span = channel % X_SPAN;
        const int bytes =
            X_ROW_BYTES == 16 ? pixel * 16 : unit_offset < X_ROW_BYTES<32 ? 32 : X_ROW_BYTES>(pixel, in_span / PIECE);
        return span * X_RING + bytes + in_span % PIECE * SIZE;
    }

    // Two pixels, STRIDE_W apart, of a row of 16-bit pixels. `odd`: the first is the second half of its word.
    static __device__ __forceinline__ unsigned pair(const unsigned* word, bool odd) {
        if (STRIDE_W == 1) return odd ? __funnelshift_r(word[0], word[1], 16) : word[0];
        const unsigned first = odd ? 0x32 : 0x10, second = (odd + STRIDE_W) % 2 ? 0x7600 : 0x5400;
        return __byte_perm(word[0], word[(odd + STRIDE_W) / 2], first | second);
    }

    __device__ __forceinline__ void load(Fragment& a, const char* line, int group, int step) const {
        if constexpr (MATRICES) {
            ptx::ldmatrix_x4_trans(a, line + at[group][0] + step * STEP);
        } else if constexpr (X_INNER) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = *reinterpret_cast<const unsigned*>(line + at[group][i] + step * STEP);
        } else {
            const unsigned* const words = reinterpret_cast<const unsigned*>(line) + step * STEP;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned* const word = words + at[group][i % 2] + i / 2 * (4 * STRIDE_W);
                a[i] = SIZE == 2 ? pair(word, odd[group][i % 2]) : word[0];
            }
        }
    }
};

}  // namespace hc::wgrad
