// halo_sm90_pointwise_planes: fprop and dgrad of 1x1 layers in nchw, for small planes of whatever size and for strides.
//
//   y[image][filter][pixel] = sum over channels of w[filter, channel] * x[image][channel][pixel]
//
// Planes of 7x7 or 14x14 are no multiples of 16 bytes, so TMA has no boxes of them; but the planes of some channels of
// an image are neighbouring bytes, and one bulk copy brings them. Rows of M are pixels, whose fragments lanes read from
// the planes, wherever those begin; so every second pixel is as good as each. Sums are transposed into planes in shared
// memory, of which a bulk copy takes those of some filters. Pixels that no output meets (strided dgrad) are zeros there
// from the beginning. Where TMA reaches rows, boxes may take the place of copies, and bands of rows that of planes.
//
// Roles: two warpgroups consume; one thread of the third asks for copies, for tile after tile.
// Budget: M_BLOCKS * COLUMNS / 2 registers of a consumer for sums, twice 16 * M_BLOCKS for fragments.
#include "families/halo_sm90/pointwise/planes_consume.cuh"
#include "kernels/ptx/register.cuh"

// Constants: ELEM is float, hc::fp16 or hc::bf16; all others integers.
//   W_LOADS            how w comes: W_ROWS a filter's channels are neighbours, W_COLUMNS a channel's filters are
//                      (16 bits), W_PACKED as halo_sm90/pack.cu leaves them
//   CHUNK_BYTES        of a filter's channels in a stage: 128, 64 or 32
//   M_BLOCKS           blocks of 64 rows of M of a consumer
//   COLUMNS            N of wgmma
//   SPLIT_N            1: the consumers have the same rows of M, and columns of N of their own; 0: the reverse
//   STAGES             of the ring
//   X_PLANE Y_PLANE    bytes of a plane, or of a band of one, in shared memory: of x, of y
//   BOXES              what TMA moves in boxes, not in bulk copies of whole planes: NO_BOXES, BOXES_OF_X, BOXES_OF_BOTH
//   SLAB Y_BUFFERS     filters whose sums are stored at a time; buffers for them
//   X_PAIRS            16 bits, whether a lane's two rows of M are a word: NO_PAIRS, ALL_PAIRS, EVEN_PAIRS of even
//                      channels
//   HAS_GAPS           1: y has pixels that no output meets
//   AFFINE ACTIVATION  what becomes of a sum (kernels/activation.cuh), or AFFINE_AND_RESIDUAL for AFFINE
extern "C" __global__ void __launch_bounds__(hc::planes::THREADS, 1)
    halo_sm90_pointwise_planes(const __grid_constant__ hc::planes::Params p) {
    using namespace hc::planes;
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
    }
}
