// halo_sm80_wgrad: the weight gradient of layers with few channels per group, on tensor cores through mma.sync.
//
//   dw[k, c, r, s] = sum over (n, p, q) of dy[n, k, p, q] * x[n, c, p * STRIDE_H + r * DIL_H - pad_top, ...]
//
// One product per group: rows (c, r, s), columns k, summed over output pixels. A block stages tiles of output pixels
// of dy, and of x with its halo, in shared memory as planes of 32-bit words; a tap is an offset in them, so a pixel of
// x is staged once for all taps. The trick: a word is one fp32 pixel rounded to TF32, or in 16 bits the same pixel of
// two tiles, of two images or below each other. mma wants pairs of neighbours of the sum in a word, and the sum has
// no order: so any tap, stride and dilation is a word address in every type, and both kinds are one program. Rows of
// 16-bit elements that copies can take as they are need no words made of them: pixel_pairs.cuh.
//
// Budget: WARP_M * WARP_N * 4 sums a thread; MIN_BLOCKS blocks a multiprocessor hide each other's loads.
#include "families/halo_sm80_wgrad/multiply.cuh"
#include "families/halo_sm80_wgrad/pixel_pairs.cuh"
#include "families/halo_sm80_wgrad/pieces.cuh"
#include "families/halo_sm80_wgrad/sums.cuh"
#include "families/halo_sm80_wgrad/window.cuh"

using namespace hc::wgrad;

// A block's stages are a range of all: tiles of a strip of columns of an image (in 16 bits of two images, or pairs of
// tiles of one; PIXEL_PAIRS: of one).
#if !PIXEL_PAIRS && !PIECES
__device__ __forceinline__ void sum_stages(Smem& smem, const Params& p, const Work& work, const Place& place,
                                           Sums& sums) {
    const Rows rows(p, place);
    Position at(p, work.first);
    for (int left = work.stages; left > 0; --left, at.advance(p)) {
        const Tile tile(p, at);
        XWindow::stage(smem[0].x, x_source(p, work, tile));
        YWindow::stage(smem[0].y, y_source(p, work, tile));
        __syncthreads();
        multiply(sums, smem[0], rows, tile, place);
        __syncthreads();
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) halo_sm80_wgrad(const Params p) {
    extern __shared__ __align__(16) char dynamic_smem[];
    Smem& smem = *reinterpret_cast<Smem*>(dynamic_smem);
    const Work work(p);
    const Place place;
    Sums sums = {};
    sum_stages(smem, p, work, place, sums);
    add_warps(sums, *reinterpret_cast<Exchange*>(dynamic_smem), place);
    if (place.part == 0) write_sums(sums, p, work, place);
}
