// Lines of nchw whose rows begin anywhere: TMA brings them from the aligned piece on in which they begin, and warps
// shift them. Rows follow one another without a gap, so that a plane is one long row, and every PLANES-th channel's
// begins at a multiple of 16 bytes: a box has the rows of these channels, and PLANES boxes are a line.
#pragma once

#include "families/halo_sm90/wgrad/split.cuh"
#include "families/halo_sm90/wgrad/tile.cuh"

namespace hc::wgrad {

// Where the first line of a box begins in the plane of its first channel, in pixels; from line to line, from plane to
// plane; the pixels of a line that there are.
struct Begin {
    int first, line, plane, from, to;
};

// Asks for a raw box: the lines of the channels from `channel` on.
template <class Raw>
__device__ __forceinline__ void ask_for_raw(const TensorMap& map, const Begin& begin, char* to, ptx::u64* full,
                                            int channel, int image) {
    ptx::mbarrier_arrive_expect_tx(full, Raw::COUNT * Raw::PITCH);
    for (int plane = 0; plane < Raw::PLANE_COUNT; ++plane)
        ptx::cp_async_bulk_tensor_3d_shared_global(to + plane * Raw::PLANE_BYTES, &map, full,
                                                   begin.first + plane * begin.plane & -PIECE,
                                                   channel / Raw::PLANE_COUNT, image);
}

// Raw boxes of a run. Thread 0 asks for them before they are shifted, as many as there is room for.
struct RawBoxes {
    Cursor asked, shifted;
    int next;  // box of the run

    // `ask(box, stage)` asks for a box that `there(box)` says exists.
    template <class There, class Ask>
    __device__ __forceinline__ void ask_ahead(int box, int boxes, ptx::u64* empty, const There& there, const Ask& ask) {
        if (threadIdx.x % 128 != 0) return;
        for (; next < min(boxes, box + RAW_STAGES); ++next) {
            if (!there(next)) continue;
            wait(&empty[asked.index], asked.parity ^ 1);
            ask(next, asked.index);
            asked.advance(RAW_STAGES);
        }
    }
};

// Clears the pixels of a piece before `from` and from `to` on.
__device__ __forceinline__ void clear_outside(Piece& piece, int from, int to) {
    constexpr int EACH = 4 / SIZE;  // pixels of a word
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        unsigned mask = ~0u;
        if (EACH * i < from) mask = EACH * i + EACH - 1 < from ? 0 : 0xffff0000u;
        if (EACH * i + EACH > to) mask &= EACH * i >= to ? 0 : 0xffffu;
        piece.word[i] &= mask;
    }
}

// Where pieces of a row go in a ring: of a channel's of line `line` of x, of a filter's of dy. `at(piece, i)` is
// piece + i of an aligned four, which costs one addition. `store` stores one there, of dy all of its terms.
struct ToX {
    char* row;

    __device__ __forceinline__ ToX(char* ring, int line, int channel)
        : row(ring + line * X_LINE + channel * X_PITCH * SIZE) {}
    __device__ __forceinline__ char* at(int piece, int i = 0) const { return row + (piece + i) * 16; }
    __device__ __forceinline__ void store(const Piece& piece, char* at) const { *reinterpret_cast<Piece*>(at) = piece; }
};

struct ToDy {
    char* row;
    int swizzle;
    bool twice;  // the line stands behind the ring's last one, too

    __device__ __forceinline__ ToDy(char* ring, int line, int filter)
        : row(ring + line * Y_LINE + filter * 128), swizzle(filter % 8), twice(line < Y_COPIES) {}
    __device__ __forceinline__ char* at(int piece) const {
        return row + piece / 8 * Y_RING + (piece % 8 ^ swizzle) * 16;
    }
    __device__ __forceinline__ char* at(int piece, int i) const {
        return row + piece / 8 * Y_RING + (piece & 4 ^ swizzle & 4) * 16 + (i ^ swizzle & 3) * 16;
    }
    __device__ __forceinline__ void store(const Piece& piece, char* at) const {
        if (TERMS == 1) {
            *reinterpret_cast<Piece*>(at) = piece;
            return;
        }
        const Piece first = first_term(piece), second = second_term(piece);
        *reinterpret_cast<Piece*>(at) = first, *reinterpret_cast<Piece*>(at + Y_TERM) = second;
        if (!twice) return;
        at += Y_LINES * Y_LINE;
        *reinterpret_cast<Piece*>(at) = first, *reinterpret_cast<Piece*>(at + Y_TERM) = second;
    }
};

// 16 bytes from byte BYTES of two neighbouring pieces on.
template <int BYTES>
__device__ __forceinline__ Piece shifted(const Piece& here, const Piece& next) {
    Piece piece;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int a = i + BYTES / 4, b = a + 1;
        const unsigned low = a < 4 ? here.word[a & 3] : next.word[a & 3];
        piece.word[i] = BYTES % 4 == 0 ? low : __funnelshift_r(low, b < 4 ? here.word[b & 3] : next.word[b & 3], 16);
    }
    return piece;
}

// Pieces of a row that is BYTES bytes late, from an aligned four of them on: four at a time, as long as all pixels
// exist.
template <int BYTES, class To>
__device__ __forceinline__ void shift_row(const char* row, int piece, int end, const Begin& begin, const To& to) {
    const Piece* from = reinterpret_cast<const Piece*>(row) + piece;
    Piece here = *from++;
#pragma unroll 1
    for (; piece + 4 <= end && piece * PIECE >= begin.from && (piece + 4) * PIECE <= begin.to; piece += 4, from += 4) {
        Piece next[4];  // all are read before one is written
#pragma unroll
        for (int i = 0; i < 4; ++i) next[i] = from[i];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            to.store(shifted<BYTES>(here, next[i]), to.at(piece, i));
            here = next[i];
        }
    }
#pragma unroll 1
    for (; piece < end; ++piece) {
        const Piece next = *from++;
        Piece pixels = shifted<BYTES>(here, next);
        clear_outside(pixels, begin.from - piece * PIECE, begin.to - piece * PIECE);
        to.store(pixels, to.at(piece));
        here = next;
    }
}

// shift_row by a number of bytes that is known at run time.
template <int BYTES, class To>
__device__ __forceinline__ void shift_row_by(int bytes, const char* row, int piece, int end, const Begin& begin,
                                             const To& to) {
    if constexpr (BYTES < 16) {
        if (bytes == BYTES)
            shift_row<BYTES>(row, piece, end, begin, to);
        else
            shift_row_by<BYTES + SIZE>(bytes, row, piece, end, begin, to);
    }
}

// The warpgroup moves the first `pieces` pieces of the lines of a box from where TMA brought them to a ring's lines
// from `to_line` on. Neighbouring lanes have neighbouring rows of a plane: they shift by as much.
template <class Raw, class To>
__device__ __forceinline__ void shift_box(const char* raw, const Begin& begin, int pieces, char* ring, int to_line) {
    constexpr int ITEMS = BOX_ROWS * Raw::COUNT, PARTS = ITEMS < 128 ? 128 / ITEMS : 1;
    constexpr int EACH = ceil_div(ceil_div(Raw::LINE_PIECES, PARTS), 4) * 4;
    const int own = threadIdx.x % 128, part = own / ITEMS, end = min(pieces, (part + 1) * EACH);
    if (part >= PARTS || part * EACH >= end) return;
#pragma unroll 1
    for (int item = own - part * ITEMS; item < ITEMS; item += 128) {
        const int line = item / Raw::COUNT, at = item - line * Raw::COUNT;
        const int plane = at / Raw::PLANE_ROWS, in_plane = at - plane * Raw::PLANE_ROWS;
        const int first = begin.first + plane * begin.plane, pixel = first + line * begin.line;
        const char* const row = raw + plane * Raw::PLANE_BYTES + in_plane * Raw::PITCH;
        const To to(ring, to_line + line, in_plane * Raw::PLANE_COUNT + plane);
        shift_row_by<0>((pixel & PIECE - 1) * SIZE, row + ((pixel & -PIECE) - (first & -PIECE)) * SIZE, part * EACH,
                        end, begin, to);
    }
}

}  // namespace hc::wgrad
