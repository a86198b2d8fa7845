// depthwise_band_wgrad: the filter gradient of depthwise layers in 16 bits on tensor cores, as partial sums.
//
//   partials[part][k, r, s] = sum over pixels (n, p, q) of dy[n, k, p, q] * x[n, k / M, row at tap r, column at tap s]
//
// For one r that is, with rows as the k of mma.sync, a matrix of 16 columns of dy by 8 * X_TILES columns of x whose
// diagonals are the taps: d[i][j] = sum over rows of dy[row, i] * x[row + r, j]. The trick: columns further right have
// the same diagonals, so that all products of a plane, and of all its images, go into the same few fragments; ldmatrix
// transposes as it reads: rows become k. The diagonals are added up at the end of a block, which does every so many-th
// strip of the planes of one filter.
//
// Planes come through a ring of buffers, padded with zeros. A zero times an infinity is a NaN that does not belong into
// the sum: a tap whose sum is not finite is summed once more, over the pixels alone.
// Budget: 4 * FILTER_ROWS * X_TILES registers for sums; BUFFERS strips of both planes in shared memory.
#include "families/depthwise/strips.cuh"
#include "kernels/products.cuh"
#include "kernels/ptx/ldmatrix.cuh"
#include "kernels/warp_sum.cuh"

// Constants: ELEM is hc::fp16 or hc::bf16; all others are integers.
//   R S DIL_H DIL_W      filter taps; pixels
//   MULTIPLIER           M: filters of a channel
//   FILTER_ROWS X_TILES  rows of the filter of a warp; 8 columns of x each
//   BUFFERS              strips under way, the one that is multiplied included
//   THREADS MIN_BLOCKS   of a block; blocks per multiprocessor that registers must allow
using hc::i64;
using elem_t = ELEM;

constexpr int ROWS = 16, TILES = 2, COLS = 16 * TILES;  // rows, tiles and columns of dy of a warp's step
constexpr int X_LOADS = (X_TILES + 2 * (TILES - 1) + 1) / 2;
constexpr int WARPS = THREADS / 32, SLICES = (R + FILTER_ROWS - 1) / FILTER_ROWS;  // warps that take a step together
constexpr int SUM_COLS = 8 * X_TILES, SUM_PITCH = SUM_COLS + 8;

constexpr int PIECE = hc::strips::PIECE_BYTES / (int)sizeof(elem_t);  // columns of one copy

static_assert(sizeof(elem_t) == 2, "ldmatrix transposes 16-bit elements");
static_assert(WARPS % (2 * SLICES) == 0, "all rows of the filter have the same number of warps, and an even one");

struct Params {
    const elem_t *x, *dy;
    float* partials;  // [part][K][R][S]
    hc::strips::Staged x_staged, dy_staged;
    hc::strips::Partition partition;
    int x_bytes;  // of a buffer; dy follows
    int h, w, p, q, pad_left;
};

struct Smem {
    float sums[WARPS][16][SUM_PITCH];
};

using Sums = float[FILTER_ROWS][X_TILES][4];

// ---- A warp's step: ROWS by COLS pixels of dy, FILTER_ROWS rows of the filter from `first` on ----

__device__ __forceinline__ void multiply(Sums& sums, const Params& p, const char* x, const char* dy, int first) {
    const int lane = threadIdx.x % 32, low = lane / 8 % 2 * 8, high = lane / 16 * 8;  // of the lane's matrix
    unsigned a[TILES][4];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
        hc::ptx::ldmatrix_x4_trans(a[tile], dy + (high + lane % 8) * p.dy_staged.row_bytes + (tile * 16 + low) * 2);
    const char* rows = x + (low + lane % 8 + first * DIL_H) * p.x_staged.row_bytes + high * 2;
#pragma unroll
    for (int i = 0; i < FILTER_ROWS; ++i) {
        if (SLICES > 1 && first + i >= R) return;
        unsigned b[X_LOADS][4];
#pragma unroll
        for (int j = 0; j < X_LOADS; ++j)
            hc::ptx::ldmatrix_x4_trans(b[j], rows + i * DIL_H * p.x_staged.row_bytes + j * 32);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int j = 0; j < X_TILES; ++j) {
                const int at = 2 * tile + j;
                hc::mma(sums[i][j], a[tile], {b[at / 2][at % 2 * 2], b[at / 2][at % 2 * 2 + 1]}, elem_t{});
            }
    }
}

__device__ __forceinline__ void multiply_strip(Sums& sums, const Params& p, const char* buffer) {
    const int slice = threadIdx.x / 32 % SLICES, col_steps = (p.q + COLS - 1) / COLS;
    int row = 0, col = int(threadIdx.x) / 32 / SLICES;  // the steps of a strip, row by row
    while (true) {
        while (col >= col_steps) col -= col_steps, row += ROWS;
        if (row >= p.partition.rows) return;
        const char* from = buffer + col * (COLS * (int)sizeof(elem_t));
        multiply(sums, p, from + row * p.x_staged.row_bytes, from + p.x_bytes + row * p.dy_staged.row_bytes,
                 slice * FILTER_ROWS);
        col += WARPS / SLICES;
    }
}

// ---- The diagonals ----

// A lane's part of one tap's sum over the block's strips, of products that belong into it only.
__device__ __forceinline__ float sum_again(const Params& p, int filter, int first, int r, int s) {
    const hc::strips::Staged &of_x = p.x_staged, &of_dy = p.dy_staged;
    float sum = 0;
    for (int i = first; i < p.partition.units; i += p.partition.parts) {
        const hc::strips::Unit unit(i, p.partition.strips);
        const elem_t* x = p.x + unit.image * of_x.image + filter / MULTIPLIER * of_x.channel;
        const elem_t* dy = p.dy + unit.image * of_dy.image + filter * of_dy.channel;
        const int begin = unit.strip * p.partition.rows;
        for (int row = begin; row < begin + p.partition.rows && row < p.p; ++row)
            for (int col = threadIdx.x % 32; col < p.q; col += 32) {
                const int h = row + r * DIL_H - of_x.pad_top, w = col + s * DIL_W - p.pad_left;
                const bool inside = (unsigned)h < (unsigned)p.h && (unsigned)w < (unsigned)p.w;
                const float value = inside ? hc::to_acc(x[h * of_x.row + w]) : 0.f;
                sum += hc::to_acc(dy[row * of_dy.row + col]) * value;
            }
    }
    return sum;
}

// Adds the diagonals of row i of the filter rows of all warps, and writes the sums of the taps.
__device__ __forceinline__ void add_diagonals(const Params& p, const Smem& smem, int i, int filter, int first) {
    const int lane = threadIdx.x % 32;
    float* const partials = p.partials + ((i64)first * p.partition.channels + filter) * (R * S);
    for (int at = threadIdx.x / 32; at < SLICES * S; at += WARPS) {
        const int slice = at / S, s = at % S, r = slice * FILTER_ROWS + i;
        if (r >= R) break;
        const int col = lane % 16 + s * DIL_W + p.x_staged.left * PIECE - p.pad_left;
        float sum = 0;
        for (int warp = slice + lane / 16 * SLICES; warp < WARPS; warp += 2 * SLICES)
            sum += smem.sums[warp][lane % 16][col];
        sum = hc::warp_sum(sum);
        if (sum * 0.f != 0.f) sum = hc::warp_sum(sum_again(p, filter, first, r, s));
        if (lane == 0) partials[r * S + s] = sum;
    }
}

__device__ __forceinline__ void add_up(const Params& p, Smem& smem, const Sums& sums, int filter, int first) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pair = lane % 4, group = lane / 4;
#pragma unroll
    for (int i = 0; i < FILTER_ROWS; ++i) {
        if (i > 0) __syncthreads();
#pragma unroll
        for (int j = 0; j < X_TILES * 4; ++j)
            smem.sums[warp][group + j / 2 % 2 * 8][j / 4 * 8 + pair * 2 + j % 2] = sums[i][j / 4][j % 4];
        __syncthreads();
        add_diagonals(p, smem, i, filter, first);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_band_wgrad(const Params p) {
    extern __shared__ __align__(16) char dynamic_smem[];
    __shared__ Smem smem;
    const int filter = blockIdx.x % p.partition.channels, first = blockIdx.x / p.partition.channels;
    const hc::strips::Copier<elem_t, THREADS> of_x(p.x_staged, p.x, filter / MULTIPLIER);
    const hc::strips::Copier<elem_t, THREADS> of_dy(p.dy_staged, p.dy, filter);
    hc::strips::Ring<BUFFERS> ring(p.partition, dynamic_smem, first);
    const auto copy = [&](char* buffer, int image, int strip) {
        of_x.copy(p.x_staged, buffer, image, strip * p.partition.rows);
        of_dy.copy(p.dy_staged, buffer + p.x_bytes, image, strip * p.partition.rows);
    };
    ring.fill(copy);
    for (int i = 0; i < BUFFERS; ++i) {
        hc::strips::clear_borders<THREADS>(p.x_staged, dynamic_smem + i * p.partition.buffer_bytes);
        hc::strips::clear_borders<THREADS>(p.dy_staged, dynamic_smem + i * p.partition.buffer_bytes + p.x_bytes);
    }
    Sums sums = {};
    for (; ring.has(); ring.advance()) {
        ring.next_buffer(copy);
        multiply_strip(sums, p, ring.buffer());
    }
    add_up(p, smem, sums, filter, first);
}
