// depthwise_lanes_wgrad_sum: dw from the partial sums of depthwise_lanes_wgrad, in the order of the parts.
//
// A block has 32 neighbouring channels of a tap, and PART_WARPS warps that share the parts, so that their loads are
// under way at once.
#include "numeric.cuh"

// Constants, all integers.
//   R S          filter taps
//   PART_WARPS   warps of a block
using hc::i64;

struct Params {
    float* dw;
    const float* partials;  // [part][r, s][k]
    i64 dw_k, dw_r, dw_s;   // strides in elements
    int channels, parts;
};

extern "C" __global__ void __launch_bounds__(32 * PART_WARPS) depthwise_lanes_wgrad_sum(const Params p) {
    __shared__ float sums[PART_WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tap = blockIdx.x % (R * S);
    const int channel = blockIdx.x / (R * S) * 32 + lane;
    const bool there = channel < p.channels;
    const float* const from = p.partials + tap * p.channels + channel;
    float sum = 0;
    if (there)
#pragma unroll 8
        for (int part = warp; part < p.parts; part += PART_WARPS) sum += from[(i64)part * (R * S) * p.channels];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || !there) return;
#pragma unroll
    for (int other = 1; other < PART_WARPS; ++other) sum += sums[other][lane];
    p.dw[channel * p.dw_k + tap / S * p.dw_r + tap % S * p.dw_s] = sum;
}
