// depthwise_nhwc_wgrad_sum: dw from the partial sums of the kernels for channels_last, in the order of the parts.
//
// A block has 32 neighbouring sums and PART_WARPS warps that share the parts, so that their loads are under way at
// once: a filter gradient has few elements, and one thread for each would wait for memory once per part.
#include "kernels/numeric.cuh"

// Constants: ELEM is float, hc::fp16 or hc::bf16; all others integers.
//   R S          filter taps
//   PART_WARPS   warps of a block
using hc::i64;
using elem_t = ELEM;

struct Params {
    elem_t* dw;
    const float* partials;                       // [part][channel block][R][S][channel]
    i64 dw_k, dw_r, dw_s;                        // strides in elements
    int elems, channels, block_channels, parts;  // elems: of a part
};

extern "C" __global__ void __launch_bounds__(32 * PART_WARPS) depthwise_nhwc_wgrad_sum(const Params p) {
    __shared__ float sums[PART_WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, i = blockIdx.x * 32 + lane;
    float sum = 0;
    if (i < p.elems)
#pragma unroll 8
        for (int part = warp; part < p.parts; part += PART_WARPS) sum += p.partials[(i64)part * p.elems + i];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || i >= p.elems) return;
#pragma unroll
    for (int other = 1; other < PART_WARPS; ++other) sum += sums[other][lane];
    const int rest = i / p.block_channels, block = rest / (R * S), tap = rest - block * (R * S);
    const int k = block * p.block_channels + i - rest * p.block_channels;
    if (k < p.channels) p.dw[k * p.dw_k + tap / S * p.dw_r + tap % S * p.dw_s] = hc::from_acc<elem_t>(sum);
}
