// depthwise_box_wgrad: the filter gradient of depthwise layers in fp32 and nchw on Hopper, as partial sums.
//
//   partials[part][k, r, s] = sum over pixels (n, p, q) of
//                                 dy[n, k, p, q] * x[n, k / M, p + r - pad_top, q + s - pad_left]
//
// The trick: TMA brings strips of both planes as boxes, zeros around x included, so that no thread spends
// instructions on either. A thread has all sums of a filter and ROWS by 4 pixels of dy in registers: a row of x is
// three or so reads of 16 bytes for up to ROWS * S * 4 multiplies. A block does every so many-th unit of one filter;
// in the end it adds the sums of its threads, in a fixed order.
//
// A zero times an infinity is a NaN that does not belong into the sum: a tap whose sum is not finite is summed once
// more, over the pixels alone.
// Budget: R * S registers for sums, ROWS * 4 for dy, a row of the window; BUFFERS units in shared memory.
#include "families/depthwise/boxes.cuh"
#include "families/depthwise/plane_sum.cuh"

// Constants, all integers.
//   R S                  filter taps
//   MULTIPLIER           M: filters of a channel
//   ROWS                 rows of dy that a thread has
//   LEAD                 columns of the first 16 bytes of a window that the filter does not meet
//   BUFFERS              units under way, the one that is multiplied included
//   THREADS MIN_BLOCKS   of a block; blocks per multiprocessor that registers must allow
using hc::i64;
using hc::ptx::u64;
using namespace hc::tile;

constexpr int TAPS = R * S, WARPS = THREADS / 32;

static_assert(THREADS % 32 == 0, "a block is a whole number of warps");
static_assert(BUFFERS >= 2, "units land while one is multiplied");

// How planes of a tensor lie in memory, in elements.
struct Side {
    i64 image, channel, row;
    int rows, cols;  // of a plane
};

struct Params {
    hc::TensorMap x_map, dy_map;
    const float *x, *dy;
    float* partials;  // [part][K][R][S]
    Side x_side, dy_side;
    Cut cut;
    int images, filters;
    int dy_offset, dy_row_bytes;  // from a buffer to its box of dy; of that box
};

struct Sums {
    float of[R][S] = {};

    // Row `at` of the window with all rows of dy that meet it.
    __device__ __forceinline__ void add(const Vector (&dy)[ROWS], const Row& x, int at) {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const int r = at - row;
            if (r < 0 || r >= R) continue;
#pragma unroll
            for (int col = 0; col < COLS; ++col)
#pragma unroll
                for (int s = 0; s < S; ++s) of[r][s] += dy[row].of[col] * met(x, col, s);
        }
    }
};

// `window` begins LEAD columns before what the first pixel of dy meets.
__device__ __forceinline__ void multiply(Sums& sums, const Params& p, const char* window, const char* pixels) {
    Vector dy[ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; ++row) dy[row] = *reinterpret_cast<const Vector*>(pixels + row * p.dy_row_bytes);
#pragma unroll
    for (int at = 0; at < ROWS + R - 1; ++at) {
        Row x;
        read(x, window + at * p.cut.row_bytes);
        sums.add(dy, x, at);
    }
}

// A lane's part of one tap's sum over the block's units, of products that belong into it only.
__device__ __forceinline__ float sum_again(const Params& p, int filter, int first, int r, int s) {
    const Side &of_x = p.x_side, &of_dy = p.dy_side;
    float sum = 0;
    for (int i = first; i < p.cut.units; i += p.cut.parts) {
        const Unit unit(p.cut, i);
        for (int image = unit.image; image < unit.image + p.cut.images && image < p.images; ++image) {
            const float* x = p.x + image * of_x.image + filter / MULTIPLIER * of_x.channel;
            const float* dy = p.dy + image * of_dy.image + filter * of_dy.channel;
            sum += hc::plane_sum<float>({x, of_x.row, of_x.rows, of_x.cols}, {dy, of_dy.row, of_dy.rows, of_dy.cols},
                                        unit.row, unit.row + p.cut.rows, r - p.cut.top, s - p.cut.left);
        }
    }
    return sum;
}

// Adds the sums of all threads, tap by tap, and writes them. `all` has room for those of every thread.
__device__ __forceinline__ void add_up(const Params& p, float* all, const Sums& sums, int filter, int first) {
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap) all[tap * THREADS + threadIdx.x] = sums.of[tap / S][tap % S];
    __syncthreads();
    const int lane = threadIdx.x % 32;
    float* const partials = p.partials + ((i64)first * p.filters + filter) * TAPS;
    for (int tap = threadIdx.x / 32; tap < TAPS; tap += WARPS) {
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum += all[tap * THREADS + warp * 32 + lane];
        sum = hc::warp_sum(sum);
        if (sum * 0.f != 0.f) sum = hc::warp_sum(sum_again(p, filter, first, tap / S, tap % S));
        if (lane == 0) partials[tap] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    depthwise_box_wgrad(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    __shared__ u64 full[BUFFERS];
    const int filter = blockIdx.x % p.filters, first = blockIdx.x / p.filters;
    const auto ask = [&](char* buffer, u64* barrier, const Unit& unit) {
        ask_input(p.x_map, p.cut, buffer, barrier, filter / MULTIPLIER, unit);
        hc::ptx::cp_async_bulk_tensor_4d_shared_global(buffer + p.dy_offset, &p.dy_map, barrier, 0, unit.row, filter,
                                                       unit.image);
    };
    Ring ring(p.cut, dynamic_smem, full, first);
    ring.begin(ask);
    const Place place(p.cut);
    const int window = place.window(p.cut), row = place.image * p.cut.rows + place.row;
    const int pixels = p.dy_offset + row * p.dy_row_bytes + place.group * (int)sizeof(Vector);
    Sums sums;
#pragma unroll 1
    for (; ring.has(); ring.advance(ask)) {
        const char* const buffer = ring.landed();
        if (place.active) multiply(sums, p, buffer + window, buffer + pixels);
    }
    add_up(p, reinterpret_cast<float*>(dynamic_smem), sums, filter, first);
}
