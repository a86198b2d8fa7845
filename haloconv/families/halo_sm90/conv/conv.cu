// halo_sm90: convolution on Hopper's tensor cores with the input staged once for all taps. One kernel serves fprop and
// dgrad: the host brings either into the form "sum over taps and channels of packed weight * shifted input".
//
// The trick: shared memory holds the input as [pixel][channels of a chunk], 32 to 128 bytes a pixel, and wgmma's
// descriptor of N = RUN neighbouring pixels may start at any pixel. So a tap is an address offset, and the halo is
// loaded once. M is filters (rows of several output pixels' filters where filters are few), K is channels.
//
// Roles: warpgroups 0 and 1 consume, three or seven warps stage input lines (or one does, and two send sums), the last
// streams weights. Two rings of shared memory: `slots` hold lines (a row of pixels, or FLAT whole tiles with their
// halo), `stages` one tap's weights. The second consumer is half a tile behind the first, with weights of its own
// (SHARED_TILE), or beginning with the second half of the taps (tile.cuh): while one writes, the other multiplies.
//
// X_BOXES: TMA brings lines, rounds fp32 to TF32 and fills what is outside with zeros; where channels are neighbours
// right into the slot, where pixels are as raw tiles that a warp transposes. Else warps copy or load them.
#include "families/halo_sm90/conv/consume.cuh"
#include "families/halo_sm90/conv/produce.cuh"
#include "kernels/ptx/register.cuh"

// Constants: ELEM is float, hc::fp16 or hc::bf16; MULTIPLY is hc::tf32, hc::fp16 or hc::bf16; all others integers.
//   RUN RUNS           pixels of one wgmma (N, a pixel run), and pixel runs of a consumer
//   FLAT               1: a line is all rows that meet a work tile, end to end; 0: a line is one row
//   SHARED_TILE        1: the consumers have two blocks of filters of one tile; 0: two tiles of one block
//   KEEPS              1: a tile column's lines are staged once, in a ring for each chunk; 0: once for each phase
//   FIRST_PHASE        0, or 1 if all taps are in phase 1 (see tile.cuh)
//   RING STAGES        slots of a ring of lines; stages of a ring of weights. Constants, because a division by a
//                      run-time number between two taps costs 5 %
//   CHUNK_BYTES        channels of a chunk: bytes of a staged pixel
//   PACKS              outputs of an output pack, each of which has 64 / PACKS rows of M: 1 or 2; or in its place
//   CLASS_ROWS         strided dgrad: neighbouring rows of M that are of one residue class (classes.cuh)
//   X_CHANNELS_INNER   1: neighbours in memory are channels, 0: pixels
//   X_BOXES            TMA boxes bring the input
//   X_JOINED           0; else boxes are cut from a channel's rows end to end, whose starts are not aligned, and
//                      every X_JOINED-th channel begins at a multiple of 16 bytes
//   RAW_DEPTH          raw tiles of a warp that transposes them, 1 or 2
//   LINE_WARPS         warps that stage lines
//   X_VECTOR           no X_BOXES: channels come in aligned groups of 16 bytes
//   Y_CHANNELS_INNER Y_BOXES Y_VECTOR  the same for the output, in groups of 8 bytes
//   Y_JOINED           0; else boxes go to a filter's rows end to end, whose starts are not aligned, and every
//                      Y_JOINED-th filter begins at a multiple of 16 bytes
//   Y_BUFFERS          output buffers: 2 of a consumer where filters are neighbours in memory; 1 or 2 of a warp where
//                      pixels are
//   Y_NEIGHBOURS       1: the pixels of a row of a tile are neighbours in the output; n > 1: pixels of n column residue
//                      classes alternate in a row of the output; 0: neither
//   OPERAND_TERMS      TF32 terms that an fp32 value is split into; terms i and j are multiplied where
//                      i + j < OPERAND_TERMS
//   Y_ELEM             element of the output: ELEM, or float for partial sums of split-K
//   AFFINE ACTIVATION  what becomes of a sum (kernels/activation.cuh), or AFFINE_AND_RESIDUAL for AFFINE
extern "C" __global__ void __launch_bounds__(THREADS, 1) halo_sm90(const __grid_constant__ Params p) {
    const Smem smem(p);
    begin(p, smem);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform, which the compiler then knows
    if (warp < CONSUMER_WARPS) {
        hc::ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(p, smem, warp / 4);
    } else {
        hc::ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
        const int line_warp = warp - CONSUMER_WARPS;
        if (warp == THREADS / 32 - 1) {
            if (hc::ptx::elect_sync()) produce_weights(p, smem);
        } else if constexpr (TRANSPOSED) {
            produce_transposed(p, smem, line_warp);
        } else if constexpr (!BOXED) {
            produce_loaded(p, smem, line_warp);
        } else if (line_warp == 0) {
            produce_boxed(p, smem);
        } else if constexpr (SENDERS) {
            if (hc::ptx::elect_sync()) send_tiles(p, smem, line_warp - 1);
        }
    }
}
