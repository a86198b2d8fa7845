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
// `slot` is where the slot begins among `slots`.
template <int ROW_BYTES, int PLANES, int TERMS, bool DEEP>
__device__ __forceinline__ void transpose(const float* raw, char* slots, int slot, int term_bytes, const UnitPixels& px,
                                          int plane_px) {
    ptx::renew(slot);  // computed once
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
            if (px.has(own_px + j))
                store_transposed<TERMS>(slots + (to[j] ^ half * ACROSS << 4), term_bytes,
                                        {of[0].word[j], of[1].word[j], of[2].word[j], of[3].word[j]});
        }
    }
}

// 16-bit types: the matrix instructions transpose 8 x 8 elements each. Lane l names where the channels of the unit's
// pixel l go: into the slot, or, of a pixel that is not the row's, into the lane's 16 of the warp's bytes at `spare`.
template <int ROW_BYTES, int PLANES, int TERMS, bool DEEP, class Half>
__device__ __forceinline__ void transpose(const Half* raw, char* slots, int slot, int spare, const UnitPixels& px,
                                          int plane_px) {
    constexpr int PIECES = ROW_BYTES / 16;
    ptx::renew(slot);
    const int lane = threadIdx.x % 32, channel = lane % 8;
    const char* from = reinterpret_cast<const char*>(raw) + channel * 64 + ((lane / 8 ^ channel >> 1) << 4);
    int to, pieces;  // where; the bits of a piece's number that move it there
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        if (piece % (PIECES / PLANES) == 0) {
            const int own_px = px.begin<Half>(piece * PLANES / PIECES, plane_px) + lane;
            const bool has = px.has(own_px);
            to = has ? slot + unit_offset<ROW_BYTES>(own_px, 0) : spare + lane * 16, pieces = has ? ~0 : 0;
        }
        unsigned transposed[4];
        ptx::ldmatrix_x4_trans(transposed, from + piece * 512);
        ptx::stmatrix_x4(slots + (to ^ piece << 4 & pieces), transposed);
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
// Pixels of a unit's outer columns. A lane has a channel of each, or two neighbours. A warp waits long for what it
// loads: the first pixel is loaded when its unit is asked for, of the others AT_ONCE before they are stored.
template <class Elem, int ROW_BYTES, int AT_ONCE>
struct EdgePixels {
    static constexpr int CHANNELS = ROW_BYTES / int(sizeof(Elem)), OF_LANE = CHANNELS > 32 ? 2 : 1;
    struct alignas(OF_LANE * sizeof(Elem)) Pixel {
        Elem channel[OF_LANE];
    };

    const Elem* row;          // the lane's first channel at column 0
    int next, channels, col;  // elements to the next channel; channels that are left; the column of place 0
    OuterColumns columns;
    Pixel first;

    // Whether a unit may have such places.
    static __device__ __forceinline__ bool meets(const UnitPixels& px) {
        return px.first - 16 / int(sizeof(Elem)) + 1 < px.inside_from || px.first + UNIT_PX > px.inside_to;
    }
    template <class P>
    __device__ __forceinline__ void begin(const P& p, const UnitPixels& px) {
        const int begin = px.begin<Elem>(0, 0);
        columns = OuterColumns::of(p, max(begin, px.from) + col, min(begin + UNIT_PX, px.to) + col);
        if (columns.count > 0) first = load(p, 0);
    }
    template <class P>
    __device__ __forceinline__ Pixel load(const P& p, int i) const {
        const int from = at_edge<COL_EDGE>(columns.at(i), p.w);
        const bool there = (unsigned)from < (unsigned)p.w;
        Pixel pixel;
#pragma unroll
        for (int k = 0; k < OF_LANE; ++k) pixel.channel[k] = there && k < channels ? row[k * next + from] : Elem{};
        return pixel;
    }
    __device__ __forceinline__ void store(char* slot, int i, const Pixel& pixel) const {
        const int byte = threadIdx.x % 32 * int(sizeof(Pixel));
        if (byte >= ROW_BYTES) return;
        char* const to = slot + unit_offset<ROW_BYTES>(columns.at(i) - col, byte / 16) + byte % 16;
        if constexpr (sizeof(Elem) == 4)
            *reinterpret_cast<unsigned*>(to) = to_tf32(pixel.channel[0]);
        else
            *reinterpret_cast<Pixel*>(to) = pixel;
    }
    // Writes them over the zeros that the unit was transposed to.
    template <class P>
    __device__ __forceinline__ void fill(const P& p, char* slot) const {
        if (columns.count == 0) return;
        __syncwarp();
        store(slot, 0, first);
#pragma unroll 1
        for (int i = 1; i < columns.count; i += AT_ONCE) {
            Pixel loaded[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j)
                if (i + j < columns.count) loaded[j] = load(p, i + j);
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j)
                if (i + j < columns.count) store(slot, i + j, loaded[j]);
        }
    }
};
#endif

}  // namespace hc
