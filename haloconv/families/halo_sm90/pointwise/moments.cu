// halo_sm90_moments: fprop of pointwise.cu or implicit_gemm.cu in nhwc, whose results are measured as they are stored.
//
//   y as there; of each filter and box of 64 pixels the mean of its results, and the sum of squared differences from it
//
// For a batch norm in training mode, or a group norm, that follows: moments_sum.cu makes statistics of all pixels of
// these, or of each image's, so that no launch reads y for them. A consumer reads a slab once more in the buffer that
// TMA stores it from: so results count as they are in memory, with bias and residual, rounded.
//
// Roles and budget are those of pointwise.cu, beside 16 registers of a slab's words.
#include "families/halo_sm90/pointwise/consume.cuh"
#ifdef TAPS
#include "families/halo_sm90/pointwise/taps_produce.cuh"
#else
#include "families/halo_sm90/pointwise/produce.cuh"
#endif
#include "kernels/ptx/register.cuh"

// Constants: ELEM is float, hc::fp16 or hc::bf16, and Y_ELEM the same; all others integers.
//   MOMENTS            1: results are measured
//   TAPS CLUSTER       those of implicit_gemm.cu; defined only where there are several taps, and clusters
//   X_INNER Y_INNER    1: channels and filters are neighbours in memory
//   KEEPS_W W_LOADS M_BLOCKS COLUMNS SPLIT_N STAGES Y_BUFFERS  those of pointwise.cu
//   AFFINE ACTIVATION AFFINE_AND_RESIDUAL  those of pointwise.cu
static_assert(MOMENTS && X_INNER && Y_INNER, "rows of M are pixels of a box");

extern "C" __global__ void __launch_bounds__(hc::pointwise::THREADS, 1)
    halo_sm90_moments(const __grid_constant__ hc::pointwise::Params p) {
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
        if (threadIdx.x / 32 == THREADS / 32 - 1 && hc::ptx::elect_sync()) {
#ifdef TAPS
            produce_taps(p, smem);
#else
            produce(p, smem);
#endif
        }
    }
}
