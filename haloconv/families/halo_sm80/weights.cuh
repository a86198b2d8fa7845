// The words of the filter that a lane multiplies: for pack.cu, and for blocks that need few and make them.
#pragma once

#include "families/halo_sm80/order.cuh"

namespace hc {

constexpr int PAIR_ELEMS = 8 / (int)sizeof(elem_t);  // of an atom
constexpr int SLICE_BYTES = 256;                     // of the weights of 8 filters

// The filter that column `column` of eight number `eight` stands for. FOUR_FILTERS: two eights share sixteen filters
// such that a lane's two columns of both are four neighbours.
__device__ __forceinline__ int filter_of(int eight, int column) {
    return FOUR_FILTERS ? eight / 2 * 16 + column / 2 * 4 + eight % 2 * 2 + column % 2 : eight * 8 + column;
}

// Strides of the filter in elements.
struct FilterStrides {
    i64 group, filter, channel, r, s;
};

// The filter of a lane. Those of `channels` and more do not exist, nor does any if it is not `there`.
struct FilterRow {
    const elem_t* from;
    int first_channel, channels;
    bool there;
};

__device__ __forceinline__ elem_t element_of(const FilterStrides& w, const Axes& axes, FilterRow row, Place at,
                                             int channel) {
    const bool tap = !TAP_PAIRS || (unsigned)at.col < (unsigned)axes.horizontal.taps;
    if (!row.there || !tap || row.first_channel + channel >= row.channels) return elem_t{};
    const i64 r = axes.vertical.first + at.row * axes.vertical.step;
    const i64 s = axes.horizontal.first + at.col * axes.horizontal.step;
    return row.from[(row.first_channel + channel) * w.channel + r * w.r + s * w.s];
}

__device__ __forceinline__ unsigned to_word(float tap, float) { return to_tf32(tap); }
template <class Half>
__device__ __forceinline__ unsigned to_word(Half tap, Half next) {
    return tap.bits | unsigned(next.bits) << 16;
}

// The word of a tap, or of a pair of them.
__device__ __forceinline__ unsigned tap_word(const FilterStrides& w, const Axes& axes, FilterRow row, Place at) {
    if (TAP_PAIRS) at.col = 2 * at.col - first_half(axes.horizontal);
    const elem_t tap = element_of(w, axes, row, at, at.part);
    ++at.col;
    return to_word(tap, TAP_PAIRS ? element_of(w, axes, row, at, at.part) : elem_t{});
}

// The words of a slice that `lane` of four has.
__device__ __forceinline__ Words2 weights_of(const FilterStrides& w, const Axes& axes, FilterRow row, int parts,
                                             bool taps_first, int slice, int lane) {
    const int ks = parts * axes.vertical.taps * row_words(axes.horizontal);
    Words2 words = {};
#if SPLIT
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int k = slice * 8 + i * 4 + lane;
        if (k >= ks) continue;
        const Place at = place_at(k, parts, axes, taps_first);
        words.word[i] = tap_word(w, axes, row, at);
    }
#else
    const int k = slice * SLICE_PAIRS + lane;
    if (k >= ks) return words;
    const Place at = place_at(k, parts, axes, false);
    elem_t elem[PAIR_ELEMS];
#pragma unroll
    for (int i = 0; i < PAIR_ELEMS; ++i) elem[i] = element_of(w, axes, row, at, at.part * PAIR_ELEMS + i);
    words = to_atom(elem);
#endif
    return words;
}

}  // namespace hc
