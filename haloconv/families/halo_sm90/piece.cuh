// What the tensor cores multiply, 16 bytes at a time.
#pragma once

#include "kernels/numeric.cuh"

namespace hc {

// One 16-byte piece: neighbouring channels of a pixel as the tensor cores want them.
struct alignas(16) Piece {
    unsigned word[4];
};

// fp32 is rounded to TF32: the tensor cores ignore the low 13 bits, so half of their unit is added, as cvt.rna.tf32
// does. A NaN stays one whatever its payload; infinities stay infinities under the cut.
__device__ __forceinline__ unsigned to_tf32(float value) {
    return value != value ? 0x7fffffffu : __float_as_uint(value) + 0x1000u;
}

__device__ __forceinline__ Piece to_piece(const float (&channel)[4]) {
    return {to_tf32(channel[0]), to_tf32(channel[1]), to_tf32(channel[2]), to_tf32(channel[3])};
}

template <class Half>
__device__ __forceinline__ Piece to_piece(const Half (&channel)[8]) {
    Piece piece;
#pragma unroll
    for (int i = 0; i < 4; ++i) piece.word[i] = channel[2 * i].bits | unsigned(channel[2 * i + 1].bits) << 16;
    return piece;
}

}  // namespace hc
