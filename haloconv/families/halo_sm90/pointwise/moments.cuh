// Mean and sum of squared differences of each filter's results in a slab, as they are stored, for a batch norm.
#pragma once

#include "families/halo_sm90/pointwise/tile.cuh"
#include "families/halo_sm90/swizzle.cuh"

#ifdef MOMENTS
namespace hc::pointwise {

constexpr int WORD = 4 / int(sizeof(y_elem_t));  // filters of a word
constexpr int LANE_WORDS = 8, LANE_ROWS = 4;     // of a warp: words of a row, rows at a time
constexpr int STEPS_OF_ROWS = 64 / LANE_ROWS;    // rows of a lane
static_assert(LANE_WORDS * 4 * 4 == ROW_BYTES, "four warps have a row");

// Filter `which` of a word.
template <class Elem>
__device__ __forceinline__ float element_of(unsigned word, int which) {
    if constexpr (sizeof(Elem) == 4)
        return __uint_as_float(word);
    else
        return to_acc(Elem{(unsigned short)(word >> 16 * which)});
}

// The sum of a lane's values, by a tree, and of those of all lanes with the same word.
__device__ __forceinline__ float sum_of_rows(float (&values)[STEPS_OF_ROWS]) {
#pragma unroll
    for (int half = STEPS_OF_ROWS / 2; half > 0; half /= 2)
#pragma unroll
        for (int i = 0; i < half; ++i) values[i] += values[i + half];
    const float sum = values[0] + __shfl_xor_sync(~0u, values[0], LANE_WORDS);
    return sum + __shfl_xor_sync(~0u, sum, 2 * LANE_WORDS);
}

// Writes those of the filters of a slab that all threads of the consumer see in `buffer`. Rows of M beyond the last
// pixel are zeros, and count. A warp reads four rows at a time, two apart: their swizzled words are in banks of their
// own.
//
// Differences are from the first pixel's result, so that one pass is enough: that is one of the results, and the square
// of its difference from the mean at most 63 / 64 of their sum. So no more than six bits cancel.
__device__ __forceinline__ void measure(const Params& p, const Tile& tile, const char* buffer, int m, int n) {
    const int lane = threadIdx.x % 32, word = threadIdx.x % 128 / 32 * LANE_WORDS + lane % LANE_WORDS;
    const int filter = tile.filter + n + word * WORD;
    const auto word_of = [&](int row) {
        return *reinterpret_cast<const unsigned*>(buffer + unit_offset<ROW_BYTES>(row, word / 4) + word % 4 * 4);
    };
    const unsigned first = word_of(0);
    unsigned words[STEPS_OF_ROWS];
#pragma unroll
    for (int i = 0; i < STEPS_OF_ROWS; ++i) words[i] = word_of(i / 2 * 8 + i % 2 + lane / LANE_WORDS * 2);
    Moments found[WORD];
#pragma unroll
    for (int which = 0; which < WORD; ++which) {
        const float from = element_of<y_elem_t>(first, which);
        float apart[STEPS_OF_ROWS], squares[STEPS_OF_ROWS];
#pragma unroll
        for (int i = 0; i < STEPS_OF_ROWS; ++i) {
            apart[i] = element_of<y_elem_t>(words[i], which) - from;
            squares[i] = apart[i] * apart[i];
        }
        const float sum = sum_of_rows(apart);
        found[which] = {from + sum / 64, sum_of_rows(squares) - sum * sum / 64};
    }
    if (lane >= LANE_WORDS || filter >= p.filters) return;
    Moments* const to = p.moments + i64(tile.box + m / 64) * p.filters + filter;
#pragma unroll
    for (int which = 0; which < WORD; ++which) to[which] = found[which];
}

}  // namespace hc::pointwise
#endif
