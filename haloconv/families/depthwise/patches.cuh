// Planes cut to patches of 8 x 8 pixels: strips of them come by bulk copies, and are padded in shared memory.
//
// wgmma needs zeros around a strip, and the windows of patches at multiples of 16 bytes: a pass over the landed strip
// makes it so.
#pragma once

#include "families/depthwise/landing.cuh"
#include "families/depthwise/march_row.cuh"
#include "kernels/ptx/fence.cuh"
#include "kernels/ptx/wgmma.cuh"

namespace hc::patches {

using namespace landing;

constexpr int EDGE = 8;       // pixels of a patch's edge: a piece in each row
constexpr int THREADS = 128;  // of a block: one warpgroup

// How strips of a tensor are padded.
struct Side {
    Planes planes;
    int row_bytes;    // of a padded strip
    int before;       // piece of a padded row in which piece 0 of the image begins
    int pieces, hop;  // pieces of a padded row that a piece of the image reaches; THREADS / pieces
};

// One thread asks for a strip; the barrier waits for its bytes, too.
template <class Elem>
__device__ __forceinline__ void ask(const Planes& planes, char* landing, ptx::u64* full, const Elem* tensor,
                                    int channel, int image, int strip_row) {
    Source source;
    source.locate(planes, tensor, channel, image, strip_row);
    ptx::mbarrier_expect_tx(full, source.bytes);
    source.copy(landing, full);
}

// What a thread pads: one piece of every hop-th row. Piece i of the image begins OFF elements behind the begin of
// a piece, OFF below 8: so a padded piece has the end of one and the begin of the next one. A thread reads READS pieces
// before it writes them.
template <class Elem, int OFF, int READS>
struct Padder {
    static constexpr int BEFORE_BYTES = OFF == 0 ? 0 : OFF <= 2 ? 4 : OFF <= 4 ? 8 : 16;
    int row;             // its first row
    int to, from;        // bytes from a padded strip's begin and a landed one's
    bool here, earlier;  // which of both pieces are in the image

    // Threads that are left over have no row.
    __device__ __forceinline__ explicit Padder(const Side& s) {
        const int thread = threadIdx.x, first = min(max(s.before, 0), s.row_bytes / PIECE_BYTES - 1);
        const int piece = first + thread % s.pieces, at = piece - s.before;
        row = thread < s.hop * s.pieces ? thread / s.pieces : s.planes.rows;
        to = row * s.row_bytes + piece * PIECE_BYTES;
        from = (row * s.planes.width + at) * PIECE_BYTES;
        here = at >= 0 && at < s.planes.width;
        earlier = OFF > 0 && at > 0 && at <= s.planes.width;
    }

    // Rows outside the image become zeros.
    __device__ __forceinline__ void pad(const Side& s, char* padded, const char* landed, int strip_row) const {
        const int hop = s.hop, first = strip_row - s.planes.pad_top, hop_bytes = hop * s.planes.width * PIECE_BYTES;
        landed += from + (first < 0 ? first : 0) * s.planes.width * PIECE_BYTES;
        padded += to;
        for (int at = row; at < s.planes.rows; at += READS * hop) {
            unsigned words[READS][8];
#pragma unroll
            for (int i = 0; i < READS; ++i) {
                const bool inside =
                    at + i * hop < s.planes.rows && (unsigned)(first + at + i * hop) < (unsigned)s.planes.extent;
#pragma unroll
                for (int word = 0; word < 8; ++word) words[i][word] = 0;
                if (OFF > 0 && inside && earlier)
                    march::load_words<BEFORE_BYTES ? BEFORE_BYTES : 4>(words[i] + 4 - BEFORE_BYTES / 4,
                                                                       landed + i * hop_bytes - BEFORE_BYTES);
                if (inside && here) march::load_words<PIECE_BYTES>(words[i] + 4, landed + i * hop_bytes);
            }
#pragma unroll
            for (int i = 0; i < READS; ++i) {
                if (at + i * hop >= s.planes.rows) break;
                unsigned shifted[4];
#pragma unroll
                for (int word = 0; word < 4; ++word) {
                    const int half = EDGE - OFF + 2 * word;
                    shifted[word] =
                        half % 2 ? words[i][half / 2] >> 16 | words[i][half / 2 + 1] << 16 : words[i][half / 2];
                }
                march::store_words<PIECE_BYTES>(padded + i * hop * s.row_bytes, shifted);
            }
            landed += READS * hop_bytes, padded += READS * hop * s.row_bytes;
        }
    }
};

__device__ __forceinline__ void clear(char* smem, int bytes) {
    const unsigned zeros[4] = {};
    for (int at = threadIdx.x * PIECE_BYTES; at < bytes; at += THREADS * PIECE_BYTES)
        march::store_words<PIECE_BYTES>(smem + at, zeros);
}

}  // namespace hc::patches
