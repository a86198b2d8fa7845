// Values in shared memory and fragments as the tensor cores want them: rounded, or in terms.
#pragma once

#include "families/halo_sm90/terms.cuh"
#include "families/halo_sm90/wgrad/tile.cuh"

namespace hc::wgrad {

// A term of a value. The first one of a NaN is a NaN whatever its payload, and of an infinity an infinity.
__device__ __forceinline__ unsigned term_of(unsigned value, int term) {
    const float number = __uint_as_float(value);
    return term == 0 && number != number ? 0x7fffffffu : tf32_term<TERMS>(number, term);
}

// The same of a piece. Of one term, the values are rounded already.
__device__ __forceinline__ Piece term_of(const Piece& piece, int term) {
    if (TERMS == 1) return piece;
    return {term_of(piece.word[0], term), term_of(piece.word[1], term), term_of(piece.word[2], term),
            term_of(piece.word[3], term)};
}

// Loaded values as a piece: rounded, but for those that are split later.
template <class Elem, int ELEMS>
__device__ __forceinline__ Piece staged(const Elem (&loaded)[ELEMS]) {
    if constexpr (TERMS == 1)
        return to_piece(loaded);
    else
        return {__float_as_uint(loaded[0]), __float_as_uint(loaded[1]), __float_as_uint(loaded[2]),
                __float_as_uint(loaded[3])};
}

}  // namespace hc::wgrad
