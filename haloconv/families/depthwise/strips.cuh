// Strips of planes in shared memory: rows that begin at multiples of 16 bytes are copied to rows with zeros before and
// behind, through a ring of buffers.
#pragma once

#include "kernels/numeric.cuh"
#include "kernels/ptx/cp_async.cuh"

namespace hc::strips {

constexpr int PIECE_BYTES = 16;  // of one copy
constexpr int COPIES = 4;        // that a thread asks for without a branch between them

struct alignas(PIECE_BYTES) Piece {
    unsigned word[PIECE_BYTES / 4];
};

// A strip of a plane in shared memory; all but `extent` and `pad_top` are the same for all strips.
struct Staged {
    i64 image, channel, row;     // strides of the tensor, in elements; columns are neighbours
    int extent, pad_top;         // rows of the plane; rows before the first one of the first strip
    int rows, spare;             // of a buffer that are copied; rows of zeros behind them
    int row_bytes, left, width;  // of a row; pieces of zeros before it, and pieces that are copied
};

// How the strips of a channel are divided among blocks.
struct Partition {
    int channels;      // of the output
    int units, parts;  // strips of a channel, and blocks that take them
    int strips, rows;  // of a plane; rows of the output of one
    int buffer_bytes;
};

// A strip of one plane: which image, and which of the plane's strips. A block does every `parts`-th strip of a channel.
struct Unit {
    int image, strip;

    __device__ __forceinline__ Unit(int index, int strips) : image(index / strips), strip(index % strips) {}

    __device__ __forceinline__ void advance(int parts, int strips) {
        strip += parts;
        while (strip >= strips) strip -= strips, ++image;
    }
};

// What one of COPIERS threads copies: one piece of every `hop`-th row.
template <class Elem, int COPIERS>
struct Copier {
    int row, hop;      // its first row; rows between its rows
    int to;            // bytes from a buffer to its first piece
    const Elem* from;  // that piece in the first strip of the first image

    // Threads that are left over have no row.
    __device__ __forceinline__ Copier(const Staged& s, const Elem* tensor, int channel) {
        const int thread = threadIdx.x, piece = thread % s.width;
        hop = COPIERS / s.width;
        row = thread < hop * s.width ? thread / s.width : s.rows;
        to = row * s.row_bytes + (s.left + piece) * PIECE_BYTES;
        from = tensor + channel * s.channel + (row - s.pad_top) * s.row + piece * (PIECE_BYTES / (int)sizeof(Elem));
    }

    // Asks for a strip that begins `first` rows after the first one; rows outside the plane become zeros.
    __device__ __forceinline__ void copy(const Staged& s, char* buffer, int image, int first) const {
        const Elem* source = from + image * s.image + first * s.row;
        const i64 step = hop * s.row;
        buffer += to;
        first -= s.pad_top;
        for (int at = row; at < s.rows;) {
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                if (at < s.rows)
                    ptx::cp_async_16(buffer, source, (unsigned)(first + at) < (unsigned)s.extent ? PIECE_BYTES : 0);
                at += hop;
                source += step;
                buffer += hop * s.row_bytes;
            }
        }
    }
};

// The zeros of a buffer, which no copy touches: columns beside the rows, and the spare rows.
template <int COPIERS>
__device__ __forceinline__ void clear_borders(const Staged& s, char* buffer) {
    const int pieces = s.row_bytes / PIECE_BYTES;
    for (int row = threadIdx.x; row < s.rows + s.spare; row += COPIERS)
        for (int piece = 0; piece < pieces; ++piece)
            if (row >= s.rows || piece < s.left || piece >= s.left + s.width)
                *reinterpret_cast<Piece*>(buffer + row * s.row_bytes + piece * PIECE_BYTES) = {};
}

// The strips of a block: which there are, and a ring of DEPTH of them, the one that is worked on included.
template <int DEPTH>
struct Ring {
    const Partition& partition;
    char* smem;
    Unit unit, next;         // the strip that is worked on, and the one that is asked for next
    int at, ahead;           // their numbers
    int full = 0, free = 0;  // their buffers

    __device__ __forceinline__ Ring(const Partition& partition, char* smem, int first)
        : partition(partition), smem(smem), unit(first, partition.strips), next(unit), at(first), ahead(first) {}

    // copy(buffer, image, strip) asks for a strip's copies.
    template <class Copy>
    __device__ __forceinline__ void ask(Copy copy) {
        if (ahead < partition.units) copy(smem + free * partition.buffer_bytes, next.image, next.strip);
        ptx::cp_async_commit_group();
        next.advance(partition.parts, partition.strips);
        ahead += partition.parts;
        free = free + 1 < DEPTH ? free + 1 : 0;
    }
    template <class Copy>
    __device__ __forceinline__ void fill(Copy copy) {
#pragma unroll 1
        for (int i = 0; i < DEPTH - 1; ++i) ask(copy);
    }

    __device__ __forceinline__ bool has() const { return at < partition.units; }
    __device__ __forceinline__ const char* buffer() const { return smem + full * partition.buffer_bytes; }

    // Waits for the present strip, and asks for one more: the buffer of the strip before is free.
    template <class Copy>
    __device__ __forceinline__ void next_buffer(Copy copy) {
        ptx::cp_async_wait_group<DEPTH - 2>();
        __syncthreads();
        ask(copy);
    }
    __device__ __forceinline__ void advance() {
        unit.advance(partition.parts, partition.strips);
        at += partition.parts;
        full = full + 1 < DEPTH ? full + 1 : 0;
    }
};

}  // namespace hc::strips
