// halo_sm90_implicit_gemm: fprop and dgrad of layers of several taps in nhwc, as one matrix product for each tap.
//
//   y[pixel, filter] = sum over taps and channels of x[pixel moved by the tap, channel] * w[filter, tap, channel]
//
// pointwise.cu with one more loop: a stage has a chunk of channels of a tap, for which TMA's im2col mode brings the
// pixels that the tap meets from the tile's outputs, and zeros from outside of the image. So a tile is neighbouring
// outputs, across ends of rows and of images, and none of its rows of M is idle. What conv.cu stages once comes once
// for each tap here, from the L2; taps that meet no pixel of a tile are left out.
//
// Roles and budget are those of pointwise.cu.
#include "families/halo_sm90/pointwise/consume.cuh"
#include "families/halo_sm90/pointwise/taps_produce.cuh"
#include "kernels/ptx/register.cuh"

// Constants: ELEM is float, hc::fp16 or hc::bf16; Y_ELEM is ELEM, or float for partial sums; all others integers.
//   TAPS               1: Params and tiles have taps
//   X_INNER            1: neighbours in memory are channels
//   Y_INNER            1: neighbours of the result are filters, which TMA stores; 0: pixels
//   BY_LANES           lanes store the result, because tiles go across ends of planes; defined only where Y_INNER is 0
//   KEEPS_W            0: filters come with the pixels
//   CLUSTER            2: the blocks of a cluster sum ranges of the channels of a tile; defined only where clusters are
//   W_LOADS M_BLOCKS COLUMNS SPLIT_N STAGES Y_BUFFERS AFFINE ACTIVATION  those of pointwise.cu, and
//   AFFINE_AND_RESIDUAL for AFFINE
static_assert(TAPS && X_INNER && !KEEPS_W, "TMA moves whole pixels, and stages have filters");

extern "C" __global__ void __launch_bounds__(hc::pointwise::THREADS, 1)
    halo_sm90_implicit_gemm(const __grid_constant__ hc::pointwise::Params p) {
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
        if (threadIdx.x / 32 == THREADS / 32 - 1 && hc::ptx::elect_sync()) produce_taps(p, smem);
    }
}
