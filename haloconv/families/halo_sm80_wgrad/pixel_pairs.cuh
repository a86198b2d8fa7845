// PIXEL_PAIRS: 16-bit rows as they lie in memory, copied without passing through registers, and multiplied as words of
// two neighbouring pixels.
//
// dy has the words that mma wants. Those of x for two neighbouring taps are made of two words: stride 1 takes the
// first word, and the upper half of the first with the lower half of the second; even strides take the lower halves of
// both, and the upper halves of both. A word serves several taps.
#pragma once

#include "families/halo_sm80_wgrad/source.cuh"
#include "kernels/products.cuh"
#include "kernels/ptx/cp_async.cuh"

#if PIXEL_PAIRS
namespace hc::wgrad {

constexpr int REACH = STRIDE_W == 1 ? 1 : STRIDE_W / 2;  // from a word of a tap to that of the pixel's neighbour
constexpr int TAP_WORDS = TAP_PAIRS + REACH;

// CHANNELS x LINES x COLS elements, copied VEC at a time. What lies outside the image is zero.
template <int CHANNELS, int LINES, int COLS, int LINE_STEP, int CHANNEL_PITCH, int VEC>
struct RawWindow {
    static constexpr int RUNS = COLS / VEC;
    static constexpr int COPIES = CHANNELS * LINES * RUNS;
    static_assert(COLS % VEC == 0 && LINE_STEP * WORD_PX % VEC == 0 && CHANNEL_PITCH * WORD_PX % VEC == 0,
                  "copies are whole and aligned");

    static __device__ __forceinline__ void stage(unsigned* to, const Source& from) {
#pragma unroll 4
        for (int i = threadIdx.x; i < COPIES; i += THREADS) {
            const int col = i % RUNS * VEC, line = i / RUNS % LINES, channel = i / RUNS / LINES;
            const bool there = channel < from.channels && (unsigned)(from.col + col) < (unsigned)from.width &&
                               (unsigned)(from.line[0] + line) < (unsigned)from.height;
            const elem_t* const source =
                from.from[0] + (channel * from.channel_stride + line * from.line_stride + (offset_t)col);
            copy(to + channel * CHANNEL_PITCH + line * LINE_STEP + col / 2, source, there);
        }
    }

  private:
    static __device__ __forceinline__ void copy(unsigned* to, const elem_t* from, bool there) {
        if constexpr (VEC == 8) ptx::cp_async_16(to, from, there ? 16 : 0);
        if constexpr (VEC == 4) ptx::cp_async_8(to, from, there ? 8 : 0);
        if constexpr (VEC == 2) ptx::cp_async_4(to, from, there ? 4 : 0);
    }
};

// Where a lane finds the words of its rows and columns, of the tile's first two pixels. What lies behind the last one
// reads that one, and is not written.
struct Lines {
    int a[WARP_EIGHTS], b[WARP_N];

    __device__ __forceinline__ Lines(const Params& p, const Place& place) {
        const int word = place.lane % 4, row = place.lane / 4;
#pragma unroll
        for (int i = 0; i < WARP_EIGHTS; ++i) {
            const int index = (place.m / TAP_PAIRS + i) * 8 + row, line = index < TILE_C * R ? index : TILE_C * R - 1;
            a[i] = (place.group * TILE_C + line / R) * X_PITCH + line % R * DIL_H * LINE_PITCH +
                   (p.lead - FIRST_HALF) / 2 + word * STRIDE_W;
        }
#pragma unroll
        for (int j = 0; j < WARP_N; ++j) {
            const int index = (place.n + j) * 8 + row;
            b[j] = (place.group * TILE_K + (index < TILE_K ? index : TILE_K - 1)) * Y_PITCH + word;
        }
    }
};

// The words of tap pair `pair` for two neighbouring pixels: lower taps, upper taps.
__device__ __forceinline__ void pair_words(unsigned& lower, unsigned& upper, const unsigned (&x)[TAP_WORDS], int pair) {
    const unsigned first = x[pair], second = x[pair + REACH];
    lower = STRIDE_W == 1 ? first : __byte_perm(first, second, 0x5410);
    upper = __byte_perm(first, second, STRIDE_W == 1 ? 0x5432 : 0x7632);
}

// Sixteen pixels from `col` of row `row` on. `masks` of the lane's two words: x may be infinite behind the last column.
template <bool MASKED>
__device__ __forceinline__ void multiply_pairs(Sums& sums, const Tiles& tiles, const Lines& lines, int row, int col,
                                               const unsigned (&masks)[2]) {
    const unsigned* const x = tiles.x + row * (STRIDE_H * LINE_PITCH) + col / 2 * STRIDE_W;
    const unsigned* const y = tiles.y + row * (TILE_Q / 2) + col / 2;
    unsigned b[WARP_N][2];
#pragma unroll
    for (int j = 0; j < WARP_N; ++j) b[j][0] = y[lines.b[j]], b[j][1] = y[lines.b[j] + 4];
#pragma unroll
    for (int i = 0; i < WARP_EIGHTS; ++i) {
        unsigned words[2][TAP_WORDS];
#pragma unroll
        for (int k = 0; k < 2 * TAP_WORDS; ++k)
            words[k / TAP_WORDS][k % TAP_WORDS] = x[lines.a[i] + k / TAP_WORDS * (4 * STRIDE_W) + k % TAP_WORDS];
#pragma unroll
        for (int pair = 0; pair < TAP_PAIRS; ++pair) {
            unsigned a[4];
            pair_words(a[0], a[1], words[0], pair);
            pair_words(a[2], a[3], words[1], pair);
            if (MASKED) {
#pragma unroll
                for (int k = 0; k < 4; ++k) a[k] &= k < 2 ? masks[0] : masks[1];
            }
#pragma unroll
            for (int j = 0; j < WARP_N; ++j) mma(sums[i * TAP_PAIRS + pair][j], a, b[j], elem_t());
        }
    }
}

__device__ __forceinline__ void multiply(Sums& sums, const Tiles& tiles, const Lines& lines, const Tile& tile,
                                         const Place& place) {
    const int whole = tile.cols / STEP * STEP, pixel = whole + place.lane % 4 * 2;
    const auto mask = [&](int col) { return (col < tile.cols ? 0xffffu : 0u) | (col + 1 < tile.cols ? ~0xffffu : 0u); };
    const unsigned masks[2] = {mask(pixel), mask(pixel + 8)};
    for (int row = place.part; row < tile.most_rows(); row += WARPS_E) {
#pragma unroll 1
        for (int col = 0; col < whole; col += STEP) multiply_pairs<false>(sums, tiles, lines, row, col, masks);
        if (whole < tile.cols) multiply_pairs<true>(sums, tiles, lines, row, whole, masks);
    }
}

using XRows = RawWindow<TILE_G * TILE_C, X_LINES, X_COLS, LINE_PITCH, X_PITCH, X_VEC>;
using YRows = RawWindow<TILE_G * TILE_K, TILE_P, TILE_Q, TILE_Q / 2, Y_PITCH, Y_VEC>;

__device__ __forceinline__ void stage_rows(Tiles& tiles, const Params& p, const Work& work, Position at) {
    const Tile tile(p, at);
    XRows::stage(tiles.x, x_source(p, work, tile));
    YRows::stage(tiles.y, y_source(p, work, tile));
    ptx::cp_async_commit_group();
}

// A block's stages; the next one comes while one is multiplied.
__device__ __forceinline__ void sum_stages(Smem& smem, const Params& p, const Work& work, const Place& place,
                                           Sums& sums) {
    const Lines lines(p, place);
    Position at(p, work.first), next = at;
    stage_rows(smem[0], p, work, next);
    for (int stage = 0; stage < work.stages; ++stage, at = next) {
        ptx::cp_async_wait_group<0>();
        __syncthreads();
        if (stage + 1 < work.stages) {
            next.advance(p);
            stage_rows(smem[(stage + 1) % 2], p, work, next);
        }
        multiply(sums, smem[stage % 2], lines, Tile(p, at), place);
    }
    __syncthreads();
}

}  // namespace hc::wgrad
#endif
