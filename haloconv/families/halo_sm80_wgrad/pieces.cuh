// PIECES: eight neighbouring 16-bit channels of a pixel, 16 bytes, are copied as they lie in memory. On their way to
// registers ldmatrix transposes them, eight pixels at a time, neighbours or not. So a tap is an address here too, and
// steps run over all pixels of a tile without a gap.
#pragma once

#include "families/halo_sm80_wgrad/source.cuh"
#include "kernels/products.cuh"
#include "kernels/ptx/cp_async.cuh"
#include "kernels/ptx/ldmatrix.cuh"

#if PIECES
namespace hc::wgrad {

constexpr int ZEROS = TILE_P * TILE_Q * PIECE_WORDS;  // place of a piece of zeros in y
constexpr int STEP_PX = 16;

// PLANES planes of LINES x COLS pieces. What lies outside the image is zero.
template <int PLANES, int LINES, int COLS, int LINE_STEP, int PLANE_STEP>
__device__ __forceinline__ void stage_pieces(unsigned* to, const Source& from) {
#pragma unroll 4
    for (int i = threadIdx.x; i < PLANES * LINES * COLS; i += THREADS) {
        const int plane = i % PLANES, col = i / PLANES % COLS, line = i / PLANES / COLS;
        const bool there = plane * 8 < from.channels && (unsigned)(from.col + col) < (unsigned)from.width &&
                           (unsigned)(from.line[0] + line) < (unsigned)from.height;
        const offset_t offset = plane * (offset_t)8 + line * from.line_stride + col * from.col_stride;
        ptx::cp_async_16(to + plane * PLANE_STEP + line * LINE_STEP + col * PIECE_WORDS, from.from[0] + offset,
                         there ? 16 : 0);
    }
}

__device__ __forceinline__ void stage_tile(Tiles& tiles, const Params& p, const Work& work, Position at) {
    const Tile tile(p, at);
    stage_pieces<TILE_G * TILE_C / 8, X_LINES, X_COLS, LINE_PITCH, X_PITCH>(tiles.x, x_source(p, work, tile));
    stage_pieces<TILE_G * TILE_K / 8, TILE_P, TILE_Q, TILE_Q * PIECE_WORDS, Y_PITCH>(tiles.y, y_source(p, work, tile));
    ptx::cp_async_commit_group();
}

// What a lane asks for: of matrices 0 and 1 pixels 0 to 7 and 8 to 15 of the first unit of 16 rows, of 2 and 3 those of
// the second. Units behind the last one are that one, and are not written.
struct Lanes {
    int a[WARP_M], b[WARP_N], pixel;

    __device__ __forceinline__ explicit Lanes(const Place& place) {
        pixel = place.lane % 16;
#pragma unroll
        for (int j = 0; j < WARP_N; ++j) {
            const int eight = place.n + j < TILE_K / 8 ? place.n + j : TILE_K / 8 - 1;
            b[j] = (place.group * (TILE_K / 8) + eight) * Y_PITCH;
        }
#pragma unroll
        for (int i = 0; i < WARP_M; ++i) {
            const int index = (place.m + i) * 2 + place.lane / 16, unit = index < UNITS ? index : UNITS - 1;
            const int tap = unit % (R * S), plane = place.group * (TILE_C / 8) + unit / (R * S);
            a[i] = plane * X_PITCH + tap / S * DIL_H * LINE_PITCH + tap % S * DIL_W * PIECE_WORDS;
        }
    }
};

// The lane's pixel of a step.
struct Pixel {
    int row, col;

    __device__ __forceinline__ Pixel(int index, int cols) : row(index / cols), col(index - index / cols * cols) {}
    __device__ __forceinline__ void advance(Pixel by, int cols) {
        row += by.row, col += by.col;
        if (col >= cols) col -= cols, ++row;
    }
};

// LAST: some lanes have no pixel. They read zeros, of x too, which may be infinite behind the last column.
template <bool LAST>
__device__ __forceinline__ void multiply_step(Sums& sums, const Tiles& tiles, const Lanes& lanes, Pixel at,
                                              bool there) {
    const unsigned* const zeros = tiles.y + ZEROS;
    const unsigned* const x = tiles.x + at.row * (STRIDE_H * LINE_PITCH) + at.col * (STRIDE_W * PIECE_WORDS);
    const unsigned* const y = tiles.y + (at.row * TILE_Q + at.col) * PIECE_WORDS;
    unsigned b[WARP_N][2];
#pragma unroll
    for (int j = 0; j < WARP_N; ++j) ptx::ldmatrix_x2_trans(b[j], LAST && !there ? zeros : y + lanes.b[j]);
#pragma unroll
    for (int i = 0; i < WARP_M; ++i) {
        unsigned m[4];
        ptx::ldmatrix_x4_trans(m, LAST && !there ? zeros : x + lanes.a[i]);
        const unsigned a[4] = {m[0], m[2], m[1], m[3]};
#pragma unroll
        for (int j = 0; j < WARP_N; ++j) mma(sums[i][j], a, b[j], elem_t());
    }
}

__device__ __forceinline__ void multiply(Sums& sums, const Tiles& tiles, const Lanes& lanes, const Tile& tile,
                                         const Place& place) {
    const int pixels = tile.most_rows() * tile.cols;
    const Pixel by(STEP_PX * WARPS_E, tile.cols);
    int first = place.part * STEP_PX;
    Pixel at(first + lanes.pixel, tile.cols);
    for (; first + STEP_PX <= pixels; first += STEP_PX * WARPS_E, at.advance(by, tile.cols))
        multiply_step<false>(sums, tiles, lanes, at, true);
    if (first < pixels) multiply_step<true>(sums, tiles, lanes, at, first + lanes.pixel < pixels);
}

// A block's stages; the next one comes while one is multiplied.
__device__ __forceinline__ void sum_stages(Smem& smem, const Params& p, const Work& work, const Place& place,
                                           Sums& sums) {
    const Lanes lanes(place);
    Position at(p, work.first), next = at;
    if (threadIdx.x < PIECE_WORDS * BUFFERS) smem[threadIdx.x / PIECE_WORDS].y[ZEROS + threadIdx.x % PIECE_WORDS] = 0;
    stage_tile(smem[0], p, work, next);
    for (int stage = 0; stage < work.stages; ++stage, at = next) {
        ptx::cp_async_wait_group<0>();
        __syncthreads();
        if (stage + 1 < work.stages) {
            next.advance(p);
            stage_tile(smem[(stage + 1) % 2], p, work, next);
        }
        multiply(sums, smem[stage % 2], lanes, Tile(p, at), place);
    }
    __syncthreads();
}

}  // namespace hc::wgrad
#endif
