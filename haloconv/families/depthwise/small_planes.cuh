// Planes that lie in memory one after the other, whole in shared memory, with extents that the compiler knows.
//
// A thread has a strip of ROWS rows of one output plane, of all its columns: taps that fall outside the columns are
// left out by the compiler, rows outside the plane by a branch.
//
// Constants, which kernels document: IN_H IN_W OUT_H OUT_W R S STEP_H STEP_W PAD_TOP PAD_LEFT ROWS PLANES, and DGRAD
// where it is not 0. The output of wgrad is dy.
#pragma once

#include "families/depthwise/march_row.cuh"
#include "kernels/numeric.cuh"
#include "kernels/ptx/cp_async.cuh"

#ifndef DGRAD
#define DGRAD 0
#endif

namespace hc::planes {

constexpr int PIECE_BYTES = 16;
constexpr int STRIDE_H = STEP_H > 0 ? STEP_H : 1, STRIDE_W = STEP_W > 0 ? STEP_W : 1;
constexpr int DIL_H = STEP_H > 0 ? 1 : -STEP_H, DIL_W = STEP_W > 0 ? 1 : -STEP_W;
constexpr int STRIPS = (OUT_H + ROWS - 1) / ROWS;
constexpr int FULL_ROWS = OUT_H - (STRIPS - 1) * ROWS;  // of the last strip; other strips have more, or as many

static_assert(!DGRAD || STRIPS == 1 || ROWS % STRIDE_H == 0, "strips of dx begin in the same residue class");

// ---- Which output meets which input at which tap ----

// The tap at which an output pixel of an axis meets an input pixel, or -1.
__device__ __forceinline__ constexpr int tap_of(int out, int in, int taps, int stride, int dil, int pad) {
    const int far = DGRAD ? out + pad - in * stride : in + pad - out * stride;
    return far >= 0 && far % dil == 0 && far / dil < taps ? far / dil : -1;
}

__device__ __forceinline__ constexpr int floor_div(int a, int b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

// Rows of a strip's window, from the input row that the strip's first row stands for.
constexpr int REACH = (R - 1) * DIL_H;
constexpr int FIRST_MET = DGRAD ? -floor_div(REACH - PAD_TOP, STRIDE_H) : -PAD_TOP;
constexpr int LAST_MET = DGRAD ? floor_div(ROWS - 1 + PAD_TOP, STRIDE_H) : (ROWS - 1) * STRIDE_H + REACH - PAD_TOP;
constexpr bool ONE = STRIPS == 1;  // then the rows of a window that are in the plane are known, too
constexpr int FIRST_ROW = ONE && FIRST_MET < 0 ? 0 : FIRST_MET;
constexpr int LAST_ROW = ONE && LAST_MET >= IN_H ? IN_H - 1 : LAST_MET;
constexpr int STRIP_STEP = DGRAD ? ROWS / STRIDE_H : ROWS * STRIDE_H;  // input rows from strip to strip

__device__ __forceinline__ constexpr bool has_row(int i, int strip) { return i < FULL_ROWS || strip < STRIPS - 1; }

// Calls step(i, col, at, r, s) for what row `window_row` of a strip's window is multiplied by: its column `at` meets
// column `col` of the strip's row i at tap (r, s). CUTS leaves out rows that the last strip does not have.
template <bool CUTS, class Step>
__device__ __forceinline__ void each_product(int window_row, int strip, Step step) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int r = tap_of(i, window_row, R, STRIDE_H, DIL_H, PAD_TOP);
        if (r < 0 || (CUTS && !has_row(i, strip))) continue;
#pragma unroll
        for (int s = 0; s < S; ++s)
#pragma unroll
            for (int col = 0; col < OUT_W; ++col) {
                const int far = DGRAD ? col + PAD_LEFT - s * DIL_W : col * STRIDE_W + s * DIL_W - PAD_LEFT;
                const int at = DGRAD ? far / STRIDE_W : far;
                if (far < 0 || (DGRAD && far % STRIDE_W != 0) || at >= IN_W) continue;
                step(i, col, at, r, s);
            }
    }
}

// ---- Planes in shared memory ----

// PLANE_BYTES of memory a plane, PITCH bytes from plane to plane in shared memory: an odd number of pieces where planes
// are whole pieces, so that lanes of neighbouring planes read from different banks.
template <class Elem, int HEIGHT, int WIDTH>
struct Geometry {
    static constexpr int PLANE_BYTES = HEIGHT * WIDTH * (int)sizeof(Elem);
    static constexpr int PLANE_PIECES = PLANE_BYTES % PIECE_BYTES ? 0 : PLANE_BYTES / PIECE_BYTES;  // 0: no whole ones
    static constexpr int PITCH = PLANE_PIECES ? (PLANE_PIECES | 1) * PIECE_BYTES : PLANE_BYTES;
    static constexpr int ROW_BYTES = WIDTH * (int)sizeof(Elem);
    static constexpr int BOTH = ROW_BYTES | PITCH | PIECE_BYTES;
    static constexpr int ALIGNMENT = BOTH & -BOTH;  // bytes that each row begins at a multiple of, up to 16
    static constexpr int WORDS = (ROW_BYTES + 3) / 4;

    static __device__ __forceinline__ constexpr int place(int piece) {
        if constexpr (PLANE_PIECES == 0)
            return piece * PIECE_BYTES;
        else
            return piece / PLANE_PIECES * PITCH + piece % PLANE_PIECES * PIECE_BYTES;
    }
    static __device__ __forceinline__ int row_at(int plane, int row) { return plane * PITCH + row * ROW_BYTES; }

    // The row that begins `at` bytes behind `smem`. Rows of halves that begin amid a word are moved by one half.
    static __device__ __forceinline__ void read(float (&row)[WIDTH], const char* smem, int at) {
        unsigned words[WORDS];
        if constexpr (ALIGNMENT >= 4) {
#pragma unroll
            for (int i = 0; i < WORDS; i += ALIGNMENT / 4) march::load_words<ALIGNMENT>(words + i, smem + at + i * 4);
        } else {
            const unsigned moved = at & 2 ? 0x5432 : 0x3210;
#pragma unroll
            for (int i = 0; i < WORDS; ++i) march::load_words<4>(words + i, smem + (at & ~3) + i * 4);
#pragma unroll
            for (int i = 0; i < WORDS; ++i) words[i] = __byte_perm(words[i], words[i + 1 < WORDS ? i + 1 : i], moved);
        }
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) row[i] = march::unpacked<Elem>(words, i);
    }
    static __device__ __forceinline__ void write(const float (&row)[WIDTH], char* smem, int at) {
        if constexpr (sizeof(Elem) == 4 || ALIGNMENT >= 4) {
            march::Row<Elem, WIDTH, 1, ALIGNMENT / (int)sizeof(Elem), 0> words;
            float values[WIDTH][1];
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) values[i][0] = row[i];
            words.set(values);
            words.store(smem + at, ~0u, sizeof(Elem));
        } else {
            write_halves(row, smem, at);
        }
    }

    // A block of THREADS asks for `planes` planes, of MOST at most, that follow one another from a multiple of 16 bytes
    // on. What is less than a piece is loaded at once, element by element, and zeros follow it.
    template <int MOST, int THREADS>
    static __device__ __forceinline__ void ask(char* smem, const Elem* run, int planes) {
        const int bytes = planes * PLANE_BYTES;
#pragma unroll
        for (int i = 0; i < (MOST * PLANE_BYTES + THREADS * PIECE_BYTES - 1) / (THREADS * PIECE_BYTES); ++i) {
            const int piece = threadIdx.x + i * THREADS;
            if (piece < bytes / PIECE_BYTES)
                ptx::cp_async_16(smem + place(piece), reinterpret_cast<const char*>(run) + piece * PIECE_BYTES,
                                 PIECE_BYTES);
        }
        constexpr int PIECE = PIECE_BYTES / (int)sizeof(Elem);
        const int whole = bytes / PIECE_BYTES * PIECE, at = whole + threadIdx.x;
        if (threadIdx.x < PIECE && whole * (int)sizeof(Elem) < bytes)
            reinterpret_cast<Elem*>(smem)[at] = at * (int)sizeof(Elem) < bytes ? run[at] : Elem{};
    }
    // Planes leave as one run; what is less than a piece does so element by element.
    template <int MOST, int THREADS>
    static __device__ __forceinline__ void leave(Elem* run, const char* smem, int planes) {
        const int bytes = planes * PLANE_BYTES;
#pragma unroll
        for (int i = 0; i < (MOST * PLANE_BYTES + THREADS * PIECE_BYTES - 1) / (THREADS * PIECE_BYTES); ++i) {
            const int piece = threadIdx.x + i * THREADS;
            unsigned words[4];
            if ((piece + 1) * PIECE_BYTES > bytes) break;
            march::load_words<PIECE_BYTES>(words, smem + place(piece));
            march::store_words<PIECE_BYTES>(reinterpret_cast<char*>(run) + piece * PIECE_BYTES, words);
        }
        const int rest = bytes / PIECE_BYTES * PIECE_BYTES / (int)sizeof(Elem) + threadIdx.x;
        if (rest * (int)sizeof(Elem) < bytes) run[rest] = reinterpret_cast<const Elem*>(smem)[rest];
    }

  private:
    // A row of an odd number of halves: one of them, the first or the last, stands alone in its word.
    static __device__ __forceinline__ void write_halves(const float (&row)[WIDTH], char* smem, int at) {
        const bool amid = at & 2;
        unsigned words[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; ++i)
            words[i] = march::packed<Elem>(row[2 * i], 2 * i + 1 < WIDTH ? row[2 * i + 1] : 0.f);
        const unsigned alone = amid ? words[0] : words[WORDS - 1];
        *reinterpret_cast<unsigned short*>(smem + at + (amid ? 0 : ROW_BYTES - 2)) = (unsigned short)alone;
        const unsigned moved = amid ? 0x5432 : 0x3210;
#pragma unroll
        for (int i = 0; i + 1 < WORDS; ++i) {
            const unsigned word = __byte_perm(words[i], words[i + 1], moved);
            march::store_words<4>(smem + at + (amid ? 2 : 0) + i * 4, &word);
        }
    }
};

}  // namespace hc::planes
