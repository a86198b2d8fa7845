// Planes of several images of one channel in shared memory: rows of 16-byte groups, zeros beside and around them.
#pragma once

#include "families/depthwise/strips.cuh"
#include "families/depthwise_toeplitz/terms.cuh"
#include "kernels/numeric.cuh"
#include "kernels/ptx/cp_async.cuh"

namespace hc::toeplitz {

constexpr int GROUP_BYTES = 16;  // a row of one of ldmatrix's matrices

// TF32 bits, rounded to nearest; rounding would make some NaN infinite.
__device__ __forceinline__ unsigned tf32_bits(float value) {
    return value == value ? ptx::cvt_rna_tf32(value) : 0x7fffffffu;
}

// The bits of an fp32 element as it is multiplied: rounded to TF32, or to two terms, of which the first is cut and the
// second rounded. Of two terms those of an infinity are NaN, and of the largest numbers they may be an infinity.
__device__ __forceinline__ unsigned rounded_bits(float value, float) { return tf32_bits(value); }
__device__ __forceinline__ unsigned rounded_bits(float value, tf32x3) {
    const float large = large_term(value);
    return __float_as_uint(large + __uint_as_float(tf32_bits(value - large)));
}

// What added to the magnitude of a 16-bit element carries into its sign if it is not finite.
__device__ __forceinline__ constexpr unsigned below_infinity(fp16) { return 0x8000 - 0x7c00; }
__device__ __forceinline__ constexpr unsigned below_infinity(bf16) { return 0x8000 - 0x7f80; }
__device__ __forceinline__ constexpr unsigned below_infinity(float) { return 0; }
__device__ __forceinline__ constexpr unsigned below_infinity(tf32x3) { return 0; }

// A plane in shared memory: `rows` rows of the image from a strip's first one on, of which column 0 is `left` bytes in.
struct Staged {
    i64 image, channel, row, col;  // strides of the tensor, in elements
    int images, height, copies;    // of the tensor; copies of a row
    int rows, row_bytes, left;     // of a plane in shared memory
    int skipped, copied;           // rows of it that are zeros in all strips; rows behind them that are copied

    __device__ __forceinline__ int plane_bytes() const { return rows * row_bytes; }
};

// What one of COPIERS threads copies: one piece of PIECE_BYTES of every `hop`-th row of each image. Pieces of several
// elements are of tensors whose columns are neighbours.
template <class Elem, int PIECE_BYTES, int COPIERS>
struct Copier {
    int row, hop;      // its first one; rows between its rows
    int to;            // bytes from a plane to its first piece
    const Elem* from;  // that piece in row 0 of image 0

    // Threads that are left over have no row.
    __device__ __forceinline__ Copier(const Staged& s, const Elem* tensor, int channel) {
        const int thread = threadIdx.x, piece = thread % s.copies;
        hop = COPIERS / s.copies;
        row = thread < hop * s.copies ? s.skipped + thread / s.copies : s.rows;
        to = row * s.row_bytes + s.left + piece * PIECE_BYTES;
        from = tensor + channel * s.channel + piece * (PIECE_BYTES / (int)sizeof(Elem)) * s.col;
    }

    static __device__ __forceinline__ void copy_piece(char* to, const Elem* from, bool inside) {
        if constexpr (PIECE_BYTES == 16)
            ptx::cp_async_16(to, from, inside ? 16 : 0);
        else if constexpr (PIECE_BYTES == 8)
            ptx::cp_async_8(to, from, inside ? 8 : 0);
        else if constexpr (PIECE_BYTES == 4)
            ptx::cp_async_4(to, from, inside ? 4 : 0);
        else
            *reinterpret_cast<unsigned short*>(to) = inside ? from->bits : 0;
    }

    // Asks for the planes of COUNT images from `image` on, of which row 0 in shared memory is row `first`. Rows and
    // images that are not there become zeros.
    template <int COUNT>
    __device__ __forceinline__ void copy(const Staged& s, char* planes, int image, int first) const {
        const int plane_bytes = s.plane_bytes();
        planes += to;
#pragma unroll 1
        for (int at = row; at < s.skipped + s.copied; at += hop) {
            const bool inside = (unsigned)(first + at) < (unsigned)s.height;
            const Elem* source = from + image * s.image + (first + at) * s.row;
            char* piece = planes;
#pragma unroll(COUNT < 8 ? COUNT : 8)
            for (int i = 0; i < COUNT; ++i) {
                copy_piece(piece, source, inside && image + i < s.images);
                source += s.image, piece += plane_bytes;
            }
            planes += hop * s.row_bytes;
        }
    }

    // Rounds what the thread has copied, once it has landed. Returns whether an element is not finite.
    template <int COUNT>
    __device__ __forceinline__ bool settle(const Staged& s, char* planes) const {
        struct alignas(PIECE_BYTES > 4 ? PIECE_BYTES : 4) Copied {
            float word[PIECE_BYTES > 4 ? PIECE_BYTES / 4 : 1];
        };
        float zero = 0;
#pragma unroll 1
        for (int i = 0; i < COUNT; ++i, planes += s.plane_bytes()) {
#pragma unroll 2
            for (int at = row; at < s.skipped + s.copied; at += hop) {
                Copied& place = *reinterpret_cast<Copied*>(planes + to + (at - row) * s.row_bytes);
                Copied copied = place;
#pragma unroll
                for (float& word : copied.word) {
                    zero += word * 0.f;
                    word = __uint_as_float(rounded_bits(word, Elem{}));
                }
                place = copied;
            }
        }
        return zero != 0.f;
    }
};

// Shared memory becomes zero, of which copies write what lies inside of images.
template <int COPIERS>
__device__ __forceinline__ void clear(char* planes, int bytes) {
    for (int at = threadIdx.x * 16; at < bytes; at += COPIERS * 16) *reinterpret_cast<strips::Piece*>(planes + at) = {};
}

}  // namespace hc::toeplitz
