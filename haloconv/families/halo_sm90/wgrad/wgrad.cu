// halo_sm90_wgrad: the weight gradient on Hopper's tensor cores, as partial sums.
//
//   dw[k, c, r, s] = sum over n, p, q of dy[n, k, p, q] * x[n, c, p stride + r dil - pad, q stride + s dil - pad]
//
// wgmma sums over pixels of a row, K. M, its operand in registers, are channels of x at one or more columns of taps:
// the fragment is read from shared memory at any shift, so a tap costs no copy. N are filters: dy by descriptor.
// A block marches down lines of x. A ring holds the lines of dy that the last ROWS rows of taps meet, so both tensors
// come from memory once for all of a block's taps, and one fragment of x feeds ROWS wgmmas.
//
// Roles: two or three warpgroups consume: they divide columns of taps, channels, filters or steps. The last one
// produces: a thread asks TMA for boxes, or (X_LOADS, Y_LOADS) its warps load what TMA cannot take, and transpose it,
// or (X_PLANES, Y_PLANES) they shift lines that TMA brings from the aligned piece on in which they begin, or
// (Y_PLANES -1) they transpose what it brings.
// Budget: COLUMN_GROUPS * ROWS * FILTERS / 2 registers of a consumer for sums. wgmma cuts its sums, so that they are
// added to those in memory every FLUSH_STEPS steps.
#include "families/halo_sm90/wgrad/consume.cuh"
#include "families/halo_sm90/wgrad/produce.cuh"
#include "kernels/ptx/register.cuh"

// Constants: ELEM is float, hc::fp16 or hc::bf16; all others integers.
//   ROWS                     rows of taps of a block
//   CHANNELS FILTERS         of a warpgroup: 8 to 64 channels, N of wgmma
//   COLUMN_GROUPS            of a warpgroup, of 64 / CHANNELS columns of taps each
//   SPLIT_S SPLIT_C SPLIT_K SPLIT_P  parts into which the consumers divide columns of taps, channels, filters and steps
//   STRIDE_W                 columns of x from one pixel of dy to the next
//   STRIP                    pixels of a line of dy; with BOX_ROWS > 1 those of the steps that all lines have
//   X_PITCH                  pixels of a line of x
//   BOX_ROWS                 lines of x, and of dy, that come at a time
//   STAGES                   boxes of x that are there at a time
//   X_LOADS Y_LOADS          0: TMA brings lines; V or -V: loads of V pixels or of V channels
//   X_PLANES Y_PLANES        0, or rows begin anywhere, and every so many channels at a multiple of 16 bytes
//                            -1: TMA brings [pixel][channels]; dy, but in 16 bits, is transposed by warps
//   X_RAW Y_RAW              pixels of a channel of a raw box then, or of a line of one that is transposed
//   IMAGE_COLUMNS            0, or images are side by side in a row: columns of dy of each
//   OPERAND_TERMS            TF32 values that an fp32 value is multiplied as; 2: x is split in registers, dy by the
//                            threads that store it
extern "C" __global__ void __launch_bounds__(hc::wgrad::THREADS, 1)
    halo_sm90_wgrad(const __grid_constant__ hc::wgrad::Params p) {
    using namespace hc::wgrad;
    extern __shared__ __align__(1024) char dynamic_smem[];
    const Smem smem(dynamic_smem);
    begin(smem);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the compiler sees that it is a warp's
    if (warpgroup < CONSUMERS) {
        hc::ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(p, smem, warpgroup);
    } else {
        hc::ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
        produce(p, smem);
    }
}
