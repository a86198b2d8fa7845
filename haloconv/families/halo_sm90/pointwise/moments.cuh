// Mean and sum of squared differences of each filter's results in a slab, as they are stored, for a batch norm.
#pragma once

#include "families/halo_sm90/pointwise/tile.cuh"
#include "families/halo_sm90/swizzle.cuh"

#ifdef MOMENTS
namespace hc::pointwise {

constexpr int WORD = 4 / int(sizeof(y_elem_t));    // filters of a word
constexpr int LANE_WORDS = 8, LANE_ROWS = 4;       // of a warp: words of a row, rows at a time
constexpr int SUMS_AT_ONCE = 4;                    // of a lane, which do not wait for each other
constexpr int STEPS_OF_ROWS = BOX_PX / LANE_ROWS;  // rows of a lane
static_assert(LANE_WORDS * 4 * 4 == ROW_BYTES, "four warps have a row");

// Filter `which` of a word.
template <class Elem>
__device__ __forceinline__ float element_of(unsigned word, int which) {
    if constexpr (sizeof(Elem) == 4)
        return __uint_as_float(word);
    else
        return to_acc(Elem{(unsigned short)(word >> 16 * which)});
}

// The sum of what the lanes with the same word have.
__device__ __forceinline__ float sum_of_lanes(float value) {
    value += __shfl_xor_sync(~0u, value, LANE_WORDS);
    return value + __shfl_xor_sync(~0u, value, 2 * LANE_WORDS);
}

// The row of its slab that a lane reads in a step: four rows at a time, two apart, whose swizzled words are in banks of
// their own.
__device__ __forceinline__ int row_of_step(int step) {
    return step / 2 * 8 + step % 2 + threadIdx.x % 32 / LANE_WORDS * 2;
}

// The box that 64 rows of M of a tile are.
struct Box {
    int index, pixels;
    float share;  // of a pixel

    __device__ __forceinline__ Box(const Params& p, const Tile& tile, int m)
        : index(tile.box + m / BOX_PX), pixels(index < p.boxes ? p.pixels.of(index) : 0), share(1.f / pixels) {}
};

// Writes those of the filters of a slab that all threads of the consumer see in `buffer`.
//
// Differences are from the first pixel's result, so that one pass is enough: that is one of the results, and the square
// of its difference from the mean at most 63 / 64 of their sum. So no more than six bits cancel.
__device__ __forceinline__ void measure(const Params& p, const Box& box, const char* buffer, int slab_filter) {
    const int lane = threadIdx.x % 32, word = threadIdx.x % 128 / 32 * LANE_WORDS + lane % LANE_WORDS;
    const int filter = slab_filter + word * WORD;
    if (box.pixels == 0) return;
    const auto word_of = [&](int row) {
        return *reinterpret_cast<const unsigned*>(buffer + unit_offset<ROW_BYTES>(row, word / 4) + word % 4 * 4);
    };
    const unsigned first = word_of(0);
    unsigned words[STEPS_OF_ROWS];
#pragma unroll
    for (int i = 0; i < STEPS_OF_ROWS; ++i) words[i] = word_of(row_of_step(i));
    if (box.pixels < BOX_PX) {  // all other rows are as the first one
#pragma unroll
        for (int i = 0; i < STEPS_OF_ROWS; ++i)
            if (row_of_step(i) >= box.pixels) words[i] = first;
    }
    Moments found[WORD];
#pragma unroll
    for (int which = 0; which < WORD; ++which) {
        const float from = element_of<y_elem_t>(first, which);
        float sums[SUMS_AT_ONCE] = {}, squares[SUMS_AT_ONCE] = {};
#pragma unroll
        for (int i = 0; i < STEPS_OF_ROWS; ++i) {
            const float apart = element_of<y_elem_t>(words[i], which) - from;
            sums[i % SUMS_AT_ONCE] += apart, squares[i % SUMS_AT_ONCE] += apart * apart;
        }
        const float sum = sum_of_lanes(sums[0] + sums[1] + (sums[2] + sums[3])), mean = sum * box.share;
        found[which] = {from + mean, sum_of_lanes(squares[0] + squares[1] + (squares[2] + squares[3])) - sum * mean};
    }
    if (lane >= LANE_WORDS || filter >= p.filters) return;
    Moments* const to = p.moments + i64(box.index) * p.filters + filter;
#pragma unroll
    for (int which = 0; which < WORD; ++which) to[which] = found[which];
}

}  // namespace hc::pointwise
#endif
