// The order of k: which tap and which channels of a chunk each k stands for, the same for the input and the filter.
//
// A lane's k come in pairs of words, one pair for each slice of four lanes' pairs (32 bytes of a row). Units: a pair is
// an atom, 8 bytes of neighbouring channels of one tap; atoms of a tap follow each other. SPLIT: the words 8 * slice +
// lane % 4 and the fourth after it, which count channels, then taps, or taps, then channels. A word of 16-bit elements
// is two taps that are neighbours in a row; as it begins at an even column, a row may have half a word too much at
// either end.
#pragma once

#include "kernels/geometry.cuh"
#include "families/halo_sm90/piece.cuh"

namespace hc {

using elem_t = ELEM;

constexpr int SLICE_PAIRS = 4;
constexpr bool TAP_PAIRS = SPLIT && sizeof(elem_t) == 2;

struct alignas(8) Words2 {
    unsigned word[2];
};

// An atom from its channels.
__device__ __forceinline__ Words2 to_atom(const float (&channel)[2]) {
    return {to_tf32(channel[0]), to_tf32(channel[1])};
}
template <class Half>
__device__ __forceinline__ Words2 to_atom(const Half (&channel)[4]) {
    return {channel[0].bits | unsigned(channel[1].bits) << 16, channel[2].bits | unsigned(channel[3].bits) << 16};
}

struct Place {
    int row, col;  // of the tap, as the axes count; TAP_PAIRS: col counts the words of a row
    int part;      // channel of the chunk, or atom of the tap
};

// TAP_PAIRS: the half of its word in which the first tap of a row lies.
__device__ __forceinline__ int first_half(const Axis& horizontal) { return TAP_PAIRS ? horizontal.base & 1 : 0; }

// Taps, or words of two, of a row of the filter.
__device__ __forceinline__ int row_words(const Axis& horizontal) {
    return TAP_PAIRS ? (horizontal.taps + first_half(horizontal) + 1) / 2 : horizontal.taps;
}

// Where k number `index` stands, counted in words or atoms. `parts` are the chunk's channels or atoms.
__device__ __forceinline__ Place place_at(int index, int parts, const Axes& axes, bool taps_first) {
    const int words = row_words(axes.horizontal), taps = axes.vertical.taps * words;
    const int tap = taps_first ? index % taps : index / parts;
    return {tap / words, tap % words, taps_first ? index / taps : index % parts};
}

}  // namespace hc
