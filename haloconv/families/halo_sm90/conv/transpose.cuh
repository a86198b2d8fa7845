// Producer: a raw tile [channels of a chunk][32 pixels], as TMA brings it from an image whose pixels are neighbours,
// transposed into the [pixel][channels] of a slot. fp32 comes rounded to TF32 already.
//
// While the tensor cores run they leave other warps few cycles, so what counts is the number of instructions: a unit
// takes 16 accesses to shared memory, where loads, rounding and predicates took about 200.
#pragma once

#include "families/halo_sm90/conv/stage.cuh"
#include "kernels/ptx/ldmatrix.cuh"
#include "kernels/ptx/register.cuh"

namespace hc {

constexpr int UNIT_PX = 32;

// Pixels of a unit: the place in the slot of the first one that it is meant for; how many pixels before that its raw
// tile begins, whose boxes begin at aligned ones; the row's places, and those of them that are inside the image.
struct UnitPixels {
    int first, shift, from, to, inside_from, inside_to;

    __device__ __forceinline__ bool has(int px) const { return px >= from && px < to; }
    // The place of the first pixel in the raw tile of the channels of plane `plane`, `plane_px` pixels apart.
    template <class Elem>
    __device__ __forceinline__ int begin(int plane, int plane_px) const {
        return first - (shift + plane * plane_px & 16 / int(sizeof(Elem)) - 1);
    }
    // Whether all pixels of the raw tile are the row's, whatever their plane.
    template <class Elem, int PLANES>
    __device__ __forceinline__ bool whole() const {
        const int before = PLANES == 1 ? shift : 16 / int(sizeof(Elem)) - 1;
        return first - before >= from && first - (PLANES == 1 ? shift : 0) + UNIT_PX <= to;
    }
};

// A piece of four fp32 channels: as TMA rounded them, or their terms, `term_bytes` apart.
template <int TERMS>
__device__ __forceinline__ void store_transposed(char* to, int term_bytes, const Piece& piece) {
    if constexpr (TERMS == 1) {
        *reinterpret_cast<Piece*>(to) = piece;
    } else {
        const float channel[4] = {__uint_as_float(piece.word[0]), __uint_as_float(piece.word[1]),
                                  __uint_as_float(piece.word[2]), __uint_as_float(piece.word[3])};
        store_piece<TERMS>(to, term_bytes, channel);
    }
}

// fp32: lanes 0 to 3 read four pixels of a channel each and write four channels of a pixel each. `crossed` sends the 8
// lanes of an access to different banks on both sides. DEEP: all is loaded before it is stored, in twice the registers.
// `slot` is where the slot begins among `slots`. WHOLE: all pixels are the row's.
template <int ROW_BYTES, int PLANES, int TERMS, bool DEEP, bool WHOLE>
__device__ __forceinline__ void transpose_pixels(const float* raw, char* slots, int slot, int term_bytes,
                                                 const UnitPixels& px, int plane_px) {
    constexpr int PIECES = ROW_BYTES / 16, ACROSS = PIECES < 4 ? PIECES : 4, HALVES = PIECES / ACROSS;
    constexpr int AT_ONCE = DEEP ? HALVES : 1;
    const int lane = threadIdx.x % 32, column = lane % 4, crossed = lane / 4 ^ (column & 2);
    if (column >= ACROSS) return;
    const char* from = reinterpret_cast<const char*>(raw) + column * 512;
    int own_px, to[4];  // of the lane's pixels
#pragma unroll
    for (int first = 0; first < HALVES; first += AT_ONCE) {
        Piece loaded[AT_ONCE][4];
#pragma unroll
        for (int i = 0; i < AT_ONCE * 4; ++i)  // channel 4 * (ACROSS * half + column) + i % 4 of the raw tile
            loaded[i / 4][i % 4] = *reinterpret_cast<const Piece*>(from + (first + i / 4) * ACROSS * 512 + i % 4 * 128 +
                                                                   ((crossed ^ (column & 1) * 4 ^ i % 4) << 4));
#pragma unroll
        for (int i = 0; i < AT_ONCE * 4; ++i) {
            const Piece(&of)[4] = loaded[i / 4];
            const int j = i % 4, half = first + i / 4;
            if (j == 0 && (PLANES > 1 || half == 0)) {
                own_px = px.begin<float>((half * ACROSS + column) * PLANES / PIECES, plane_px) + 4 * crossed;
#pragma unroll
                for (int k = 0; k < 4; ++k) to[k] = slot + unit_offset<ROW_BYTES>(own_px + k, column);
            }
            if (WHOLE || px.has(own_px + j))
                store_transposed<TERMS>(slots + (to[j] ^ half * ACROSS << 4), term_bytes,
                                        {of[0].word[j], of[1].word[j], of[2].word[j], of[3].word[j]});
        }
    }
}

template <int ROW_BYTES, int PLANES, int TERMS, bool DEEP>
__device__ __forceinline__ void transpose(const float* raw, char* slots, int slot, int term_bytes, const UnitPixels& px,
                                          int plane_px) {
    ptx::renew(slot);  // computed once
    if (px.whole<float, PLANES>())
        transpose_pixels<ROW_BYTES, PLANES, TERMS, DEEP, true>(raw, slots, slot, term_bytes, px, plane_px);
    else
        transpose_pixels<ROW_BYTES, PLANES, TERMS, DEEP, false>(raw, slots, slot, term_bytes, px, plane_px);
}

// 16-bit types: the matrix instructions transpose 8 x 8 elements each. Lane l serves pixel l of the unit.
template <int ROW_BYTES, int PLANES, int TERMS, bool DEEP, class Half>
__device__ __forceinline__ void transpose(const Half* raw, char* slots, int slot, int, const UnitPixels& px,
                                          int plane_px) {
    ptx::renew(slot);
    const int lane = threadIdx.x % 32, channel = lane % 8;
    const char* from = reinterpret_cast<const char*>(raw) + channel * 64 + ((lane / 8 ^ channel >> 1) << 4);
    const bool whole = px.whole<Half, PLANES>();
#pragma unroll
    for (int piece = 0; piece < ROW_BYTES / 16; ++piece) {
        const int begin = px.begin<Half>(piece * PLANES / (ROW_BYTES / 16), plane_px);
        unsigned transposed[4];
        ptx::ldmatrix_x4_trans(transposed, from + piece * 512);
        if (whole) {
            ptx::stmatrix_x4(slots + (slot + unit_offset<ROW_BYTES>(begin + lane, 0) ^ piece << 4), transposed);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int group = begin + 8 * i, at = group + lane / 4;
                const unsigned matrix[1] = {transposed[i]};
                if (group >= px.from && group + 8 <= px.to)
                    ptx::stmatrix_x1(slots + (slot + unit_offset<ROW_BYTES>(group + lane % 8, 0) ^ piece << 4), matrix);
                else if (px.has(at))
                    *reinterpret_cast<unsigned*>(slots + slot + unit_offset<ROW_BYTES>(at, piece) + lane % 4 * 4) =
                        transposed[i];
            }
        }
    }
}

// Where rows lie end to end in memory, what is left and right of a row is no zero: it is overwritten.
template <class Elem, int ROW_BYTES, int PLANES>
__device__ __forceinline__ void clear_outside(char* slot, const UnitPixels& px, int plane_px) {
    constexpr int PIECES = ROW_BYTES / 16;
    if (max(px.first - 16 / int(sizeof(Elem)) + 1, px.from) >= px.inside_from &&
        min(px.first + UNIT_PX, px.to) <= px.inside_to)
        return;
    __syncwarp();
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane) {
        const int own_px = px.begin<Elem>(plane, plane_px) + threadIdx.x % 32;
        if (!px.has(own_px) || (own_px >= px.inside_from && own_px < px.inside_to)) continue;
#pragma unroll
        for (int i = 0; i < PIECES / PLANES; ++i)
            *reinterpret_cast<Piece*>(slot + unit_offset<ROW_BYTES>(own_px, plane * (PIECES / PLANES) + i)) = {};
    }
}

#if EDGES
// Where the pixels of a line's chunk come from: channel 0 at the first column of its row, null for a row outside;
// the channels that are left, and the column of the line's first place.
template <class Elem>
struct EdgeSource {
    const Elem* row;
    int channels, first_col;
};

// Writes the pixels of a unit that are outside the image and that outputs read. A lane has a channel: there are few.
template <class Elem, int ROW_BYTES, class P>
__device__ __forceinline__ void fill_edges(const P& p, const EdgeSource<Elem>& from, char* slot, const UnitPixels& px) {
    const int before = px.from - from.first_col;  // from a column to its place
    const int first = max(max(px.begin<Elem>(0, 0), px.from), before + p.edge_from);
    const int end = min(min(px.begin<Elem>(0, 0) + UNIT_PX, px.to), before + p.edge_to);
    if (from.row == nullptr || (first >= px.inside_from && end <= px.inside_to)) return;
    __syncwarp();
    for (int at = first; at < end; ++at) {
        if (at >= px.inside_from && at < px.inside_to) at = px.inside_to;
        const int col = edge_col(p, at - before);
        if (at >= end || (unsigned)col >= (unsigned)p.w) continue;
#pragma unroll
        for (int c = threadIdx.x % 32; c < ROW_BYTES / int(sizeof(Elem)); c += 32) {
            if (c >= from.channels) continue;
            const Elem value = from.row[c * p.x_c + col * p.x_w];
            const int byte = c * int(sizeof(Elem));
            char* const to = slot + unit_offset<ROW_BYTES>(at, byte / 16) + byte % 16;
            if constexpr (sizeof(Elem) == 4)
                *reinterpret_cast<unsigned*>(to) = to_tf32(value);
            else
                *reinterpret_cast<Elem*>(to) = value;
        }
    }
}
#endif

}  // namespace hc
