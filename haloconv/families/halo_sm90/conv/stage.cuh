// Producer: input pixels from global memory through registers into [pixel][channels of a chunk], swizzled for wgmma.
#pragma once

#include "families/halo_sm90/terms.cuh"
#include "families/halo_sm90/swizzle.cuh"
#include "families/halo_sm90/conv/tile.cuh"
#include "kernels/ptx/cp_async.cuh"

namespace hc {

// How the 32 pixels of a unit come from global memory. While the tensor cores run, they leave other warps few cycles of
// the register file: what counts is the number of instructions, so loads are as wide as the layout allows, and each
// position is computed by one lane only. `place` is that of the lane's pixel; `channels` are left from x on, the others
// and all channels of a pixel outside are zero.

// Stores a piece as its terms, which are `term_bytes` apart.
template <int TERMS, class Elem, int ELEMS>
__device__ __forceinline__ void store_piece(char* to, int term_bytes, const Elem (&channel)[ELEMS]) {
#pragma unroll
    for (int term = 0; term < TERMS; ++term)
        *reinterpret_cast<Piece*>(to + term * term_bytes) = term_of<TERMS>(channel, term);
}

// Neighbouring lanes load neighbouring pixels, channel by channel, `stride` elements apart.
template <class Elem, int ROW_BYTES, int TERMS>
__device__ __forceinline__ void load_pixels(char* slot, int term_bytes, int first_px, int px_limit, const Elem* x,
                                            i64 stride, int channels, Place place) {
    constexpr int ELEMS = 16 / sizeof(Elem), PIECES = ROW_BYTES / 16;
    constexpr int BATCH = PIECES < 32 / ELEMS ? PIECES : 32 / ELEMS;  // 32 loads in flight
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
            if (px < px_limit) store_piece<TERMS>(slot + unit_offset<ROW_BYTES>(px, first + i), term_bytes, channel[i]);
    }
}

// Neighbouring lanes load neighbouring pieces of a pixel, whose place they get from the lane that computed it. VECTOR:
// pieces are whole and aligned.
template <class Elem, int ROW_BYTES, bool VECTOR, int TERMS>
__device__ __forceinline__ void load_channels(char* slot, int term_bytes, int first_px, int px_limit, const Elem* x,
                                              int channels, Place place) {
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
            if (px < px_limit) store_piece<TERMS>(slot + unit_offset<ROW_BYTES>(px, piece), term_bytes, loaded[i].elem);
        }
    }
}

// load_channels by asynchronous copies, for types that are multiplied as they are: no register waits for memory. The
// copies join the thread's current group.
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
