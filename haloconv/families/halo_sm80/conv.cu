// halo_sm80: convolution of few channels per group on tensor cores through mma.sync, fprop and dgrad.
//
//   y[pixel, filter] = sum over (tap, channel of the group) of x[pixel at tap, channel] * w[filter, channel, tap]
//
// A fragment's 16 rows are output pixels, its 8 columns filters of one group, its k (tap, channel): groups of 8
// channels and 8 filters waste nothing. The trick: a block keeps its input pixels with their halo in shared memory, and
// a lane's operand lies at the sum of its pixel's offset and one that a table gives for its k: any filter, stride,
// dilation and padding, with no index arithmetic in the loop. dgrad of a strided layer is one dense problem per residue
// of the pixel (geometry.cuh). Channels that do not fit at once come in chunks. fp32 is rounded to TF32 once, where it
// was staged, and by halo_sm80_pack for the filter.
//
// Budget: 4 * M_TILES * N_TILES sums a thread; shared memory for the tile, its weights and the table (shape.cuh).

// Constants: ELEM is float, hc::fp16 or hc::bf16; all others integers.
//   DGRAD                        1: the output is x, in one class of pixels per residue of the stride
//   UNIT_BYTES                   of one pixel in a plane: an element (SPLIT), or 8, 16 or 32
//   STAGED_PX                    pixels of an asynchronous copy (SPLIT), or of a load through registers; or else
//   COPY_BYTES                   of an asynchronous copy of channels of a pixel
//   BOXES                        1: TMA brings whole planes of a tile, and rounds fp32 on the way
//   M_TILES N_TILES              fragments of a warp: 16 pixels, 8 filters each
//   WARPS DEPTH MIN_BLOCKS       of a block; buffers of the input; blocks per multiprocessor that registers must allow
//   STORES                       0: of single outputs, 1: of two neighbouring filters, 2: of two neighbouring pixels,
//                                3: of four neighbouring filters
//   IN_ROW MOVE_W                1: the rows of a fragment are neighbours; input columns between neighbours
//   PACKED                       0: a block makes its weights from the filter
//   LATE                         1: outputs go while the next tile comes; a warp has one item of a tile at most
//   I64_OFFSETS                  1: offsets inside a tensor are 64-bit integers
//   AFFINE ACTIVATION            what becomes of a sum (kernels/activation.cuh), or AFFINE_AND_RESIDUAL for AFFINE

#define SPLIT (UNIT_BYTES < 8)  // planes of single channels, else units of neighbouring channels
#ifdef COPY_BYTES
#define STAGED_PX 1
#else
#define COPY_BYTES (SPLIT ? STAGED_PX * UNIT_BYTES : 0)  // 0: through registers
#endif
#define FILTER_PAIRS (STORES == 1)
#define PIXEL_PAIRS (STORES == 2)
#define FOUR_FILTERS (STORES == 3)

#include "families/halo_sm80/multiply.cuh"
#include "families/halo_sm80/stage.cuh"
#include "families/halo_sm80/write.cuh"

namespace hc {

static_assert(!SPLIT || (UNIT_BYTES == sizeof(elem_t) && COPY_BYTES >= 4),
              "planes of single channels are copied by runs of pixels");
static_assert(!TAP_PAIRS || MOVE_W % 2 == 0, "pixels begin at whole words");
static_assert(SPLIT || UNIT_BYTES == 8 || UNIT_BYTES == 16 || UNIT_BYTES == 32, "a unit is 1, 2 or 4 atoms");
static_assert(SPLIT || COPY_BYTES <= UNIT_BYTES, "a copy stays inside a unit");
static_assert(!FOUR_FILTERS || N_TILES % 2 == 0, "two eights share their filters");
static_assert(!BOXES || (SPLIT && COPY_BYTES == 16), "boxes are of planes, and begin at multiples of 16 bytes");
static_assert(DEPTH == 1 || DEPTH == 2, "one buffer, or one that is filled while the other is multiplied");

// The steps of a block: its tiles, each with its chunks of channels.
__device__ __forceinline__ void convolve(const Params& p, char* smem) {
    const Work work = this_work(p);
    const Tables tables = tables_of(p, smem);
    char* const w_smem = smem + p.table_bytes;
    char* const x_smem = w_smem + p.weight_buffers * p.weight_bytes;
    const int steps = work.tiles * p.chunks;
    Sums sums;
    Step next = step_at(p, work, 0);
    begin_landings(p, x_smem);
    stage(p, work, next, 0, x_smem, w_smem);
    write_ks(p, work, tables.ks);
    write_pixels(p, work, tables);
    if (!PACKED) make_weights(p, work, w_smem);
    for (int step = 0; step < steps; ++step) {
        const Step at = next;
        char* const x = x_smem + step % DEPTH * p.x_bytes;
        ptx::cp_async_wait_group<0>();
        settle(p, work, at, x);
        await_landing(p, work, step, x_smem);
        __syncthreads();
        if (step + 1 < steps) next = step_at(p, work, step + 1);
        if (DEPTH == 2 && step + 1 < steps) stage(p, work, next, step + 1, x_smem, w_smem);
        multiply_tile(sums, p, work, at, tables, x, w_smem + step % p.weight_buffers * p.weight_bytes);
        if (BOXES) ptx::fence_proxy_async_shared();  // this tile was read before TMA writes over it
        if (DEPTH == 1 && step + 1 < steps) {
            __syncthreads();
            stage(p, work, next, step + 1, x_smem, w_smem);
        }
        if (LATE && at.chunk == p.chunks - 1) write_late(sums, p, work, at.tile, tables);
    }
}

}  // namespace hc

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS) halo_sm80(const __grid_constant__ hc::Params p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    hc::convolve(p, dynamic_smem);
}
