// halo_sm80_f64: convolution in double precision on tensor cores through mma.sync, fprop and dgrad.
//
//   y[pixel, filter] = sum over (chunk of channels, tap) of x[pixel at tap, channel] * w[filter, channel, tap]
//
// A block has M pixels, which follow each other in a strip of columns through all images, and N filters. Of a chunk of
// channels it stages once the pixels that all its taps read, [octet of channels][row][column][8], zeros where there
// is padding; a tap is then an offset. Weights come tap by tap, packed as fragments by pack.cu. The order of k is free,
// so a lane's two k of an instruction are neighbouring channels: each operand is one load of 16 bytes without bank
// conflicts. A strided layer's dgrad is one dense problem per residue of the pixel (geometry.cuh).
//
// Budget: 4 * M_TILES * N_TILES fp64 sums a thread; shared memory for the octets of a chunk or two and for the weights
// of STAGES steps.
#include "families/halo_sm80_f64/stage.cuh"
#include "kernels/products_f64.cuh"

// Constants, all integers:
//   DGRAD                1: the output is x, one residue class at a time
//   X_COPY               channels of an asynchronous copy; 0: single ones, as neighbours in memory are pixels
//   M_TILES N_TILES      fragments of a warp: 16 pixels, 8 filters each
//   WARPS_M WARPS_N      warps of a block, along its pixels and its filters
//   OCTETS               octets of channels of a chunk
//   MMA_K                channels of an instruction
//   STAGES               steps whose operands are in shared memory or on their way
//   MIN_BLOCKS           blocks per multiprocessor that registers must allow
//   HAS_BIAS             adds bias[k]
namespace hc {

constexpr int MMA_OCTETS = MMA_K / OCTET;

static_assert(sizeof(Work) <= 256, "the host leaves WORK_BYTES of shared memory for a block's Work");

using Sums = double[M_TILES][N_TILES][4];
using Rows = unsigned[M_TILES][2];  // where a lane's pixels lie in an octet, bytes

// All products of one tap and one chunk. The weights of a warp, of which there are fewer, stay for all its pixels.
__device__ __forceinline__ void multiply(Sums& sums, const Rows& rows, const char* x, unsigned octet_bytes,
                                         const char* w) {
#pragma unroll
    for (int first = 0; first < OCTETS; first += MMA_OCTETS) {
        double b[N_TILES][MMA_K / 4];
#pragma unroll
        for (int j = 0; j < N_TILES; ++j)
#pragma unroll
            for (int octet = 0; octet < MMA_OCTETS; ++octet) {
                const int place = ((first + octet) * BLOCK_EIGHTS + j) * EIGHT_BYTES;
                const Pair pair = *reinterpret_cast<const Pair*>(w + place);
                b[j][2 * octet] = pair.of[0], b[j][2 * octet + 1] = pair.of[1];
            }
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
            double a[MMA_K / 2];
#pragma unroll
            for (int part = 0; part < 2 * MMA_OCTETS; ++part) {
                const unsigned place = (first + part / 2) * octet_bytes + rows[i][part % 2];
                const Pair pair = *reinterpret_cast<const Pair*>(x + place);
                a[part / 2 * 4 + part % 2] = pair.of[0], a[part / 2 * 4 + part % 2 + 2] = pair.of[1];
            }
#pragma unroll
            for (int j = 0; j < N_TILES; ++j) mma_f64<MMA_K>(sums[i][j], a, b[j]);
        }
    }
}

// The pixel of the tile that a lane has in half `half` of fragment i.
__device__ __forceinline__ int pixel_of(int i, int half) {
    const int warp_m = threadIdx.x / 32 % WARPS_M;
    return (warp_m * M_TILES + i) * 16 + half * 8 + threadIdx.x % 32 / 4;
}

// Pixels behind the last one read what the first one does.
__device__ __forceinline__ void find_rows(Rows& rows, const Params& p, const Work& work) {
#pragma unroll
    for (int i = 0; i < M_TILES * 2; ++i) {
        const int m = pixel_of(i / 2, i % 2);
        const Pixel at = pixel_after(work.first, m < work.pixels ? m : 0, p.rows, p.strip_cols);
        const int col = at.col * work.axes.horizontal.pixel_move;
        rows[i / 2][i % 2] = (staged_row(p, work, at) * p.staged_cols.value + col) * PIXEL_BYTES + threadIdx.x % 4 * 16;
    }
}

__device__ __forceinline__ void write(const Sums& sums, const Params& p, const Work& work) {
    const Axis &v = work.axes.vertical, &h = work.axes.horizontal;
    const int first = work.filter + threadIdx.x / 32 / WARPS_M * (N_TILES * 8) + threadIdx.x % 4 * 2;
    const i64 channel = (i64)work.group * p.filters + first;
#pragma unroll
    for (int i = 0; i < M_TILES * 2; ++i) {
        const int m = pixel_of(i / 2, i % 2);
        const Pixel at = pixel_after(work.first, m, p.rows, p.strip_cols);
        const int col = work.strip * p.strip_cols + at.col;
        if (m >= work.pixels || at.row >= v.pixels || col >= h.pixels) continue;
        const i64 row = v.residue + (i64)at.row * v.spacing;
        double* const y =
            p.y + at.n * p.y_n + row * p.y_h + (h.residue + (i64)col * h.spacing) * p.y_w + channel * p.y_k;
#pragma unroll
        for (int e = 0; e < N_TILES * 2; ++e) {
            const int filter = e / 2 * 8 + e % 2;
            if (first + filter >= p.filters) continue;
            const double sum = sums[i / 2][e / 2][i % 2 * 2 + e % 2];
            y[filter * p.y_k] = HAS_BIAS ? sum + p.bias[channel + filter] : sum;
        }
    }
}

__device__ __forceinline__ void convolve(const Params& p, char* smem) {
    __shared__ Work shared_work;  // read where copies are asked for: registers are for sums
    if (threadIdx.x == 0) shared_work = this_work(p);
    __syncthreads();
    const Work& work = shared_work;
    char* const w_smem = smem + p.x_buffers * p.x_bytes;
    Rows rows;
    find_rows(rows, p, work);
    Sums sums = {};
    Step ahead = {}, at = {};
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) stage(p, work, ahead, smem, w_smem);
    const int steps = p.chunks * work.taps;
    for (int step = 0; step < steps; ++step) {
        ptx::cp_async_wait_group<STAGES - 2>();
        __syncthreads();
        stage(p, work, ahead, smem, w_smem);
        const unsigned move = tap_offset(p, work, at) * PIXEL_BYTES;
        const char* const w = w_smem + at.w_buffer * WEIGHT_BYTES + threadIdx.x % 32 * 16;
        multiply(sums, rows, smem + at.x_buffer * p.x_bytes + move, p.octet_bytes,
                 w + threadIdx.x / 32 / WARPS_M * (N_TILES * EIGHT_BYTES));
        advance(p, work, at);
    }
    write(sums, p, work);
}

}  // namespace hc

extern "C" __global__ void __launch_bounds__(hc::THREADS, MIN_BLOCKS)
    halo_sm80_f64(const __grid_constant__ hc::Params p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    hc::convolve(p, dynamic_smem);
}
