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

// Constants: ELEM is float, hc::fp16 or hc::bf16; OFFSET is int or hc::i64; all others integers.
//   C_PER_GROUP K_PER_GROUP              channels of one group
//   R S STRIDE_H STRIDE_W DIL_H DIL_W    filter taps; pixels
//   TILE_P TILE_Q                        output rows and columns of a tile
//   TILE_C TILE_K TILE_G                 channels and filters of a group, and groups, of a block
//   WARPS_M WARPS_N WARPS_E              warps along the rows, the columns and the pixels of a group's product
//   MIN_BLOCKS                           blocks per multiprocessor that registers must allow
//   STAGED                               0: words of one pixel, in 16 bits of that pixel of two tiles; 1: PIXEL_PAIRS,
//                                        2: PIECES
//   FIRST_HALF                           PIXEL_PAIRS: the half of its word that the first tap of a row begins with
//   X_INNER X_VEC Y_INNER Y_VEC          1: lanes load neighbouring channels, 0: columns; elements of a load
//   PLANE_PITCH LINE_PITCH X_PITCH       words from a residue of columns, a line, a channel of x to the next one
//   Y_PITCH                              words from a filter of dy to the next one
//   OFFSET                               an element's distance inside a tile, in elements of x or dy
//   SMEM_BYTES                           dynamic shared memory of a launch

#include "families/halo_sm80_wgrad/multiply.cuh"
#include "families/halo_sm80_wgrad/pixel_pairs.cuh"
#include "families/halo_sm80_wgrad/pieces.cuh"
#include "families/halo_sm80_wgrad/sums.cuh"
#include "families/halo_sm80_wgrad/window.cuh"

using namespace hc::wgrad;

static_assert(PIECES || TILE_Q % STEP == 0, "a row of a tile is a whole number of steps");
static_assert(TILE_G == 1 || (TILE_C == C_PER_GROUP && TILE_K == K_PER_GROUP), "several groups are whole groups");
static_assert(PIXEL_PAIRS || PIECES || (PLANE_PITCH * STRIDE_W >= X_COLS && LINE_PITCH >= PLANE_PITCH * STRIDE_W),
              "a line holds its planes");
static_assert(LINE_PITCH * WORD_PX >= X_COLS * PIECE_WORDS, "a line holds its columns");
static_assert(X_PITCH >= X_LINES * LINE_PITCH && Y_PITCH * WORD_PX >= TILE_P * TILE_Q * PIECE_WORDS,
              "a channel holds its lines");
static_assert(!PIECES || (sizeof(elem_t) == 2 && TILE_C % 8 == 0 && TILE_K % 8 == 0 &&
                          Y_PITCH >= TILE_P * TILE_Q * PIECE_WORDS + PIECE_WORDS),
              "pieces have eight channels, and the first plane of dy a place for zeros");
static_assert(!PIXEL_PAIRS || (sizeof(elem_t) == 2 && DIL_W == 1 && (STRIDE_W == 1 || STRIDE_W % 2 == 0)),
              "neighbouring taps of neighbouring pixels share words");
static_assert(sizeof(Smem) <= SMEM_BYTES && (WARPS_E == 1 || sizeof(Exchange) <= SMEM_BYTES),
              "the launch asks for enough shared memory");

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
