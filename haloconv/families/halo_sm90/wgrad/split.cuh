// Values in shared memory and fragments as the tensor cores want them: rounded, or in terms.
#pragma once

#include "families/halo_sm90/piece.cuh"
#include "families/halo_sm90/wgrad/tile.cuh"

namespace hc::wgrad {

// A value in two terms. The first is the value as it is, of which wgmma ignores the low 13 bits; the addition makes the
// payload of a NaN one that wgmma sees.
__device__ __forceinline__ unsigned first_term(unsigned value) {
    return __float_as_uint(__fadd_rn(__uint_as_float(value), -0.f));
}

// The second is what wgmma ignores, rounded to TF32. Of an infinity or a NaN it is none.
__device__ __forceinline__ unsigned second_term(unsigned value) {
    return __float_as_uint(__uint_as_float(value) - __uint_as_float(value & 0xffffe000u)) + 0x1000u;
}

__device__ __forceinline__ Piece first_term(const Piece& piece) {
    return {first_term(piece.word[0]), first_term(piece.word[1]), first_term(piece.word[2]), first_term(piece.word[3])};
}

__device__ __forceinline__ Piece second_term(const Piece& piece) {
    return {second_term(piece.word[0]), second_term(piece.word[1]), second_term(piece.word[2]),
            second_term(piece.word[3])};
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
