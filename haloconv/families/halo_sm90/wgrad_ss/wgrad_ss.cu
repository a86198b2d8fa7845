// halo_sm90_wgrad_ss: the weight gradient in 16 bits on Hopper's tensor cores, or partial sums of it.
//
//   dw[k, c, r, s] = sum over n, p, q of dy[n, k, p, q] * x[n, c, p + r dil_h - pad_top, q + s dil_w - pad_left]
//
// wgmma sums over pixels, K, and takes both from shared memory as TMA brings them, MN-major: [pixel][channels].
// M are filters, N channels. Boxes of x and dy have one pitch, so that a tap is a shift of the first pixel of x, in the
// descriptor: it costs no instruction and no copy, and short rows follow one another in a step.
//
// Roles: two or three warpgroups consume: they divide filters, channels or taps. One thread of the last asks TMA.
// Budget: SUMS registers of a consumer; stages of a box of dy and the box of x that it meets, and in their place the
// sums of a block that is in a cluster.
#include "families/halo_sm90/wgrad_ss/consume.cuh"
#include "families/halo_sm90/wgrad_ss/produce.cuh"
#include "kernels/ptx/register.cuh"

// Constants: ELEM is hc::fp16 or hc::bf16; all others integers.
//   M_BLOCKS  blocks of 64 filters of a consumer
//   COLUMNS   channels of a consumer, N of wgmma
//   TAPS      of a consumer, which follow one another in the filter
//   SPLIT_K SPLIT_C SPLIT_T  parts into which the consumers divide filters, channels and taps
//   STAGES    boxes that are there at a time
//   CLUSTER   blocks that add their sums in shared memory, neighbours; 1: each writes its own to memory
//   RESULT_TAPS  items that a thread adds: sum.cuh
extern "C" __global__ void __launch_bounds__(hc::wgrad_ss::THREADS, 1)
    halo_sm90_wgrad_ss(const __grid_constant__ hc::wgrad_ss::Params p) {
    using namespace hc::wgrad_ss;
    extern __shared__ __align__(1024) char dynamic_smem[];
    const Smem smem(p, dynamic_smem);
    begin(p, smem);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the compiler sees that it is a warp's
    if (warpgroup < CONSUMERS) {
        hc::ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(p, smem, warpgroup);
    } else {
        hc::ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x / 32 == PRODUCER && hc::ptx::elect_sync()) produce(p, smem);
    }
}
