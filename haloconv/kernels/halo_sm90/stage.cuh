// Producer: input pixels from global memory through registers into [pixel][channels of a chunk], swizzled for wgmma.
#pragma once

#include "halo_sm90/piece.cuh"
#include "halo_sm90/swizzle.cuh"
#include "halo_sm90/tile.cuh"
#include "ptx/cp_async.cuh"

namespace hc {

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
                *reinterpret_cast<Piece*>(slot + unit_offset<ROW_BYTES>(px, first + i)) = to_piece(channel[i]);
    }
}

// 16-bit types, pieces of whose pixels (2 or 4) are aligned: into a raw tile of 32 pixels, as the copy engine would
// bring it (turn.cuh). Each part of the warp copies other channels. `place` is that of the lane's first pixel.
template <class Elem, int ROW_BYTES, int PIECE_PX>
__device__ __forceinline__ void copy_pieces(char* raw, const Elem* x, i64 stride, int channels, Place place) {
    constexpr int LANES = 32 / PIECE_PX, AT_ONCE = 32 / LANES, COPIES = ROW_BYTES / 2 / AT_ONCE, BYTES = 2 * PIECE_PX;
    const int first_px = threadIdx.x % LANES * PIECE_PX, own = threadIdx.x % 32 / LANES;
    const Elem* from = place.inside ? x + place.offset + own * stride : x;
    const i64 step = place.inside ? AT_ONCE * stride : 0;
    const bool all = channels >= ROW_BYTES / 2;
#pragma unroll 4
    for (int i = 0; i < COPIES; ++i, from += step) {
        const int channel = i * AT_ONCE + own;
        const bool there = place.inside && (all || channel < channels);
        char* to = raw + channel * 64 + ((first_px / 8 ^ (channel / 2 & 3)) << 4) + first_px % 8 * 2;
        if constexpr (PIECE_PX == 2)
            ptx::cp_async_4(to, there ? from : x, there ? BYTES : 0);
        else
            ptx::cp_async_8(to, there ? from : x, there ? BYTES : 0);
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
                *reinterpret_cast<Piece*>(slot + unit_offset<ROW_BYTES>(px, piece)) = to_piece(loaded[i].elem);
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
            ptx::cp_async_16(slot + unit_offset<ROW_BYTES>(first_px + from, piece),
                             there ? x + offset + piece * ELEMS : x, there ? 16 : 0);
    }
}

}  // namespace hc
