// Epilogue: the sums of a consumer through small buffers in shared memory to the output.
//
// A warp holds 16 rows of M. Lane l holds rows l / 4 and l / 4 + 8 of pixels 2 * (l % 4) and the next, in every group
// of eight pixels. A row is a filter: row m is filter m, or of each eight filter spread_row(m), where fp32 leaves by
// pixels. A buffer makes rows of neighbours in memory of them, swizzled: pixels of one filter (by pixels, every warp
// for itself) or filters of one pixel (by filters, the four warps of a consumer together). From there TMA moves
// boxes, or lanes store what is inside.
#pragma once

#include "families/halo_sm90/swizzle.cuh"
#include "families/halo_sm90/conv/tile.cuh"
#include "kernels/activation.cuh"
#include "kernels/ptx/ldmatrix.cuh"

namespace hc {

constexpr int WARP_ROWS = 16, CONSUMER_ROWS = 64;

// By pixels: WARP_ROWS rows of PIXELS pixels.
template <class Elem>
struct PixelBuffer {
    static constexpr int PIXELS = 128 / sizeof(Elem), BYTES = WARP_ROWS * 128;
};

// By filters: PIXELS rows of ROW_BYTES for each of PARTS parts of the filters.
template <class Elem, int ROW_BYTES>
struct FilterBuffer {
    static constexpr int PIXELS = 128 / sizeof(Elem), PARTS = CONSUMER_ROWS * sizeof(Elem) / ROW_BYTES;
    static constexpr int PART_BYTES = PIXELS * ROW_BYTES, BYTES = PARTS * PART_BYTES;

    // Byte `byte` of the filters of pixel `px`.
    static __device__ __forceinline__ int offset(int px, int byte) {
        return byte / ROW_BYTES * PART_BYTES + unit_offset<ROW_BYTES>(px, byte % ROW_BYTES / 16) + byte % 16;
    }
};

// What becomes of a sum before it is an output. `own` are bias and scale of the filters of the lane's two rows.
template <Affine BEFORE, Activation KIND>
struct Finish {
    BiasAndScale own[2];

    __device__ __forceinline__ float operator()(float sum, int half) const {
        return finished<BEFORE, KIND>(sum, own[half]);
    }
    // Two neighbouring pixels of a row as 16-bit elements.
    template <class Half, int COUNT>
    __device__ __forceinline__ unsigned pair(const float (&sums)[COUNT], int group, int half) const {
        const int first = 4 * group + 2 * half;
        return from_acc_pair<Half>((*this)(sums[first], half), (*this)(sums[first + 1], half));
    }
};

struct alignas(8) FloatPair {
    float px[2];
};

// Fills a warp's buffer, from pixel group `first_group` on.
template <class Elem, int COUNT, class Finished>
__device__ __forceinline__ void fill_by_pixels(char* buffer, const float (&sums)[COUNT], int first_group,
                                               const Finished& finish) {
    constexpr int PX = PixelBuffer<Elem>::PIXELS;
    const int lane = threadIdx.x % 32;
    if constexpr (sizeof(Elem) == 4) {
        const int to = unit_offset<128>(spread_row(lane / 4), lane % 4 / 2) + lane % 2 * 8;
#pragma unroll
        for (int i = 0; i < PX / 4; ++i) {
            const int group = i / 2, half = i % 2, first = 4 * (first_group + group) + 2 * half;
            *reinterpret_cast<FloatPair*>(buffer + (to ^ group << 5) + half * 1024) = {finish(sums[first], half),
                                                                                       finish(sums[first + 1], half)};
        }
    } else {
        const int half = lane / 8 % 2, to = unit_offset<128>(lane % 8 + 8 * half, lane / 16);
#pragma unroll
        for (int group = 0; group < PX / 8; group += 2) {
            unsigned matrices[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                matrices[i] = finish.template pair<Elem>(sums, first_group + group + i / 2, i % 2);
            ptx::stmatrix_x4(buffer + (to ^ group << 4), matrices);
        }
    }
}

// Fills a consumer's buffer with the rows of warp `warp` of it.
template <class Elem, int ROW_BYTES, int COUNT, class Finished>
__device__ __forceinline__ void fill_by_filters(char* buffer, int warp, const float (&sums)[COUNT], int first_group,
                                                const Finished& finish) {
    using Buffer = FilterBuffer<Elem, ROW_BYTES>;
    constexpr int GROUP_BYTES = 8 * ROW_BYTES;
    const int lane = threadIdx.x % 32;
    if constexpr (sizeof(Elem) == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int half = i / 2, odd = i % 2, row = warp * WARP_ROWS + 8 * half + lane / 4;
            char* to = buffer + Buffer::offset(2 * (lane % 4) + odd, row * 4);
#pragma unroll
            for (int group = 0; group < Buffer::PIXELS / 8; ++group)
                *reinterpret_cast<float*>(to + group * GROUP_BYTES) =
                    finish(sums[4 * (first_group + group) + 2 * half + odd], half);
        }
    } else {
        const int row = warp * WARP_ROWS + lane / 8 % 2 * 8;
        char* to = buffer + Buffer::offset(lane / 16 * 8 + lane % 8, row * 2);
#pragma unroll
        for (int group = 0; group < Buffer::PIXELS / 8; group += 2) {
            unsigned matrices[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                matrices[i] = finish.template pair<Elem>(sums, first_group + group + i / 2, i % 2);
            ptx::stmatrix_x4_trans(to + group * GROUP_BYTES, matrices);
        }
    }
}

// Where a warp's rows stand in the output, and how many there are.
template <class Elem>
struct Rows {
    Elem* y;  // first row
    i64 stride;
    int count;
};

// Stores a warp's buffer row by row, PIECE_BYTES of neighbouring pixels a lane, as many lanes a row as it takes, from
// `to` on: the lane's first pixel in its first row. All rows are there. One warp of a scheduler writes while no other
// hides its latencies: all is read before it is stored.
template <int PIECE_BYTES, class Elem>
__device__ __forceinline__ void store_pieces(const char* buffer, int lane, Elem* to, bool inside, i64 stride) {
    constexpr int LANES = 128 / PIECE_BYTES, AT_ONCE = 32 / LANES, STEPS = WARP_ROWS / AT_ONCE;
    struct alignas(PIECE_BYTES) Pixels {
        Elem px[PIECE_BYTES / sizeof(Elem)];
    };
    const int first = lane / LANES, byte = lane % LANES * PIECE_BYTES;
    Pixels values[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
        values[i] =
            *reinterpret_cast<const Pixels*>(buffer + unit_offset<128>(i * AT_ONCE + first, byte / 16) + byte % 16);
    to += first * stride;
#pragma unroll
    for (int i = 0; i < STEPS; ++i, to += AT_ONCE * stride)
        if (inside) *reinterpret_cast<Pixels*>(to) = values[i];
}

// Stores the first `count` pixels of a warp's buffer, which are neighbours in memory from `to` on, if pieces of
// PIECE_BYTES fit; whether they do.
template <int PIECE_BYTES, class Elem>
__device__ __forceinline__ bool store_row(const char* buffer, int lane, int count, Elem* to, const Rows<Elem>& rows) {
    constexpr int PIECE = PIECE_BYTES / sizeof(Elem);
    const unsigned misaligned = (unsigned)(unsigned long long)to | (unsigned)rows.stride * sizeof(Elem);
    if (misaligned % PIECE_BYTES || count % PIECE || rows.count < WARP_ROWS) return false;
    const int px = lane % (128 / PIECE_BYTES) * PIECE;
    store_pieces<PIECE_BYTES>(buffer, lane, to + px, px < count, rows.stride);
    return true;
}

// Whether PIECE_BYTES of neighbouring pixels from px on are one aligned piece, or all outside; `first` is px's place.
template <int PIECE_BYTES, class Elem, class PlaceOf>
__device__ __forceinline__ bool is_piece(const PlaceOf& place_of, int px, const Rows<Elem>& rows, Place& first) {
    first = place_of(px);
    const unsigned address = (unsigned)(unsigned long long)(rows.y + first.offset);
    bool same = true, aligned = (address | (unsigned)rows.stride * sizeof(Elem)) % PIECE_BYTES == 0;
#pragma unroll
    for (int i = 1; i < PIECE_BYTES / int(sizeof(Elem)); ++i) {
        const Place next = place_of(px + i);
        same &= next.inside == first.inside, aligned &= next.offset == first.offset + i;
    }
    return same && (aligned || !first.inside);
}

// Stores a warp's buffer of pixels one by one. place_of(px) is pixel px's place.
template <class Elem, class PlaceOf>
__device__ __forceinline__ void store_elements(const char* buffer, int lane, const PlaceOf& place_of,
                                               const Rows<Elem>& rows) {
#pragma unroll 1
    for (int px = lane; px < PixelBuffer<Elem>::PIXELS; px += 32) {
        const Place place = place_of(px);
        const int byte = px * sizeof(Elem);
        Elem* to = rows.y + place.offset;
#pragma unroll 1
        for (int row = 0; place.inside && row < rows.count; ++row, to += rows.stride)
            *to = *reinterpret_cast<const Elem*>(buffer + unit_offset<128>(row, byte / 16) + byte % 16);
    }
}

// Stores a warp's buffer of pixels in the widest pieces that all their places allow.
template <class Elem, class PlaceOf>
__device__ __forceinline__ void store_by_pixels(const char* buffer, int lane, const PlaceOf& place_of,
                                                const Rows<Elem>& rows) {
    Place place;
    if (__all_sync(~0u, is_piece<8>(place_of, lane % 16 * (8 / sizeof(Elem)), rows, place) && rows.count == WARP_ROWS))
        return store_pieces<8>(buffer, lane, rows.y + place.offset, place.inside, rows.stride);
    if (__all_sync(~0u, is_piece<4>(place_of, lane * (4 / sizeof(Elem)), rows, place) && rows.count == WARP_ROWS))
        return store_pieces<4>(buffer, lane, rows.y + place.offset, place.inside, rows.stride);
    store_elements<Elem>(buffer, lane, place_of, rows);
}

// Stores pixels [first, end) of a warp's buffer, which are neighbours in memory: pixel 0 of the first row at `to`, a
// multiple of 16 bytes.
template <class Elem>
__device__ __forceinline__ void store_part(const char* buffer, int lane, int first, int end, Elem* to,
                                           const Rows<Elem>& rows) {
    constexpr int PIECE = 8 / sizeof(Elem);
    if ((first | end | (int)rows.stride) % PIECE == 0 && rows.count == WARP_ROWS) {
        const int px = lane % 16 * PIECE;
        return store_pieces<8>(buffer, lane, to + px, px >= first && px < end, rows.stride);
    }
#pragma unroll 1
    for (int px = lane; px < PixelBuffer<Elem>::PIXELS; px += 32) {
        if (px < first || px >= end) continue;
#pragma unroll 1
        for (int row = 0; row < rows.count; ++row)
            to[row * rows.stride + px] = *reinterpret_cast<const Elem*>(
                buffer + unit_offset<128>(row, px * sizeof(Elem) / 16) + px * sizeof(Elem) % 16);
    }
}

// Stores 32 pixels of a consumer's buffer, from pixel `first_px` on, neighbouring lanes to neighbouring filters. `own`
// are the places of the lane's pixel, one for each of OUTPUTS outputs that its rows stand for; the first `count`
// filters of each are there.
template <class Elem, int ROW_BYTES, bool VECTOR, int OUTPUTS>
__device__ __forceinline__ void store_by_filters(const char* buffer, int warp, int first_px,
                                                 const Place (&own)[OUTPUTS], Elem* y, int count) {
    using Buffer = FilterBuffer<Elem, ROW_BYTES>;
    constexpr int PART_BYTES = 8;  // wider stores reach half the rate
    constexpr int ELEMS = PART_BYTES / sizeof(Elem), LANES = CONSUMER_ROWS / ELEMS, PER_STEP = 32 / LANES;
    struct alignas(PART_BYTES) Part {
        Elem elem[ELEMS];
    };
    const int lane = threadIdx.x % 32, row = lane % LANES * ELEMS;
    const int output = row / (CONSUMER_ROWS / OUTPUTS), filter = row % (CONSUMER_ROWS / OUTPUTS);
#pragma unroll
    for (int i = 0; i < 32 / PER_STEP / 4; ++i) {
        const int px = (4 * i + warp) * PER_STEP + lane / LANES;
        Place at;
#pragma unroll
        for (int j = 0; j < OUTPUTS; ++j) {
            const i64 offset = __shfl_sync(~0u, own[j].offset, px);
            const bool inside = __shfl_sync(~0u, int(own[j].inside), px);
            if (j == output) at = {offset, inside};
        }
        const Part part = *reinterpret_cast<const Part*>(buffer + Buffer::offset(first_px + px, row * sizeof(Elem)));
        Elem* to = y + at.offset + filter;
        if (VECTOR) {
            if (at.inside && filter < count) *reinterpret_cast<Part*>(to) = part;
        } else {
#pragma unroll
            for (int j = 0; j < ELEMS; ++j)
                if (at.inside && filter + j < count) to[j] = part.elem[j];
        }
    }
}

}  // namespace hc
