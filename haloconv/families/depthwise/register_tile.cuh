// What both depthwise_tile kernels have: the filter of a channel in registers, and tiles of ROWS by 4 sums of a thread.
//
// Constants: those of the kernels, with R, S, ROWS and LEAD.
#pragma once

#include "families/depthwise/finish.cuh"
#include "families/depthwise/quads.cuh"
#include "kernels/numeric.cuh"

namespace hc::tile {

struct Filter {
    float of[R][S];
    float bias;

    template <class Params>
    __device__ __forceinline__ void load(const Params& p, int channel) {
        const float* from = p.w + channel * p.w_k;
        bias = HAS_BIAS ? p.bias[channel] : 0.f;
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int s = 0; s < S; ++s)
                of[r][s] = from[(DGRAD ? R - 1 - r : r) * p.w_r + (DGRAD ? S - 1 - s : s) * p.w_s];
    }
};

struct Sums {
    float of[ROWS][COLS];

    __device__ __forceinline__ explicit Sums(const Filter& filter) {
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
#pragma unroll
            for (int col = 0; col < COLS; ++col) of[row][col] = filter.bias;
    }
    // Row `at` of the window with all rows of the filter that meet it.
    __device__ __forceinline__ void add(const Filter& filter, const Row& x, int at) {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const int r = at - row;
            if (r < 0 || r >= R) continue;
#pragma unroll
            for (int s = 0; s < S; ++s)
#pragma unroll
                for (int col = 0; col < COLS; ++col) of[row][col] += met(x, col, s) * filter.of[r][s];
        }
    }
    // All rows of a window in shared memory that begins LEAD columns before what the first output meets.
    __device__ __forceinline__ void add_window(const Filter& filter, const char* window, int row_bytes) {
#pragma unroll
        for (int at = 0; at < ROWS + R - 1; ++at) {
            Row x;
            read(x, window + at * row_bytes);
            add(filter, x, at);
        }
    }
    // What becomes of the first `rows` rows, which `store` takes to `to`.
    template <class Params>
    __device__ __forceinline__ void finish(const Params& p, int channel, const float* to, i64 stride, int rows) {
        Finish own;
        own.load(p.bias, channel);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const auto residual = residual_at<Vector>(p, to, i < rows);
#pragma unroll
            for (int col = 0; col < COLS; ++col) of[i][col] = own(of[i][col], residual.of[col]);
            to += stride;
        }
    }
    // The first `rows` rows to `to` and `stride` elements behind it each.
    __device__ __forceinline__ void store(float* to, i64 stride, int rows) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const Vector leaving = {of[i][0], of[i][1], of[i][2], of[i][3]};
            if (i < rows) *reinterpret_cast<Vector*>(to) = leaving;
            to += stride;
        }
    }
};

}  // namespace hc::tile
