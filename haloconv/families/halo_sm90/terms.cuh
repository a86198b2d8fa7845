// fp32 values as sums of several values in TF32.
#pragma once

#include "families/halo_sm90/piece.cuh"

namespace hc {

// A value as a sum of TERMS values: the term of that number. All but the last are cut, so that what remains is exact;
// the last is rounded. Of an infinity or a NaN NaN remains, so that no sum that it is in stays finite.
template <int TERMS>
__device__ __forceinline__ unsigned tf32_term(float value, int term) {
#pragma unroll
    for (int i = 0; i < TERMS - 1; ++i) {
        const unsigned cut = __float_as_uint(value) & 0xffffe000u;
        if (i == term) return cut;
        value -= __uint_as_float(cut);
    }
    return to_tf32(value);
}

// A term of a piece. 16-bit types are multiplied as they are.
template <int TERMS, class Elem, int ELEMS>
__device__ __forceinline__ Piece term_of(const Elem (&channel)[ELEMS], int term) {
    if constexpr (TERMS == 1)
        return to_piece(channel);
    else
        return {tf32_term<TERMS>(channel[0], term), tf32_term<TERMS>(channel[1], term),
                tf32_term<TERMS>(channel[2], term), tf32_term<TERMS>(channel[3], term)};
}

}  // namespace hc
