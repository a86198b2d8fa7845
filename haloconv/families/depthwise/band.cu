// depthwise_band: fprop and dgrad of depthwise layers in 16 bits on tensor cores, with banded matrices of weights.
//
//   y[col, row] = sum over r, k of band_r[col, k] * x[row + r, k],   band_r[col, k] = w[r, k - col]
//
// A row of the filter is a matrix of 16 output columns by 16 * SLICES input columns whose diagonals are taps. mma.sync
// multiplies it with 8 rows of a plane, which ldmatrix reads as they lie in memory: no element is converted, and the
// many multiplies by zero take less time than the taps would elsewhere. The trick: the 16 rows of a fragment stand for
// columns 0, 2, ..., 14, 1, 3, ..., 15, so that a thread's sums are neighbours. dgrad is fprop with the filter flipped.
//
// A zero of the matrix times an infinity is a NaN that does not belong into the sum: sums that are not finite are
// summed once more over the taps alone. A block keeps its channel's matrices; strips come through a ring of buffers.
// Budget: 4 * R * SLICES registers for matrices, 4 * TILES for sums; BUFFERS strips of a plane in shared memory.
#include "families/depthwise/strips.cuh"
#include "families/depthwise/finish.cuh"
#include "families/depthwise/march_row.cuh"
#include "families/depthwise/taps.cuh"
#include "kernels/products.cuh"
#include "kernels/ptx/ldmatrix.cuh"

// Constants: ELEM is hc::fp16 or hc::bf16; all others are integers.
//   DGRAD                1: in is dy, out is dx, and taps count from the filter's end
//   R S DIL_H DIL_W      filter taps; pixels
//   MULTIPLIER           M: filters of a channel
//   SLICES TILES         16 input columns of a matrix each; 16 output columns of a warp's step each
//   BUFFERS              strips under way, the one that is multiplied included
//   THREADS MIN_BLOCKS   of a block; blocks per multiprocessor that registers must allow
//   HAS_BIAS             adds bias[k]
//   AFFINE ACTIVATION    of an epilogue of fprop, or AFFINE_AND_RESIDUAL for AFFINE (finish.cuh)
using hc::i64;
using elem_t = ELEM;

constexpr int PIECE = hc::strips::PIECE_BYTES / (int)sizeof(elem_t);  // columns of one copy
constexpr int ROWS = 8, COLS = 16 * TILES;                            // output rows and columns of a warp's step
constexpr int MATRICES = 2 * (TILES + SLICES - 1);                    // of 8 input columns
constexpr int OUT_PIECES = COLS / PIECE;
constexpr int OUT_ROW_BYTES = (OUT_PIECES + 1) * hc::strips::PIECE_BYTES;  // rows begin in different banks

static_assert(sizeof(elem_t) == 2, "bands are of 16-bit elements");
static_assert(TILES == 1 || TILES == 2 || TILES == 4, "a warp's step leaves in pieces that divide its lanes");

struct Params {
    const elem_t *in, *w, *bias;
    elem_t* out;
#ifdef AFFINE_AND_RESIDUAL
    const elem_t* residual;  // as out
#endif
    i64 w_k, w_r, w_s;  // strides in elements
    i64 out_n, out_c, out_h;
    hc::strips::Staged staged;
    hc::strips::Partition partition;
    int out_rows, out_cols, pad_left;
};

// ---- Banded matrices ----

// The rows of one channel's filter between zeros, as they are, and once more without the first element: then any two
// neighbours are a word of one of both.
struct Filter {
    static constexpr int BEFORE = 32, WIDTH = BEFORE + 16 * SLICES + 2;
    alignas(4) unsigned short of[2][R][WIDTH];

    __device__ __forceinline__ void load(const Params& p, int channel) {
        const elem_t* filter = hc::filter_of(p, channel);
        for (int i = threadIdx.x; i < 2 * R * WIDTH; i += THREADS) {
            const int at = i % WIDTH - BEFORE + i / (R * WIDTH);
            const bool meets = at >= 0 && at < S * DIL_W && at % DIL_W == 0;
            (&of[0][0][0])[i] = meets ? hc::tap(p, filter, i / WIDTH % R, at / DIL_W).bits : 0;
        }
    }

    // Taps `at` and `at` + 1, counted in columns.
    __device__ __forceinline__ unsigned pair(int r, int at) const {
        const int odd = at & 1;
        return *reinterpret_cast<const unsigned*>(&of[odd][r][BEFORE + at - odd]);
    }
};

// Fragments of the banded matrices of one channel, and its bias.
struct Bands {
    unsigned of[R][SLICES][4];
    float bias;

    __device__ __forceinline__ Bands(const Params& p, const Filter& filter, int channel) {
        const int group = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
        bias = HAS_BIAS ? hc::to_acc(p.bias[channel]) : 0.f;
#pragma unroll
        for (int i = 0; i < SLICES * 4; ++i) {
            // columns from output column 2 * group + i % 2 to the input columns of the word
            const int at =
                i / 4 * 16 + i / 2 % 2 * 8 + pair * 2 - (2 * group + i % 2) + p.pad_left - p.staged.left * PIECE;
#pragma unroll
            for (int r = 0; r < R; ++r) of[r][i / 4][i % 4] = filter.pair(r, at);
        }
    }
};

// ---- A warp's step: ROWS by COLS outputs ----

using Sums = float[TILES][4];

// `rows` is the lane's place in the first row of the window: row lane % 8, column 8 * (lane / 8).
__device__ __forceinline__ void load_row(unsigned (&x)[MATRICES], const char* rows) {
#pragma unroll
    for (int i = 0; i < MATRICES / 4; ++i) {
        unsigned four[4];
        hc::ptx::ldmatrix_x4(four, rows + i * 64);
#pragma unroll
        for (int j = 0; j < 4; ++j) x[i * 4 + j] = four[j];
    }
    if constexpr (MATRICES % 4 == 2) {
        unsigned two[2];
        hc::ptx::ldmatrix_x2(two, rows + MATRICES / 4 * 64);
        x[MATRICES - 2] = two[0], x[MATRICES - 1] = two[1];
    }
}

__device__ __forceinline__ void multiply(Sums& sums, const Params& p, const Bands& bands, const char* rows) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[tile][j] = bands.bias;
#pragma unroll
    for (int r = 0; r < R; ++r) {
        unsigned x[MATRICES];
        load_row(x, rows + r * DIL_H * p.staged.row_bytes);
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
                hc::mma(sums[tile], bands.of[r][slice], {x[2 * (tile + slice)], x[2 * (tile + slice) + 1]}, elem_t{});
    }
}

__device__ __forceinline__ bool finite(const Sums& sums) {
    float zeros[4] = {};  // chains of additions side by side
#pragma unroll
    for (int i = 0; i < TILES * 4; ++i) zeros[i % 4] += sums[i / 4][i % 4] * 0.f;
    return zeros[0] + zeros[1] + (zeros[2] + zeros[3]) == 0.f;
}

// Sum j of a tile stands in row 2 * (lane % 4) + j % 2, column 2 * (lane / 4) + j / 2. `window` is the first one's.
__device__ __forceinline__ void sum_again(Sums& sums, const Params& p, const Bands& bands, int channel,
                                          const char* window) {
    const elem_t* filter = hc::filter_of(p, channel);
    const int row = threadIdx.x % 4 * 2, col = threadIdx.x % 32 / 4 * 2 + p.staged.left * PIECE - p.pad_left;
#pragma unroll 1
    for (int i = 0; i < TILES * 4; ++i) {
        const char* from =
            window + (row + i % 2) * p.staged.row_bytes + (i / 4 * 16 + col + i / 2 % 2) * (int)sizeof(elem_t);
        float sum = bands.bias;
#pragma unroll 1
        for (int r = 0; r < R; ++r)
#pragma unroll 1
            for (int s = 0; s < S; ++s) {
                const auto x = reinterpret_cast<const elem_t*>(from + r * DIL_H * p.staged.row_bytes)[s * DIL_W];
                sum += hc::to_acc(x) * hc::to_acc(hc::tap(p, filter, r, s));
            }
#pragma unroll
        for (int at = 0; at < TILES * 4; ++at)
            if (at == i) sums[at / 4][at % 4] = sum;
    }
}

// What becomes of a step's sums. `out_step` is its first element; it has `rows` rows and `cols` columns of the output.
__device__ __forceinline__ void finish(Sums& sums, const Params& p, int channel, const elem_t* out_step, int rows,
                                       int cols) {
    hc::Finish own;
    own.load(p.bias, channel);
#pragma unroll
    for (int i = 0; i < TILES * 4; ++i) {
        const int row = threadIdx.x % 4 * 2 + i % 2, col = i / 4 * 16 + threadIdx.x % 32 / 4 * 2 + i / 2 % 2;
        const auto residual = hc::residual_at<elem_t>(p, out_step + row * p.out_h + col, row < rows && col < cols);
        sums[i / 4][i % 4] = own(sums[i / 4][i % 4], hc::to_acc(residual));
    }
}

// Where a lane's part of a step passes on its way out: the warp's own shared memory, so that rows leave in pieces.
struct Writer {
    char *to, *from;  // the lane's first pair of sums, and its first piece
    int row, col;     // of that piece
    i64 out;          // the same, in elements

    __device__ __forceinline__ Writer(const Params& p, char* smem) {
        const int lane = threadIdx.x % 32;
        smem += threadIdx.x / 32 * (ROWS * OUT_ROW_BYTES);
        row = lane / OUT_PIECES, col = lane % OUT_PIECES * PIECE;
        to = smem + lane % 4 * 2 * OUT_ROW_BYTES + lane / 4 * 4;
        from = smem + row * OUT_ROW_BYTES + col * (int)sizeof(elem_t);
        out = row * p.out_h + col;
    }

    // `out_step` is the step's first element; it has `rows` rows and `cols` columns of the output.
    __device__ __forceinline__ void store(const Params& p, const Sums& sums, elem_t* out_step, int rows,
                                          int cols) const {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < TILES * 2; ++i) {
            const float (&sum)[4] = sums[i / 2];
            *reinterpret_cast<unsigned*>(to + i % 2 * OUT_ROW_BYTES + i / 2 * 32) =
                hc::march::packed<elem_t>(sum[i % 2], sum[i % 2 + 2]);
        }
        __syncwarp();
        elem_t* piece = out_step + out;
#pragma unroll
        for (int first = 0; first < ROWS; first += 32 / OUT_PIECES) {
            if (row + first < (rows < ROWS ? rows : ROWS) && col < cols)
                *reinterpret_cast<hc::strips::Piece*>(piece) =
                    *reinterpret_cast<const hc::strips::Piece*>(from + first * OUT_ROW_BYTES);
            piece += 32 / OUT_PIECES * p.out_h;
        }
    }
};

// ---- A block ----

__device__ __forceinline__ void convolve(const Params& p, const Bands& bands, const Writer& writer, int channel,
                                         const hc::strips::Unit& unit, const char* buffer) {
    const int lane = threadIdx.x % 32, first_row = unit.strip * p.partition.rows;
    const int left = p.out_rows - first_row, rows = left < p.partition.rows ? left : p.partition.rows;
    elem_t* const out = p.out + unit.image * p.out_n + channel * p.out_c + first_row * p.out_h;
    for (int row = threadIdx.x / 32 * ROWS; row < rows; row += THREADS / 32 * ROWS) {
        const char* window = buffer + row * p.staged.row_bytes;
        elem_t* to = out + row * p.out_h;
        for (int col = 0; col < p.out_cols; col += COLS) {
            Sums sums;
            multiply(sums, p, bands, window + lane % 8 * p.staged.row_bytes + lane / 8 * hc::strips::PIECE_BYTES);
            if (!finite(sums)) sum_again(sums, p, bands, channel, window);
            if constexpr (EPILOGUE) finish(sums, p, channel, to, rows - row, p.out_cols - col);
            writer.store(p, sums, to, rows - row, p.out_cols - col);
            window += COLS * (int)sizeof(elem_t);
            to += COLS;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_band(const Params p) {
    extern __shared__ __align__(16) char dynamic_smem[];
    __shared__ Filter filter;
    const int channel = blockIdx.x % p.partition.channels, first = blockIdx.x / p.partition.channels;
    const hc::strips::Copier<elem_t, THREADS> copier(p.staged, p.in, channel / MULTIPLIER);
    hc::strips::Ring<BUFFERS> ring(p.partition, dynamic_smem, first);
    const auto copy = [&](char* buffer, int image, int strip) {
        copier.copy(p.staged, buffer, image, strip * p.partition.rows);
    };
    ring.fill(copy);
    for (int i = 0; i < BUFFERS; ++i)
        hc::strips::clear_borders<THREADS>(p.staged, dynamic_smem + i * p.partition.buffer_bytes);
    filter.load(p, channel);
    __syncthreads();
    const Bands bands(p, filter, channel);
    const Writer writer(p, dynamic_smem + BUFFERS * p.partition.buffer_bytes);
    for (; ring.has(); ring.advance()) {
        ring.next_buffer(copy);
        convolve(p, bands, writer, channel, ring.unit, ring.buffer());
    }
}
