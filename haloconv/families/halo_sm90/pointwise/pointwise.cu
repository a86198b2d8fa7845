// halo_sm90_pointwise: fprop and dgrad of 1x1 layers on Hopper's tensor cores, as one matrix product.
//
//   y[filter, pixel] = sum over channels of w[filter, channel] * x[channel, pixel]
//
// TMA brings boxes of x and of w and takes boxes of y: no thread copies. M of wgmma are pixels where filters are
// neighbours in the result, and filters where pixels are, so that rows of sums are rows in memory. 16-bit operands are
// K-major or MN-major, as they lie in memory. TF32 operands in shared memory must be K-major: where pixels are
// neighbours in x, they are M and come from registers, and sums are transposed before they are stored.
//
// Roles: two warpgroups consume; one thread of the third asks TMA, for tile after tile; its other warps clear gaps.
// Stages hold a chunk of channels of a tile's pixels and filters; with KEEPS_W filters stay for all tiles of a block.
// Budget: M_BLOCKS * COLUMNS / 2 registers of a consumer for sums; stages and buffers of sums.
#include "families/halo_sm90/pointwise/consume.cuh"
#include "families/halo_sm90/pointwise/produce.cuh"
#include "kernels/ptx/register.cuh"

// Constants: ELEM is float, hc::fp16 or hc::bf16; Y_ELEM is ELEM, or float for partial sums; all others integers.
//   X_INNER Y_INNER    1: neighbours in memory are channels (filters); 0: pixels
//   W_LOADS            how w comes: W_ROWS a filter's channels are neighbours, W_COLUMNS a channel's filters are
//                      (16 bits), W_PACKED as halo_sm90/pack.cu leaves them
//   KEEPS_W            1: filters of a tile stay in shared memory; 0: they come with the pixels
//   M_BLOCKS           blocks of 64 rows of M of a consumer
//   COLUMNS            N of wgmma
//   SPLIT_N            1: the consumers have the same rows of M, and columns of N of their own; 0: the reverse
//   STAGES Y_BUFFERS   stages of the ring; buffers of a consumer for slabs of sums that are stored, 2 at least
//   AFFINE ACTIVATION  what becomes of a sum (kernels/activation.cuh), or AFFINE_AND_RESIDUAL for AFFINE
//   HAS_GAPS           the result has pixels that no output meets, which become zeros; defined only where it has
extern "C" __global__ void __launch_bounds__(hc::pointwise::THREADS, 1)
    halo_sm90_pointwise(const __grid_constant__ hc::pointwise::Params p) {
    using namespace hc::pointwise;
    extern __shared__ __align__(1024) char dynamic_smem[];
    const Smem smem(p, dynamic_smem);
    begin(p, smem);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the compiler sees that it is a warp's
    if (warpgroup < CONSUMERS) {
        hc::ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(p, smem, warpgroup);
    } else {
        hc::ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x / 32 == THREADS / 32 - 1 && hc::ptx::elect_sync()) produce(p, smem);
#ifdef HAS_GAPS
        if (threadIdx.x / 32 < THREADS / 32 - 1) clear_gaps(p);
#endif
    }
}
