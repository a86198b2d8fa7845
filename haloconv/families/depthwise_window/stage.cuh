// Columns of planes, staged from global to shared memory in fp32; zeros where the source ends.
//
// A lane takes a column's rows one after another, so that a row costs little more than its load and its store.
#pragma once

#include "kernels/numeric.cuh"

namespace hc {

// Which columns and rows a lane takes: channels innermost, then columns, then runs of rows; warps alternate.
struct Lanes {
    int channel_shift, col_shift;  // lanes along channels and columns, as powers of two

    __device__ __forceinline__ int channel() const { return threadIdx.x & ((1 << channel_shift) - 1); }
    __device__ __forceinline__ int col() const { return threadIdx.x >> channel_shift & ((1 << col_shift) - 1); }
    __device__ __forceinline__ int line() const { return threadIdx.x % 32 >> (channel_shift + col_shift); }
    __device__ __forceinline__ int lines() const { return 32 >> (channel_shift + col_shift); }
};

// Where a column's first row comes from and goes. Row i is at position h + i * step_h; those in [0, end) are copied.
template <class Elem>
struct Column {
    const Elem* at;
    float* to;
    int h, end;
};

// Rows of all columns: `step` elements apart where they come from, `step_h` positions; where they go `row_words` apart,
// and `skew_words` more after each ROWS rows.
struct ColumnRows {
    int count;
    i64 step;
    int step_h, row_words, skew_words;
};

// Stages a lane's rows of a column, [begin, end). Whether all of them are finite.
template <int ROWS, class Elem>
__device__ __forceinline__ bool stage_rows(Column<Elem> column, const ColumnRows& rows, int begin, int end) {
    constexpr int BATCH = 12;  // loads in flight of a lane
    static_assert(BATCH % ROWS == 0, "a batch begins at a multiple of ROWS");
    bool finite = true;
    // Not below 0: all of the rows may be above the image.
    const int last = max(0, min(column.h + end * rows.step_h, column.end));
    column.at += begin * rows.step, column.h += begin * rows.step_h;
    column.to += begin * rows.row_words + begin / ROWS * rows.skew_words;
    for (int first = begin; first < end; first += BATCH) {
        Elem staged[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            staged[i] = {};
            if ((unsigned)column.h < (unsigned)last) staged[i] = *column.at;
            column.at += rows.step, column.h += rows.step_h;
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const float value = to_acc(staged[i]);
            if (first + i < end) column.to[i * rows.row_words + i / ROWS * rows.skew_words] = value;
            finite = finite && value * 0.f == 0.f;
        }
        column.to += BATCH * rows.row_words + BATCH / ROWS * rows.skew_words;
    }
    return finite;
}

// Stages `columns` columns of so many planes; `column_at(plane, index)` says which. `warp` is where a warp begins in
// the list of column groups. Returns whether all elements of the thread are finite.
template <int ROWS, int BLOCK, class ColumnAt>
__device__ __forceinline__ bool stage_columns(Lanes lanes, int planes, int columns, const ColumnRows& rows, int warp,
                                              ColumnAt column_at) {
    const int passes = (columns + (1 << lanes.col_shift) - 1) >> lanes.col_shift;
    const int run = ((rows.count + lanes.lines() - 1) / lanes.lines() + ROWS - 1) / ROWS * ROWS;
    const int begin = lanes.line() * run, end = begin + run < rows.count ? begin + run : rows.count;
    bool finite = true;
    for (int step = warp; step < (planes >> lanes.channel_shift) * passes; step += BLOCK / 32) {
        const int group = step / passes, index = ((step - group * passes) << lanes.col_shift) + lanes.col();
        if (index >= columns) continue;
        const auto column = column_at((group << lanes.channel_shift) + lanes.channel(), index);
        finite = stage_rows<ROWS>(column, rows, begin, end) && finite;
    }
    return finite;
}

}  // namespace hc
