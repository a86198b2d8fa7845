// direct_sums: the plain sums beside the direct family's products, in an order fixed by the shapes alone.
//
//   sum_partials   out[i] = sum over parts of partials[part][i], the last step of wgrad and of the bias gradient
//   direct_bgrad   partials[part][k] = sum of y[n, k, p, q] over the pixels of the part
//
// Both move each element once and are bound by memory bandwidth. Shared memory: THREADS sums (bgrad).
#include "numeric.cuh"

// Constants: ELEM is float, double, hc::fp16 or hc::bf16; the others are integers.
//   THREADS         threads of a block
//   CHANNEL_LANES   bgrad: channels that neighbouring lanes read, 1 where pixels are neighbours in memory, else 32
//   CHUNK_PIXELS    bgrad: pixels of one row that a block sums before it adds them to its total
using i64 = long long;
using elem_t = ELEM;
using acc_t = hc::AccOf<elem_t>::type;

constexpr int PIXEL_LANES = THREADS / CHANNEL_LANES;
static_assert(THREADS % CHANNEL_LANES == 0 && (PIXEL_LANES & (PIXEL_LANES - 1)) == 0,
              "the tree halves the pixel lanes");

struct SumParams {
    elem_t* out;
    const acc_t* partials;           // [part][K][C][R][S]
    i64 out_k, out_c, out_r, out_s;  // strides in elements
    i64 elems;                       // K * C * R * S
    int c, r, s, parts;
};

extern "C" __global__ void __launch_bounds__(THREADS) sum_partials(const SumParams p) {
    const i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= p.elems) return;
    acc_t sum = 0;
#pragma unroll 4
    for (int part = 0; part < p.parts; ++part) sum += p.partials[part * p.elems + i];
    const i64 s = i % p.s, r = i / p.s % p.r, c = i / ((i64)p.s * p.r) % p.c, k = i / ((i64)p.s * p.r * p.c);
    p.out[k * p.out_k + c * p.out_c + r * p.out_r + s * p.out_s] = hc::from_acc<elem_t>(sum);
}

struct BgradParams {
    const elem_t* y;
    acc_t* partials;         // [part][K]
    i64 y_n, y_k, y_p, y_q;  // strides in elements
    i64 n, p, q, chunks;     // images, rows, pixels of a row, ceil(q / CHUNK_PIXELS)
    int k, parts;
};

// Sum of one chunk of one row, this lane's share.
__device__ __forceinline__ acc_t sum_chunk(const BgradParams& p, i64 chunk, int channel, int pixel_lane) {
    const i64 first = chunk % p.chunks * CHUNK_PIXELS;
    const i64 row = chunk / p.chunks;
    const i64 end = first + CHUNK_PIXELS < p.q ? first + CHUNK_PIXELS : p.q;
    const elem_t* from = p.y + row / p.p * p.y_n + row % p.p * p.y_p + channel * p.y_k;
    acc_t sum = 0;
#pragma unroll 8
    for (i64 q = first + pixel_lane; q < end; q += PIXEL_LANES) sum += hc::to_acc(from[q * p.y_q]);
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) direct_bgrad(const BgradParams p) {
    __shared__ acc_t sums[PIXEL_LANES][CHANNEL_LANES];
    const int channel_lane = threadIdx.x % CHANNEL_LANES, pixel_lane = threadIdx.x / CHANNEL_LANES;
    const int part = blockIdx.x % p.parts;
    const int channel = blockIdx.x / p.parts * CHANNEL_LANES + channel_lane;
    acc_t sum = 0;
    if (channel < p.k)
        for (i64 chunk = part; chunk < p.n * p.p * p.chunks; chunk += p.parts)
            sum += sum_chunk(p, chunk, channel, pixel_lane);
    sums[pixel_lane][channel_lane] = sum;
    __syncthreads();
    for (int half = PIXEL_LANES / 2; half > 0; half /= 2) {
        if (pixel_lane < half) sums[pixel_lane][channel_lane] += sums[pixel_lane + half][channel_lane];
        __syncthreads();
    }
    if (pixel_lane == 0 && channel < p.k) p.partials[(i64)part * p.k + channel] = sums[0][channel_lane];
}
