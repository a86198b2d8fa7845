// The arithmetic: a thread's tile of sums against a window of pixels and a filter that both lie in shared memory.
//
// sums[i][j] += window[m][j + t] * taps[m - i][t] over window rows m and taps t. A window row is read once, by 16-byte
// loads, for all filter rows that meet it, and a quad of taps once for all columns: 8 taps of ROWS filter rows take
// 4 + 2 * ROWS loads for 64 * ROWS multiplies.
//
// The quads of a window row lie apart: the even ones in its first half, the odd ones in the second. Threads whose tiles
// are neighbours then read neighbouring 16 bytes, where rows in plain order would put two of them on the same banks.
#pragma once

#include "kernels/numeric.cuh"
#include "kernels/ptx/register.cuh"

namespace hc {

constexpr int TILE_J = 8;  // columns of a thread's tile

using Quad = Pack4<float>;

// Place of column `col` in a window row, in words; `half` is half of the row.
__device__ __forceinline__ int window_col(int col, int half) { return (col / 4 % 2) * half + col / 8 * 4 + col % 4; }

// Pixels of one window row from a column on, a multiple of four: quads 0, 2, ... are neighbours, and 1, 3, ...
struct WindowRow {
    const float *first, *second;

    template <int QUADS>
    __device__ __forceinline__ void read(float (&pixels)[4 * QUADS]) const {
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
            const Quad quad = *reinterpret_cast<const Quad*>((q % 2 ? second : first) + q / 2 * 4);
#pragma unroll
            for (int i = 0; i < 4; ++i) pixels[4 * q + i] = quad.lane[i];
        }
    }
    __device__ __forceinline__ WindowRow four_on() const { return {second, first + 4}; }
};

// A filter (of one residue class of the stride): rows `row_words` apart in shared memory.
struct Taps {
    const float* first;
    int rows, cols, row_words;
};

template <int TAPS, int PIXELS>
__device__ __forceinline__ void add_taps(float (&sums)[TILE_J], const float (&pixels)[PIXELS], int first, Quad taps) {
#pragma unroll
    for (int t = 0; t < TAPS; ++t)
#pragma unroll
        for (int j = 0; j < TILE_J; ++j) sums[j] += pixels[first + t + j] * taps.lane[t];
}

// What a window row adds to neighbouring rows of the tile: the first meets the filter row `taps`, the next the one
// before it, and so on.
template <int ROWS>
struct RowProduct {
    float (*sums)[TILE_J];
    const int row_words;

    // `taps` are those from the column on that meets the window row's first pixel.
    __device__ __forceinline__ void add_eight(const WindowRow& row, const float* taps) const {
        float pixels[16];
        row.read<4>(pixels);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const Quad* quads = reinterpret_cast<const Quad*>(taps - i * row_words);
            add_taps<4>(sums[i], pixels, 0, quads[0]);
            add_taps<4>(sums[i], pixels, 4, quads[1]);
        }
    }

    template <int TAPS>
    __device__ __forceinline__ void add_few(const WindowRow& row, const float* taps) const {
        float pixels[12];
        row.read<3>(pixels);
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            add_taps<TAPS>(sums[i], pixels, 0, *reinterpret_cast<const Quad*>(taps - i * row_words));
    }

    __device__ __forceinline__ void add(WindowRow row, const float* taps, int cols) const {
        int quad = 4;
#pragma unroll 1
        for (; cols >= 8; cols -= 8, taps += 8) {
            add_eight(row, taps);
            ptx::renew(quad);  // or the half row that two rounds share is kept, by more moves than it takes reads
            row = {row.first + quad, row.second + quad};
        }
        if (cols >= 4) {
            add_few<4>(row, taps);
            row = row.four_on();
            cols -= 4, taps += 4;
        }
        if (cols == 1) add_few<1>(row, taps);
        if (cols == 2) add_few<2>(row, taps);
        if (cols == 3) add_few<3>(row, taps);
    }
};

// Rows of a window that stand in shared memory: `count` from row `first` on, and behind them, if there are others, one
// row of zeros for all of those.
struct Stored {
    int first, count;

    __device__ __forceinline__ int place(int row) const {
        const unsigned at = row - first;
        return at < (unsigned)count ? at : count;
    }
};

// A window (of one residue class of the stride) as a thread sees it. Stored rows are `row_words` apart, and
// `skew_words` more after each ROWS rows.
struct Window {
    const float* first;  // even quads of the first stored row, at the thread's first column
    int half_words, row_words, skew_words;
    Stored stored;
    int row;  // of the window, that the tile's first result and the first row of taps meet
};

// Rows that a thread's tile meets, as far as there are so many; the others are known to be zeros.
struct Rows {
    int first, end;
};

// Adds the products of a thread's tile.
template <int ROWS>
__device__ __forceinline__ void add_window(float (&sums)[ROWS][TILE_J], const Window& window, const Taps& taps,
                                           Rows rows) {
    const int all = taps.rows + ROWS - 1, end = rows.end < all ? rows.end : all;
#pragma unroll 1
    for (int m = rows.first; m < end; ++m) {
        const int at = window.stored.place(window.row + m);
        const float* even = window.first + at * window.row_words + at / ROWS * window.skew_words;
        const WindowRow row = {even, even + window.half_words};
        const float* filter_row = taps.first + m * taps.row_words;
        if (m >= ROWS - 1 && m < taps.rows) {
            RowProduct<ROWS>{sums, taps.row_words}.add(row, filter_row, taps.cols);
        } else {  // not every row of the tile meets a filter row
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                if ((unsigned)(m - i) < (unsigned)taps.rows)
                    RowProduct<1>{sums + i, taps.row_words}.add(row, filter_row - i * taps.row_words, taps.cols);
        }
    }
}

}  // namespace hc
