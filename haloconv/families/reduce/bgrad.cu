// bgrad: sums of dy over images and pixels, in an order fixed by the shapes alone.
//
//   bgrad          db[k] = sum of dy[n, k, p, q]: few pixels, in one launch
//   bgrad_parts    partials[part][k], the same over the pixels of a part: many pixels, whose parts sum_partials adds
//
// Each element is read once: large tensors are bound by memory bandwidth, small ones by its latency, so that a lane has
// AT_ONCE loads in flight.
//
// Budget: AT_ONCE registers for loads; THREADS sums in shared memory.
#include "kernels/numeric.cuh"

// Constants: ELEM is float, double, hc::fp16 or hc::bf16; the others are integers.
//   THREADS         threads of a block
//   CHANNEL_LANES   channels that neighbouring lanes read, 1 where pixels are neighbours in memory
using i64 = long long;
using elem_t = ELEM;
using acc_t = hc::AccOf<elem_t>::type;

constexpr int PIXEL_LANES = THREADS / CHANNEL_LANES;
constexpr int AT_ONCE = 8;  // a power of two
static_assert(THREADS % CHANNEL_LANES == 0 && (PIXEL_LANES & (PIXEL_LANES - 1)) == 0,
              "the tree halves the pixel lanes");

// to[part][channel] = sum of dy over the pixels of a part: one run of neighbours in the order (n, p, q).
struct Params {
    const elem_t* dy;
    void* to;
    i64 n_stride, k_stride, p_stride, q_stride;  // in elements
    i64 n, p, q;                                 // images, rows, pixels of a row
    i64 step_rows, step_cols, step_elems;        // from a pixel to the PIXEL_LANES-th after it, without carries
    i64 next_row, next_image;                    // elements that a carry adds
    int k, parts;
};

struct Smem {
    acc_t sums[PIXEL_LANES][CHANNEL_LANES];
};

// A pixel, as an offset into one channel; moved without a division.
struct Walk {
    i64 row, col, offset;

    __device__ __forceinline__ Walk(const Params& p, i64 pixel)
        : row(pixel / p.q % p.p),
          col(pixel % p.q),
          offset(pixel / p.q / p.p * p.n_stride + row * p.p_stride + col * p.q_stride) {}

    __device__ __forceinline__ void advance(const Params& p) {
        offset += p.step_elems, row += p.step_rows, col += p.step_cols;
        if (col >= p.q) col -= p.q, ++row, offset += p.next_row;
        if (row >= p.p) row -= p.p, offset += p.next_image;
    }
};

// The sum of this lane's pixels of [pixel, end). AT_ONCE loads are in flight together; where their pixels are in one
// row, the walk goes over all but the last by one addition.
__device__ __forceinline__ acc_t sum_pixels(const Params& p, i64 pixel, i64 end, int channel) {
    constexpr int ALL_BUT_ONE = (AT_ONCE - 1) * PIXEL_LANES;
    const elem_t* from = p.dy + channel * p.k_stride;
    Walk at(p, pixel);
    acc_t sum = 0;
    while (pixel < end) {
        acc_t values[AT_ONCE];
        if (at.col + ALL_BUT_ONE < p.q && pixel + ALL_BUT_ONE < end) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) values[i] = hc::to_acc(from[at.offset + i * PIXEL_LANES * p.q_stride]);
            at.col += ALL_BUT_ONE, at.offset += ALL_BUT_ONE * p.q_stride, pixel += ALL_BUT_ONE;
            at.advance(p), pixel += PIXEL_LANES;
        } else {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i, at.advance(p), pixel += PIXEL_LANES)
                values[i] = pixel < end ? hc::to_acc(from[at.offset]) : 0;
        }
#pragma unroll
        for (int half = AT_ONCE / 2; half > 0; half /= 2)
#pragma unroll
            for (int i = 0; i < half; ++i) values[i] += values[i + half];
        sum += values[0];
    }
    return sum;
}

template <class To>
__device__ __forceinline__ void sum_channels(const Params& p) {
    __shared__ Smem smem;
    auto& sums = smem.sums;
    const int channel_lane = threadIdx.x % CHANNEL_LANES, pixel_lane = threadIdx.x / CHANNEL_LANES;
    const int part = blockIdx.x % p.parts;
    const int channel = blockIdx.x / p.parts * CHANNEL_LANES + channel_lane;
    const i64 pixels = p.n * p.p * p.q;
    const i64 begin = pixels * part / p.parts, end = pixels * (part + 1) / p.parts;
    sums[pixel_lane][channel_lane] = channel < p.k ? sum_pixels(p, begin + pixel_lane, end, channel) : acc_t(0);
    __syncthreads();
    for (int half = PIXEL_LANES / 2; half > 0; half /= 2) {
        if (pixel_lane < half) sums[pixel_lane][channel_lane] += sums[pixel_lane + half][channel_lane];
        __syncthreads();
    }
    To* to = static_cast<To*>(p.to) + (i64)part * p.k;
    if (pixel_lane == 0 && channel < p.k) to[channel] = hc::from_acc<To>(sums[0][channel_lane]);
}

extern "C" __global__ void __launch_bounds__(THREADS) bgrad(const Params p) { sum_channels<elem_t>(p); }

extern "C" __global__ void __launch_bounds__(THREADS) bgrad_parts(const Params p) { sum_channels<acc_t>(p); }
