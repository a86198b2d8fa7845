// Staging: planes of the source with their halo, and filters, from global to shared memory in fp32.
//
// A window is stored by residue classes of the stride: class (rho_h, rho_w) holds rows rho_h, rho_h + stride and so on,
// and such columns, so that a tap of a strided problem meets neighbouring pixels too. Positions outside the image are
// zero; without a stride, rows outside of it are one row.
#pragma once

#include "families/depthwise_window/line.cuh"
#include "families/depthwise_window/product.cuh"
#include "families/depthwise_window/stage.cuh"
#include "kernels/ceil_div.cuh"

namespace hc {

// Where things stand in shared memory, in words of 4 bytes, and which lanes read what.
struct WindowParams {
    int half_words, row_words, skew_words;  // of a row: see product.cuh
    int class_words, plane_words;           // one residue class of the stride; all classes of a plane
    int tap_words, filter_row_words;        // taps of one class in a filter row; the whole row
    int filter_words;                       // one filter
    int channel_shift, col_shift;           // lanes of a warp along channels and columns, as powers of two
    int tap_shift;                          // along columns of a filter
    int planes, filters;                    // of a block
    int classes_w;                          // column classes of a dilation that a block does side by side, or 1
};

// A block's part of a plane: rows `h` from window row 0 on, columns alike.
struct Origin {
    int h, w;
};

// How many of `count` rows or columns are of the first one's residue class. Few layers have a stride: nothing is
// divided by 1.
__device__ __forceinline__ int in_class(int count, int stride) { return stride == 1 ? count : ceil_div(count, stride); }

// Rows of a window that begins at row `h` of the source.
__device__ __forceinline__ Stored stored_rows(const AxisParams& axis, const Line& rows, int h) {
    if (rows.stride > 1) return {0, axis.lines};
    const int first = h < 0 ? in_class(-h, rows.spacing) : 0;
    const int inside = h < axis.extent ? in_class(axis.extent - h, rows.spacing) - first : 0;
    return {first, inside < axis.lines - 1 ? inside : axis.lines - 1};
}

// Rows that a tile at window row `row` meets and that stand in shared memory.
__device__ __forceinline__ Rows rows_met(const Stored& stored, int row) {
    const int first = stored.first - row, end = first + stored.count;
    return {first > 0 ? first : 0, end > 0 ? end : 0};
}

// Rows that any lane of the warp has: its loop is the same for all.
__device__ __forceinline__ Rows rows_of_warp(Rows rows) {
#pragma unroll
    for (int far = 16; far > 0; far /= 2) {
        const int first = __shfl_xor_sync(0xffffffffu, rows.first, far);
        const int end = __shfl_xor_sync(0xffffffffu, rows.end, far);
        rows = {first < rows.first ? first : rows.first, end > rows.end ? end : rows.end};
    }
    return rows;
}

__device__ __forceinline__ Rows no_rows() { return {1 << 30, 0}; }
__device__ __forceinline__ Rows all_rows() { return {0, 1 << 30}; }

// Stages the stored rows of every plane of the block. `planes(plane)` is where a plane begins, null if there is none.
template <int ROWS, int BLOCK, class Elem, class Planes>
__device__ __forceinline__ void stage_windows(float* windows, const WindowParams& p, const AxisParams (&axes)[2],
                                              const Line& rows, const Line& cols, Origin origin, Stored stored,
                                              i64 stride_h, i64 stride_w, Planes planes) {
    const int window_cols = axes[1].lines * cols.stride, step_h = rows.stride * rows.spacing;
    const int top = origin.h + stored.first * step_h, behind = top + stored.count * step_h;
    const int end = behind < axes[0].extent ? behind : axes[0].extent;
    const ColumnRows copied = {rows.stride > 1 ? stored.count : stored.count + 1, step_h * stride_h, step_h,
                               p.row_words, p.skew_words};
    const auto column_at = [&](int plane, int index) -> Column<Elem> {
        const int rho = rows.stride == 1 ? 0 : index / window_cols, col = index - rho * window_cols;
        const int m = cols.stride == 1 ? col : col / cols.stride, residue = rho * cols.stride + col - m * cols.stride;
        const int h = top + rho * rows.spacing, w = origin.w + col * cols.spacing;
        const Elem* from = planes(plane);
        return {from + h * stride_h + w * stride_w,
                windows + plane * p.plane_words + residue * p.class_words + window_col(m, p.half_words), h,
                from && (unsigned)w < (unsigned)axes[1].extent ? end : 0};
    };
    stage_columns<ROWS, BLOCK>({p.channel_shift, p.col_shift}, p.planes, window_cols * rows.stride, copied,
                               threadIdx.x / 32, column_at);
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

// Stages the taps of every filter of the block, each class of the stride a run of whole quads.
// `filters(filter)` is where a filter begins, null if there is none. Whether all taps of the thread are finite.
template <int BLOCK, class Elem, class Filters>
__device__ __forceinline__ bool stage_filters(float* to, const WindowParams& p, const Line& rows, const Line& cols,
                                              TapRange range, i64 stride_r, i64 stride_s, Filters filters) {
    const ColumnRows copied = {range.rows, rows.tap_step * stride_r, 1, p.filter_row_words, 0};
    const i64 r = rows.tap_first + range.row0 * rows.tap_step;
    const auto column_at = [&](int filter, int index) -> Column<Elem> {
        const int rho = cols.stride == 1 ? 0 : index / p.tap_words;
        const int col = rho + (index - rho * p.tap_words) * cols.stride;
        const i64 s = cols.tap_first + (range.col0 + col) * cols.tap_step;
        const Elem* from = filters(filter);
        return {from + r * stride_r + s * stride_s, to + filter * p.filter_words + index, 0,
                from && col < range.cols ? range.rows : 0};
    };
    return stage_columns<1, BLOCK>({p.channel_shift, p.tap_shift}, p.filters, p.filter_row_words, copied,
                                   BLOCK / 32 - 1 - threadIdx.x / 32, column_at);
}

// Which tap rows of each class of the stride a thread takes: `rows` from row `first` on.
struct TapRows {
    int first, rows;
};

// Adds what the thread's part of the staged taps contributes to its tile, class by class of the stride. `window` is
// the plane's, at the thread's first column; `row` the tile's first row in it. `rows` are those worth a look.
template <int ROWS>
__device__ __forceinline__ void add_classes(float (&sums)[ROWS][TILE_J], const float* window, const float* filter,
                                            const WindowParams& p, const Line& rows, const Line& cols, TapRange range,
                                            TapRows own, Stored stored, int row, Rows met) {
    const int tap_row_words = rows.stride * p.filter_row_words;
    filter += own.first * tap_row_words;
#pragma unroll 1
    for (int rho_h = 0; rho_h < rows.stride; ++rho_h) {
        const int left = in_class(range.rows - rho_h, rows.stride) - own.first;
#pragma unroll 1
        for (int rho_w = 0; rho_w < cols.stride && left > 0; ++rho_w) {
            const Taps taps = {filter + rho_h * p.filter_row_words + rho_w * p.tap_words,
                               left < own.rows ? left : own.rows, in_class(range.cols - rho_w, cols.stride),
                               tap_row_words};
            const Window from = {window + (rho_h * cols.stride * p.classes_w + rho_w) * p.class_words,
                                 p.half_words,
                                 p.row_words,
                                 p.skew_words,
                                 stored,
                                 row + own.first};
            add_window<ROWS>(sums, from, taps, met);
        }
    }
}

}  // namespace hc
