// Staging: planes of the source with their halo, and filters, from global to shared memory in fp32.
//
// A window is stored by residue classes of the stride: class (rho_h, rho_w) holds rows rho_h, rho_h + stride and so on,
// and such columns, so that a tap of a strided problem meets neighbouring pixels too. Positions outside the image are
// zero.
#pragma once

#include "depthwise_window/line.cuh"
#include "depthwise_window/product.cuh"

namespace hc {

// Where things stand in shared memory, in words of 4 bytes, and which lanes read what.
struct WindowParams {
    int half_words, row_words, skew_words;  // of a row: see product.cuh
    int class_words, plane_words;           // one residue class of the stride; all classes of a plane
    int tap_words, filter_row_words;        // taps of one class in a filter row; the whole row
    int filter_words;                       // one filter
    int channel_shift, col_shift;           // lanes of a warp along channels and columns, as powers of two
    int warp_shift;                         // warps that share the rows of a plane, as a power of two
    int block_n, block_c;                   // planes of a block: images, channels
    int classes_w;                          // column classes of a dilation that a block does side by side, or 1
};

// A block's part of a plane: rows `h` from window row 0 on, columns alike.
struct Origin {
    int h, w;
};

// Offset of window row `row` (all classes) in a plane, in words. `classes_w` are stored for each row.
template <int ROWS>
__device__ __forceinline__ int window_row(const WindowParams& p, int row, int stride_h, int classes_w) {
    const int m = stride_h == 1 ? row : row / stride_h;
    const int rho = row - m * stride_h;
    return rho * classes_w * p.class_words + m * p.row_words + m / ROWS * p.skew_words;
}

// What a lane stages: channels innermost, then columns, then lines; warps share planes, or rows of one.
struct Lanes {
    int channel, col, cols, row, rows, group, groups;

    template <int BLOCK>
    static __device__ __forceinline__ Lanes make(const WindowParams& p) {
        const int lane = threadIdx.x % 32, pixel = lane >> p.channel_shift, warp = threadIdx.x / 32;
        const int lines = 32 >> (p.channel_shift + p.col_shift);
        const int share = warp & ((1 << p.warp_shift) - 1);
        return {lane & ((1 << p.channel_shift) - 1),
                pixel & ((1 << p.col_shift) - 1),
                1 << p.col_shift,
                share * lines + (pixel >> p.col_shift),
                lines << p.warp_shift,
                warp >> p.warp_shift,
                BLOCK / 32 >> p.warp_shift};
    }
};

// Stages column `col` of a window: the lane's rows of it. `from` is the plane, null if there is none.
template <int ROWS, class Elem>
__device__ __forceinline__ void stage_column(float* window, const WindowParams& p, const AxisParams (&axes)[2],
                                             const Line& rows, const Line& cols, Origin origin, i64 stride_h,
                                             const Lanes& lanes, int col, const Elem* from) {
    constexpr int BATCH = 8;  // loads in flight of a lane
    const int m = cols.stride == 1 ? col : col / cols.stride, window_rows = axes[0].lines * rows.stride;
    float* to = window + (col - m * cols.stride) * p.class_words + window_col(m, p.half_words);
    for (int first = lanes.row; first < window_rows; first += BATCH * lanes.rows) {
        Elem staged[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int h = origin.h + (first + i * lanes.rows) * rows.spacing;
            staged[i] = {};
            if (from && (unsigned)h < (unsigned)axes[0].extent) staged[i] = from[h * stride_h];
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int row = first + i * lanes.rows;
            if (row < window_rows) to[window_row<ROWS>(p, row, rows.stride, cols.stride)] = to_acc(staged[i]);
        }
    }
}

// Stages every plane of the block. `planes(plane)` is where a plane begins, null if there is none.
template <int ROWS, int BLOCK, class Elem, class Planes>
__device__ __forceinline__ void stage_windows(float* windows, const WindowParams& p, const AxisParams (&axes)[2],
                                              const Line& rows, const Line& cols, Origin origin, i64 stride_h,
                                              i64 stride_w, Planes planes) {
    const Lanes lanes = Lanes::make<BLOCK>(p);
    const int window_cols = axes[1].lines * cols.stride;
    for (int group = lanes.group; group < (p.block_n * p.block_c) >> p.channel_shift; group += lanes.groups) {
        const int plane = (group << p.channel_shift) + lanes.channel;
        const Elem* from = planes(plane);
        for (int col = lanes.col; col < window_cols; col += lanes.cols) {
            const int w = origin.w + col * cols.spacing;
            const bool wanted = from && (unsigned)w < (unsigned)axes[1].extent;
            stage_column<ROWS, Elem>(windows + plane * p.plane_words, p, axes, rows, cols, origin, stride_h, lanes, col,
                                     wanted ? from + w * stride_w : nullptr);
        }
    }
}

// Taps [row0, row0 + rows) x [col0, col0 + cols) of a line's own numbering.
struct TapRange {
    int row0, rows, col0, cols;
};

__device__ __forceinline__ TapRange tap_range(const AxisParams (&axes)[2], const Line& rows, const Line& cols, int row0,
                                              int col0) {
    const int left_h = rows.taps - row0, left_w = cols.taps - col0;
    return {row0, left_h < axes[0].chunk ? left_h : axes[0].chunk, col0,
            left_w < axes[1].chunk ? left_w : axes[1].chunk};
}

// Stages the taps of every channel of the block, each class of the stride a run of whole quads.
// `filters(channel)` is where a filter begins, null if there is none. Whether all taps of the thread are finite.
template <int BLOCK, class Elem, class Filters>
__device__ __forceinline__ bool stage_filters(float* to, const WindowParams& p, const Line& rows, const Line& cols,
                                              TapRange range, i64 stride_r, i64 stride_s, Filters filters) {
    constexpr int BATCH = 4;  // loads in flight of a thread
    const int filter_taps = range.rows * p.filter_row_words, all = filter_taps * p.block_c;
    bool finite = true;
    for (int first = threadIdx.x; first < all; first += BATCH * BLOCK) {
        Elem staged[BATCH];
        int at[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int index = first + i * BLOCK, pixel = index >> p.channel_shift, outer = pixel / filter_taps;
            const int channel = (outer << p.channel_shift) + (index & ((1 << p.channel_shift) - 1));
            const int place = pixel - outer * filter_taps;
            const int row = place / p.filter_row_words, in_row = place - row * p.filter_row_words;
            const int rho = cols.stride == 1 ? 0 : in_row / p.tap_words;
            const int col = rho + (in_row - rho * p.tap_words) * cols.stride;
            const Elem* from = index < all ? filters(channel) : nullptr;
            at[i] = channel * p.filter_words + place;
            staged[i] = {};
            if (from && col < range.cols) {
                const i64 r = rows.tap_first + (range.row0 + row) * rows.tap_step;
                const i64 s = cols.tap_first + (range.col0 + col) * cols.tap_step;
                staged[i] = from[r * stride_r + s * stride_s];
            }
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const float tap = to_acc(staged[i]);
            if (first + i * BLOCK < all) to[at[i]] = tap;
            finite = finite && tap * 0.f == 0.f;
        }
    }
    return finite;
}

// a / b rounded up; 0 where a is not positive and above -b.
__device__ __forceinline__ int ceil_div(int a, int b) { return b == 1 ? a : (a + b - 1) / b; }

// Which tap rows of each class of the stride a thread takes: `rows` from row `first` on, a multiple of ROWS.
struct Share {
    int first, rows;
};

// Adds what the thread's share of the staged taps contributes to its tile, class by class of the stride. `inside`: rows
// of the window that are not all zeros; all rows with a stride.
template <int ROWS>
__device__ __forceinline__ void add_classes(float (&sums)[ROWS][TILE_J], const float* window, const float* filter,
                                            const WindowParams& p, const Line& rows, const Line& cols, TapRange range,
                                            Share share, Rows inside) {
    const int tap_row_words = rows.stride * p.filter_row_words;
    window += window_row<ROWS>(p, share.first, 1, 1);
    filter += share.first * tap_row_words;
#pragma unroll 1
    for (int rho_h = 0; rho_h < rows.stride; ++rho_h) {
        const int left = ceil_div(range.rows - rho_h, rows.stride) - share.first;
#pragma unroll 1
        for (int rho_w = 0; rho_w < cols.stride && left > 0; ++rho_w) {
            const Taps taps = {filter + rho_h * p.filter_row_words + rho_w * p.tap_words,
                               left < share.rows ? left : share.rows, ceil_div(range.cols - rho_w, cols.stride),
                               tap_row_words};
            const Window from = {window + (rho_h * cols.stride * p.classes_w + rho_w) * p.class_words, p.half_words,
                                 p.row_words, p.skew_words};
            add_window<ROWS>(sums, from, taps, inside);
        }
    }
}

}  // namespace hc
