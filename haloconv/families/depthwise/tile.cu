// depthwise_tile: fprop and dgrad of depthwise layers in fp32 whose rows are aligned, from planes in shared memory.
//
//   y[p, q] = sum over (r, s) of w[r, s] * x[p + r - pad_top, q + s - pad_left]
//
// The trick: strips of planes come through a ring of buffers, so that no load waits for device memory, and a thread has
// ROWS by 4 outputs at a time in registers: a row of its window is three or so reads of 16 bytes for up to ROWS * S * 4
// multiplies. All taps are unrolled, and little else is, so that the loop stays in the instruction caches. dgrad is
// fprop with the flipped filter. A block does every so many-th strip of the planes of one channel.
//
// Budget: R * S registers for the filter, ROWS * 4 for sums, a row of the window; BUFFERS strips in shared memory.
#include "families/depthwise/register_tile.cuh"
#include "families/depthwise/strips.cuh"

// Constants, all integers.
//   DGRAD                0: in is x, out is y; 1: in is dy, out is dx, and taps count from the filter's end
//   R S                  filter taps
//   MULTIPLIER           M: filters of a channel
//   ROWS                 rows of a thread's outputs
//   LEAD                 columns of the first 16 bytes of a window that the filter does not meet
//   BUFFERS              strips under way, the one that is multiplied included
//   THREADS MIN_BLOCKS   of a block; blocks per multiprocessor that registers must allow
//   HAS_BIAS             adds bias[k]
//   AFFINE ACTIVATION    of an epilogue of fprop, or AFFINE_AND_RESIDUAL for AFFINE (finish.cuh)
using hc::i64;
using namespace hc::tile;

static_assert(THREADS % 32 == 0, "a block is a whole number of warps");
static_assert(BUFFERS >= 2, "strips are copied while one is multiplied");

struct Params {
    const float *in, *w, *bias;
    float* out;
#ifdef AFFINE_AND_RESIDUAL
    const float* residual;  // as out
#endif
    i64 w_k, w_r, w_s;  // strides in elements
    i64 out_n, out_c, out_h;
    hc::strips::Staged staged;
    hc::strips::Partition partition;
    int out_rows, col_groups;
};

// What a thread computes of each strip: a group of columns, and every `hop`-th group of rows.
struct Own {
    int row, hop;  // in rows
    int from;      // bytes from a buffer to its first window
    float* out;    // its first output in the first strip of the first image

    __device__ __forceinline__ Own(const Params& p, int channel) {
        const int groups = THREADS / p.col_groups, thread = threadIdx.x, col = thread % p.col_groups;
        hop = groups * ROWS;
        row = thread < groups * p.col_groups ? thread / p.col_groups * ROWS : 1 << 30;
        from = row * p.staged.row_bytes + col * (COLS * (int)sizeof(float));
        out = p.out + channel * p.out_c + row * p.out_h + col * COLS;
    }
};

__device__ __forceinline__ void convolve(const Params& p, const Filter& filter, const Own& own, int channel,
                                         const hc::strips::Unit& unit, const char* buffer) {
    const int first_row = unit.strip * p.partition.rows, left = p.out_rows - first_row;
    const int rows = left < p.partition.rows ? left : p.partition.rows;
    float* out = own.out + unit.image * p.out_n + first_row * p.out_h;
    const char* window = buffer + own.from;
#pragma unroll 1
    for (int row = own.row; row < rows; row += own.hop) {
        Sums sums(filter);
        sums.add_window(filter, window, p.staged.row_bytes);
        if constexpr (EPILOGUE) sums.finish(p, channel, out, p.out_h, rows - row);
        sums.store(out, p.out_h, rows - row);
        window += own.hop * p.staged.row_bytes;
        out += own.hop * p.out_h;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_tile(const Params p) {
    extern __shared__ __align__(16) char dynamic_smem[];
    const int channel = blockIdx.x % p.partition.channels, first = blockIdx.x / p.partition.channels;
    const hc::strips::Copier<float, THREADS> copier(p.staged, p.in, channel / MULTIPLIER);
    hc::strips::Ring<BUFFERS> ring(p.partition, dynamic_smem, first);
    const auto copy = [&](char* buffer, int image, int strip) {
        copier.copy(p.staged, buffer, image, strip * p.partition.rows);
    };
    ring.fill(copy);
    for (int i = 0; i < BUFFERS; ++i)
        hc::strips::clear_borders<THREADS>(p.staged, dynamic_smem + i * p.partition.buffer_bytes);
    Filter filter;
    filter.load(p, channel);
    const Own own(p, channel);
    for (; ring.has(); ring.advance()) {
        ring.next_buffer(copy);
        convolve(p, filter, own, channel, ring.unit, ring.buffer());
    }
}
