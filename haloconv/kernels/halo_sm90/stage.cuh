// Producer: input pixels from global memory through registers into [pixel][channels of a chunk], swizzled for wgmma.
#pragma once

#include "halo_sm90/tile.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"

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

// Where piece `piece` of pixel `px` stands in a slot, in bytes: 16-byte units of a row are exchanged by address bits.
template <int ROW_BYTES>
__device__ __forceinline__ int piece_offset(int px, int piece) {
    const int row_bytes = px * ROW_BYTES;
    return row_bytes + ((piece ^ (row_bytes >> 7 & (ROW_BYTES / 16 - 1))) << 4);
}

// How the 32 pixels of a unit come from global memory. While the tensor cores run, they leave other warps few cycles of
// the register file: what counts is the number of instructions, so loads are as wide as the layout allows, and each
// position is computed by one lane only. `place` is that of the lane's pixel; `channels` are left from x on, the others
// and all channels of a pixel outside are zero.

// Neighbouring lanes load neighbouring pixels, channel by channel, `stride` elements apart.
template <class Elem, int ROW_BYTES>
__device__ __forceinline__ void load_pixels(char* slot, int first_px, int px_limit, const Elem* x, i64 stride,
                                            int channels, Place place) {
    constexpr int ELEMS = 16 / sizeof(Elem), PIECES = ROW_BYTES / 16;
    constexpr int BATCH = PIECES < 32 / ELEMS ? PIECES : 32 / ELEMS;  // 32 loads under way
    const int px = first_px + threadIdx.x % 32;
    const Elem* from = x + place.offset;
    const int there = place.inside ? channels : 0;
#pragma unroll 1
    for (int first = 0; first < PIECES; first += BATCH) {
        Elem channel[BATCH][ELEMS];
#pragma unroll
        for (int i = 0; i < BATCH * ELEMS; ++i) {
            const int c = first * ELEMS + i;
            channel[i / ELEMS][i % ELEMS] = c < there ? from[c * stride] : Elem{};
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (px < px_limit)
                *reinterpret_cast<Piece*>(slot + piece_offset<ROW_BYTES>(px, first + i)) = to_piece(channel[i]);
    }
}

template <class Elem>
struct alignas(4 * sizeof(Elem)) Quad {
    Elem px[4];
};

// The same where four pixels are one aligned load that is inside or outside as a whole: a lane turns four pixels of the
// channels of a piece into four pieces. Lanes 0 to 3 hold neighbouring pieces, so that a store meets every bank. `px`
// and `place` are those of the lane's first pixel.
template <class Elem, int ROW_BYTES>
__device__ __forceinline__ void load_quads(char* slot, int px, int px_limit, const Elem* x, i64 stride, int channels,
                                           Place place) {
    constexpr int ELEMS = 16 / sizeof(Elem), PIECES = ROW_BYTES / 16, ACROSS = PIECES < 4 ? PIECES : 4;
    const int column = threadIdx.x % 4;
    const bool wanted = px < px_limit && column < ACROSS;
    const Elem* from = x + place.offset + column * ELEMS * stride;
    const int there = wanted && place.inside ? channels - column * ELEMS : 0;
    Quad<Elem> loaded[PIECES / ACROSS][ELEMS];
#pragma unroll
    for (int i = 0; i < PIECES / ACROSS * ELEMS; ++i) {
        const int c = i / ELEMS * ACROSS * ELEMS + i % ELEMS;
        const Quad<Elem>* at = reinterpret_cast<const Quad<Elem>*>(from + c * stride);
        loaded[i / ELEMS][i % ELEMS] = c < there ? *at : Quad<Elem>{};
    }
#pragma unroll
    for (int i = 0; i < PIECES / ACROSS * 4; ++i) {
        Elem channel[ELEMS];
#pragma unroll
        for (int j = 0; j < ELEMS; ++j) channel[j] = loaded[i / 4][j].px[i % 4];
        char* to = slot + piece_offset<ROW_BYTES>(px + i % 4, i / 4 * ACROSS + column);
        if (wanted) *reinterpret_cast<Piece*>(to) = to_piece(channel);
    }
}

// Neighbouring lanes load neighbouring pieces of a pixel, whose place they get from the lane that computed it. VECTOR:
// pieces are whole and aligned.
template <class Elem, int ROW_BYTES, bool VECTOR>
__device__ __forceinline__ void load_channels(char* slot, int first_px, int px_limit, const Elem* x, int channels,
                                              Place place) {
    constexpr int ELEMS = 16 / sizeof(Elem), PIECES = ROW_BYTES / 16, PER_STEP = 32 / PIECES;
    constexpr int LOADS = VECTOR ? 8 : 16 / ELEMS, BATCH = PIECES < LOADS ? PIECES : LOADS;
    struct alignas(VECTOR ? 16 : sizeof(Elem)) Channels {
        Elem elem[ELEMS];
    };
    const int lane = threadIdx.x % 32, piece = lane % PIECES, limit = place.inside ? channels : 0;
#pragma unroll 1
    for (int first = 0; first < PIECES; first += BATCH) {
        Channels loaded[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int from = (first + i) * PER_STEP + lane / PIECES;
            const i64 offset = __shfl_sync(~0u, place.offset, from);
            const int there = __shfl_sync(~0u, limit, from) - piece * ELEMS;
            const Channels* at = reinterpret_cast<const Channels*>(x + offset + piece * ELEMS);
            loaded[i] = {};
            if (VECTOR) {
                if (there > 0) loaded[i] = *at;
            } else {
#pragma unroll
                for (int j = 0; j < ELEMS; ++j)
                    if (j < there) loaded[i].elem[j] = at->elem[j];
            }
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int px = first_px + (first + i) * PER_STEP + lane / PIECES;
            if (px < px_limit)
                *reinterpret_cast<Piece*>(slot + piece_offset<ROW_BYTES>(px, piece)) = to_piece(loaded[i].elem);
        }
    }
}

// The same for types that are multiplied as they are, by asynchronous copies: no register waits for memory. The copies
// join the thread's current group.
template <class Elem, int ROW_BYTES>
__device__ __forceinline__ void copy_channels(char* slot, int first_px, int px_limit, const Elem* x, int channels,
                                              Place place) {
    constexpr int ELEMS = 16 / sizeof(Elem), PIECES = ROW_BYTES / 16, PER_STEP = 32 / PIECES;
    const int lane = threadIdx.x % 32, piece = lane % PIECES, limit = place.inside ? channels : 0;
#pragma unroll 2
    for (int i = 0; i < PIECES; ++i) {
        const int from = i * PER_STEP + lane / PIECES;
        const i64 offset = __shfl_sync(~0u, place.offset, from);
        const bool there = __shfl_sync(~0u, limit, from) > piece * ELEMS;
        if (first_px + from < px_limit)
            ptx::cp_async_16(slot + piece_offset<ROW_BYTES>(first_px + from, piece),
                             there ? x + offset + piece * ELEMS : x, there ? 16 : 0);
    }
}

}  // namespace hc
