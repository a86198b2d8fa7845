// Epilogue: the sums of a run of pixels from wgmma's registers through a small buffer of each warp to the output.
//
// A warp holds 16 rows of M. Lane l holds rows l / 4 and l / 4 + 8 of pixels 2 * (l % 4) and the next, in every group
// of eight pixels. The buffer turns that into whole lines of memory.
#pragma once

#include "halo_sm90/tile.cuh"

namespace hc {

constexpr int WARP_ROWS = 16;

// A warp's buffer: 32 or 64 pixels of 16 rows (by pixels), or 32 pixels of 16 rows with the row fastest (by rows).
template <class Elem, bool BY_ROWS>
struct WarpBuffer {
    static constexpr int PIXELS = BY_ROWS ? 32 : 128 / sizeof(Elem);
    // Pitches that send the eight rows (four pixel pairs) that a store touches to different banks, in elements.
    static constexpr int PITCH = BY_ROWS ? WARP_ROWS + 16 / sizeof(Elem) : PIXELS + 8;
    static constexpr int BYTES = (BY_ROWS ? PIXELS : WARP_ROWS) * PITCH * sizeof(Elem);
};

template <class Elem>
struct alignas(2 * sizeof(Elem)) Pair {
    Elem lane[2];
};

// Where the warp's rows stand in the output, and how many there are.
template <class Elem>
struct Rows {
    Elem* y;  // first row
    i64 stride;
    int count;
    float bias[2];  // of the lane's two rows
};

// Stores sums of PIXELS pixels, from pixel group `first_group` on, into the warp's buffer.
template <class Elem, bool BY_ROWS, int COUNT>
__device__ __forceinline__ void fill(Elem* buffer, int lane, const float (&sums)[COUNT], int first_group,
                                     const Rows<Elem>& rows) {
    using Buffer = WarpBuffer<Elem, BY_ROWS>;
#pragma unroll
    for (int group = 0; group < Buffer::PIXELS / 8; ++group)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = lane / 4 + 8 * half, px = 8 * group + 2 * (lane % 4);
            const float* pair = &sums[4 * (first_group + group) + 2 * half];
            const Elem first = from_acc<Elem>(pair[0] + rows.bias[half]);
            const Elem second = from_acc<Elem>(pair[1] + rows.bias[half]);
            if (BY_ROWS) {
                buffer[px * Buffer::PITCH + row] = first;
                buffer[(px + 1) * Buffer::PITCH + row] = second;
            } else {
                *reinterpret_cast<Pair<Elem>*>(&buffer[row * Buffer::PITCH + px]) = {first, second};
            }
        }
}

// Writes the buffer row by row: 16 lanes a row, PER_LANE neighbouring pixels (8 bytes) a lane, `places` theirs. One
// warp of a scheduler writes while no other hides its latencies: all is read before it is stored where it can be.
// PACKED: all rows are there, and every lane's pixels are neighbours, aligned, and inside or outside together.
template <bool PACKED, class Elem, int PER_LANE>
__device__ __forceinline__ void write_rows(const Elem* buffer, int lane, const Place (&places)[PER_LANE],
                                           const Rows<Elem>& rows) {
    struct alignas(PER_LANE * sizeof(Elem)) Pixels {
        Elem px[PER_LANE];
    };
    const int first = lane / 16;
    const Elem* from = buffer + first * WarpBuffer<Elem, false>::PITCH + lane % 16 * PER_LANE;
    Elem* to = rows.y + first * rows.stride;
    if (PACKED) {
        Pixels values[WARP_ROWS / 2];
        to += places[0].offset;
#pragma unroll
        for (int i = 0; i < WARP_ROWS / 2; ++i)
            values[i] = *reinterpret_cast<const Pixels*>(from + 2 * i * WarpBuffer<Elem, false>::PITCH);
#pragma unroll
        for (int i = 0; i < WARP_ROWS / 2; ++i, to += 2 * rows.stride)
            if (places[0].inside) *reinterpret_cast<Pixels*>(to) = values[i];
    } else {
#pragma unroll 1
        for (int row = first; row < rows.count; row += 2) {
            const Pixels value = *reinterpret_cast<const Pixels*>(from);
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j)
                if (places[j].inside) to[places[j].offset] = value.px[j];
            from += 2 * WarpBuffer<Elem, false>::PITCH, to += 2 * rows.stride;
        }
    }
}

template <class Elem, int PER_LANE>
__device__ __forceinline__ void write_by_pixels(const Elem* buffer, int lane, const Place (&places)[PER_LANE],
                                                const Rows<Elem>& rows) {
    bool packed = ((unsigned long long)(rows.y + places[0].offset) | rows.stride * sizeof(Elem)) % 8 == 0;
#pragma unroll
    for (int j = 1; j < PER_LANE; ++j)
        packed &= places[j].inside == places[0].inside && places[j].offset == places[0].offset + j;
    packed |= !places[0].inside && !places[PER_LANE - 1].inside && PER_LANE == 2;
    if (rows.count == WARP_ROWS && __all_sync(~0u, packed))
        write_rows<true>(buffer, lane, places, rows);
    else
        write_rows<false>(buffer, lane, places, rows);
}

// Writes the buffer pixel by pixel, neighbouring lanes to neighbouring rows of M (channels of the output).
template <class Elem, bool VECTOR>
__device__ __forceinline__ void write_by_rows(const Elem* buffer, int lane, Place own, const Rows<Elem>& rows) {
    using Buffer = WarpBuffer<Elem, true>;
    constexpr int PART_BYTES = 8;  // wider stores reach half the rate
    constexpr int ELEMS = PART_BYTES / sizeof(Elem), PARTS = WARP_ROWS / ELEMS;
    struct alignas(PART_BYTES) Part {
        Elem elem[ELEMS];
    };
    const int row = lane % PARTS * ELEMS;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        const int px = i * (32 / PARTS) + lane / PARTS;
        const i64 offset = __shfl_sync(~0u, own.offset, px);
        const bool inside = __shfl_sync(~0u, int(own.inside), px);
        const Part part = *reinterpret_cast<const Part*>(&buffer[px * Buffer::PITCH + row]);
        Elem* to = rows.y + offset + row;
        if (VECTOR) {
            if (inside && row < rows.count) *reinterpret_cast<Part*>(to) = part;
        } else {
#pragma unroll
            for (int j = 0; j < ELEMS; ++j)
                if (inside && row + j < rows.count) to[j] = part.elem[j];
        }
    }
}

}  // namespace hc
